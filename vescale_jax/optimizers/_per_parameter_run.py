"""Running the graph of an update on one device's shards.

Comes in: a graph, this device's shards of every buffer, and what every device has whole. Goes out: arrays for any
nodes. Everything is done on flat arrays, a buffer at a time. Reductions over parameters are done in rounds: what can be
summed without the result of another sum travels in one `psum`, whatever the number of parameters.

Shapes: local shards `(*stack, S)`; a part is a vector `(P,)`, one member after the other in slot order, row-major over
the dims that it keeps. A node that is the same number everywhere stays a scalar.
"""

import functools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from vescale_layouts import LocalSegments, Terms

from ._per_parameter_nodes import Dims, Node

Kept = Mapping[int, Dims]
"""The kept dims of each member of a part, by number in slot order."""


class Runner:
    """Computes nodes, once each.

    Arguments:

    - `segments`: of every buffer.
    - `inputs`: of every input node, by its position.
    """

    def __init__(self, segments: Sequence[LocalSegments], inputs: Sequence[Any]) -> None:
        self.segments = segments
        self.inputs = inputs
        self.values: dict[Node, Any] = {}

    def compute(self, wanted: Sequence[Node]) -> None:
        """Computes nodes and whatever they are made of; `values` has them afterwards."""
        nodes = _reachable(wanted)
        rounds: dict[Node, int] = {}
        for node in nodes:
            rounds[node] = max((rounds[x] for x in _made_of(node)), default=0) + _travels(node)
        for number in range(max(rounds.values(), default=0) + 1):
            self._travel([node for node in nodes if _travels(node) and rounds[node] == number])
            for node in nodes:
                if rounds[node] == number and node not in self.values:
                    self.values[node] = self._value(node)

    def shard(self, node: Node, buffer: int) -> jax.Array:
        """A node as a local shard of one buffer, or as a scalar; means nothing outside of its members."""
        value = self.values[node]
        if np.ndim(value) == 0 or node.store == "shard":
            return value
        local = self.segments[buffer]
        kept = {i: member.kept for i, member in node.members.items()}
        slots = local.layout.plan.slots
        if not any(kept.values()):
            place = dict(zip(sorted(kept), range(len(kept)), strict=True))
            return local.spread(value[np.array([place.get(i, 0) for i in range(len(slots))])], 1)
        return value.at[self._index(node, buffer)].get(mode="clip")

    def part(self, node: Node, buffer: int, kept: Kept) -> jax.Array:
        """A node that is no shard as a part with certain members and dims, or as a scalar."""
        value = self.values[node]
        if np.ndim(value) == 0:
            return value
        own = {i: member.kept for i, member in node.members.items()}
        places = self._places(buffer, own, kept)
        return value if np.array_equal(places, np.arange(len(value))) else value[places]

    def length(self, buffer: int, dims: Dims, tensor: int) -> int:
        """Elements of a part of one member."""
        return math.prod(self.shape(buffer, tensor)[dim] for dim in dims)

    def shape(self, buffer: int, tensor: int) -> tuple[int, ...]:
        """Of a parameter, layers of a stack included."""
        layout = self.segments[buffer].layout
        return (*layout.stack, *layout.plan.ordered_slots[tensor].shape)

    def _value(self, node: Node) -> Any:
        match node.op:
            case "input":
                return self.inputs[node.detail]
            case "constant":
                return jnp.asarray(node.detail)
            case "broadcast":
                return jnp.broadcast_to(self.values[_one(node)], node.detail)
            case "result":
                return self.values[_one(node)][node.detail]
            case "pick":
                return self._pick(node)
            case "total":
                return self._total(node)
            case "reduce":
                return self._reduce_part(node)
            case "bind":
                primitive, params, _ = node.detail
                return primitive.bind(*(self.values[x] for x in _made_of(node)), **primitive.get_bind_params(params))
        return self._apply(node)

    def _apply(self, node: Node) -> Any:
        """A primitive, element by element, on arrays of one shape or on scalars."""
        primitive, params = node.detail
        kept = {i: member.kept for i, member in node.members.items()}
        operands: list[Any] = []
        place = 0
        for x in node.operands:
            if x is None:
                operands.append(self._numbers(node, place, kept))
                place += 1
            elif node.store == "shard":
                operands.append(self.shard(x, node.buffer))
            elif node.store == "part":
                operands.append(self.part(x, node.buffer, kept))
            else:
                operands.append(self.values[x])
        shape = next((np.shape(x) for x in operands if np.ndim(x)), ())
        return primitive.bind(*(jnp.broadcast_to(x, shape) for x in operands), **params)

    def _numbers(self, node: Node, place: int, kept: Kept) -> Any:
        """The number of each member in one place of the operands."""
        numbers = {i: member.numbers[place] for i, member in sorted(node.members.items())}
        first = next(iter(numbers.values()))
        if all(np.asarray(x).tobytes() == np.asarray(first).tobytes() for x in numbers.values()):
            return jnp.asarray(first)
        if node.store == "part":
            lengths = [self.length(node.buffer, kept[i], i) for i in numbers]
            return jnp.asarray(np.repeat(np.array(list(numbers.values())), lengths))
        local = self.segments[node.buffer]
        count = len(local.layout.plan.slots)
        return local.spread(jnp.asarray(np.array([numbers.get(i, first) for i in range(count)])), 1)

    def _travel(self, nodes: Sequence[Node]) -> None:
        """Reduces shards to parts: on the device first, then all of them at once over the devices."""
        pending: dict[tuple[str, Any], list[tuple[Node, jax.Array]]] = {}
        for node in nodes:
            local = self._reduce_shard(node)
            pending.setdefault((node.detail, local.dtype), []).append((node, local))
        for (reducer, _), found in pending.items():
            layout = self.segments[found[0][0].buffer].layout
            joined = jnp.concatenate([part for _, part in found])
            if layout.plan.num_shards > 1 and joined.size:
                over = {"sum": lax.psum, "max": lax.pmax, "min": lax.pmin}[reducer]
                joined = over(joined, layout.axis)
            end = 0
            for node, part in found:
                self.values[node] = joined[end : end + part.size].astype(node.dtype)
                end += part.size

    def _reduce_shard(self, node: Node) -> jax.Array:
        """This device's share of a reduction to parts."""
        local, x = self.segments[node.buffer], self.shard(_one(node), node.buffer)
        x = jnp.broadcast_to(x, local.layout.local_shape)
        if node.detail == "sum" and jnp.issubdtype(x.dtype, jnp.floating):
            x = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        kept = {i: member.kept for i, member in node.members.items()}
        self._check_room(node, kept)
        if not any(kept.values()):
            return local.total(x, node.detail)[np.array(sorted(kept))]
        length = sum(self.length(node.buffer, dims, i) for i, dims in kept.items())
        count = len(local.layout.plan.slots)
        is_member = local.spread(jnp.asarray(np.array([i in kept for i in range(count)])), False)
        at = jnp.where(is_member, self._index(node, node.buffer), length)
        return _segment(node.detail)(x.reshape(-1), at.reshape(-1), length + 1)[:length]

    def _reduce_part(self, node: Node) -> jax.Array:
        """A reduction of parts to smaller ones; nothing travels."""
        x, own = _one(node), {i: member.kept for i, member in _one(node).members.items()}
        own = {i: own[i] for i in node.members}
        value = self.part(x, node.buffer, own)
        length = sum(self.length(node.buffer, dims, i) for i, dims in own.items())
        kept = {i: member.kept for i, member in node.members.items()}
        at = self._places(node.buffer, kept, own)
        total = sum(self.length(node.buffer, dims, i) for i, dims in kept.items())
        return _segment(node.detail)(jnp.broadcast_to(value, (length,)), jnp.asarray(at), total)

    def _pick(self, node: Node) -> Any:
        """One member's part as an array of its own."""
        tensor, sizes, order, lengths = node.detail
        source = _one(node)
        value = self.values[source]
        if sizes is None:
            return value if np.ndim(value) == 0 else value[self._starts(source)[tensor]]
        if np.ndim(value) == 0:
            return jnp.broadcast_to(value, lengths)
        start = self._starts(source)[tensor]
        return value[start : start + math.prod(sizes)].reshape(sizes).transpose(order).reshape(lengths)

    def _total(self, node: Node) -> Any:
        """A sum of single numbers: one sum for all that are members of one node."""
        picked, others = _addends(node)
        found = [self.values[x] for x in others.elements()]
        for source, tensors in picked.items():
            value = self.values[source]
            if np.ndim(value) == 0:
                found.append(value * sum(tensors.values()))
                continue
            starts = self._starts(source)
            times = np.zeros(len(value), np.int32)
            for tensor, count in tensors.items():
                times[starts[tensor]] = count
            if not np.all(times == 1):
                value = jnp.where(times > 0, value * times.astype(value.dtype), jnp.zeros_like(value))
            found.append(value.sum(dtype=node.dtype))
        return functools.reduce(jnp.add, found).astype(node.dtype)

    def _starts(self, node: Node) -> dict[int, int]:
        """Where each member's part starts."""
        starts: dict[int, int] = {}
        end = 0
        for i in sorted(node.members):
            starts[i] = end
            end += self.length(node.buffer, node.members[i].kept, i)
        return starts

    def _index(self, node: Node, buffer: int) -> jax.Array:
        """Where each element of the shard belongs in a part."""
        local = self.segments[buffer]
        layers = len(local.layout.stack)
        starts = self._starts(node)
        terms: list[Terms] = []
        for i, slot in enumerate(local.layout.plan.ordered_slots):
            if i not in node.members:
                terms.append(Terms(0))
                continue
            kept, shape = node.members[i].kept, self.shape(buffer, i)
            strides = dict(zip(range(layers, len(shape)), _strides(slot), strict=True))
            dims: list[tuple[int, int, int]] = []
            step = 1
            for dim in reversed([dim for dim in kept if dim >= layers]):
                dims.append((strides[dim], shape[dim], step))
                step *= shape[dim]
            terms.append(Terms(starts[i], tuple(dims), step if layers and kept[:layers] == tuple(range(layers)) else 0))
        return local.index(terms)

    def _places(self, buffer: int, source: Kept, kept: Kept) -> np.ndarray:
        """For every element of one part, the element of another that it is made of, or is summed to."""
        places: list[np.ndarray] = [np.zeros(0, np.int64)]
        starts: dict[int, int] = {}
        end = 0
        for i in sorted(source):
            starts[i] = end
            end += self.length(buffer, source[i], i)
        for i in sorted(kept):
            shape = self.shape(buffer, i)
            sizes = tuple(shape[dim] for dim in kept[i])
            grid = np.indices(sizes).reshape(len(sizes), -1) if sizes else np.zeros((0, 1), np.int64)
            at = np.full(math.prod(sizes), starts[i])
            step = 1
            for dim in reversed(source[i]):
                if dim in kept[i]:
                    at = at + grid[kept[i].index(dim)] * step
                step *= shape[dim]
            places.append(at)
        return np.concatenate(places)

    def _check_room(self, node: Node, kept: Kept) -> None:
        """Refuses reductions of what is stored tile by tile, unless its order and its room do not matter."""
        layout = self.segments[node.buffer].layout
        for i, dims in kept.items():
            slot = layout.plan.ordered_slots[i]
            inner = any(dim >= len(layout.stack) for dim in dims)
            partial = 0 < sum(dim < len(layout.stack) for dim in dims) < len(layout.stack)
            if partial or (slot.storage == "tiled" and (inner or slot.size != slot.spec.size)):
                raise ValueError(
                    f"per_parameter: {slot.name}: got an optimizer that reduces over parts of a parameter stored "
                    f"{slot.storage}; want row-major storage, and all layers of a stack or none; call fully_shard with "
                    "storage='row_major'"
                )


def _strides(slot: Any) -> list[int]:
    """Elements of the slot between neighbours along each dim, row-major or transposed."""
    shape = list(slot.shape)
    order = list(range(len(shape)))
    if slot.storage == "transposed":
        order[-2:] = order[-1], order[-2]
    strides = [0] * len(shape)
    step = 1
    for dim in reversed(order):
        strides[dim] = step
        step *= shape[dim]
    return strides


def _segment(reducer: str) -> Any:
    found = {"sum": jax.ops.segment_sum, "max": jax.ops.segment_max, "min": jax.ops.segment_min}[reducer]
    return lambda x, at, count: found(x, at, num_segments=count)


def _one(node: Node) -> Node:
    """The only operand."""
    (x,) = node.operands
    assert x is not None
    return x


def _travels(node: Node) -> bool:
    """Whether a node is a reduction of shards."""
    return node.op == "reduce" and _one(node).store == "shard"


def _addends(node: Node) -> tuple[dict[Node, Counter[int]], Counter[Node]]:
    """What a total adds: numbers of members, by node, and wholes; each as often as it occurs."""
    picked: dict[Node, Counter[int]] = {}
    others: Counter[Node] = Counter()
    left = [node]
    while left:
        for x in left.pop().operands:
            assert x is not None
            if x.op == "total":
                left.append(x)
            elif x.op == "pick":
                picked.setdefault(_one(x), Counter())[x.detail[0]] += 1
            else:
                others[x] += 1
    return picked, others


def _made_of(node: Node) -> list[Node]:
    """The nodes whose values one needs."""
    if node.op == "total":
        picked, others = _addends(node)
        return [*picked, *others]
    return [x for x in node.operands if x is not None]


def _reachable(wanted: Sequence[Node]) -> list[Node]:
    """The nodes and all they are made of, operands first."""
    found: set[Node] = set()
    left = list(wanted)
    while left:
        node = left.pop()
        if node not in found:
            found.add(node)
            left += _made_of(node)
    return sorted(found, key=lambda node: node.number)
