"""Gather and reduce-scatter: the two collectives of a group, as JAX primitives.

Shapes: N shards, S elements a shard, G = N * S elements gathered (1D); tensors have their logical shapes (ND).

`gather` takes the local shard `(S,)` to the group's whole tensors: cast, one `all_gather`, static slices.
`reduce_scatter` is its transpose: cotangents of the tensors, packed with one concatenate, one `psum_scatter`, back to
`(S,)`. Both are called inside `jax.shard_map`, manual over the layout's axis.

Why primitives and not a composition. Resharding after forward means that the backward pass gathers again instead of
keeping the tensors. `jax.checkpoint` decides that equation by equation, and a composition offers it the output of the
cast, of the `all_gather`, of every slice and every reshape to keep, as well as equal equations of the user's own model.
One primitive is one decision. It also lets the second gather differ from the first one in form (untiled instead of
tiled, the same bytes), without which XLA's common-subexpression elimination would merge the two on backends that drop
optimization barriers early, and the tensors would stay alive after all.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import ShapedArray
from jax.extend.core import JaxprEqn, Primitive, Var
from jax.interpreters import ad, batching, mlir, partial_eval
from jax.typing import DTypeLike
from vescale_planner import GroupPlan

from ._layout import Layout
from ._pack import pack, unpack


@dataclass(frozen=True, slots=True)
class _Call:
    """The static part of both primitives."""

    plan: GroupPlan
    axis: str
    shard_dtype: Any
    gather_dtype: Any
    reduce_dtype: Any
    keep: bool


def gather(
    layout: Layout,
    shard: jax.Array,
    *,
    gather_dtype: DTypeLike | None = None,
    reduce_dtype: DTypeLike | None = None,
    keep: bool = False,
) -> dict[str, jax.Array]:
    """Gathers a group's tensors from the shards of all devices; its gradient is a reduce-scatter.

    Arguments:

    - `layout`: of the group.
    - `shard`: the local shard, of shape `(S,)`.
    - `gather_dtype`: of the tensors and of the bytes on the wire; the shard is cast first. None: the shard's dtype.
    - `reduce_dtype`: in which cotangents are summed over the devices. None: float32, or the shard's dtype if wider.
    - `keep`: under `reshard_policy`, whether the tensors stay alive from forward to backward; otherwise the backward
      pass gathers them again.

    Returns: the tensors by name, in slot order.
    """
    shard_dtype = jnp.dtype(shard.dtype)
    if reduce_dtype is None:
        reduce_dtype = jnp.promote_types(shard_dtype, jnp.float32)
    call = _Call(
        plan=layout.plan,
        axis=layout.axis,
        shard_dtype=shard_dtype,
        gather_dtype=jnp.dtype(shard_dtype if gather_dtype is None else gather_dtype),
        reduce_dtype=jnp.dtype(reduce_dtype),
        # One shard is the whole buffer: there is nothing to free.
        keep=keep or layout.plan.num_shards == 1,
    )
    return dict(zip(layout.plan.slots, _gather_p.bind(shard, call=call, again=False), strict=True))


def reduce_scatter(
    layout: Layout,
    tensors: Mapping[str, jax.Array],
    *,
    reduce_dtype: DTypeLike = jnp.float32,
    shard_dtype: DTypeLike = jnp.float32,
) -> jax.Array:
    """Sums a group's tensors over the devices and leaves each device its shard.

    Arguments:

    - `layout`: of the group.
    - `tensors`: this device's tensors by name, of their logical shapes (ND).
    - `reduce_dtype`: in which they are packed and summed.
    - `shard_dtype`: of the result.

    Returns: the local shard of the sum, of shape `(S,)`, zero in the padding.
    """
    summed = lax.psum_scatter(pack(layout.plan, tensors, reduce_dtype), layout.axis, tiled=True)
    return summed.astype(shard_dtype)


# Equations that only lay out or cast what they are given. Made from gathered tensors, their outputs are copies of
# weights, which resharding is there to free; made from activations, computing them again costs next to nothing.
_LAYOUT_EQUATIONS = frozenset(
    ["broadcast_in_dim", "concatenate", "convert_element_type", "copy", "expand_dims", "name", "reshape", "rev"]
    + ["slice", "split", "squeeze", "transpose"]
)


def reshard_policy(prim: Primitive, *_: Any, **params: Any) -> bool:
    """The `jax.checkpoint` policy that saves activations and frees gathered tensors.

    Saves everything except the tensors of a `gather` with `keep=False` and what merely casts or lays them out anew;
    the backward pass gathers once more.
    """
    if prim is _gather_p:
        return params["call"].keep
    return prim.name not in _LAYOUT_EQUATIONS


_gather_p = Primitive("ragged_all_gather")
_gather_p.multiple_results = True
_scatter_p = Primitive("ragged_reduce_scatter")
_scatter_p.multiple_results = True


def _gather_impl(shard: jax.Array, *, call: _Call, again: bool) -> list[jax.Array]:
    if call.gather_dtype != call.shard_dtype:
        # The barrier keeps the cast before the collective: XLA may otherwise move it behind and double the bytes.
        shard = lax.optimization_barrier(shard.astype(call.gather_dtype))
    if again:
        buffer = lax.all_gather(shard, call.axis, tiled=False).reshape(call.plan.buffer_size)
    else:
        buffer = lax.all_gather(shard, call.axis, tiled=True)
    return list(unpack(call.plan, buffer).values())


def _scatter_impl(*tensors: jax.Array, call: _Call) -> list[jax.Array]:
    buffer = pack(call.plan, dict(zip(call.plan.slots, tensors, strict=True)), call.reduce_dtype)
    return [lax.psum_scatter(buffer, call.axis, tiled=True).astype(call.shard_dtype)]


def _gather_abstract(_: ShapedArray, *, call: _Call, again: bool) -> list[ShapedArray]:
    del again
    return [ShapedArray(slot.shape, call.gather_dtype) for slot in call.plan.slots.values()]


def _scatter_abstract(*_: ShapedArray, call: _Call) -> list[ShapedArray]:
    return [ShapedArray((call.plan.shard_size,), call.shard_dtype)]


def _gather_transpose(cotangents: Sequence[Any], _: Any, *, call: _Call, again: bool) -> list[jax.Array]:
    del again
    return _scatter_p.bind(*map(ad.instantiate_zeros, cotangents), call=call)


def _scatter_transpose(cotangents: Sequence[Any], *_: Any, call: _Call) -> list[jax.Array]:
    return _gather_p.bind(ad.instantiate_zeros(cotangents[0]), call=call, again=False)


def _gather_partial_eval(
    saveable: Any, unknown: Sequence[bool], instantiated: Sequence[bool], eqn: JaxprEqn
) -> tuple[JaxprEqn | None, JaxprEqn | None, list[bool], list[bool], list[Var]]:
    """How `jax.checkpoint` splits a gather: the forward one, and the one that the backward pass makes again."""
    n = len(eqn.outvars)
    missing = [v for v, inst in zip(eqn.invars, instantiated, strict=True) if isinstance(v, Var) and not inst]
    if any(unknown):
        return None, eqn, [True] * n, [True] * n, missing
    verdict = saveable(eqn.primitive, *[v.aval for v in eqn.invars], **eqn.params)
    if verdict and type(verdict).__name__ != "RecomputeType":
        return eqn, None, [False] * n, [False] * n, []
    return eqn, eqn.replace(params=dict(eqn.params, again=True)), [False] * n, [True] * n, missing


def _batcher(prim: Primitive, impl: Any) -> None:
    def rule(args: Sequence[Any], dims: Sequence[Any], **params: Any) -> tuple[list[jax.Array], list[int]]:
        in_axes = tuple(None if d is batching.not_mapped else d for d in dims)
        outs = jax.vmap(lambda *a: impl(*a, **params), in_axes=in_axes)(*args)
        return outs, [0] * len(outs)

    batching.primitive_batchers[prim] = rule


for _prim, _impl, _abstract, _transpose in (
    (_gather_p, _gather_impl, _gather_abstract, _gather_transpose),
    (_scatter_p, _scatter_impl, _scatter_abstract, _scatter_transpose),
):
    _prim.def_impl(_impl)
    _prim.def_abstract_eval(_abstract)
    mlir.register_lowering(_prim, mlir.lower_fun(_impl, multiple_results=True))
    ad.deflinear2(_prim, _transpose)
    _batcher(_prim, _impl)
partial_eval.partial_eval_jaxpr_custom_rules[_gather_p] = _gather_partial_eval
