"""apply: the user's function on a sharded model, for evaluation.

Comes in: a function of the model and a batch. Goes out: the same function of a sharded model and a global batch,
jitted. Nothing is differentiated, and nothing of the model changes.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from ._batch import place
from ._inside import cast_floats, gather_units, on_devices
from ._loss import finish_aux, read_aux, sum_over_devices
from ._scans import with_loops
from ._sharded import Buffers, Sharded, check_alive, check_sharded


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

        def local(params: Buffers, frozen: Buffers, rest: tuple[Any, ...], batch: Any) -> Any:
            tensors = gather_units(structure.units, params, trainable=True)
            tensors |= gather_units(structure.units, frozen, trainable=False)

            def whole(tensors: Any, _: Any, rest: tuple[Any, ...], batch: Any) -> Any:
                return fn(structure.form.inside(tensors, rest), batch)

            out = with_loops(whole, [unit for unit in structure.units if unit.stack])(tensors, {}, rest, batch)
            if not mean:
                if not replicate_batch and any(jnp.ndim(leaf) == 0 for leaf in jax.tree.leaves(out)):
                    raise TypeError(
                        "apply: got a function that returns a scalar; want arrays with the batch on dim 0, or metrics; "
                        "pass mean=True for metrics"
                    )
                return cast_floats(out, structure.policy.output_dtype)
            return finish_aux(sum_over_devices(read_aux(out), structure.axis), structure.num_shards)

        same = mean or replicate_batch
        out_specs = PartitionSpec() if same else PartitionSpec(structure.axis)
        return on_devices(local, model, batch, replicate=replicate_batch, out_specs=out_specs)

    @functools.wraps(fn, assigned=("__name__", "__doc__"), updated=())
    def wrapped(model: Sharded, batch: Any) -> Any:
        structure = check_sharded(model, "apply")
        check_alive(model, "apply")
        batch = place(batch, structure.mesh, structure.axis, replicate=replicate_batch, what="apply")
        return jitted(model, batch)

    return wrapped
