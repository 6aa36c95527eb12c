"""Backward: loss and gradients of one batch on one device, unit by unit.

Comes in: a function of whole parameters and the shards. Goes out: what the function returned, and the gradients: summed
over the devices, as shards, or packed and not yet summed. It runs while the step is traced, inside `shard_map`.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ._groups import Group, Unit, each_group
from ._inside import gather_again, gather_units, reduce_unit
from ._pullback import Tensors, value_and_pullback
from ._scans import stack_key, start_key, with_loops
from ._schedule import run_backward
from ._sharded import Buffers, Structure
from ._wait import zero_after


def differentiate(
    structure: Structure,
    total: Callable[[Tensors, Tensors, Any, Any], tuple[jax.Array, Any]],
    params: Buffers,
    frozen: Buffers,
    rest: tuple[Any, ...],
    batch: Any,
    *,
    reduce: bool = True,
) -> tuple[Any, Any, Buffers]:
    """Gathers, evaluates and pulls back, unit by unit.

    Arguments:

    - `structure`: of the model.
    - `total`: a function of the trainable and the frozen parameters by path, of the rest and of the batch that returns
      the summed loss and anything else.
    - `params`, `frozen`: the local shards, each of shape `(S,)`, or `(L, S)` in a stack.
    - `rest`, `batch`: what else `total` is given.
    - `reduce`: whether gradients are summed over the devices.

    Returns: what `total` returned beside the loss; which of it differs from device to device; and the gradients, in
    the reduce dtype: sums over the devices as shards `(S,)` or `(L, S)`, or this device's own as buffers `(G,)` or
    `(L, G)`.
    """
    units = structure.units
    # One shard is the whole buffer: there is nothing to free. Stacks free their layers themselves.
    alone = structure.num_shards == 1
    resharded = [unit for unit in units if unit.reshard_after_forward and not unit.stack and not alone]
    stacks = [unit for unit in units if unit.stack]
    freed = {path for _, group in each_group(resharded) for path in group.paths} | set(map(start_key, stacks))
    by_name = {unit.name: unit for unit in units}
    tensors = gather_units(units, params, trainable=True)
    others = gather_units(units, frozen, trainable=False) | {start_key(unit): jnp.int32(0) for unit in stacks}
    if not reduce:
        for unit, group in each_group(stacks):
            if group.trainable:
                key = stack_key(unit, group)
                others[key], tensors[key] = tensors[key], jnp.zeros(group.layout.buffer_shape, group.reduce_dtype)
    total = with_loops(total, stacks)
    value, returned, varies, pull = value_and_pullback(total, freed, tensors, others, rest, batch)
    jaxpr, inputs = pull.trace(jnp.ones_like(value), tensors, others, rest, batch)
    first = len(inputs) - len(jax.tree.leaves((tensors, others, rest, batch)))
    grads: Buffers = {}

    def fetch(name: str, earlier: jax.Array, left_so_far: Sequence[jax.Array]) -> Tensors:
        if by_name[name].stack:
            return {start_key(by_name[name]): jnp.int32(zero_after(left_so_far))}
        return gather_again(by_name[name], params, frozen, earlier)

    def finish(name: str, gradients: Tensors) -> jax.Array:
        grads[name] = reduce_unit(by_name[name], gradients, reduce=reduce)
        return next(iter(grads[name].values())).data

    run_backward(
        jaxpr,
        inputs,
        missing={first + i: path for i, path in enumerate([*sorted(tensors), *sorted(others)]) if path in freed},
        outputs=sorted(tensors),
        unit_of={path: unit.name for unit, group in each_group(units) for path in _names(unit, group)}
        | {start_key(unit): unit.name for unit in stacks},
        fetch=fetch,
        finish=finish,
        start=value,
    )
    return returned, varies, grads


def _names(unit: Unit, group: Group) -> tuple[str, ...]:
    """What a group's gradients are called: parameters, or shards of a stack."""
    return (stack_key(unit, group),) if unit.stack else group.paths
