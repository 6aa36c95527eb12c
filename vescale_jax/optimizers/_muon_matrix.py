"""Matrix: how a parameter is taken for one matrix or many.

Comes in: a parameter of any rank (ND). Goes out: batches of matrices (B, m, n), of one shape each, and the way back. A
kernel of Flax is (in, out), so `x @ kernel` sums over its rows. The idea of naming the dims is that of
`optax.contrib.MuonDimensionNumbers`; splits are ours.
"""

import math
from dataclasses import dataclass
from itertools import pairwise

import jax
import jax.numpy as jnp

from vescale_planner import Faults

Split = int | tuple[int, ...]
"""Into how many equal parts, or into parts of these widths."""


@dataclass(frozen=True, slots=True)
class Matrix:
    """Which dims of a parameter are rows and columns; each choice of an index in the other dims is a matrix of its own.

    | parameter | shape | Matrix |
    |---|---|---|
    | linear layer | (in, out) | `Matrix()` |
    | experts, stacked layers | (e, in, out) | `Matrix()` |
    | attention, query | (d, heads, k) | `Matrix((0,), (1, 2))`; a matrix a head: `Matrix((0,), (2,))` |
    | attention, output | (heads, k, d) | `Matrix((0, 1), (2,))`; a matrix a head: `Matrix()` |
    | fused query, key, value | (d, 3 h k) | `Matrix(split_cols=3)`; a matrix a head: `Matrix(split_cols=3 * h)` |
    | with fewer keys | (d, (h + 2 g) k) | `Matrix(split_cols=(h * k, g * k, g * k))` |
    | convolution | (y, x, in, out) | `Matrix((0, 1, 2), (3,))` |

    Arguments:

    - `rows`, `cols`: dims of the parameter, negative ones counted from the end. Several are flattened together.
    - `split_rows`, `split_cols`: cut the flattened rows or columns into matrices of their own: into so many equal
      parts, or into parts of these widths.
    """

    rows: tuple[int, ...] = (-2,)
    cols: tuple[int, ...] = (-1,)
    split_rows: Split = 1
    split_cols: Split = 1

    def check(self, path: str, shape: tuple[int, ...], faults: Faults) -> None:
        """Notes why a parameter of some shape cannot be taken so."""
        dims = [*self.rows, *self.cols]
        if not self.rows or not self.cols or any(not -len(shape) <= dim < len(shape) for dim in dims):
            want = f"dims of shape {shape} for rows and for columns"
            faults.add(path, got=repr(self), want=want, change="pass other dims, or 'adamw'")
            return
        if len({dim % len(shape) for dim in dims}) < len(dims):
            faults.add(path, got=repr(self), want="every dim once", change="pass other dims")
            return
        rows, cols = self.flattened(shape)
        for what, split, size in (("split_rows", self.split_rows, rows), ("split_cols", self.split_cols, cols)):
            fits = size % max(split, 1) == 0 < split if isinstance(split, int) else sum(split) == size
            if not fits or (isinstance(split, tuple) and min(split, default=0) < 1):
                want = f"parts of {size}, what shape {shape} has there"
                faults.add(path, got=f"{what}={split}", want=want, change="pass a divisor, or widths that add up to it")

    def flattened(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """Rows and columns before they are split."""
        return math.prod(shape[dim] for dim in self.rows), math.prod(shape[dim] for dim in self.cols)

    def leading(self, shape: tuple[int, ...]) -> int:
        """How many of the first dims only count matrices."""
        used = {dim % len(shape) for dim in (*self.rows, *self.cols)}
        return min(used)

    def shapes(self, shape: tuple[int, ...]) -> list[tuple[int, int, int]]:
        """The batches of `split`: (B, m, n)."""
        rows, cols = self.flattened(shape)
        if not rows * cols:
            return []
        batch = math.prod(shape) // (rows * cols)
        found: list[tuple[int, int, int]] = []
        for count, m in _parts(self.split_rows, rows):
            found += [(batch * count * times, m, n) for times, n in _parts(self.split_cols, cols)]
        return found

    def split(self, x: jax.Array) -> list[jax.Array]:
        """The matrices of a parameter: one array `(B, m, n)` for each of `shapes`."""
        flat = x.transpose(self._order(x.ndim)).reshape(-1, *self.flattened(x.shape))
        found: list[jax.Array] = []
        for band in _cut(flat, self.split_rows, 1):
            for part in _cut(band, self.split_cols, 3):
                b, p, m, q, n = part.shape
                found.append(part.transpose(0, 1, 3, 2, 4).reshape(b * p * q, m, n))
        return found

    def join(self, parts: list[jax.Array], shape: tuple[int, ...]) -> jax.Array:
        """The inverse of `split`.

        Arguments:

        - `parts`: arrays `(B, m, n)`.
        - `shape`: of the parameter.
        """
        rows, cols = self.flattened(shape)
        batch = math.prod(shape) // (rows * cols)
        left = iter(parts)
        bands: list[jax.Array] = []
        for p, m in _parts(self.split_rows, rows):
            band = [
                next(left).reshape(batch, p, q, m, n).transpose(0, 1, 3, 2, 4).reshape(batch, p * m, q * n)
                for q, n in _parts(self.split_cols, cols)
            ]
            bands.append(jnp.concatenate(band, axis=2) if len(band) > 1 else band[0])
        flat = jnp.concatenate(bands, axis=1) if len(bands) > 1 else bands[0]
        order = self._order(len(shape))
        back = sorted(range(len(shape)), key=lambda dim: order[dim])
        return flat.reshape([shape[dim] for dim in order]).transpose(back)

    def _order(self, ndim: int) -> list[int]:
        """The dims in the order batch, rows, columns."""
        used = [dim % ndim for dim in (*self.rows, *self.cols)]
        return [*(dim for dim in range(ndim) if dim not in used), *used]

    def __str__(self) -> str:
        text = f"rows {self.rows}, cols {self.cols}"
        for name, split in (("rows", self.split_rows), ("cols", self.split_cols)):
            text += f", {name} split {split}" if split != 1 else ""
        return text


def _parts(split: Split, size: int) -> list[tuple[int, int]]:
    """(count, width) of the parts: equal ones together."""
    return [(split, size // split)] if isinstance(split, int) else [(1, width) for width in split]


def _cut(x: jax.Array, split: Split, axis: int) -> list[jax.Array]:
    """Cuts one dim into parts: (..., size, ...) -> (..., count, width, ...), one array for each width."""
    size = x.shape[axis]
    if isinstance(split, int):
        return [x.reshape(*x.shape[:axis], split, size // split, *x.shape[axis + 1 :])]
    starts = [sum(split[:i]) for i in range(len(split) + 1)]
    pieces = [jax.lax.slice_in_dim(x, start, stop, axis=axis) for start, stop in pairwise(starts)]
    return [jnp.expand_dims(piece, axis) for piece in pieces]
