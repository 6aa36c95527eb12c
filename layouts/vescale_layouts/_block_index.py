"""BlockIndex: which blocks lie on which shard, and where, as small tables.

Comes in: a plan and a block for each tensor. Goes out: batches of equal blocks and, for every shard, the position of
every element of every block. Nothing here needs a device; the formula runs on NumPy and on JAX arrays alike.

Shapes: N shards of S elements, B blocks of r x c in a batch, T' tensors at most on one shard.

The idea: under XLA all devices run one program, so what differs between them has to be data. Blocks of one shape form a
batch of B blocks, B being the most that any shard holds. A shard holds of each tensor a run of consecutive blocks (see
`_grid.py`), hence four integers a tensor and shard say all: where the run ends in the batch, which block it starts
with, where the tensor starts, and what shape it has. The rest is arithmetic, block by block, done on the device. So the
tables grow with the tensors that a shard holds of and not with S, whatever the lengths of rows.
"""

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from vescale_planner import Block, Cuts, Faults, GroupPlan, Slot, Tile

from ._grid import GRID_FIELDS, MAX_REGIONS, REGION_FIELDS, Grid, tiles_of

_INT32 = 2**31
_CUTS_AT_ONCE = 2**16


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Blocks of one shape.

    Attributes:

    - `count`: B, blocks on each shard, those that are absent on some included.
    - `rows`, `cols`: of a block; edge blocks are filled up with zeros.
    - `names`: the tensors, in slot order.
    - `grids`: int32 (shapes, ...), one row for all tensors of one shape and storage; the same on all shards.
    - `runs`: int32 (N, T', 4), T' being the most tensors that a shard holds of: end of the tensor's run in the batch,
      number of its first block minus its place in the batch, start of the tensor from the start of the shard (modulo
      2**32), and its row in `grids`.
    - `held`: (N, T'), the tensor that each run is of, as an index of `names`; -1 for none. Not needed on devices.
    """

    count: int
    rows: int
    cols: int
    names: tuple[str, ...]
    grids: np.ndarray
    runs: np.ndarray
    held: np.ndarray


@dataclass(frozen=True, slots=True, eq=False)
class BlockIndex:
    """The blocks of a group; made by `block_index`.

    Attributes:

    - `plan`: the plan.
    - `blocks`: the block of each tensor that takes part.
    - `batches`: one for each shape of blocks, in the order in which the shapes first occur.
    """

    plan: GroupPlan
    blocks: tuple[tuple[str, Block], ...]
    batches: tuple[Batch, ...]

    @property
    def table_size(self) -> int:
        """int32 numbers that one device holds in tables."""
        return sum(batch.grids.size + batch.runs[0].size for batch in self.batches)

    def positions(self, batch: int, shard: int) -> np.ndarray:
        """Where the elements of one batch lie in a shard: int32 (B, r, c), S where there is none."""
        chosen = self.batches[batch]
        return positions(np, chosen, chosen.grids, chosen.runs[shard], self.plan.shard_size)

    def shape(self, name: str) -> tuple[int, int, int]:
        """The blocks of a tensor: (matrices, blocks down, blocks across)."""
        return Grid.of(self.plan.slots[name], dict(self.blocks)[name]).shape

    def order(self, name: str) -> tuple[int, np.ndarray]:
        """The batch of a tensor, and where its blocks lie in the concatenation of all shards' batches.

        Returns: the batch's index, and int64 (matrices, blocks down, blocks across): shard * B + place in the batch.
        """
        number = next(i for i, batch in enumerate(self.batches) if name in batch.names)
        batch = self.batches[number]
        grid = Grid.of(self.plan.slots[name], dict(self.blocks)[name])
        where = np.zeros(math.prod(grid.shape), np.int64)
        logical = grid.logical()
        for shard, run in zip(*np.nonzero(batch.held == batch.names.index(name)), strict=True):
            runs = batch.runs[shard]
            places = np.arange(runs[run - 1, 0] if run else 0, runs[run, 0])
            where[logical[places + runs[run, 1]]] = shard * batch.count + places
        return number, where.reshape(grid.shape)


def choose_blocks(plan: GroupPlan, blocks: Mapping[str, Block] | None) -> tuple[tuple[str, Block], ...]:
    """The block of each tensor that has elements; None takes the plan's own for all.

    Raises: `ValueError` that names every tensor which is unknown or whose block the plan does not keep whole on every
    number of shards.
    """
    faults = Faults("BlockView")
    if blocks is None:
        blocks = {name: slot.spec.block for name, slot in plan.slots.items()}
    for name in blocks:
        if name not in plan.slots:
            want = f"one of {list(plan.slots)}"
            faults.add(name, got="a block for a tensor without a slot", want=want, change="drop it")
    if plan.shard_size >= _INT32:
        want = f"fewer than {_INT32}"
        faults.add("shard", got=f"{plan.shard_size} elements", want=want, change="use more devices or smaller units")
    chosen = [(name, blocks[name]) for name, slot in plan.slots.items() if name in blocks and slot.spec.size]
    for name, block in chosen:
        _check_whole(plan.slots[name], block, faults)
    faults.raise_if_any()
    return tuple(chosen)


def _check_whole(slot: Slot, block: Block, faults: Faults) -> None:
    """Notes a fault unless every boundary that the plan's block allows is one between view blocks, too."""
    own = slot.spec.block
    got = f"blocks {block} of a parameter planned with {own}, {slot.storage} storage"
    want = f"a parameter whose shards never cut {block}"
    stands_by_tile = slot.storage == "tiled" or (slot.storage == "transposed" and not isinstance(block, Tile))
    if stands_by_tile and tiles_of(slot.shape, block) != tiles_of(slot.shape, own):
        change = f"take {own!r}, or plan with storage='row_major'"
        faults.add(slot.name, got=got, want=f"{own}, the tile it is stored by", change=change)
        return
    if not refines(slot.cuts, _cuts(slot, block)):
        change = f"pass blocks={block!r} for it to fully_shard (or to TensorSpec)"
        faults.add(slot.name, got=got, want=want, change=change)


def _cuts(slot: Slot, block: Block) -> Cuts:
    """Where shard boundaries may fall between blocks of another kind in the same storage."""
    if slot.storage == "tiled":
        return slot.cuts
    (_, rows, cols), (height, width) = tiles_of(slot.shape, block)
    if slot.storage == "transposed":
        rows, cols, height, width = cols, rows, width, height
    return (
        Cuts.periodic(slot.size, width, cols) if height == 1 else Cuts.periodic(slot.size, height * cols, rows * cols)
    )


def refines(coarse: Cuts, fine: Cuts) -> bool:
    """Whether every legal cut of `coarse` is one of `fine`, for slots of one size."""
    period = min(coarse.period, coarse.size)
    # What follows repeats after this many elements, in both.
    repeat = math.lcm(
        coarse.granularity if coarse.is_uniform else period, fine.granularity if fine.is_uniform else fine.period
    )
    end = min(coarse.size, repeat + 1)
    for begin in range(0, end, period):
        stop = min(begin + period, end)
        for first in range(begin, stop, coarse.granularity * _CUTS_AT_ONCE):
            at = np.arange(first, min(first + coarse.granularity * _CUTS_AT_ONCE, stop), coarse.granularity)
            if np.any(at % fine.period % fine.granularity):
                return False
    return True


@functools.lru_cache(maxsize=1024)
def block_index(plan: GroupPlan, blocks: tuple[tuple[str, Block], ...]) -> BlockIndex:
    """Makes the tables, once for equal plans and blocks; `blocks` come from `choose_blocks`."""
    grids = {name: Grid.of(plan.slots[name], block) for name, block in blocks}
    shapes = dict.fromkeys((grid.rows, grid.cols) for grid in grids.values())
    batches = (
        _batch(plan, rows, cols, {n: g for n, g in grids.items() if (g.rows, g.cols) == (rows, cols)})
        for rows, cols in shapes
    )
    return BlockIndex(plan, blocks, tuple(batches))


def _batch(plan: GroupPlan, rows: int, cols: int, grids: Mapping[str, Grid]) -> Batch:
    size, shards = plan.shard_size, plan.num_shards
    shapes = {grid: row for row, grid in enumerate(dict.fromkeys(grids.values()))}
    runs = np.zeros((shards, len(grids), 4), np.int64)
    for t, (name, grid) in enumerate(grids.items()):
        slot = plan.slots[name]
        inside = np.clip(np.arange(shards + 1) * size - slot.offset, 0, slot.size)
        # Most shards have nothing of a tensor: all of it lies before them, or behind.
        places, back = np.unique(inside, return_inverse=True)
        before = np.array([grid.blocks_before(int(x)) for x in places])[back]
        runs[:, t, 0] = np.diff(before)
        runs[:, t, 1] = before[:-1]
        runs[:, t, 2] = slot.offset - np.arange(shards) * size
        runs[:, t, 3] = shapes[grid]
    counts = runs[:, :, 0].copy()
    runs[:, :, 0] = np.cumsum(counts, axis=1)
    runs[:, :, 1] -= runs[:, :, 0] - counts
    total = runs[:, -1:, 0]
    # What a shard holds comes first, in order; the rest is left out, or ends where the last run does.
    held = np.argsort(counts == 0, axis=1, kind="stable")[:, : int((counts > 0).sum(axis=1).max())]
    runs = np.take_along_axis(runs, held[:, :, None], axis=1)
    absent = np.take_along_axis(counts, held, axis=1) == 0
    runs[:, :, 0] = np.where(absent, total, runs[:, :, 0])
    numbers = np.array([grid.numbers for grid in shapes], np.int64)
    return Batch(
        int(total.max()), rows, cols, tuple(grids), _wrapped(numbers), _wrapped(runs), np.where(absent, -1, held)
    )


def _wrapped(numbers: np.ndarray) -> np.ndarray:
    """int64 modulo 2**32: sums of starts and steps come out right as long as the result fits."""
    return numbers.astype(np.uint32).view(np.int32)


def positions(xp: Any, batch: Batch, grids: Any, runs: Any, shard_size: int, first: Any = 0, count: int = -1) -> Any:
    """Where the elements of some blocks of a batch lie in one shard.

    Arguments:

    - `xp`: `numpy` or `jax.numpy`.
    - `batch`: gives B, r and c.
    - `grids`, `runs`: its tables, for one shard.
    - `shard_size`: S.
    - `first`, `count`: which blocks, n in all; -1: all B. Those behind the last one are absent.

    Returns: int32 (n, r, c), S where a block has no element.
    """
    count = batch.count if count < 0 else count
    b = xp.arange(count, dtype=xp.int32) + first
    t = _run_of(xp, runs[:, 0], b)
    present = t < len(runs)
    _, skip, base, shape = runs[xp.minimum(t, len(runs) - 1)].T
    numbers = grids[shape]
    matrix_size, matrix_blocks, transposed = numbers[:, :GRID_FIELDS].T
    regions = numbers[:, GRID_FIELDS:].reshape(count, MAX_REGIONS, len(REGION_FIELDS))
    # An absent block would start anywhere; what is read is never outside of the tables.
    matrix, tile = _divided(xp.where(present, b + skip, 0), matrix_blocks)
    chosen = (tile[:, None] >= regions[:, 1:, 0]).sum(axis=1, dtype=xp.int32)
    first, start, per, line_step, step, height, width, height_limit, width_limit, row_stride, col_stride = (
        xp.take_along_axis(regions, chosen[:, None, None], axis=1)[:, 0].T
    )
    line, place = _divided(tile - first, per)
    start = base + matrix * matrix_size + start + line * line_step + place * step
    stored = xp.minimum(height, height_limit - line * height), xp.minimum(width, width_limit - place * width)
    rows = xp.where(transposed == 1, stored[1], stored[0])
    cols = xp.where(transposed == 1, stored[0], stored[1])
    # An absent block has no row.
    of_block = (start, row_stride, col_stride, xp.where(present, rows, 0), cols)
    if xp is jnp:
        # Computed once a block and not again for each of its elements.
        of_block = lax.optimization_barrier(of_block)
    start, row_stride, col_stride, rows, cols = (x[:, None, None] for x in of_block)
    i = xp.arange(batch.rows, dtype=xp.int32)[None, :, None]
    j = xp.arange(batch.cols, dtype=xp.int32)[None, None, :]
    at = start + i * row_stride + j * col_stride
    return xp.where((i < rows) & (j < cols), at, shard_size).astype(xp.int32)


def _divided(x: Any, by: Any) -> tuple[Any, Any]:
    """Quotient and remainder."""
    quotient = x // by
    return quotient, x - quotient * by


def _run_of(xp: Any, ends: Any, b: Any) -> Any:
    """The first run that ends behind each place of the batch."""
    if xp is jnp:
        return jnp.searchsorted(ends, b, side="right", method="scan_unrolled").astype(jnp.int32)
    return np.searchsorted(ends, b, side="right").astype(np.int32)
