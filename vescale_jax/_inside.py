"""Inside the step: from shards to whole parameters, and from their gradients to shards.

Everything here runs while the step is traced, inside `shard_map`. Every group is gathered by its own collective; XLA
places each gather before its first use.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from vescale_layouts import DBuffer, gather, reduce_scatter

from ._groups import Unit, each_group
from ._sharded import Buffers


def gather_units(
    units: Sequence[Unit], buffers: Buffers, *, trainable: bool, again: bool = False
) -> dict[str, jax.Array]:
    """Gathers the whole parameters of some units.

    Arguments:

    - `units`: which ones.
    - `buffers`: the local shards, each of shape `(S,)`.
    - `trainable`: whether of the trainable groups or of the frozen ones.
    - `again`: whether they were gathered, and freed, before.

    Returns: parameters by path, in the gathered dtype.
    """
    tensors: dict[str, jax.Array] = {}
    for unit, group in each_group(units):
        if group.trainable == trainable:
            shard = buffers[unit.name][group.name].data
            gathered = gather(group.layout, shard, gather_dtype=group.gather_dtype, again=again)
            tensors.update((group.prefix + name, tensor) for name, tensor in gathered.items())
    return tensors


def reduce_units(units: Sequence[Unit], grads: Mapping[str, jax.Array]) -> Buffers:
    """Sums the gradients of whole parameters over the devices and keeps this device's shards.

    Arguments:

    - `units`: all units.
    - `grads`: by path, of every trainable parameter.

    Returns: the shards, each of shape `(S,)` and of the stored dtype, by unit and group.
    """
    buffers: Buffers = {}
    for unit, group in each_group(units):
        if group.trainable:
            tensors = {name: grads[group.prefix + name] for name in group.layout.plan.slots}
            shard = reduce_scatter(group.layout, tensors, reduce_dtype=group.reduce_dtype, shard_dtype=group.dtype)
            buffers.setdefault(unit.name, {})[group.name] = DBuffer(shard, group.layout)
    return buffers


def cast_floats(tree: Any, dtype: Any) -> Any:
    """Casts floating-point leaves and leaves the others alone; with None, all."""
    if dtype is None:
        return tree
    return jax.tree.map(
        lambda x: jnp.asarray(x, dtype) if jnp.issubdtype(jnp.result_type(x), jnp.floating) else x, tree
    )
