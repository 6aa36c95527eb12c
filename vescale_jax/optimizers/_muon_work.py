"""Work: which device orthogonalises which matrices, and how they get there and back.

Comes in: the groups that hold matrices, with their plans. Goes out: a `Work`, all of it static.

- Layers of equal plans are a *stack*, whether they lie stacked in one buffer or are units of their own. Over N devices,
  each device gets whole layers, as many as every other: one all_to_all of the layers' shards there, one back. Shards
  travel as they are, with what they hold beside matrices.
- What does not divide evenly is *loose*: single matrices, given to devices by what they cost, about
  min(m, n)^2 max(m, n). Of these nothing else travels, by one exact exchange there and one back.

Layers are stacked where no more travels than the matrices have bytes, and no device waits much; the rest is loose.

Shapes: N shards of S elements, G = N * S; L layers of a stack, T = ceil(L / N) on each device.
"""

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from vescale_layouts import Exchange, Layout, Place, Runs, choose_owners, exchange_of, intersect
from vescale_planner import GroupPlan, Slot, TensorSpec

from ._muon_matrix import Matrix

# How much more layers a device may have to do than would be its share, for one exchange instead of two.
_UNEVEN = 1.15
# How much more than the matrices' own bytes one all_to_all of loose matrices may carry.
_SLACK = 1.1

Matrices = tuple[tuple[str, Matrix], ...]
"""The matrices of a group, by the names of their slots."""


@dataclass(frozen=True, slots=True)
class Source:
    """A group with matrices.

    Attributes:

    - `layout`: of the group.
    - `matrices`: which of its tensors, in slot order.
    """

    layout: Layout
    matrices: Matrices

    @property
    def layers(self) -> int:
        """Layers that its buffer holds; 1 if it is no stack."""
        return math.prod(self.layout.stack)


@dataclass(frozen=True, slots=True)
class Stack:
    """Layers that are exchanged whole.

    Attributes:

    - `plan`: of one layer.
    - `matrices`: of one layer.
    - `members`: (source, first layer, last layer and one) in order.
    - `layers`: L in all.
    """

    plan: GroupPlan
    matrices: Matrices
    members: tuple[tuple[int, int, int], ...]
    layers: int

    @property
    def turns(self) -> int:
        """T, layers on each device, absent ones included."""
        return -(-self.layers // self.plan.num_shards)


@dataclass(frozen=True, slots=True)
class Kind:
    """Loose matrices of one shape, stored and taken apart alike.

    Attributes:

    - `plan`: of one of them, alone on one shard.
    - `matrices`: how it is taken apart.
    - `offset`: where they lie on the device that has them, in elements.
    - `counts`: how many each device has; they lie one after the other.
    """

    plan: GroupPlan
    matrices: Matrices
    offset: int
    counts: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Loose:
    """Matrices that are exchanged one by one.

    Attributes:

    - `members`: (source, layer) of the shards that hold them, which lie one after the other.
    - `kinds`: what there is of them.
    - `there`, `back`: the exchanges.
    """

    members: tuple[tuple[int, int], ...]
    kinds: tuple[Kind, ...]
    there: Exchange
    back: Exchange


@dataclass(frozen=True, eq=False)
class Work:
    """Everything that is to be done in a step; made by `work_of`.

    Attributes:

    - `sources`: the groups.
    - `stacks`, `loose`: how they are exchanged; `loose` is None where nothing is.
    - `costs`: multiplications of one step of the iteration on each device, by about min(m, n)^2 max(m, n) a matrix.
    """

    sources: tuple[Source, ...]
    stacks: tuple[Stack, ...]
    loose: Loose | None
    costs: tuple[float, ...]

    @property
    def matrix_elements(self) -> int:
        """Elements of all matrices."""
        return sum(
            source.layers * sum(source.layout.plan.slots[name].spec.size for name, _ in source.matrices)
            for source in self.sources
        )

    @property
    def wire_elements(self) -> int:
        """Elements that leave a device in one step, there and back, over all devices and with padding."""
        stacked = 2 * sum(s.turns * (s.plan.num_shards - 1) * s.plan.buffer_size for s in self.stacks)
        return stacked + (self.loose.there.wire_elements + self.loose.back.wire_elements if self.loose else 0)

    def __str__(self) -> str:
        lines = [
            f"stack of {s.layers} layers, {len(s.matrices)} parameters each, {s.turns} on a device: "
            + ("2 all_to_all" if s.plan.num_shards > 1 else "nothing travels")
            for s in self.stacks
        ]
        if self.loose is not None:
            count = sum(sum(kind.counts) for kind in self.loose.kinds)
            ways = {self.loose.there.transport, self.loose.back.transport}
            lines.append(f"{count} loose matrices of {len(self.loose.kinds)} kinds: {' and '.join(sorted(ways))}")
        ratio = self.wire_elements / max(self.matrix_elements, 1)
        busiest = max(self.costs, default=0) * len(self.costs) / max(sum(self.costs), 1)
        lines.append(f"{ratio:.2f} times the matrices travel; the busiest device has {busiest:.2f} times its share")
        return "\n".join(lines)


@functools.lru_cache(maxsize=64)
def work_of(sources: tuple[Source, ...]) -> Work:
    """Plans the work of a step.

    Arguments:

    - `sources`: the groups with matrices, all over the same axis.
    """
    shards = sources[0].layout.plan.num_shards if sources else 1
    classes: dict[tuple[Layout, Matrices], list[tuple[int, int]]] = {}
    for number, source in enumerate(sources):
        alike = classes.setdefault((source.layout.layer, source.matrices), [])
        alike += [(number, layer) for layer in range(source.layers)]
    stacks: list[Stack] = []
    left: list[tuple[int, int]] = []
    costs = [0.0] * shards
    for (layout, matrices), layers in classes.items():
        taken = _stacked(layout.plan, matrices, len(layers))
        left += layers[taken:]
        if not taken:
            continue
        stack = Stack(layout.plan, matrices, _ranges(layers[:taken]), taken)
        stacks.append(stack)
        each = sum(_cost(matrix, layout.plan.slots[name].shape) for name, matrix in matrices)
        for device in range(shards):
            costs[device] += each * min(max(taken - device * stack.turns, 0), stack.turns)
    loose = _loose(sources, left, costs) if left else None
    return Work(sources, tuple(stacks), loose, tuple(costs))


def _stacked(plan: GroupPlan, matrices: Matrices, layers: int) -> int:
    """How many of some equal layers are exchanged whole."""
    shards, size = plan.num_shards, sum(plan.slots[name].spec.size for name, _ in matrices)
    if shards == 1:
        return layers
    padded = -(-layers // shards) * shards
    # What travels, against the bytes of the matrices.
    if padded * plan.buffer_size * (shards - 1) <= layers * size * shards and padded <= _UNEVEN * layers:
        return layers
    return layers // shards * shards if plan.buffer_size * (shards - 1) <= size * shards else 0


def _ranges(layers: Sequence[tuple[int, int]]) -> tuple[tuple[int, int, int], ...]:
    found: list[tuple[int, int, int]] = []
    for source, layer in layers:
        if found and found[-1][0] == source and found[-1][2] == layer:
            found[-1] = (source, found[-1][1], layer + 1)
        else:
            found.append((source, layer, layer + 1))
    return tuple(found)


def _cost(matrix: Matrix, shape: tuple[int, ...]) -> float:
    return float(sum(b * min(m, n) ** 2 * max(m, n) for b, m, n in matrix.shapes(shape)))


@dataclass(frozen=True, slots=True)
class _Thing:
    """One loose matrix, or what of a parameter cannot be parted: where it lies, and what it is."""

    plan: GroupPlan
    matrix: Matrix
    key: tuple[int, int, str]
    start: int

    def at(self, device: int, offset: int) -> Place:
        return Place(self.key, self.start, self.start + self.plan.shard_size, device, offset)


def _loose(sources: Sequence[Source], layers: Sequence[tuple[int, int]], costs: list[float]) -> Loose:
    """Gives single matrices to devices; adds to `costs` what each device has to do."""
    shards = len(costs)
    things = [thing for source, layer in layers for thing in _things(sources[source], source, layer)]
    before, base = _held(sources, layers)
    each = [_cost(thing.matrix, thing.plan.ordered_slots[0].shape) for thing in things]
    owners = choose_owners(each, [thing.plan.shard_size for thing in things], shards)
    owners = _nearest(owners, shards, intersect(before, [thing.at(i, 0) for i, thing in enumerate(things)]))
    held: dict[tuple[GroupPlan, Matrix], list[list[_Thing]]] = {}
    for thing, owner, cost in zip(things, owners, each, strict=True):
        held.setdefault((thing.plan, thing.matrix), [[] for _ in range(shards)])[owner].append(thing)
        costs[owner] += cost
    kinds: list[Kind] = []
    after: list[Place] = []
    offset = 0
    for (plan, matrix), devices in held.items():
        kinds.append(Kind(plan, (("matrix", matrix),), offset, tuple(map(len, devices))))
        for device, mine in enumerate(devices):
            after += [thing.at(device, offset + turn * plan.shard_size) for turn, thing in enumerate(mine)]
        offset += plan.shard_size * max(map(len, devices))
    runs = Runs(shards, base, offset, intersect(before, after))
    platform = sources[0].layout.mesh.devices.flat[0].platform
    there, back = (exchange_of(x, platform, slack=_SLACK) for x in (runs, runs.reversed))
    return Loose(tuple(layers), tuple(kinds), there, back)


def _things(source: Source, number: int, layer: int) -> Iterator[_Thing]:
    """The matrices of one layer, each by itself where the first dims of a parameter only count them."""
    for name, matrix in source.matrices:
        slot = source.layout.plan.slots[name]
        ndim = len(slot.shape)
        lead = min(matrix.leading(slot.shape), ndim - 2)
        count = math.prod(slot.shape[:lead])
        size = slot.size // count
        rows, cols = (tuple(dim % ndim - lead for dim in dims) for dims in (matrix.rows, matrix.cols))
        inner = Matrix(rows, cols, matrix.split_rows, matrix.split_cols)
        spec = TensorSpec("matrix", slot.shape[lead:], slot.spec.block)
        plan = GroupPlan(1, 1, size, (Slot(spec, 0, size, slot.storage),))
        for i in range(count):
            yield _Thing(plan, inner, (number, layer, name), i * size)


def _held(sources: Sequence[Source], layers: Sequence[tuple[int, int]]) -> tuple[list[Place], int]:
    """Where the matrices of some layers lie when their shards lie one after the other, and the elements of these."""
    found: list[Place] = []
    base = 0
    for source, layer in layers:
        plan = sources[source].layout.plan
        wanted = {name for name, _ in sources[source].matrices}
        for device in range(plan.num_shards):
            found += [
                Place((source, layer, p.name), p.start, p.stop, device, base + p.offset)
                for p in plan.pieces(device)
                if p.name in wanted
            ]
        base += plan.shard_size
    return found, base


def _nearest(owners: Sequence[int], shards: int, runs: np.ndarray) -> list[int]:
    """Gives the work of one device to another, so that much of it lies there already.

    `runs` says what of each thing lies where; see `intersect`.
    """
    there = np.zeros((shards, shards), np.int64)
    np.add.at(there, (np.array(owners, np.int64)[runs[:, 3]], runs[:, 0]), runs[:, 5])
    chosen: dict[int, int] = {}
    taken: set[int] = set()
    for flat in np.argsort(-there, axis=None, kind="stable"):
        work, device = divmod(int(flat), shards)
        if work not in chosen and device not in taken:
            chosen[work] = device
            taken.add(device)
    return [chosen[owner] for owner in owners]
