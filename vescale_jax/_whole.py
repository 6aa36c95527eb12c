"""Whole: all layers of a stack at once, for code that reads a stack outside of its loop.

Comes in: a group's shards of all layers. Goes out: its parameters with the layers on dim 0. The gradient is summed over
the devices in the reduce dtype, as that of a loop is, or left to a sink.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from vescale_layouts import gather_buffer, pack, scatter_buffer, unpack

from ._groups import Group


def whole_stack(group: Group, shard: jax.Array, sink: jax.Array | None) -> dict[str, jax.Array]:
    """Gathers all layers of a group.

    Arguments:

    - `group`: of a stack of L layers.
    - `shard`: this device's shards, `(L, S)`.
    - `sink`: None, or an array `(L, G)` of the reduce dtype whose gradient is that of the buffers on this device; the
      shards have none then.

    Returns: the parameters by slot, `(L, *shape)`, in the gathered dtype.
    """
    return _whole(group, shard, sink)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _whole(group: Group, shard: jax.Array, sink: jax.Array | None) -> dict[str, jax.Array]:
    layout = group.layout
    buffers = jax.vmap(functools.partial(gather_buffer, layout.layer, gather_dtype=group.gather_dtype))(shard)
    return jax.vmap(functools.partial(unpack, layout.plan))(buffers)


def _forward(group: Group, shard: jax.Array, sink: jax.Array | None) -> tuple[dict[str, jax.Array], Any]:
    # What is saved has to be a tree of arrays: an empty tuple says that there is a sink.
    return _whole(group, shard, sink), None if sink is None else ()


def _backward(group: Group, sunk: Any, cotangents: dict[str, jax.Array]) -> tuple[Any, Any]:
    if not jnp.issubdtype(group.dtype, jnp.floating):
        return None, None
    layout = group.layout
    packed = jax.vmap(lambda tensors: pack(layout.plan, tensors, group.reduce_dtype))(cotangents)
    if sunk is not None:
        return None, packed
    return jax.vmap(functools.partial(scatter_buffer, layout.layer, shard_dtype=group.dtype))(packed), None


_whole.defvjp(_forward, _backward)
