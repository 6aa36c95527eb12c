"""Runs: which elements go from where to where when tensors change their places.

Comes in: where pieces of tensors lie before and afterwards, device by device. Goes out: a table of runs, elements that
are moved together because they lie in equal steps before and side by side afterwards. Tables have a row a run, whatever
the number of elements; only a tensor whose storage order changes is looked at element by element, on the host.
"""

import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from vescale_planner import Faults, GroupPlan, Slot

from ._storage import load, store


@dataclass(frozen=True, slots=True)
class Place:
    """A piece of a tensor on one device; counts in elements.

    Attributes:

    - `key`: the tensor; anything hashable.
    - `start`, `stop`: which part of it.
    - `device`: index along the mesh axis.
    - `offset`: where the part starts on the device.
    """

    key: Any
    start: int
    stop: int
    device: int
    offset: int


@dataclass(frozen=True, eq=False)
class Runs:
    """What is moved from where to where; counts in elements.

    Attributes:

    - `num_shards`: N.
    - `source_size`, `target_size`: of what one device holds, before and afterwards.
    - `table`: int64 `(R, 6)`: device, offset and step between elements before; device and offset afterwards; elements.
    """

    num_shards: int
    source_size: int
    target_size: int
    table: np.ndarray = field(repr=False)

    @property
    def reversed(self) -> "Runs":
        """The way back, for runs of step 1."""
        device, offset, step, to, at, length = self.table.T
        table = np.stack([to, at, step, device, offset, length], 1)
        return Runs(self.num_shards, self.target_size, self.source_size, table)


@functools.lru_cache(maxsize=256)
def runs_between(source: GroupPlan, target: GroupPlan) -> Runs:
    """The runs from one plan to another.

    Arguments:

    - `source`, `target`: plans of the same tensors for the same number of shards.

    Raises: `ValueError` that names every tensor which is in one plan only or of another shape, or both numbers of
    shards.
    """
    _check(source, target)
    kept: set[str] = set()
    parts: list[np.ndarray] = []
    for name, slot in source.slots.items():
        other = target.slots[name]
        if _same_storage(slot, other):
            kept.add(name)
        elif slot.spec.size:
            parts.append(_reordered(slot, source.shard_size, other, target.shard_size))
    before = [place for place in places(source) if place.key in kept]
    after = [place for place in places(target) if place.key in kept]
    table = np.concatenate([intersect(before, after), *parts])
    return Runs(source.num_shards, source.shard_size, target.shard_size, table)


def places(plan: GroupPlan) -> Iterator[Place]:
    """Every piece of every tensor of a plan, in storage order."""
    for device in range(plan.num_shards):
        for piece in plan.pieces(device):
            yield Place(piece.name, piece.start, piece.stop, device, piece.offset)


def intersect(source: Iterable[Place], target: Iterable[Place]) -> np.ndarray:
    """The table of `Runs` for tensors that keep their storage order.

    Arguments:

    - `source`, `target`: the pieces before and afterwards. What lies nowhere before is left out; a piece that lies in
      several places afterwards goes to all of them.

    Returns: int64 `(R, 6)`.
    """
    by_key: dict[Any, list[Place]] = {}
    for place in sorted(source, key=lambda place: place.start):
        by_key.setdefault(place.key, []).append(place)
    cursors = dict.fromkeys(by_key, 0)
    rows: list[tuple[int, ...]] = []
    for there in sorted(target, key=lambda place: place.start):
        pieces = by_key.get(there.key, [])
        # Both are ascending: what ends before this piece starts is never needed again.
        while cursors.get(there.key, 0) < len(pieces) and pieces[cursors[there.key]].stop <= there.start:
            cursors[there.key] += 1
        for here in pieces[cursors.get(there.key, 0) :]:
            if here.start >= there.stop:
                break
            start, stop = max(here.start, there.start), min(here.stop, there.stop)
            before, after = here.offset + start - here.start, there.offset + start - there.start
            rows.append((here.device, before, 1, there.device, after, stop - start))
    return np.array(rows, np.int64).reshape(-1, 6)


def _same_storage(slot: Slot, other: Slot) -> bool:
    """Whether two slots hold a tensor in the same order."""
    if slot.storage == other.storage == "tiled":
        return slot.tile_order == other.tile_order
    return slot.storage == other.storage


def _reordered(slot: Slot, source_size: int, other: Slot, target_size: int) -> np.ndarray:
    """The runs of a tensor that is stored in another order afterwards."""
    before = store(other, load(slot, np.arange(slot.size, dtype=np.int64)) + 1) - 1
    after = np.flatnonzero(before >= 0)
    before = before[after] + slot.offset
    after = after + other.offset
    device, to = before // source_size, after // target_size
    steps = np.diff(before)
    # Lines of equal length in equal steps: the commonest step is that within a line.
    values, counts = np.unique(steps, return_counts=True)
    step = int(values[np.argmax(counts)]) if len(values) else 1
    ends = (steps != step) | (np.diff(after) != 1) | (np.diff(device) != 0) | (np.diff(to) != 0)
    first = np.concatenate([[0], np.flatnonzero(ends) + 1])
    length = np.diff(np.append(first, len(before)))
    rows = [device[first], before[first] % source_size, np.where(length > 1, step, 1)]
    return np.stack([*rows, to[first], after[first] % target_size, length], 1)


def _check(source: GroupPlan, target: GroupPlan) -> None:
    faults = Faults("redistribute")
    if source.num_shards != target.num_shards:
        got = f"plans for {source.num_shards} and {target.num_shards} shards"
        faults.add("num_shards", got=got, want="the same number", change="plan both for the same mesh axis")
    for name, slot in source.slots.items():
        other = target.slots.get(name)
        if other is None or other.shape != slot.shape:
            got = "no such tensor in the target" if other is None else f"shape {other.shape} in the target"
            faults.add(name, got=got, want=f"shape {slot.shape}", change="plan the same tensors")
    for name in target.slots:
        if name not in source.slots:
            faults.add(name, got="no such tensor in the source", want="one", change="plan the same tensors")
    faults.raise_if_any()
