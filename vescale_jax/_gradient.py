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

from vescale_layouts import DBuffer, scatter_buffer
from vescale_planner import Faults

from ._accumulation import Accumulation, accumulate, check_rows
from ._backward import differentiate
from ._batch import place
from ._groups import Group, each_group
from ._inside import buffer_specs, cast_floats, on_devices
from ._loss import as_mean, finish_aux, is_mean, ratio, read_aux, sum_over_devices
from ._pullback import Tensors
from ._rest import changed_leaves, really_changed, settle, to_sum
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
    loss_fn: Callable[..., Any],
    *,
    has_aux: bool = False,
    replicate_batch: bool = False,
    accumulation: Accumulation | None = None,
) -> Callable[[Sharded, Any], tuple[Value, Buffers]]:
    """Makes a function of a sharded model and a global batch that returns loss and sharded gradients.

    Arguments:

    - `loss_fn`: a function of the model in the user's own form (an `nnx.Module`, a bound linen module, or a pytree)
      and of this device's rows. It returns a scalar, the mean over its rows, if every row weighs the same; or a
      `Mean` of sum and count. It must not reduce over devices itself.
    - `has_aux`: whether `loss_fn` returns `(loss, aux)`: a pytree of metrics, of which each `Mean` becomes the global
      mean, floats are averaged over the devices and integers summed.
    - `replicate_batch`: whether every device gets all rows; for batches smaller than the mesh.
    - `accumulation`: in how many pieces each device works on its rows, and how gradients are added up. None: one. What
      a microbatch changes of the rest, the next one is given; loss and metrics are those of all rows.

    Returns: a function `(model, batch) -> (Value, gradients)`, where the gradients have the structure, dtypes and
    shardings of `model.params`. It is jitted, and can be traced inside a larger step.

    Raises: `TypeError` for a loss function or an accumulation that is none.
    """
    _check_arguments(loss_fn, accumulation)

    @jax.jit
    def jitted(model: Sharded, batch: Any) -> tuple[Value, Buffers]:
        structure = model.structure
        local = functools.partial(_local, structure, loss_fn, has_aux, accumulation)
        out = on_devices(
            local, model, batch, replicate=replicate_batch, out_specs=(PartitionSpec(), buffer_specs(model.params))
        )
        (loss, norm, aux, changed), grads = out
        rest = tuple(changed.get(i, leaf) for i, leaf in enumerate(model.rest))
        return Value(loss, norm, aux, dataclasses.replace(model, rest=rest)), grads

    @functools.wraps(loss_fn, assigned=("__name__", "__doc__"), updated=())
    def wrapped(model: Sharded, batch: Any) -> tuple[Value, Buffers]:
        structure = check_sharded(model, "value_and_grad")
        check_alive(model, "value_and_grad")
        batch = place(batch, structure.mesh, structure.axis, replicate=replicate_batch, what="value_and_grad")
        if accumulation is not None:
            devices = 1 if replicate_batch else structure.num_shards
            check_rows(batch, devices, accumulation, "value_and_grad")
        return jitted(model, batch)

    return wrapped


def _check_arguments(loss_fn: Any, accumulation: Any) -> None:
    faults = Faults("value_and_grad")
    if not callable(loss_fn):
        change = "pass the function itself, such as lambda model, batch: ..."
        faults.add("loss_fn", got=repr(loss_fn), want="a function of the model and a batch", change=change)
    if not isinstance(accumulation, Accumulation | None):
        change = "pass vs.Accumulation(microbatches=4) for four pieces"
        faults.add("accumulation", got=repr(accumulation), want="a vs.Accumulation, or None", change=change)
    faults.raise_if_any(TypeError)


def _local(
    structure: Structure,
    loss_fn: Callable[..., Any],
    has_aux: bool,
    accumulation: Accumulation | None,
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

    def evaluate(rest: tuple[Any, ...], batch: Any) -> Any:
        (loss, aux, changed), varies, grads = differentiate(
            structure, total, params, frozen, rest, batch, reduce=accumulation is None or accumulation.reduce == "each"
        )
        differs.append(varies[2])
        return (loss, aux), really_changed(structure, rest, changed), grads

    differs: list[dict[int, bool]] = []
    if accumulation is None:
        (loss, aux), changed, grads = evaluate(rest, batch)
    else:
        (loss, aux), changed, grads = accumulate(accumulation, evaluate, _dtypes(structure), rest, batch)
    grads = _finished(structure, grads, scatter=accumulation is not None and accumulation.reduce == "end")
    squares = sum(
        (jnp.sum(jnp.square(g.astype(jnp.promote_types(g.dtype, jnp.float32)))) for g in jax.tree.leaves(grads)),
        start=jnp.float32(0),
    )
    (loss, squares, aux, summed) = sum_over_devices((loss, squares, aux, to_sum(changed, rest, differs[-1])), axis)
    scale = jnp.where(loss.count == 0, 0, 1 / loss.count)
    grads = jax.tree.map(lambda g: (g * scale).astype(g.dtype), grads)
    norm = jnp.sqrt(squares) * jnp.abs(scale)
    parts = num_shards * (accumulation.microbatches if accumulation else 1)
    return (ratio(loss), norm, finish_aux(aux, parts), settle(changed, rest, summed, num_shards)), grads


def _dtypes(structure: Structure) -> dict[str, dict[str, Any]]:
    """The stored dtype of every trainable group."""
    found: dict[str, dict[str, Any]] = {}
    for unit, group in each_group(structure.units):
        if group.trainable:
            found.setdefault(unit.name, {})[group.name] = group.dtype
    return found


def _finished(structure: Structure, grads: Buffers, *, scatter: bool) -> Buffers:
    """Gradients as shards in the stored dtypes; with `scatter`, summed over the devices now."""

    def one(group: Group, data: jax.Array) -> jax.Array:
        if not scatter:
            return data.astype(group.dtype)
        send = functools.partial(scatter_buffer, group.layout.layer, shard_dtype=group.dtype)
        for _ in group.layout.stack:
            send = jax.vmap(send)
        return send(data.astype(group.reduce_dtype))

    finished: Buffers = {}
    for unit, group in each_group(structure.units):
        if group.trainable:
            data = one(group, grads[unit.name][group.name].data)
            finished.setdefault(unit.name, {})[group.name] = DBuffer(data, group.layout)
    return finished


def _pair(out: Any) -> tuple[Any, Any]:
    if not isinstance(out, tuple) or is_mean(out) or len(out) != 2:
        got = "one array" if hasattr(out, "shape") else type(out).__name__
        raise TypeError(f"loss_fn: got {got}; want (loss, aux), since has_aux=True; return two values")
    return out
