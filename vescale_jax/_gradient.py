"""value_and_grad and apply: the user's function on a sharded model.

Comes in: a function of the model and a batch. Goes out: the same function of a sharded model and a global batch. It
runs in `jax.shard_map`, manual over the shard axis: each device gathers the units, works on its rows, and leaves its
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

from ._batch import batch_specs, place
from ._groups import each_group
from ._inside import cast_floats, gather_again, gather_units, reduce_unit
from ._loss import as_mean, check_aux, finish_aux, is_mean, ratio, sum_over_devices
from ._pullback import Tensors, value_and_pullback
from ._rest import changed_leaves, own_keys, settle, to_sum
from ._schedule import run_backward
from ._sharded import Buffers, Sharded, Structure, check_sharded


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
        mapped = jax.shard_map(
            functools.partial(_local, structure, loss_fn, has_aux),
            mesh=structure.mesh,
            in_specs=(cut, cut, whole, batch_specs(batch, structure.axis, replicate_batch)),
            out_specs=(whole, cut),
            axis_names={structure.axis},
            check_vma=False,
        )
        (loss, norm, aux, changed), grads = mapped(model.params, model.frozen, model.rest, batch)
        rest = tuple(changed.get(i, leaf) for i, leaf in enumerate(model.rest))
        return Value(loss, norm, aux, dataclasses.replace(model, rest=rest)), grads

    @functools.wraps(loss_fn, assigned=("__name__", "__doc__"), updated=())
    def wrapped(model: Sharded, batch: Any) -> tuple[Value, Buffers]:
        structure = check_sharded(model, "value_and_grad")
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
    policy, axis = structure.policy, structure.axis
    rest = own_keys(rest, axis)
    batch = cast_floats(batch, policy.gather_dtype if policy.cast_inputs else None)

    units, resharded = structure.units, [unit for unit in structure.units if unit.reshard_after_forward]
    if structure.num_shards == 1:
        resharded = []  # One shard is the whole buffer: there is nothing to free.
    freed = {path for _, group in each_group(resharded) for path in group.paths}
    by_name = {unit.name: unit for unit in units}

    def total(tensors: Tensors, others: Tensors, rest: tuple[Any, ...], batch: Any) -> tuple[jax.Array, Any]:
        model = structure.form.inside({**tensors, **others}, rest)
        out = loss_fn(model, batch)
        loss, aux = _pair(out) if has_aux else (out, ())
        loss = as_mean(loss)
        check_aux(aux)
        aux = jax.tree.map(lambda m: as_mean(m) if is_mean(m) else m, aux, is_leaf=is_mean)
        after = structure.form.rest_after(model, rest)
        return loss.total, (loss, cast_floats(aux, policy.output_dtype), changed_leaves(structure, rest, after))

    tensors = gather_units(units, params, trainable=True)
    others = gather_units(units, frozen, trainable=False)
    value, (loss, aux, changed), varies, pull = value_and_pullback(total, freed, tensors, others, rest, batch)
    jaxpr, inputs = pull.trace(jnp.ones_like(value), tensors, others, rest, batch)
    paths = [*sorted(tensors), *sorted(others)]
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
        missing={first + i: path for i, path in enumerate(paths) if path in freed},
        outputs=sorted(tensors),
        unit_of={path: unit.name for unit, group in each_group(units) for path in group.paths},
        fetch=fetch,
        finish=finish,
        start=value,
    )
    squares = sum(
        (jnp.sum(jnp.square(g.astype(jnp.promote_types(g.dtype, jnp.float32)))) for g in jax.tree.leaves(grads)),
        start=jnp.float32(0),
    )
    (loss, squares, aux, summed) = sum_over_devices((loss, squares, aux, to_sum(changed, rest, varies[2])), axis)
    changed = settle(changed, rest, summed, structure.num_shards)
    scale = jnp.where(loss.count == 0, 0, 1 / loss.count)
    grads = jax.tree.map(lambda g: (g * scale).astype(g.dtype), grads)
    norm = jnp.sqrt(squares) * jnp.abs(scale)
    return (ratio(loss), norm, finish_aux(aux, structure.num_shards), changed), grads


def apply(
    fn: Callable[..., Any], *, replicate_batch: bool = False, mean: bool = False
) -> Callable[[Sharded, Any], Any]:
    """Makes a jitted function of a sharded model and a global batch out of one of the user's model: for evaluation.

    Arguments:

    - `fn`: a function of the model in the user's own form and of this device's rows.
    - `replicate_batch`: whether every device gets all rows and returns the same; for batches smaller than the mesh.
    - `mean`: whether `fn` returns metrics to be reduced over the devices, as `value_and_grad` does with `aux`;
      otherwise it returns arrays with the batch on dim 0.

    Returns: a function `(model, batch) -> outputs`. Counters and batch statistics that `fn` changes are dropped.
    """

    @jax.jit
    def jitted(model: Sharded, batch: Any) -> Any:
        structure = model.structure
        cut, whole = PartitionSpec(structure.axis), PartitionSpec()

        def local(params: Buffers, frozen: Buffers, rest: tuple[Any, ...], batch: Any) -> Any:
            policy = structure.policy
            batch = cast_floats(batch, policy.gather_dtype if policy.cast_inputs else None)
            tensors = gather_units(structure.units, params, trainable=True)
            tensors |= gather_units(structure.units, frozen, trainable=False)
            out = fn(structure.form.inside(tensors, own_keys(rest, structure.axis)), batch)
            if not mean:
                return cast_floats(out, policy.output_dtype)
            check_aux(out)
            out = jax.tree.map(lambda m: as_mean(m) if is_mean(m) else m, out, is_leaf=is_mean)
            return finish_aux(sum_over_devices(out, structure.axis), structure.num_shards)

        return jax.shard_map(
            local,
            mesh=structure.mesh,
            in_specs=(cut, cut, whole, batch_specs(batch, structure.axis, replicate_batch)),
            out_specs=whole if mean or replicate_batch else cut,
            axis_names={structure.axis},
            check_vma=False,
        )(model.params, model.frozen, model.rest, batch)

    @functools.wraps(fn, assigned=("__name__", "__doc__"), updated=())
    def wrapped(model: Sharded, batch: Any) -> Any:
        structure = check_sharded(model, "apply")
        batch = place(batch, structure.mesh, structure.axis, replicate=replicate_batch, what="apply")
        return jitted(model, batch)

    return wrapped


def _pair(out: Any) -> tuple[Any, Any]:
    if not isinstance(out, tuple) or is_mean(out) or len(out) != 2:
        raise TypeError(f"loss_fn: got {type(out).__name__}; want (loss, aux), since has_aux=True; return two values")
    return out
