"""TileOrder: where each element of a matrix lies when every tile is contiguous.

In come a batch of matrices and a tile; out go the length of a slot in tiled storage and the position of each element in
it. The idea: cut the matrix into tiles of r x c, store each tile as one run, and a shard boundary may fall behind any
tile instead of behind whole bands of r rows. Everything is counted in *bins* of r*c elements, so that one granularity
fits all: a full tile fills a bin, several edge tiles share one, and every matrix starts at a new bin.

The order of one matrix of R x C elements, with tiles clamped to the matrix (r <= R, c <= C):

1. the full tiles, row by row of the tile grid, each row-major inside: one bin each;
2. the right edge tiles (r x C % c), top to bottom, `c // (C % c)` in a bin;
3. the bottom edge tiles (R % r x c), left to right, `r // (R % r)` in a bin;
4. the corner tile (R % r x C % c): in the last bin of step 3 if it fits there, else in the last of step 2, else alone.

Room that is left in a bin holds no element: it is padding, and lies inside the slot.
"""

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TileOrder:
    """The tiled storage order of a batch of matrices.

    Attributes:

    - `batch`, `rows`, `cols`: the matrices.
    - `tile_rows`, `tile_cols`: the tile, already clamped to the matrix; see `of`.
    """

    batch: int
    rows: int
    cols: int
    tile_rows: int
    tile_cols: int

    @staticmethod
    def of(matrices: tuple[int, int, int], tile_rows: int, tile_cols: int) -> "TileOrder":
        """The order of `matrices` = (how many, rows, cols), none of them 0, in tiles of at most the given size."""
        batch, rows, cols = matrices
        return TileOrder(batch, rows, cols, min(tile_rows, rows), min(tile_cols, cols))

    @property
    def bin_size(self) -> int:
        """Elements of one bin, which is the granularity of the slot."""
        return self.tile_rows * self.tile_cols

    @property
    def full(self) -> tuple[int, int]:
        """The grid of full tiles: (down, across)."""
        return self.rows // self.tile_rows, self.cols // self.tile_cols

    @property
    def edge(self) -> tuple[int, int]:
        """Height of the bottom edge tiles and width of the right edge tiles; 0 where there are none."""
        return self.rows % self.tile_rows, self.cols % self.tile_cols

    @property
    def right_bins(self) -> int:
        """Bins that the right edge tiles of one matrix fill."""
        width = self.edge[1]
        return -(-self.full[0] // (self.tile_cols // width)) if width else 0

    @property
    def bottom_bins(self) -> int:
        """Bins that the bottom edge tiles of one matrix fill."""
        height = self.edge[0]
        return -(-self.full[1] // (self.tile_rows // height)) if height else 0

    @property
    def corner(self) -> int | None:
        """Where the corner tile starts, in elements from the start of its matrix; None without a corner tile."""
        height, width = self.edge
        size = height * width
        if not size:
            return None
        full = self.full[0] * self.full[1]
        end_of_right = full + self.right_bins
        end = end_of_right + self.bottom_bins
        for last_bin, tiles, per_bin, tile in (
            (end - 1, self.full[1], self.tile_rows // height, height * self.tile_cols),
            (end_of_right - 1, self.full[0], self.tile_cols // width, self.tile_rows * width),
        ):
            used = ((tiles - 1) % per_bin + 1) * tile
            if used + size <= self.bin_size:
                return last_bin * self.bin_size + used
        return end * self.bin_size

    @property
    def matrix_size(self) -> int:
        """Elements from the start of one matrix to the start of the next: whole bins."""
        bins = self.full[0] * self.full[1] + self.right_bins + self.bottom_bins
        corner = self.corner
        return (bins + (corner is not None and corner == bins * self.bin_size)) * self.bin_size

    @property
    def size(self) -> int:
        """Elements of the slot."""
        return self.batch * self.matrix_size

    def tile_start(self, down: int, across: int) -> tuple[int, int]:
        """Start of a tile of the grid, in elements from its matrix's start, and the width of its rows."""
        full_down, full_across = self.full
        height, width = self.edge
        if down < full_down and across < full_across:
            return (down * full_across + across) * self.bin_size, self.tile_cols
        if down < full_down:
            bins, place = divmod(down, self.tile_cols // width)
            start = (full_down * full_across + bins) * self.bin_size
            return start + place * self.tile_rows * width, width
        if across < full_across:
            bins, place = divmod(across, self.tile_rows // height)
            start = (full_down * full_across + self.right_bins + bins) * self.bin_size
            return start + place * height * self.tile_cols, self.tile_cols
        corner = self.corner
        assert corner is not None
        return corner, width

    def position(self, matrix: int, row: int, col: int) -> int:
        """Position of one element in the slot, in elements from its start."""
        down, row_in_tile = divmod(row, self.tile_rows)
        across, col_in_tile = divmod(col, self.tile_cols)
        start, width = self.tile_start(down, across)
        return matrix * self.matrix_size + start + row_in_tile * width + col_in_tile


def matrices_of(shape: tuple[int, ...]) -> tuple[int, int, int]:
    """A shape as a batch of matrices: (how many, rows, cols). A vector is one row, a scalar one element."""
    rows = shape[-2] if len(shape) > 1 else 1
    cols = shape[-1] if shape else 1
    return math.prod(shape[:-2]), rows, cols
