"""Grid: the blocks of one tensor as tiles of its matrices, numbered in storage order.

Comes in: a slot and a block. Goes out: how many blocks there are, where each starts in the slot, its height, width and
strides, and which block of the logical tensor it is.

The idea: every kind of block is a tile of some matrix (a run of n elements is a 1 x n tile of one long row), and in
every storage order the elements (i, j) of a tile lie at `start + i * row_stride + j * col_stride`. The start is an
affine function of the tile's number within a *region*: row-major and transposed matrices are one region, tiled storage
has up to four (full tiles, right edge, bottom edge, corner; see `vescale_planner.TileOrder`). So a dozen integers
describe all blocks of a tensor, however many there are.
"""

import math
from dataclasses import dataclass, fields

import numpy as np

from vescale_planner import Block, Elements, Rows, Slab, Slot, Tile, TileOrder


@dataclass(frozen=True, slots=True)
class Region:
    """Tiles of one matrix that lie in equal steps; tile t is place `t % per` of line `t // per`. Counts in elements.

    Attributes:

    - `first`: number of its first tile within the matrix; `count`: its tiles.
    - `start`: of its first tile, from the start of the matrix.
    - `per`: tiles in a line; `line_step`, `step`: from line to line, and from tile to tile in a line.
    - `height`, `width`: of a stored tile; `height_limit`, `width_limit`: where the region ends, which cuts edge tiles.
    - `row_stride`, `col_stride`: between neighbours of a logical tile.
    - `down`, `across`, `wrap`: tile t is `(down + t // wrap, across + t % wrap)` of the stored grid.
    """

    first: int
    count: int
    start: int
    per: int
    line_step: int
    step: int
    height: int
    width: int
    height_limit: int
    width_limit: int
    row_stride: int
    col_stride: int
    down: int = 0
    across: int = 0
    wrap: int = 1


# What the devices have to know of a region, in this order.
REGION_FIELDS = tuple(field.name for field in fields(Region) if field.name not in ("count", "down", "across", "wrap"))
MAX_REGIONS = 4
# Of a grid: elements and blocks of a matrix, whether tiles are stored transposed.
GRID_FIELDS = 3


@dataclass(frozen=True, slots=True)
class Grid:
    """All blocks of one tensor.

    Attributes:

    - `rows`, `cols`: of a block that is no edge block.
    - `matrices`, `matrix_size`, `matrix_blocks`: how many, and the elements and blocks of each, as stored.
    - `shape`: of the logical grid: (matrices, blocks down, blocks across).
    - `transposed`: whether tiles are stored column by column.
    - `regions`: of each matrix.
    """

    rows: int
    cols: int
    matrices: int
    matrix_size: int
    matrix_blocks: int
    shape: tuple[int, int, int]
    transposed: bool
    regions: tuple[Region, ...]

    @classmethod
    def of(cls, slot: Slot, block: Block) -> "Grid":
        """The grid of a tensor that is not empty; with tiled storage, `block` is the slot's own tile."""
        (matrices, rows, cols), (height, width) = tiles_of(slot.shape, block)
        if slot.tile_order is not None:
            return _tiled(slot.tile_order)
        transposed = slot.storage == "transposed"
        lines, line, h, w = (cols, rows, width, height) if transposed else (rows, cols, height, width)
        down, across = -(-lines // h), -(-line // w)
        strides = (1, line) if transposed else (line, 1)
        region = Region(0, down * across, 0, across, h * line, w, h, w, lines, line, *strides, wrap=across)
        shape = (matrices, across, down) if transposed else (matrices, down, across)
        return cls(height, width, matrices, rows * cols, down * across, shape, transposed, (region,))

    @property
    def numbers(self) -> list[int]:
        """The grid as one row of integers: `GRID_FIELDS`, then `REGION_FIELDS` for `MAX_REGIONS` regions."""
        row = [self.matrix_size, self.matrix_blocks, int(self.transposed)]
        for region in self.regions:
            row += [getattr(region, name) for name in REGION_FIELDS]
        # No tile has so high a number: the region is never chosen.
        absent = [self.matrix_blocks, *[1] * (len(REGION_FIELDS) - 1)]
        return row + absent * (MAX_REGIONS - len(self.regions))

    def blocks_before(self, position: int) -> int:
        """Blocks that start before a position of the slot, which cuts none."""
        matrices, rest = divmod(position, self.matrix_size)
        found = matrices * self.matrix_blocks
        for region in self.regions:
            if rest > region.start:
                lines, more = divmod(rest - region.start, region.line_step)
                found += min(region.count, lines * region.per + min(-(-more // region.step), region.per))
        return found

    def logical(self) -> np.ndarray:
        """For every block in storage order, its number in the row-major order of `shape`."""
        found = np.zeros(self.matrix_blocks, np.int64)
        for region in self.regions:
            t = np.arange(region.count)
            down, across = region.down + t // region.wrap, region.across + t % region.wrap
            down, across = (across, down) if self.transposed else (down, across)
            found[region.first : region.first + region.count] = down * self.shape[2] + across
        return (np.arange(self.matrices)[:, None] * self.matrix_blocks + found[None]).reshape(-1)


def tiles_of(shape: tuple[int, ...], block: Block) -> tuple[tuple[int, int, int], tuple[int, int]]:
    """A tensor as (matrices, rows, cols) and its blocks as tiles of (rows, cols), clamped to the matrix."""
    size = math.prod(shape)
    last = shape[-1] if shape else 1
    if isinstance(block, Tile):
        matrices = (math.prod(shape[:-2]), shape[-2] if len(shape) > 1 else 1, last)
        tile = (block.rows, block.cols)
    elif isinstance(block, Rows):
        matrices, tile = (1, size // max(last, 1), last), (block.count, last)
    elif isinstance(block, Slab) and block.dims:
        slab = math.prod(shape[block.dims :])
        matrices, tile = (1, size // max(slab, 1), slab), (block.count, slab)
    else:
        matrices, tile = (1, 1, size), (1, block.count if isinstance(block, Elements) else size)
    return matrices, (min(tile[0], matrices[1]), min(tile[1], matrices[2]))


def _tiled(order: TileOrder) -> Grid:
    """The grid of tiled storage, its regions in storage order."""
    (a, b), (h, w), (r, c) = order.full, order.edge, (order.tile_rows, order.tile_cols)
    size = order.bin_size
    right_start, bottom_start = a * b * size, (a * b + order.right_bins) * size
    parts: list[tuple[int, Region]] = [(0, Region(0, a * b, 0, b, b * size, size, r, c, a * r, b * c, c, 1, 0, 0, b))]
    if w:
        per = c // w
        lines = order.right_bins * r
        parts.append((right_start, Region(0, a, right_start, per, size, r * w, r, w, lines, per * w, w, 1, 0, b, 1)))
    if h:
        per = r // h
        lines, line = order.bottom_bins * h, per * c
        parts.append((bottom_start, Region(0, b, bottom_start, per, size, h * c, h, c, lines, line, c, 1, a, 0, b)))
    if order.corner is not None:
        corner = order.corner
        parts.append((corner, Region(0, 1, corner, 1, size, size, h, w, h, w, w, 1, a, b, 1)))
    regions: list[Region] = []
    first = 0
    for _, region in sorted(parts, key=lambda part: part[0]):
        values = {field.name: getattr(region, field.name) for field in fields(Region)}
        regions.append(Region(**{**values, "first": first}))
        first += region.count
    shape = (order.batch, a + bool(h), b + bool(w))
    return Grid(r, c, order.batch, order.matrix_size, first, shape, False, tuple(regions))
