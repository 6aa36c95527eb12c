"""Inside the step: from shards to whole parameters, and from their gradients to shards.

Everything here runs while the step is traced, inside `shard_map`. Every group is gathered by its own collective; XLA
places each gather before its first use.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from vescale_layouts import DBuffer, gather, pack, scatter_buffer

from ._batch import batch_specs
from ._groups import Unit, each_group
from ._rest import own_keys
from ._scans import stack_key
from ._sharded import Buffers, Sharded, is_buffer


def on_devices(
    local: Callable[[Buffers, Buffers, tuple[Any, ...], Any], Any],
    model: Sharded,
    batch: Any,
    *,
    replicate: bool,
    out_specs: Any,
) -> Any:
    """Runs a function on every device, on its shards and its rows.

    Arguments:

    - `local`: a function of the trainable and the frozen shards, each of shape `(S,)` or `(L, S)`, of the rest, with
      random keys of the device's own, and of the device's rows, in the policy's dtype.
    - `model`, `batch`: global, traced.
    - `replicate`: whether every device gets all rows.
    - `out_specs`: of what `local` returns.
    """
    structure, policy = model.structure, model.structure.policy

    def prepared(params: Buffers, frozen: Buffers, rest: tuple[Any, ...], batch: Any) -> Any:
        batch = cast_floats(batch, policy.gather_dtype if policy.cast_inputs else None)
        return local(params, frozen, own_keys(rest, structure.axis), batch)

    specs = batch_specs(batch, structure.axis, replicate)
    mapped = jax.shard_map(
        prepared,
        mesh=structure.mesh,
        in_specs=(buffer_specs(model.params), buffer_specs(model.frozen), PartitionSpec(), specs),
        out_specs=out_specs,
        axis_names={structure.axis},
        check_vma=False,
    )
    return mapped(model.params, model.frozen, model.rest, batch)


def buffer_specs(buffers: Buffers) -> Any:
    """The partition spec of every buffer."""
    return jax.tree.map(lambda buffer: DBuffer(buffer.layout.spec, buffer.layout), buffers, is_leaf=is_buffer)


def gather_units(
    units: Sequence[Unit], buffers: Buffers, *, trainable: bool, again: bool = False
) -> dict[str, jax.Array]:
    """Gathers the whole parameters of some units, except those of stacks, which gather layer by layer.

    Arguments:

    - `units`: which ones.
    - `buffers`: the local shards, each of shape `(S,)`, or `(L, S)` in a stack.
    - `trainable`: whether of the trainable groups or of the frozen ones.
    - `again`: whether they were gathered, and freed, before.

    Returns: parameters by path, in the gathered dtype; the shards of stacks as they are, by `stack_key`.
    """
    tensors: dict[str, jax.Array] = {}
    for unit, group in each_group(units):
        if group.trainable == trainable:
            shard = buffers[unit.name][group.name].data
            if unit.stack:
                tensors[stack_key(unit, group)] = shard
                continue
            gathered = gather(group.layout, shard, gather_dtype=group.gather_dtype, again=again)
            tensors.update((group.prefix + name, tensor) for name, tensor in gathered.items())
    return tensors


def gather_again(unit: Unit, params: Buffers, frozen: Buffers, after: jax.Array) -> dict[str, jax.Array]:
    """Gathers a unit for the backward pass.

    Arguments:

    - `unit`: which one.
    - `params`, `frozen`: the local shards, each of shape `(S,)`.
    - `after`: an array that has to be there first.

    Returns: the unit's parameters by path, trainable and frozen ones.
    """
    mine = {unit.name: params.get(unit.name, {})}, {unit.name: frozen.get(unit.name, {})}
    (params, frozen), _ = lax.optimization_barrier((mine, after))
    tensors = gather_units([unit], params, trainable=True, again=True)
    return tensors | gather_units([unit], frozen, trainable=False, again=True)


def reduce_unit(unit: Unit, grads: Mapping[str, jax.Array], *, reduce: bool = True) -> dict[str, DBuffer]:
    """Packs the gradients of a unit's parameters, sums them over the devices and keeps this device's shards.

    Arguments:

    - `unit`: which one.
    - `grads`: by path, of every trainable parameter of the unit; of a stack, whose loop has reduced them already, by
      `stack_key`.
    - `reduce`: whether they are summed over the devices.

    Returns: the shards, each of shape `(S,)`, or `(L, S)` in a stack, by group, in the reduce dtype; or without
    reduction the buffers, `(G,)` or `(L, G)`.
    """
    buffers: dict[str, DBuffer] = {}
    for _, group in each_group([unit]):
        if group.trainable and unit.stack:
            buffers[group.name] = DBuffer(grads[stack_key(unit, group)], group.layout)
        elif group.trainable:
            tensors = {name: grads[group.prefix + name] for name in group.layout.plan.slots}
            packed = pack(group.layout.plan, tensors, group.reduce_dtype)
            data = scatter_buffer(group.layout, packed, shard_dtype=group.reduce_dtype) if reduce else packed
            buffers[group.name] = DBuffer(data, group.layout)
    return buffers


def cast_floats(tree: Any, dtype: Any) -> Any:
    """Casts floating-point leaves and leaves the others alone; with None, all."""
    if dtype is None:
        return tree
    return jax.tree.map(
        lambda x: jnp.asarray(x, dtype) if jnp.issubdtype(jnp.result_type(x), jnp.floating) else x, tree
    )
