"""Ranges: which element of one slot is which element of another slot of the same tensor.

Comes in: slots of two plans, which may store the tensor in different orders. Goes out: positions. Everything here is
arithmetic on integers, for any run of positions, so that no table of a whole tensor is ever made.

Orders: row-major, transposed, and tile by tile as `vescale_planner.TileOrder` describes.
"""

import numpy as np

from vescale_planner import Slot, TileOrder


def order_of(slot: Slot) -> tuple[object, ...]:
    """What decides the order of elements in a slot: slots of one shape with equal answers lie alike."""
    order = slot.tile_order
    if order is not None:
        return ("tiled", order)
    if slot.storage == "transposed" and min(slot.shape[-2:], default=0) > 1:
        return ("transposed", slot.shape)
    return ("row_major",)


def elements_at(slot: Slot, positions: np.ndarray) -> np.ndarray:
    """The elements that lie at some positions of a slot.

    Arguments:

    - `slot`: of the tensor.
    - `positions`: int64, from the start of the slot.

    Returns: int64, row-major numbers of elements of the tensor; -1 where a slot is filled up.
    """
    kind, *_ = order_of(slot)
    if kind == "row_major":
        return positions
    if kind == "transposed":
        rows, cols = slot.shape[-2:]
        matrix, rest = np.divmod(positions, rows * cols)
        col, row = np.divmod(rest, rows)
        return (matrix * rows + row) * cols + col
    order = slot.tile_order
    assert order is not None
    return _elements_in_tiles(order, positions)


def positions_of(slot: Slot, elements: np.ndarray) -> np.ndarray:
    """Where some elements of a tensor lie in a slot: the inverse of `elements_at`.

    Arguments:

    - `slot`: of the tensor.
    - `elements`: int64, row-major numbers of elements.

    Returns: int64 positions, from the start of the slot.
    """
    kind, *_ = order_of(slot)
    if kind == "row_major":
        return elements
    if kind == "transposed":
        rows, cols = slot.shape[-2:]
        matrix, rest = np.divmod(elements, rows * cols)
        row, col = np.divmod(rest, cols)
        return (matrix * cols + col) * rows + row
    order = slot.tile_order
    assert order is not None
    return _positions_in_tiles(order, elements)


def _elements_in_tiles(order: TileOrder, positions: np.ndarray) -> np.ndarray:
    (a, b), (h, w), (r, c) = order.full, order.edge, (order.tile_rows, order.tile_cols)
    size = order.bin_size
    matrix, rest = np.divmod(positions, order.matrix_size)
    row, col = np.full_like(rest, -1), np.full_like(rest, -1)

    def fill(where: np.ndarray, down: np.ndarray, across: np.ndarray, width: int, within: np.ndarray) -> None:
        row[where] = down * r + within // width
        col[where] = across * c + within % width

    bins, inside = np.divmod(rest, size)
    right, bottom = a * b, a * b + order.right_bins
    full = bins < right
    fill(full, bins[full] // max(b, 1), bins[full] % max(b, 1), c, inside[full])
    if w:
        place, within = np.divmod(inside, r * w)
        down = (bins - right) * (c // w) + place
        where = (bins >= right) & (bins < bottom) & (place < c // w) & (down < a)
        fill(where, down[where], np.full_like(down[where], b), w, within[where])
    if h:
        place, within = np.divmod(inside, h * c)
        across = (bins - bottom) * (r // h) + place
        where = (bins >= bottom) & (bins < bottom + order.bottom_bins) & (place < r // h) & (across < b)
        fill(where, np.full_like(across[where], a), across[where], c, within[where])
    if order.corner is not None:
        where = (rest >= order.corner) & (rest < order.corner + h * w)
        within = rest[where] - order.corner
        fill(where, np.full_like(within, a), np.full_like(within, b), w, within)
    return np.where(row < 0, -1, (matrix * order.rows + row) * order.cols + col)


def _positions_in_tiles(order: TileOrder, elements: np.ndarray) -> np.ndarray:
    (a, b), (h, w), (r, c) = order.full, order.edge, (order.tile_rows, order.tile_cols)
    size = order.bin_size
    matrix, rest = np.divmod(elements, order.rows * order.cols)
    row, col = np.divmod(rest, order.cols)
    (down, i), (across, j) = np.divmod(row, r), np.divmod(col, c)
    start, width = (down * b + across) * size, np.full_like(col, c)
    if w:
        bins, place = np.divmod(down, c // w)
        where = (across >= b) & (down < a)
        start, width = np.where(where, (a * b + bins) * size + place * r * w, start), np.where(where, w, width)
    if h:
        bins, place = np.divmod(across, r // h)
        where = (down >= a) & (across < b)
        start = np.where(where, (a * b + order.right_bins + bins) * size + place * h * c, start)
    if order.corner is not None:
        where = (down >= a) & (across >= b)
        start, width = np.where(where, order.corner, start), np.where(where, w, width)
    return matrix * order.matrix_size + start + i * width + j
