"""orthogonalise: the matrices in some buffers made nearly orthogonal, each on the device that has it to do.

Comes in: gradient and momentum for each group with matrices, and the `Work`. Goes out: the gradients, with the scaled
orthogonal matrices in the places of matrices. What travels, travels before and after the iteration. A
device goes through its matrices one layer at a time, so the temporary memory of the iteration does not depend on their
number. That of the exchange does, unless it is done in turns.

Shapes: see `_muon_work.py`.
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from vescale_layouts import pack, unpack
from vescale_planner import GroupPlan

from ._muon_places import among
from ._muon_work import Kind, Loose, Matrices, Source, Stack, Work
from ._newton_schulz import in_chunks, newton_schulz


@dataclass(frozen=True, slots=True)
class Iteration:
    """How matrices are made orthogonal.

    Attributes:

    - `coefficients`: for every step.
    - `eps`: added to norms.
    - `consistent_rms`: see `muon`.
    - `exchange_dtype`: of what travels.
    - `compute_dtype`: of the products.
    - `chunk`: elements of matrices that are worked on at a time.
    - `turn_layers`: layers of a stack that each device is sent at a time; None: all.
    """

    coefficients: tuple[tuple[float, ...], ...]
    eps: float
    consistent_rms: float | None
    exchange_dtype: Any
    compute_dtype: Any
    chunk: int
    turn_layers: int | None

    def scale(self, rows: int, cols: int) -> float:
        """By what an orthogonal matrix is multiplied."""
        if self.consistent_rms is None:
            return math.sqrt(max(1, cols / rows))
        return self.consistent_rms * math.sqrt(max(rows, cols))


Direction = Callable[[jax.Array, jax.Array], jax.Array]
"""What is to be made orthogonal, float32, from gradient and momentum, element by element."""


def orthogonalise(
    work: Work,
    iteration: Iteration,
    direction: Callable[..., jax.Array],
    count: jax.Array,
    factor: jax.Array,
    grads: Sequence[jax.Array],
    momenta: Sequence[jax.Array],
) -> list[jax.Array]:
    """Does the work of a step.

    Arguments:

    - `work`: what is to be done.
    - `iteration`: how.
    - `direction`: a `Direction`, but for its first argument, which is `count`; called on parts of buffers.
    - `count`: a scalar, the number of the step.
    - `factor`: a scalar that the scaled orthogonal matrices are multiplied by.
    - `grads`, `momenta`: a global array `(*stack, G)` for each of `work.sources`.

    Returns: arrays of the shapes and dtypes of `grads`. What belongs to no matrix is as in `grads`.
    """
    layouts = [source.layout for source in work.sources]
    mesh, axis = layouts[0].mesh, layouts[0].axis
    specs = [layout.spec for layout in layouts]

    def on_device(count: jax.Array, factor: jax.Array, grads: Any, momenta: Any) -> list[jax.Array]:
        pairs = [(g.reshape(-1, g.shape[-1]), m.reshape(-1, m.shape[-1])) for g, m in zip(grads, momenta, strict=True)]
        step = functools.partial(direction, count)
        done = _done(work, iteration, step, factor, axis, lax.axis_index(axis), pairs)
        return [x.reshape(g.shape) for g, x in zip(grads, done, strict=True)]

    mapped = jax.shard_map(
        on_device,
        mesh=mesh,
        in_specs=(PartitionSpec(), PartitionSpec(), specs, specs),
        out_specs=specs,
        axis_names={axis},
        check_vma=False,
    )
    return mapped(count, factor, list(grads), list(momenta))


def _done(
    work: Work,
    iteration: Iteration,
    direction: Direction,
    factor: jax.Array,
    axis: str,
    device: jax.Array,
    pairs: Sequence[tuple[jax.Array, jax.Array]],
) -> list[jax.Array]:
    """All work on one device: gradients and momenta of each source, (layers, S), to what becomes of them."""
    # Each source's layers, as they come back: (first layer, layers (n, S)).
    done: list[list[tuple[int, jax.Array]]] = [[] for _ in pairs]
    onto = [_onto(source, device, factor) for source in work.sources]

    def part(source: int, first: int, stop: int) -> jax.Array:
        g, m = (x[first:stop] for x in pairs[source])
        return direction(g, m).astype(iteration.exchange_dtype)

    for stack in work.stacks:
        (source, first, stop), *more = stack.members
        if not more and _in_place(stack, iteration, len(pairs[source][0])):
            found = _in_exchange_turns(stack, iteration, direction, onto[source], axis, *pairs[source])
            done[source].append((first, found))
            continue
        rows = _on_stack(stack, iteration, axis, device, _joined([part(*member) for member in stack.members]))
        for source, first, stop in stack.members:
            done[source].append((first, onto[source](rows[: stop - first], pairs[source][0][first:stop])))
            rows = rows[stop - first :]
    if work.loose is not None:
        held = _joined([part(source, layer, layer + 1)[0] for source, layer in work.loose.members])
        held = _on_loose(work.loose, iteration, axis, device, held)
        for source, layer in work.loose.members:
            size = pairs[source][0].shape[1]
            done[source].append((layer, onto[source](held[None, :size], pairs[source][0][layer : layer + 1])))
            held = held[size:]
    return [_joined([layers for _, layers in sorted(parts, key=lambda part: part[0])]) for parts in done]


def _onto(source: Source, device: jax.Array, factor: jax.Array) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """Puts what became of some layers, (n, S), in the places of matrices, and leaves gradients in all others."""
    plan, names = source.layout.plan, {name for name, _ in source.matrices}
    if len(names) == len(plan.slots):
        return lambda new, old: (factor * new.astype(jnp.float32)).astype(old.dtype)
    position = device * plan.shard_size + jnp.arange(plan.shard_size, dtype=jnp.int32)
    inside = among(plan, names, position)[None]

    def put(new: jax.Array, old: jax.Array) -> jax.Array:
        new = (factor * new.astype(jnp.float32)).astype(old.dtype)
        return jnp.where(jnp.broadcast_to(inside, new.shape), new, old)

    return put


def _joined(parts: Sequence[jax.Array]) -> jax.Array:
    return jnp.concatenate(parts) if len(parts) > 1 else parts[0]


def _on_stack(stack: Stack, iteration: Iteration, axis: str, device: jax.Array, rows: jax.Array) -> jax.Array:
    """The layers of a stack, (L, S) before and afterwards."""
    shards, turns, layers = stack.plan.num_shards, stack.turns, stack.layers
    if shards * turns > layers:
        rows = jnp.concatenate([rows, jnp.zeros((shards * turns - layers, rows.shape[1]), rows.dtype)])
    # Device k gets layers k * T and onwards, each as its N shards: (N, T, S).
    x = _exchanged(rows.reshape(shards, turns, rows.shape[1]), axis, shards)
    count = jnp.clip(layers - device * turns, 0, turns) if shards * turns > layers else None
    x = _in_turns(_layer_of(stack, iteration), x, turns, 1, count)
    return _exchanged(x, axis, shards).reshape(shards * turns, rows.shape[1])[:layers]


def _in_place(stack: Stack, iteration: Iteration, layers: int) -> bool:
    """Whether a stack is one buffer, and is to be exchanged in several turns of equal size."""
    turns, at_once = stack.turns, iteration.turn_layers
    whole = stack.layers == layers == turns * stack.plan.num_shards
    return at_once is not None and at_once < turns and whole and turns % at_once == 0


def _in_exchange_turns(
    stack: Stack,
    iteration: Iteration,
    direction: Direction,
    onto: Callable[[jax.Array, jax.Array], jax.Array],
    axis: str,
    grads: jax.Array,
    momenta: jax.Array,
) -> jax.Array:
    """The same on a stack that is one buffer, a few layers a device at a time: written over the gradients, (L, S)."""
    shards, at_once = stack.plan.num_shards, iteration.turn_layers or 1
    layers = shards * at_once

    def turn(t: Any, x: jax.Array) -> jax.Array:
        g, m = (lax.dynamic_slice_in_dim(rows, t * layers, layers) for rows in (x, momenta))
        u = direction(g, m).astype(iteration.exchange_dtype)
        some = _exchanged(u.reshape(shards, at_once, -1), axis, shards)
        some = _in_turns(_layer_of(stack, iteration), some, at_once, 1, None)
        new = onto(_exchanged(some, axis, shards).reshape(layers, -1), g)
        return lax.dynamic_update_slice_in_dim(x, new, t * layers, 0)

    return lax.fori_loop(0, stack.turns // at_once, turn, grads)


def _layer_of(stack: Stack, iteration: Iteration) -> Callable[[jax.Array], jax.Array]:
    """What is done to one layer, (N, S) before and afterwards."""

    def one(layer: jax.Array) -> jax.Array:
        found = _on_layer(stack.plan, stack.matrices, iteration, layer.reshape(stack.plan.buffer_size))
        return found.reshape(layer.shape)

    return one


def _exchanged(x: jax.Array, axis: str, shards: int) -> jax.Array:
    """All layers' shards to their owners, or back: (N, T, S)."""
    if shards == 1:
        return x
    # The barriers keep casts where they are, so that the bytes on the wire are those of the exchange dtype.
    return lax.optimization_barrier(lax.all_to_all(lax.optimization_barrier(x), axis, 0, 0, tiled=True))


def _on_loose(loose: Loose, iteration: Iteration, axis: str, device: jax.Array, held: jax.Array) -> jax.Array:
    """Shards that hold loose matrices, one after the other, before and afterwards."""
    x = lax.optimization_barrier(loose.there(lax.optimization_barrier(held), axis))
    parts = [_on_kind(kind, iteration, device, x) for kind in loose.kinds]
    return lax.optimization_barrier(loose.back(lax.optimization_barrier(_joined(parts)), axis))


def _on_kind(kind: Kind, iteration: Iteration, device: jax.Array, x: jax.Array) -> jax.Array:
    size, turns = kind.plan.shard_size, max(kind.counts)
    own = lax.slice(x, (kind.offset,), (kind.offset + turns * size,)).reshape(turns, size)
    count = None if min(kind.counts) == turns else jnp.asarray(kind.counts, jnp.int32)[device]
    found = _in_turns(lambda one: _on_layer(kind.plan, kind.matrices, iteration, one), own, turns, 0, count)
    return found.reshape(turns * size)


def _in_turns(
    function: Callable[[jax.Array], jax.Array], x: jax.Array, turns: int, dim: int, count: jax.Array | None
) -> jax.Array:
    """Writes a function of each place along a dim over it, for the first `count` places, one after the other."""

    def turn(t: Any, x: jax.Array) -> jax.Array:
        one = lax.dynamic_index_in_dim(x, t, dim, keepdims=False)
        # What a device does not have, it does not compute: nothing in a branch travels.
        new = function(one) if count is None else lax.cond(t < count, function, lambda same: same, one)
        return lax.dynamic_update_index_in_dim(x, new, t, dim)

    return turn(0, x) if turns == 1 else lax.fori_loop(0, turns, turn, x)


def _on_layer(plan: GroupPlan, matrices: Matrices, iteration: Iteration, buffer: jax.Array) -> jax.Array:
    """One layer, whole: (G,) before and afterwards; matrices of one shape are a batch."""
    tensors = unpack(plan, buffer)
    batches: dict[tuple[int, int], list[tuple[str, int, jax.Array]]] = {}
    for name, matrix in matrices:
        for i, part in enumerate(matrix.split(tensors[name])):
            batches.setdefault((part.shape[1], part.shape[2]), []).append((name, i, part))
    found: dict[str, dict[int, jax.Array]] = {name: {} for name, _ in matrices}
    for (rows, cols), parts in batches.items():
        scale = iteration.scale(rows, cols)

        def step(x: jax.Array, scale: float = scale) -> jax.Array:
            wide = x.astype(jnp.float32)
            out = newton_schulz(wide, iteration.coefficients, iteration.eps, iteration.compute_dtype)
            return (scale * out).astype(x.dtype)

        x = in_chunks(step, _joined([part for _, _, part in parts]), max(1, iteration.chunk // (rows * cols)))
        for name, i, part in parts:
            found[name][i] = x[: len(part)]
            x = x[len(part) :]
    out = {name: jnp.zeros(x.shape, x.dtype) for name, x in tensors.items()}
    for name, matrix in matrices:
        parts = found[name]
        out[name] = matrix.join([parts[i] for i in range(len(parts))], tensors[name].shape)
    return pack(plan, out, buffer.dtype)
