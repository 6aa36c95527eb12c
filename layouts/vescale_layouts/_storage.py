"""Storage orders: a tensor as the run of elements that its slot holds, and back.

Comes in: a slot and a tensor of its logical shape (ND). Goes out: the slot's elements (1D), row-major, transposed or
tile by tile, as the planner chose; and the way back. Row-major is a reshape, transposed a transpose that a matrix
product takes as it is, tiled a copy. All of it works on NumPy arrays as on JAX arrays, so that hosts and devices agree.

Shapes of tiled storage: B matrices of R x C elements, tiles of r x c, of which a x b are full; the edge tiles are h
high and w wide. The order is that of `vescale_planner.TileOrder`.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from vescale_planner import Slot, TileOrder


def store(slot: Slot, tensor: Any) -> Any:
    """Lays out a tensor as its slot holds it.

    Arguments:

    - `slot`: says in which order.
    - `tensor`: of the slot's logical shape (ND).

    Returns: an array of shape `(slot.size,)`; room that belongs to no element is zero.
    """
    if slot.storage == "transposed":
        return tensor.swapaxes(-1, -2).reshape(slot.size)
    order = slot.tile_order
    if order is None:
        return tensor.reshape(slot.size)
    return _to_tiles(order, tensor.reshape(order.batch, order.rows, order.cols)).reshape(slot.size)


def load(slot: Slot, run: Any) -> Any:
    """Takes a tensor out of what its slot holds: the inverse of `store`.

    Arguments:

    - `slot`: says in which order.
    - `run`: the slot's elements, of shape `(slot.size,)`.

    Returns: an array of the slot's logical shape (ND).
    """
    if slot.storage == "transposed":
        *batch, rows, cols = slot.shape
        return run.reshape(*batch, cols, rows).swapaxes(-1, -2)
    order = slot.tile_order
    if order is None:
        return run.reshape(slot.shape)
    return _from_tiles(order, run.reshape(order.batch, order.matrix_size)).reshape(slot.shape)


def _to_tiles(order: TileOrder, x: Any) -> Any:
    """(B, R, C) -> (B, matrix size)."""
    xp = jnp if isinstance(x, jax.Array) else np
    (a, b), (h, w), (r, c) = order.full, order.edge, (order.tile_rows, order.tile_cols)
    full = x[:, : a * r, : b * c].reshape(-1, a, r, b, c).swapaxes(2, 3).reshape(-1, a * b * r * c)
    parts = [full]
    if w:
        right = x[:, : a * r, b * c :].reshape(-1, a, r * w)
        parts.append(_fill_bins(xp, right, c // w, order.right_bins, order.bin_size))
    if h:
        bottom = x[:, a * r :, : b * c].reshape(-1, h, b, c).swapaxes(1, 2).reshape(-1, b, h * c)
        parts.append(_fill_bins(xp, bottom, r // h, order.bottom_bins, order.bin_size))
    out = xp.concatenate(parts, axis=1)
    if order.corner is not None:
        corner = x[:, a * r :, b * c :].reshape(-1, h * w)
        room = order.matrix_size - out.shape[1]
        out = xp.pad(out, ((0, 0), (0, room)))
        out = xp.concatenate([out[:, : order.corner], corner, out[:, order.corner + h * w :]], axis=1)
    return out


def _from_tiles(order: TileOrder, x: Any) -> Any:
    """(B, matrix size) -> (B, R, C)."""
    xp = jnp if isinstance(x, jax.Array) else np
    (a, b), (h, w), (r, c) = order.full, order.edge, (order.tile_rows, order.tile_cols)
    end = a * b * r * c
    out = x[:, :end].reshape(-1, a, b, r, c).swapaxes(2, 3).reshape(-1, a * r, b * c)
    right_end = end + order.right_bins * order.bin_size
    if w:
        right = _empty_bins(x[:, end:right_end], a, r * w, c // w, order.bin_size).reshape(-1, a * r, w)
        out = xp.concatenate([out, right], axis=2)
    if h:
        bottom_end = right_end + order.bottom_bins * order.bin_size
        bottom = _empty_bins(x[:, right_end:bottom_end], b, h * c, r // h, order.bin_size)
        bottom = bottom.reshape(-1, b, h, c).swapaxes(1, 2).reshape(-1, h, b * c)
        if order.corner is not None:
            corner = x[:, order.corner : order.corner + h * w].reshape(-1, h, w)
            bottom = xp.concatenate([bottom, corner], axis=2)
        out = xp.concatenate([out, bottom], axis=1)
    return out


def _fill_bins(xp: Any, tiles: Any, per_bin: int, bins: int, bin_size: int) -> Any:
    """Edge tiles (B, n, size), so many to a bin, -> (B, bins * bin size)."""
    _, n, size = tiles.shape
    tiles = xp.pad(tiles, ((0, 0), (0, bins * per_bin - n), (0, 0))).reshape(-1, bins, per_bin * size)
    return xp.pad(tiles, ((0, 0), (0, 0), (0, bin_size - per_bin * size))).reshape(-1, bins * bin_size)


def _empty_bins(run: Any, n: int, size: int, per_bin: int, bin_size: int) -> Any:
    """The inverse of `_fill_bins`: (B, bins * bin size) -> (B, n, size)."""
    bins = math.prod(run.shape[1:]) // bin_size
    return run.reshape(-1, bins, bin_size)[:, :, : per_bin * size].reshape(-1, bins * per_bin, size)[:, :n]
