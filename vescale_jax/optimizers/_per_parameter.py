"""per_parameter: any optax optimizer on the logical parameters, while the data stay flat shards.

Comes in: an optax transformation and a sharded model. Goes out: a transformation over the model's buffers that does
what the given one does to the parameters themselves: masks by rank or path, labels, trust ratios, factored moments.

The given optimizer is traced over logical parameters, shapes only (`_per_parameter_graph.py`); the trace is then run on
each device's shards (`_per_parameter_run.py`). What is the same for all parameters of a buffer is done once for the
buffer. What differs is chosen or spread by tables with a few integers a run. Reductions over parameters are sums on the
device and one `psum` of a small vector a round. No parameter, gradient or moment is gathered.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import optax

from vescale_jax._sharded import Sharded
from vescale_jax._step_aside import steps_aside
from vescale_planner import Faults

from ._per_parameter_graph import Graph
from ._per_parameter_nodes import Dims, Value
from ._per_parameter_output import CHANGE, WANT, Wanted, run_graph, wanted_nodes
from ._per_parameter_state import Cell, StateSpec, state_spec
from ._per_parameter_target import Target
from ._per_parameter_ways import ways


class PerParameter(optax.GradientTransformationExtraArgs):
    """What `per_parameter` returns; `optimizers.describe` asks it for `ways`.

    Attributes:

    - `ways`: a function without arguments: for each parameter, by path, its label and with which others it is treated
      alike, in words. An update that needs more arguments, such as the loss, gives none.
    """

    ways: Callable[[], dict[str, str]]


_NO_EXTRA = jax.tree.structure({}), ()


def per_parameter(tx: Any, model: Sharded) -> PerParameter:
    """Runs an optax optimizer on the parameters of a sharded model, not on the buffers they lie in.

        tx = optax.adamw(1e-3, mask=lambda params: jax.tree.map(lambda x: x.ndim > 1, params))
        tx = vs.optimizers.per_parameter(tx, model)
        state = vs.train_state(model, tx)

    The optimizer, its masks and its labels are given the tree of trainable parameters with their logical shapes: for a
    bare pytree and for linen the user's own tree, with None in the place of frozen parameters; for nnx nested dicts by
    path. Updates are those of the unsharded run, up to the order of sums.

    Arguments:

    - `tx`: an optax transformation, or a chain of them. It may compute element by element, reduce over parameters or
      their dims, and combine what is reduced, also over all parameters. It may not mix elements of one parameter in
      another way (matrix products, sorting), nor draw random numbers in its shape.
    - `model`: what `fully_shard` returned, concrete or abstract; only its structure is kept.

    Returns: an optax transformation over `model.params`, for `train_state` and `train_step`. Its state has the
    structure of the optimizer's, with buffers, or a `Columns`, in the place of every tree of parameters.

    Raises: `TypeError` if `model` is no sharded model, `ValueError` if nothing in it is trained. `init` and `update`
    raise `ValueError` that names the parameters which the optimizer treats in a way that is not supported.
    """
    inner = optax.with_extra_args_support(tx)
    target = Target.of(model)

    @functools.cache
    def spec() -> StateSpec:
        return _checked(_with_dims(state_spec(inner, target), target, inner), target, inner)

    def init(params: Any) -> Any:
        arrays = target.arrays(params)
        closed = jax.make_jaxpr(inner.init)(target.tree)
        graph = Graph(target.shapes, target.paths)
        out = graph.run(closed.jaxpr, closed.consts, [target.leaf(graph, home, 0) for home in target.homes])
        return spec().pack(run_graph(target, graph, arrays, _of_state(spec(), out)))

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        shards = target.arrays(updates) + ([] if params is None else target.arrays(params))
        more, extra_def = jax.tree.flatten(extra)
        graph = Graph(target.shapes, target.paths)
        wanted = _trace(graph, target, inner, spec(), params is not None, (extra_def, more))
        found = run_graph(target, graph, [*shards, *spec().unpack(state), *map(jnp.asarray, more)], wanted)
        count = len(target.buffers)
        return target.pack(found[:count]), spec().pack(found[count:])

    def words() -> dict[str, str]:
        graph = Graph(target.shapes, target.paths)
        try:
            wanted = _trace(graph, target, inner, spec(), True, _NO_EXTRA)
        except TypeError as error:
            # See `_checked`.
            if "missing" not in str(error):
                raise
            return {}
        return ways(target, graph, wanted[: len(target.buffers)], spec().logical)

    made = PerParameter(*steps_aside(init, update))
    made.ways = words
    return made


def _trace(
    graph: Graph, target: Target, inner: Any, spec: StateSpec, has_params: bool, extra: tuple[Any, Sequence[Any]]
) -> list[Wanted]:
    """Puts an update into a graph; its inputs are gradients, parameters if there are any, state and more.

    Returns: what is wanted of it: updates, then state.
    """
    extra_def, more = extra
    structs = [jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)) for x in more]
    params = target.tree if has_params else None
    closed, shape = jax.make_jaxpr(
        lambda grads, params, state, extra: inner.update(grads, state, params, **extra), return_shape=True
    )(target.tree, params, spec.logical, extra_def.unflatten(structs))
    if jax.tree.structure(shape) != jax.tree.structure((target.tree, spec.logical)):
        raise ValueError(
            "per_parameter: tx: got an optimizer whose update changes the structure of its state or of the updates; "
            "want one that keeps it; choose another one"
        )
    values = [target.leaf(graph, home, 0) for home in target.homes]
    first = len(target.buffers)
    if has_params:
        values += [target.leaf(graph, home, first) for home in target.homes]
        first *= 2
    values += _state_values(graph, target, spec, first)
    first += len(spec.cells)
    values += [graph.input_whole(first + k, x.shape, x.dtype) for k, x in enumerate(structs)]
    out = graph.run(closed.jaxpr, closed.consts, values)
    count = len(target.homes)
    dtypes = [x.dtype for x in closed.out_avals]
    updates: dict[int, dict[int, Any]] = {}
    for home, x in zip(target.homes, out, strict=False):
        updates.setdefault(home[0], {})[home[1]] = x
    dtype = {k: jnp.result_type(*(dtypes[i] for i, home in enumerate(target.homes) if home[0] == k)) for k in updates}
    wanted = [Wanted(k, True, dtype[k], updates[k], {}) for k in range(len(target.buffers))]
    return [*wanted, *_of_state(spec, out[count:])]


def _state_values(graph: Graph, target: Target, spec: StateSpec, first: int) -> list[Value]:
    """The leaves of the logical state; the arrays of the state are inputs from `first` on."""
    values: dict[int, Value] = {}
    for position, cell in enumerate(spec.cells, first):
        if cell.buffer < 0:
            values[cell.leaves[0]] = graph.input_whole(position, cell.shapes[0], cell.dtype)
            continue
        for tensor, number in cell.leaves.items():
            home = cell.buffer, tensor
            axes = tuple((dim,) for dim in range(len(target.shapes[home]))) if cell.shard else _axes(cell, tensor)
            values[number] = graph.input(position, home, axes, "shard" if cell.shard else "part", cell.dtype)
    return [values[number] for number in range(len(values))]


def _axes(cell: Cell, tensor: int) -> tuple[Dims, ...] | None:
    kept = cell.kept[tensor]
    if kept is None:
        return None
    dims = iter(kept)
    # A part of one element keeps no dim, whatever its shape.
    return tuple((next(dims),) if size != 1 and kept else () for size in cell.shapes[tensor])


def _with_dims(spec: StateSpec, target: Target, inner: Any) -> StateSpec:
    """Learns which dims the smaller leaves of the state have where shapes do not tell, from what an update makes."""
    for _ in range(3):
        if all(kept is not None for cell in spec.cells for kept in cell.kept.values()):
            return spec
        graph = Graph(target.shapes, target.paths)
        out = _trace(graph, target, inner, spec, True, _NO_EXTRA)[len(target.buffers) :]
        cells: list[Cell] = []
        for cell, want in zip(spec.cells, out, strict=True):
            kept = dict(cell.kept)
            for tensor, dims in kept.items():
                axes = getattr(want.values[tensor], "axes", None)
                if dims is None and axes and any(axes):
                    kept[tensor] = tuple(dim for dims in axes for dim in dims)
            cells.append(replace(cell, kept=kept))
        spec = replace(spec, cells=tuple(cells))
    faults = Faults("per_parameter")
    for cell in spec.cells:
        for tensor, dims in cell.kept.items():
            if dims is None:
                got = f"state of shape {cell.shapes[tensor]} that may belong to several dims"
                faults.add(target.paths[cell.buffer, tensor], got=got, want=WANT, change=CHANGE)
    faults.raise_if_any()
    return spec


def _checked(spec: StateSpec, target: Target, inner: Any) -> StateSpec:
    """Refuses before the first step what an update would be refused for."""
    graph = Graph(target.shapes, target.paths)
    try:
        wanted = _trace(graph, target, inner, spec, True, _NO_EXTRA)
    except TypeError as error:
        # An update that needs more arguments, such as the loss, is not known before it is called.
        if "missing" not in str(error):
            raise
        return spec
    for want in wanted:
        wanted_nodes(graph, want)
    return spec


def _of_state(spec: StateSpec, out: Sequence[Any]) -> list[Wanted]:
    """The state, an array for each cell; `out` has a value for each leaf of the logical state."""
    return [
        Wanted(
            cell.buffer,
            cell.shard,
            cell.dtype,
            {tensor: out[number] for tensor, number in cell.leaves.items()},
            {tensor: dims or () for tensor, dims in cell.kept.items()},
            cell.shapes[0] if cell.buffer < 0 else (),
        )
        for cell in spec.cells
    ]
