"""Storage orders: how the elements of one tensor are ordered inside its slot, and which cuts follow.

In come a shape, a block and a storage order; out go the `Cuts` of the slot and the position of every element. A 32 x 32
block in a row-major matrix makes 32 whole rows the granularity, and a group whose row lengths differ needs a shard size
that is a multiple of them all. The paper (arXiv 2602.22437) stops there; we may also store a tensor otherwise:

- `"row_major"`: as it is; views are free.
- `"transposed"`: a tensor (..., R, C) is stored as (..., C, R), row-major. As free, since a matrix product takes either
  orientation. For `Tile` blocks only: rows would be torn apart.
- `"tiled"`: each tile is one contiguous run, in the order of `TileOrder`. The granularity falls to one tile and
  unpacking becomes a copy. For `Tile` blocks only.
"""

import math
from functools import lru_cache
from typing import Literal

from ._blocks import Block, Elements, Rows, Slab, Tile
from ._cuts import Cuts
from ._tiles import TileOrder, matrices_of

Storage = Literal["row_major", "transposed", "tiled"]
"""The order of a tensor's elements inside its slot."""


def storage_choices(shape: tuple[int, ...], block: Block) -> tuple[Storage, ...]:
    """The storage orders that make a difference for such a tensor, the free ones first."""
    if not isinstance(block, Tile):
        return ("row_major",)
    _, rows, cols = matrices_of(shape)
    if rows <= 1 or cols <= 1:
        return ("row_major",)
    return ("row_major", "transposed", "tiled")


@lru_cache(maxsize=4096)
def cuts_of(shape: tuple[int, ...], block: Block, storage: Storage) -> Cuts:
    """The legal cuts of a tensor in one storage order."""
    size = math.prod(shape)
    if size == 0:
        return Cuts.uniform(0, 1)
    if isinstance(block, Elements):
        return Cuts.uniform(size, block.count)
    if isinstance(block, Rows):
        return Cuts.uniform(size, block.count * (shape[-1] if shape else 1))
    if isinstance(block, Slab):
        return Cuts.uniform(size, block.count * math.prod(shape[block.dims :]) if block.dims else size)
    if isinstance(block, Tile):
        return _cuts_of_tiles(size, matrices_of(shape), block, storage)
    return Cuts.uniform(size, size)


def _cuts_of_tiles(size: int, matrices: tuple[int, int, int], block: Tile, storage: Storage) -> Cuts:
    """The cuts of a tensor with `Tile` blocks."""
    _, rows, cols = matrices
    matrix = rows * cols
    if storage == "tiled":
        order = TileOrder.of(matrices, block.rows, block.cols)
        return Cuts.uniform(order.size, order.bin_size)
    height, width = min(block.rows, rows), min(block.cols, cols)
    if storage == "transposed":
        height, width, cols = width, height, rows
    if height == 1:  # a tile of one row is a run already
        return Cuts.periodic(size, width, cols)
    return Cuts.periodic(size, height * cols, matrix)


def position_of(shape: tuple[int, ...], block: Block, storage: Storage, index: tuple[int, ...]) -> int:
    """Position of the element at `index` inside its slot, in elements from the slot's start.

    The mapping is one to one. For row-major and transposed storage it covers the whole slot; tiled storage may leave
    positions that belong to no element.
    """
    batch, rows, cols = matrices_of(shape)
    flat = 0
    for dim, i in zip(shape, index, strict=True):
        if not 0 <= i < dim:
            raise IndexError(f"index {index} lies outside shape {shape}")
        flat = flat * dim + i
    if storage == "row_major":
        return flat
    matrix, rest = divmod(flat, rows * cols)
    row, col = divmod(rest, cols)
    if storage == "transposed":
        return (matrix * cols + col) * rows + row
    assert isinstance(block, Tile)
    return TileOrder.of((batch, rows, cols), block.rows, block.cols).position(matrix, row, col)
