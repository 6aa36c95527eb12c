"""value_and_grad: the user's loss on a sharded model.

Comes in: a loss of the model and a batch. Goes out: loss and gradients of a sharded model and a global batch. It runs
in `jax.shard_map`, manual over the shard axis: each device gathers the units, works on its rows, and leaves its
part of every gradient to one reduce-scatter a unit. One small all-reduce carries loss, count, gradient norm and
metrics.

The sums are divided at the end: a device does not have to know the others' counts before it differentiates.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from ._batch import place
from ._groups import each_group
from ._inside import cast_floats, gather_again, gather_units, on_devices, reduce_unit
from ._loss import as_mean, finish_aux, is_mean, ratio, read_aux, sum_over_devices
from ._pullback import Tensors, value_and_pullback
from ._rest import changed_leaves, settle, to_sum
from ._schedule import run_backward
from ._sharded import Buffers, Sharded, Structure, check_alive, check_sharded


class Value(NamedTuple):
    """What one evaluation of a loss gives.

    Attributes:

    - `loss`: the global mean, float32.
    - `grad_norm`: the norm of the whole gradient, before any clipping.
    - `aux`: the loss function's metrics, reduced over the devices.
    - `model`: the model with what the loss function changed of its rest: counters, batch statistics.
    """

    loss: jax.Array
    grad_norm: jax.Array
    aux: Any
    model: Sharded


def value_and_grad(
    loss_fn: Callable[..., Any], *, has_aux: bool = False, replicate_batch: bool = False
) -> Callable[[Sharded, Any], tuple[Value, Buffers]]:
    """Makes a function of a sharded model and a global batch that returns loss and sharded gradients.

    Arguments:

    - `loss_fn`: a function of the model in the user's own form (an `nnx.Module`, a bound linen module, or a pytree)
      and of this device's rows. It returns a scalar, the mean over its rows, if every row weighs the same; or a
      `Mean` of sum and count. It must not reduce over devices itself.
    - `has_aux`: whether `loss_fn` returns `(loss, aux)`: a pytree of metrics, of which each `Mean` becomes the global
      mean, floats are averaged over the devices and integers summed.
    - `replicate_batch`: whether every device gets all rows; for batches smaller than the mesh.

    Returns: a function `(model, batch) -> (Value, gradients)`, where the gradients have the structure, dtypes and
    shardings of `model.params`. It is jitted, and can be traced inside a larger step.
    """

    @jax.jit
    def jitted(model: Sharded, batch: Any) -> tuple[Value, Buffers]:
        structure = model.structure
        cut, whole = PartitionSpec(structure.axis), PartitionSpec()
        local = functools.partial(_local, structure, loss_fn, has_aux)
        out = on_devices(local, model, batch, replicate=replicate_batch, out_specs=(whole, cut))
        (loss, norm, aux, changed), grads = out
        rest = tuple(changed.get(i, leaf) for i, leaf in enumerate(model.rest))
        return Value(loss, norm, aux, dataclasses.replace(model, rest=rest)), grads

    @functools.wraps(loss_fn, assigned=("__name__", "__doc__"), updated=())
    def wrapped(model: Sharded, batch: Any) -> tuple[Value, Buffers]:
        structure = check_sharded(model, "value_and_grad")
        check_alive(model, "value_and_grad")
        batch = place(batch, structure.mesh, structure.axis, replicate=replicate_batch, what="value_and_grad")
        return jitted(model, batch)

    return wrapped


def _local(
    structure: Structure,
    loss_fn: Callable[..., Any],
    has_aux: bool,
    params: Buffers,
    frozen: Buffers,
    rest: tuple[Any, ...],
    batch: Any,
) -> Any:
    """One device's part: its shards `(S,)` and its rows."""
    policy, axis, num_shards = structure.policy, structure.axis, structure.num_shards

    def total(tensors: Tensors, others: Tensors, rest: tuple[Any, ...], batch: Any) -> tuple[jax.Array, Any]:
        model = structure.form.inside({**tensors, **others}, rest)
        out = loss_fn(model, batch)
        loss, aux = _pair(out) if has_aux else (out, ())
        loss, aux = as_mean(loss), read_aux(aux)
        after = structure.form.rest_after(model, rest)
        return loss.total, (loss, cast_floats(aux, policy.output_dtype), changed_leaves(structure, rest, after))

    (loss, aux, changed), varies, grads = _differentiate(structure, total, params, frozen, rest, batch)
    squares = sum(
        (jnp.sum(jnp.square(g.astype(jnp.promote_types(g.dtype, jnp.float32)))) for g in jax.tree.leaves(grads)),
        start=jnp.float32(0),
    )
    (loss, squares, aux, summed) = sum_over_devices((loss, squares, aux, to_sum(changed, rest, varies[2])), axis)
    scale = jnp.where(loss.count == 0, 0, 1 / loss.count)
    grads = jax.tree.map(lambda g: (g * scale).astype(g.dtype), grads)
    norm = jnp.sqrt(squares) * jnp.abs(scale)
    return (ratio(loss), norm, finish_aux(aux, num_shards), settle(changed, rest, summed, num_shards)), grads


def _differentiate(
    structure: Structure,
    total: Callable[[Tensors, Tensors, Any, Any], tuple[jax.Array, Any]],
    params: Buffers,
    frozen: Buffers,
    rest: tuple[Any, ...],
    batch: Any,
) -> tuple[Any, Any, Buffers]:
    """Gathers, evaluates and pulls back, unit by unit.

    Returns: what `total` returned beside the loss; which of it differs from device to device; and the gradients' sums
    over the devices, as shards `(S,)`.
    """
    units = structure.units
    # One shard is the whole buffer: there is nothing to free.
    resharded = [unit for unit in units if unit.reshard_after_forward and structure.num_shards > 1]
    freed = {path for _, group in each_group(resharded) for path in group.paths}
    by_name = {unit.name: unit for unit in units}
    tensors = gather_units(units, params, trainable=True)
    others = gather_units(units, frozen, trainable=False)
    value, returned, varies, pull = value_and_pullback(total, freed, tensors, others, rest, batch)
    jaxpr, inputs = pull.trace(jnp.ones_like(value), tensors, others, rest, batch)
    first = len(inputs) - len(jax.tree.leaves((tensors, others, rest, batch)))
    grads: Buffers = {}

    def fetch(name: str, after: jax.Array) -> Tensors:
        return gather_again(by_name[name], params, frozen, after)

    def finish(name: str, gradients: Tensors) -> jax.Array:
        grads[name] = reduce_unit(by_name[name], gradients)
        return next(iter(grads[name].values())).data

    run_backward(
        jaxpr,
        inputs,
        missing={first + i: path for i, path in enumerate([*sorted(tensors), *sorted(others)]) if path in freed},
        outputs=sorted(tensors),
        unit_of={path: unit.name for unit, group in each_group(units) for path in group.paths},
        fetch=fetch,
        finish=finish,
        start=value,
    )
    return returned, varies, grads


def _pair(out: Any) -> tuple[Any, Any]:
    if not isinstance(out, tuple) or is_mean(out) or len(out) != 2:
        got = "one array" if hasattr(out, "shape") else type(out).__name__
        raise TypeError(f"loss_fn: got {got}; want (loss, aux), since has_aux=True; return two values")
    return out
