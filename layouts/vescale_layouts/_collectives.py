"""Gather and reduce-scatter: the two collectives of a group.

Shapes: N shards, S elements a shard, G = N * S elements gathered (1D); tensors have their logical shapes (ND).

`gather` takes the local shard `(S,)` to the group's whole tensors: cast, one `all_gather`, static slices.
`reduce_scatter` takes cotangents of the tensors back to `(S,)`: cast, one concatenate, one `psum_scatter`. Each is the
other's transpose; both are called inside `jax.shard_map`, manual over the layout's axis. `gather_buffer` and
`scatter_buffer` are the collectives alone, for a loop that sends one layer's buffer while it works on another's.
"""

import functools
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from ._layout import Layout
from ._pack import pack, unpack


def gather(
    layout: Layout,
    shard: jax.Array,
    *,
    gather_dtype: DTypeLike | None = None,
    reduce_dtype: DTypeLike | None = None,
    again: bool = False,
) -> dict[str, jax.Array]:
    """Gathers a group's tensors from the shards of all devices; its gradient is a reduce-scatter.

    Arguments:

    - `layout`: of the group.
    - `shard`: the local shard, of shape `(S,)`.
    - `gather_dtype`: of the tensors and of the bytes on the wire; the shard is cast first. None: the shard's dtype.
    - `reduce_dtype`: in which cotangents are summed over the devices. None: float32, or the shard's dtype if wider.
    - `again`: whether this repeats an earlier gather of the same shard whose tensors were freed. The same bytes travel,
      in a form that XLA does not take for the earlier one: merged by common-subexpression elimination, the two would
      keep the tensors alive between them.

    Returns: the tensors by name, in slot order.
    """
    gather_dtype = jnp.dtype(shard.dtype if gather_dtype is None else gather_dtype)
    reduce_dtype = jnp.dtype(sum_dtype(shard.dtype) if reduce_dtype is None else reduce_dtype)
    return _gather(layout, shard, gather_dtype, reduce_dtype, again)


def sum_dtype(dtype: DTypeLike) -> jnp.dtype:
    """The dtype in which cotangents of a shard are summed unless told otherwise.

    Arguments:

    - `dtype`: of the shard.

    Returns: float32, or the dtype itself where that is wider or no float.
    """
    dtype = jnp.dtype(dtype)
    # By width, since JAX promotes 8-bit floats to nothing by itself.
    return jnp.dtype(jnp.float32) if jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4 else dtype


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
    return scatter_buffer(layout, pack(layout.plan, tensors, reduce_dtype), shard_dtype=shard_dtype)


def gather_buffer(
    layout: Layout, shard: jax.Array, *, gather_dtype: DTypeLike | None = None, again: bool = False
) -> jax.Array:
    """Gathers a group's buffer from the shards of all devices; `unpack` takes the tensors out.

    Arguments:

    - `layout`: of the group.
    - `shard`: the local shard, of shape `(S,)`.
    - `gather_dtype`, `again`: see `gather`.

    Returns: the buffer, of shape `(G,)`.
    """
    if gather_dtype is not None and gather_dtype != shard.dtype:
        # The barrier keeps the cast before the collective: XLA may otherwise move it behind and double the bytes.
        shard = lax.optimization_barrier(shard.astype(gather_dtype))
    if _alone(layout):
        return shard
    if again:
        return lax.all_gather(shard, layout.axis, tiled=False).reshape(layout.buffer_size)
    return lax.all_gather(shard, layout.axis, tiled=True)


def scatter_buffer(layout: Layout, packed: jax.Array, *, shard_dtype: DTypeLike) -> jax.Array:
    """Sums a packed buffer over the devices and leaves each device its shard.

    Arguments:

    - `layout`: of the group.
    - `packed`: this device's buffer, of shape `(G,)`; summed in its own dtype.
    - `shard_dtype`: of the result.

    Returns: the local shard of the sum, of shape `(S,)`.
    """
    if _alone(layout):
        return packed.astype(shard_dtype)
    return lax.psum_scatter(packed, layout.axis, tiled=True).astype(shard_dtype)


def _alone(layout: Layout) -> bool:
    """Whether the shard is the buffer: on one device, or when there is no element (no collective takes none)."""
    return layout.plan.num_shards == 1 or not layout.buffer_size


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 2, 3, 4))
def _gather(
    layout: Layout, shard: jax.Array, gather_dtype: jnp.dtype, reduce_dtype: jnp.dtype, again: bool
) -> dict[str, jax.Array]:
    buffer = gather_buffer(layout, shard, gather_dtype=gather_dtype, again=again)
    return unpack(layout.plan, buffer)


def _forward(
    layout: Layout, shard: jax.Array, gather_dtype: jnp.dtype, reduce_dtype: jnp.dtype, again: bool
) -> tuple[dict[str, jax.Array], jax.Array]:
    # An empty array carries the shard's dtype to the backward pass.
    return _gather(layout, shard, gather_dtype, reduce_dtype, again), jnp.zeros(0, shard.dtype)


def _backward(
    layout: Layout,
    gather_dtype: jnp.dtype,
    reduce_dtype: jnp.dtype,
    again: bool,
    like: jax.Array,
    cotangents: dict[str, jax.Array],
) -> tuple[jax.Array]:
    del gather_dtype, again
    return (reduce_scatter(layout, cotangents, reduce_dtype=reduce_dtype, shard_dtype=like.dtype),)


_gather.defvjp(_forward, _backward)
