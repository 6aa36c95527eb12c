"""Loop: a stack of layers run one by one, each gathered just before its turn.

Comes in: the body of a loop over layers and the stack's shards. Goes out: what the loop returns, as a function that can
be differentiated. With look-ahead, the next layer is gathered while one layer computes; in the backward pass the layer
before is gathered again and the gradients of the layer after are reduced meanwhile. Two gathered layers are alive at
most. Loops are unrolled by two, so that what they carry need not be copied from turn to turn, and the first and the
last turn stand outside, so that nothing is gathered or reduced in vain.

Shapes: L layers, N shards of S elements: a group's shards are (L, S) on each device, a gathered layer (G,).

This is veScale-FSDP's overlap (arXiv 2602.22437, section 4.3) and FSDP2's implicit prefetch, for a compiler that keeps
a collective inside the turn in which it was written.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero

from vescale_layouts import gather_buffer, pack, scatter_buffer, unpack

from ._groups import Group
from ._layer import Layer, Operands, is_float
from ._wait import zero_after

Shards = dict[str, jax.Array]
"""Shards or buffers of the groups of a stack, by name."""


@dataclass(frozen=True, eq=False)
class Loop:
    """A loop over the layers of a stack.

    Attributes:

    - `body`: a function of one turn's operands that returns the new carry, then the turn's results.
    - `groups`: the groups of the stack, by the name of their shards.
    - `tensors`: group and slot of each parameter that the body takes.
    - `length`: L.
    - `reverse`: whether the last layer is the first to run.
    - `unroll`: turns in one, without look-ahead.
    - `prefetch`: layers that are gathered ahead: 0 or 1.
    - `reshard`: whether gathered layers are freed and gathered again for the backward pass.
    """

    body: Callable[[Operands], Sequence[Any]]
    groups: Mapping[str, Group]
    tensors: tuple[tuple[str, str], ...]
    length: int
    reverse: bool
    unroll: int
    prefetch: int
    reshard: bool

    def __call__(
        self,
        shards: Shards,
        sinks: Shards,
        start: Any,
        shared: Sequence[Any],
        carry: Sequence[Any],
        slices: Sequence[Any],
    ) -> tuple[list[Any], list[Any]]:
        """Runs the loop.

        Arguments:

        - `shards`: of each group, `(L, S)`.
        - `sinks`: of groups whose gradients are not to be reduced, any array `(L, G)` of the reduce dtype. It is not
          read; its gradient is that of the buffers on this device, and the shards have none.
        - `start`: an integer zero; nothing is gathered before it is there. In the backward pass its value may be
          another zero, that waits for something else.
        - `shared`: what is the same in all turns.
        - `carry`: what the first turn is given.
        - `slices`: arrays with the layers on dim 0.

        Returns: the last carry, and the turns' results with the layers on dim 0.
        """

        @jax.custom_vjp
        def differentiable(shards: Shards, sinks: Shards, start: Any, shared: Any, carry: Any, slices: Any) -> Any:
            def turn(_: Shards, operands: Operands) -> tuple[list[Any], Any]:
                outputs = list(self.body(operands))
                return outputs[: len(carry)], outputs[len(carry) :]

            return self.run(turn, shards, start, shared, carry, slices)

        differentiable.defvjp(
            functools.partial(_forward, self),
            functools.partial(_backward, self, frozenset(sinks)),
            symbolic_zeros=True,
        )
        return differentiable(shards, dict(sinks), start, list(shared), list(carry), list(slices))

    def gather(self, shards: Shards, place: Any, *, after: Any = (), again: bool = False) -> Shards:
        """One layer's buffers, gathered once the arrays in `after` are there."""
        mine = _at(shards, place + zero_after(after))
        return {
            name: gather_buffer(group.layout.layer, mine[name], gather_dtype=group.gather_dtype, again=again)
            for name, group in self.groups.items()
        }

    def tensors_of(self, buffers: Shards) -> list[Any]:
        """The parameters that the body takes, out of one layer's buffers."""
        whole = {name: unpack(self.groups[name].layout.plan, buffer) for name, buffer in buffers.items()}
        return [whole[group][slot] for group, slot in self.tensors]

    def run(
        self,
        one: Callable[[Shards, Operands], tuple[list[Any], Any]],
        shards: Shards,
        start: Any,
        shared: Sequence[Any],
        carry: list[Any],
        slices: Sequence[Any],
    ) -> tuple[list[Any], Any]:
        """Runs a turn for every layer; what the turns return beside the carry is stacked by layer."""

        def turn(carry: list[Any], buffers: Shards, place: Any) -> tuple[list[Any], Any]:
            carry, out = one(buffers, Operands(self.tensors_of(buffers), shared, carry, _at(slices, place)))
            return _rounded(carry), out

        carry = _rounded(carry)
        if not self.prefetch:
            return lax.scan(
                lambda carry, place: turn(carry, self.gather(shards, place + start), place),
                carry,
                jnp.arange(self.length),
                reverse=self.reverse,
                unroll=self.unroll,
            )

        def place(t: Any) -> Any:
            return self.length - 1 - t if self.reverse else t

        def ahead(state: Any, t: Any) -> tuple[Any, None]:
            carry, buffers, stacked = state
            # Not before the turn that precedes this one is done, or three layers are alive.
            following = self.gather(shards, place(t + 1), after=(carry, buffers))
            carry, out = turn(carry, buffers, place(t))
            # What a turn ends with must not be fused into the next one, which would then read two buffers and copy one.
            carry, following = lax.optimization_barrier((carry, following))
            return (carry, following, _put(stacked, out, place(t))), None

        first = self.gather(shards, place(0) + start)
        _, like = jax.eval_shape(turn, carry, first, 0)
        state = (carry, first, _empty(self.length, like))
        if self.length > 1:
            state, _ = lax.scan(ahead, state, jnp.arange(self.length - 1), unroll=2)
        carry, buffers, stacked = state
        carry, out = turn(carry, buffers, place(self.length - 1))
        return carry, _put(stacked, out, place(self.length - 1))


class _Saved(NamedTuple):
    """What the forward pass leaves for the backward pass."""

    layer: "_Static"
    shards: Shards
    start: Any
    shared: Any
    slices: Any
    stored: Any
    buffers: Any


@jax.tree_util.register_static
@dataclass(frozen=True, eq=False)
class _Static:
    """Carries what is no array."""

    value: Layer


def _forward(
    loop: Loop, shards: Any, sinks: Any, start: Any, shared: Any, carry: Any, slices: Any
) -> tuple[Any, _Saved]:
    """The forward pass where gradients are wanted; every array comes with whether it is differentiated."""

    def values(tree: Any) -> Any:
        return jax.tree.map(lambda x: x.value, tree)

    wanted = Operands(
        [sinks.get(group, shards[group]).perturbed for group, _ in loop.tensors],
        [x.perturbed and is_float(x.value) for x in shared],
        [is_float(x.value) for x in carry],
        [x.perturbed and is_float(x.value) for x in slices],
    )
    shards, start, shared, carry, slices = map(values, (shards, start, shared, carry, slices))
    shapes = Operands(
        [
            jax.ShapeDtypeStruct(loop.groups[group].layout.plan.slots[slot].shape, loop.groups[group].gather_dtype)
            for group, slot in loop.tensors
        ],
        shared,
        carry,
        [jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for x in slices],
    )
    layer = Layer.of(loop.body, shapes, wanted)

    def turn(buffers: Shards, operands: Operands) -> tuple[list[Any], Any]:
        outputs, stored = layer.forward(operands)
        kept = {} if loop.reshard else buffers
        return outputs[: len(carry)], (outputs[len(carry) :], stored, kept)

    last, (results, stored, buffers) = loop.run(turn, shards, start, shared, carry, slices)
    return (last, results), _Saved(_Static(layer), shards, start, shared, slices, stored, buffers)


def _backward(loop: Loop, sunk: frozenset[str], saved: _Saved, cotangents: Any) -> tuple[Any, ...]:
    """The backward pass: gradients of the shards, summed over the devices, of shared values, carry and slices."""
    wanted = saved.layer.value.wanted
    active = iter(saved.layer.value.active)
    of_carry, of_results = ([ct for ct in part if next(active)] for part in cotangents)
    turns = _Turns(loop, sunk, saved, of_results)
    carried = _rounded([_instantiated(ct) for ct in of_carry])
    zeros: list[Any] = [
        jnp.zeros(x.shape, x.dtype) for x, want in zip(saved.shared, wanted.shared, strict=True) if want
    ]
    run = _pull_ahead if loop.prefetch else _pull
    carried, shared, shards, slices = run(turns, carried, zeros)
    return (
        # Stacked in the dtype of the sums, and cast where they are read: half the bytes for sums in bfloat16.
        {
            name: shards[name].astype(group.dtype) if name in shards and name not in sunk else None
            for name, group in loop.groups.items()
        },
        {name: shards.get(name) for name in sunk},
        None,
        _spread(shared, wanted.shared),
        _spread(carried, wanted.carry),
        _spread(slices, wanted.slices),
    )


@dataclass(frozen=True, eq=False)
class _Turns:
    """What a backward turn is made of.

    Attributes:

    - `loop`, `saved`: of the forward pass.
    - `sunk`: the groups whose gradients are not reduced.
    - `of_results`: cotangents of the turns' results, of those that have one.
    """

    loop: Loop
    sunk: frozenset[str]
    saved: _Saved
    of_results: Sequence[Any]

    @property
    def groups(self) -> dict[str, Group]:
        """The groups that have gradients."""
        wanted = self.saved.layer.value.wanted.tensors
        trained = {group for want, (group, _) in zip(wanted, self.loop.tensors, strict=True) if want}
        return {name: group for name, group in self.loop.groups.items() if name in trained}

    def gather(self, place: Any, after: Any = ()) -> Shards:
        """One layer's buffers again, or those that were kept."""
        if not self.loop.reshard:
            return _at(self.saved.buffers, place)
        place = place if after else place + self.saved.start
        return self.loop.gather(self.saved.shards, place, after=after, again=True)

    def pull(
        self, carried: list[Any], buffers: Shards, place: Any, hold: Any = 0
    ) -> tuple[list[Any], list[Any], Shards, Any]:
        """One turn: the gradients of its carry and shared values, of its parameters, packed, and of its slices.

        Nothing is packed before `hold`, an integer zero, is there.
        """
        loop, saved, layer = self.loop, self.saved, self.saved.layer.value
        of_results = [_cotangent_at(ct, place) for ct in self.of_results]
        operands = Operands(
            loop.tensors_of(buffers), saved.shared, [None] * len(layer.wanted.carry), _at(saved.slices, place)
        )
        found = layer.backward(operands, _at(saved.stored, place), [*carried, *of_results])
        grads: dict[tuple[str, str], Any] = {}
        for name, grad in zip(loop.tensors, found.tensors, strict=True):
            # The body may take a parameter more than once.
            grads[name] = grads[name] + grad if name in grads and grad is not None else grad
        packed = {
            name: pack(group.layout.plan, _held(_complete(group, name, grads), hold), group.reduce_dtype)
            for name, group in self.groups.items()
        }
        return _rounded(_some(found.carry)), _some(found.shared), packed, _some(found.slices)

    def reduce(self, packed: Shards) -> Shards:
        """Packed gradients, summed over the devices, in the reduce dtype."""
        return {
            name: packed[name]
            if name in self.sunk
            else scatter_buffer(group.layout.layer, packed[name], shard_dtype=group.reduce_dtype)
            for name, group in self.groups.items()
        }


def _pull(turns: _Turns, carried: list[Any], shared: list[Any]) -> tuple[list[Any], list[Any], Shards, Any]:
    """The backward turns, each of which gathers and reduces for itself."""
    loop = turns.loop

    def turn(state: Any, place: Any) -> tuple[Any, Any]:
        carried, shared = state
        carried, more, packed, slices = turns.pull(carried, turns.gather(place), place)
        return (carried, _sum(shared, more)), (turns.reduce(packed), slices)

    (carried, shared), stacked = lax.scan(
        turn, (carried, shared), jnp.arange(loop.length), reverse=not loop.reverse, unroll=loop.unroll
    )
    return carried, shared, *stacked


def _pull_ahead(turns: _Turns, carried: list[Any], shared: list[Any]) -> tuple[list[Any], list[Any], Shards, Any]:
    """The backward turns, in each of which the next layer is gathered and the gradients of the last one are reduced."""
    loop, gather, reduce = turns.loop, turns.gather, turns.reduce
    last = loop.length - 1

    def place(t: Any) -> Any:
        return t if loop.reverse else last - t

    def turn_of(carried: list[Any], buffers: Shards, t: Any, hold: Any) -> tuple[list[Any], list[Any], Shards, Any]:
        # What is computed again must not be so before its turn: activations are fetched when the cotangent is there.
        return turns.pull(carried, buffers, place(t) + zero_after([carried]), hold)

    buffers = gather(place(0))
    _, _, packed_like, slices_like = jax.eval_shape(turns.pull, carried, buffers, 0)
    stacked = _empty(loop.length, (jax.eval_shape(reduce, packed_like), slices_like))
    following = gather(place(1)) if last else buffers
    carried, more, packed, slices = turn_of(carried, buffers, 0, 0)
    shared = _sum(shared, more)
    of_shards, of_slices = stacked
    of_slices = _put(of_slices, slices, place(0))

    def turn(state: Any, t: Any) -> tuple[Any, None]:
        carried, shared, buffers, packed, of_shards, of_slices, hold = state
        following = gather(place(t + 1), (carried, buffers))
        reduced = reduce(packed)
        of_shards = _put(of_shards, reduced, place(t - 1))
        # Packed not before what was packed two turns ago is reduced, or three such buffers are alive and one is copied.
        carried, more, packed, slices = turn_of(carried, buffers, t, hold)
        carried, following = lax.optimization_barrier((carried, following))
        of_slices = _put(of_slices, slices, place(t))
        hold = jnp.int32(zero_after([reduced]))
        return (carried, _sum(shared, more), following, packed, of_shards, of_slices, hold), None

    state = (carried, shared, following, packed, of_shards, of_slices, jnp.int32(0))
    if last > 1:
        state, _ = lax.scan(turn, state, jnp.arange(1, last), unroll=2)
    carried, shared, buffers, packed, of_shards, of_slices, hold = state
    if last:
        of_shards = _put(of_shards, reduce(packed), place(last - 1))
        carried, more, packed, slices = turn_of(carried, buffers, last, hold)
        shared, of_slices = _sum(shared, more), _put(of_slices, slices, place(last))
    return carried, shared, _put(of_shards, reduce(packed), place(last)), of_slices


def _complete(group: Group, name: str, grads: Mapping[tuple[str, str], Any]) -> dict[str, Any]:
    """The gradients of all parameters of a group; zero for those that the body does not take."""
    dtype: Any = group.reduce_dtype
    return {
        slot: jnp.zeros(spec.shape, dtype) if grads.get((name, slot)) is None else grads[name, slot]
        for slot, spec in group.layout.plan.slots.items()
    }


def _held(grads: dict[str, Any], hold: Any) -> dict[str, Any]:
    """The gradients, of which the smallest is there no sooner than `hold`, an integer zero."""
    if isinstance(hold, int) or not grads:
        return grads
    slot = min(grads, key=lambda name: (not grads[name].size, grads[name].size))
    return {**grads, slot: grads[slot] * (1 + hold).astype(grads[slot].dtype)}


def _instantiated(cotangent: Any) -> Any:
    shape, dtype = cotangent.shape, cotangent.dtype
    return jnp.zeros(shape, dtype) if isinstance(cotangent, SymbolicZero) else cotangent


def _cotangent_at(cotangent: Any, place: Any) -> Any:
    shape, dtype = cotangent.shape, cotangent.dtype
    return jnp.zeros(shape[1:], dtype) if isinstance(cotangent, SymbolicZero) else _at(cotangent, place)


def _some(values: Sequence[Any]) -> list[Any]:
    return [x for x in values if x is not None]


def _spread(values: Sequence[Any], wanted: Sequence[bool]) -> list[Any]:
    """Gradients where they are wanted, None elsewhere."""
    found = iter(values)
    return [next(found) if want else None for want in wanted]


def _sum(left: Sequence[Any], right: Sequence[Any]) -> list[Any]:
    return _rounded([a + b for a, b in zip(left, right, strict=True)])


def _rounded(values: Sequence[Any]) -> list[Any]:
    """What goes from turn to turn, in its own precision.

    XLA leaves out a rounding to bfloat16 between two operations in float32. It cannot between turns of a loop, but
    where turns are unrolled or stand outside; numbers would depend on the look-ahead.
    """

    def one(x: Any) -> Any:
        if not jnp.issubdtype(x.dtype, jnp.floating) or x.dtype.itemsize >= 4:
            return x
        precision = jnp.finfo(x.dtype)
        return lax.reduce_precision(x, exponent_bits=precision.nexp, mantissa_bits=precision.nmant)

    return [one(x) for x in values]


def _at(tree: Any, place: Any) -> Any:
    """One layer of stacked arrays."""
    return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, place, 0, keepdims=False), tree)


def _put(stacked: Any, values: Any, place: Any) -> Any:
    """Stacked arrays with one layer written."""
    return jax.tree.map(lambda x, value: lax.dynamic_update_index_in_dim(x, value, place, 0), stacked, values)


def _empty(length: int, like: Any) -> Any:
    """Stacked arrays to be written."""
    return jax.tree.map(lambda x: lax.empty((length, *x.shape), x.dtype), like)
