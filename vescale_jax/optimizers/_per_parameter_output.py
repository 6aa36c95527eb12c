"""Running a graph on all devices, and laying out what comes of it.

Comes in: a graph, arrays, and what is wanted. Goes out: buffers, in which each parameter has what its node says and
padding is zero; vectors of parts; and arrays that belong to no parameter.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from vescale_layouts import LocalSegments, Segments
from vescale_planner import Faults

from ._per_parameter_graph import Graph
from ._per_parameter_nodes import Dims, Node, Value
from ._per_parameter_run import Runner
from ._per_parameter_target import Target

WANT = "one that treats parameters element by element, reduces over their dims, or combines the results"
CHANGE = "choose another one, or one of vs.optimizers"


@dataclass(frozen=True)
class Wanted:
    """An array that the devices return.

    Attributes:

    - `buffer`: -1 for one that belongs to no parameter.
    - `shard`: whether it is a shard or a vector of parts.
    - `dtype`: of it; `shape` of one that belongs to no parameter.
    - `values`: of each parameter, by number in slot order.
    - `kept`: dims of each parameter's part.
    """

    buffer: int
    shard: bool
    dtype: Any
    values: Mapping[int, Any]
    kept: Mapping[int, Dims]
    shape: tuple[int, ...] = ()


def run_graph(target: Target, graph: Graph, arrays: Sequence[Any], wanted: Sequence[Wanted]) -> list[Any]:
    """Runs a graph on all devices, each on its own shards."""
    nodes = [wanted_nodes(graph, want) for want in wanted]
    layouts = [buffer.layout for buffer in target.buffers]
    tables = [Segments.of(layout).table for layout in layouts]
    cut: dict[int, PartitionSpec] = {}
    for node in graph.nodes.made:
        if node.op == "input":
            cut[node.detail] = layouts[node.buffer].spec if node.store == "shard" else PartitionSpec()

    def on_device(tables: Any, arrays: Sequence[Any]) -> list[Any]:
        segments = [Segments.of(x).local(table) for x, table in zip(layouts, tables, strict=True)]
        runner = Runner(segments, arrays)
        runner.compute([node for found in nodes for node in found.values()])
        return [_output(runner, segments, want, found) for want, found in zip(wanted, nodes, strict=True)]

    mapped = jax.shard_map(
        on_device,
        mesh=layouts[0].mesh,
        in_specs=(PartitionSpec(layouts[0].axis), [cut.get(k, PartitionSpec()) for k in range(len(arrays))]),
        out_specs=[layouts[want.buffer].spec if want.shard else PartitionSpec() for want in wanted],
        axis_names={layouts[0].axis},
        check_vma=False,
    )
    return mapped(tables, list(arrays))


def wanted_nodes(graph: Graph, want: Wanted) -> dict[int, Node]:
    """The node of each value.

    Raises: `ValueError` that names all parameters with an update that is not supported.
    """
    found = _nodes(graph, want)
    faults = Faults("per_parameter")
    for path, why in graph.faults.items() if None in found.values() else ():
        faults.add(path, got=f"an optimizer that {why}", want=WANT, change=CHANGE)
    faults.raise_if_any()
    return {tensor: node for tensor, node in found.items() if node is not None}


def _nodes(graph: Graph, want: Wanted) -> dict[int, Node | None]:
    """The node of each value, if it lies as it should."""
    found: dict[int, Node | None] = {}
    for tensor, x in want.values.items():
        if want.buffer < 0:
            x = graph.whole(x, want.shape)
            found[tensor] = graph.shaped(x, want.shape).node
            continue
        home = want.buffer, tensor
        if not isinstance(x, Value) or x.home != home:
            x = graph.whole(x, ())
        found[tensor] = x.node
        if x.node is None:
            continue
        if x.home is None and not x.splat:
            found[tensor] = graph.fault(
                home, "takes an array of its shape from elsewhere (such as random numbers)"
            ).node
        elif x.home is not None and x.axes is not None:
            dims = [dim for dims in x.axes for dim in dims]
            rows = all(not dims or dims == (k,) for k, dims in enumerate(x.axes))
            if not (rows if want.shard else dims == sorted(dims)):
                found[tensor] = graph.fault(home, "exchanges its dims").node
            elif not want.shard and x.node.store == "shard":
                found[tensor] = graph.part(x, want.kept[tensor]).node
    return found


def _output(runner: Runner, segments: Sequence[LocalSegments], want: Wanted, nodes: Mapping[int, Any]) -> Any:
    if want.buffer < 0:
        return jnp.asarray(
            runner.values[nodes[0]], None if jax.dtypes.issubdtype(want.dtype, jax.dtypes.extended) else want.dtype
        )
    kinds: dict[Node, list[int]] = {}
    for tensor, node in nodes.items():
        kinds.setdefault(node, []).append(tensor)
    if want.shard:
        return _shard(runner, segments[want.buffer], want, kinds)
    kept = want.kept
    order = sorted(kept)
    lengths = {i: runner.length(want.buffer, kept[i], i) for i in order}
    pieces: list[Any] = []
    where: dict[int, int] = {}
    end = 0
    for node, tensors in kinds.items():
        mine = {i: kept[i] for i in tensors}
        size = sum(lengths[i] for i in mine)
        pieces.append(jnp.broadcast_to(runner.part(node, want.buffer, mine), (size,)).astype(want.dtype))
        for i in sorted(mine):
            where[i] = end
            end += lengths[i]
    joined = jnp.concatenate(pieces)
    at = np.concatenate([np.arange(where[i], where[i] + lengths[i]) for i in order])
    return joined if np.array_equal(at, np.arange(len(at))) else joined[at]


def _shard(runner: Runner, local: LocalSegments, want: Wanted, kinds: Mapping[Node, Sequence[int]]) -> Any:
    """One array for a buffer, of which each parameter takes what its node says; zero elsewhere."""
    layout = local.layout
    slots = layout.plan.ordered_slots
    values = {node: runner.shard(node, want.buffer).astype(want.dtype) for node in kinds}
    (first, *_), held = values, {i for tensors in kinds.values() for i in tensors}
    if len(values) == 1 and first.op == "input":
        return values[first]
    everywhere = not layout.plan.gaps and all(i in held for i, slot in enumerate(slots) if slot.size)
    # The commonest value is what the others, and zero in padding, are written over.
    base = max(kinds, key=lambda node: len(kinds[node])) if everywhere else None
    found = jnp.zeros((), want.dtype) if base is None else values[base]
    found = jnp.broadcast_to(found, layout.local_shape)
    for node, tensors in kinds.items():
        if node is not base:
            mine = local.spread(jnp.asarray(np.isin(np.arange(len(slots)), tensors)), False)
            found = jnp.where(mine, values[node], found)
    return found
