"""The training step: gradients on shards, clipping, an optax update, and everything donated.

Comes in: a loss function of the user's model, an optax transformation. Goes out: one jitted step. The optimizer works
on the flat buffers, one array a group: any element-wise optax transformation runs unchanged. It is traced over the
whole buffers, so what it reduces over them (a global norm) is global; XLA cuts its element-wise work into shards.

A step whose loss or gradient is not finite changes nothing but a count. Every device decides so alike and without
asking the others, since loss and norm are sums over all of them.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from ._accumulation import Accumulation
from ._batch import place
from ._elementwise import check_elementwise
from ._gradient import value_and_grad
from ._sharded import Sharded, check_alive, check_sharded, is_abstract, shardings


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["step", "model", "opt_state", "skipped"], meta_fields=[]
)
@dataclass(frozen=True)
class TrainState:
    """Everything that a step changes.

    Attributes:

    - `step`: updates done, an int32 scalar.
    - `model`: the sharded model.
    - `opt_state`: the optimizer's state; what has the buffers' size is sharded as they are.
    - `skipped`: steps that were skipped, an int32 scalar: `step + skipped` batches have been seen.
    """

    step: Any
    model: Sharded
    opt_state: Any
    skipped: Any


class Metrics(NamedTuple):
    """What a step reports: global values, the same on every device.

    Attributes:

    - `loss`: the mean before the step.
    - `grad_norm`: of the whole gradient, before clipping.
    - `aux`: the loss function's metrics.
    - `skipped`: whether the step was skipped, since `loss` or `grad_norm` is not finite: a bool scalar.
    """

    loss: jax.Array
    grad_norm: jax.Array
    aux: Any
    skipped: jax.Array


def train_state(model: Sharded, tx: Any) -> TrainState:
    """The state before the first step; the optimizer's state is born sharded.

    Arguments:

    - `model`: what `fully_shard` returned; with `abstract=True` the state is abstract too.
    - `tx`: an optax transformation.

    Raises: `ValueError` for an optimizer that would treat a buffer otherwise than the parameters in it, `RuntimeError`
    for a model whose memory a step has taken.
    """
    replicated = check_sharded(model, "train_state").replicated
    _check_optimizer(tx, "train_state")
    check_alive(model, "train_state")
    check_elementwise(tx, model.params, "train_state")
    shapes = jax.eval_shape(tx.init, model.params)
    targets = shardings(shapes, replicated)
    if is_abstract(model):
        count: Any = jax.ShapeDtypeStruct((), jnp.int32, sharding=replicated)
        described = jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, targets)
        return TrainState(count, model, described, count)
    opt_state = jax.jit(tx.init, out_shardings=targets)(model.params)
    # Two arrays: the step is given the memory of both.
    step, skipped = (jnp.zeros((), jnp.int32, device=replicated) for _ in range(2))
    return TrainState(step, model, opt_state, skipped)


def train_step(
    loss_fn: Callable[..., Any],
    tx: Any,
    *,
    has_aux: bool = False,
    max_norm: float | None = None,
    skip_nonfinite: bool = True,
    accumulation: Accumulation | None = None,
    replicate_batch: bool = False,
    donate: bool = True,
    compiler_options: Mapping[str, bool | int | str] | None = None,
) -> "TrainStep":
    """Makes the jitted training step.

    Arguments:

    - `loss_fn`, `has_aux`, `accumulation`, `replicate_batch`: see `value_and_grad`.
    - `tx`: an element-wise optax transformation, or one of `vs.optimizers`, as given to `train_state`.
    - `max_norm`: the global norm above which gradients are scaled down to it. It costs no collective of its own;
      `optax.clip_by_global_norm` works as well.
    - `skip_nonfinite`: whether a step whose loss or gradient norm is not finite is skipped: parameters, the optimizer's
      state, counters and statistics stay bit for bit, on every device, and `TrainState.skipped` counts it. On, since
      one such step would otherwise spoil all parameters for good; it costs no collective, and the metrics tell.
    - `donate`: whether the step may reuse the old state's memory, which is gone then.
    - `compiler_options`: for XLA, for this step alone, as `jax.jit` takes them.

    Returns: a function `(state, batch) -> (state, metrics)`, compiled at its first call.

    Raises: `ValueError` if `max_norm` is not positive.
    """
    if max_norm is not None and not max_norm > 0:
        raise ValueError(f"train_step: max_norm: got {max_norm}; want a positive number; pass None for no clipping")
    _check_optimizer(tx, "train_step")
    gradient = value_and_grad(loss_fn, has_aux=has_aux, replicate_batch=replicate_batch, accumulation=accumulation)

    def step(state: TrainState, batch: Any) -> tuple[TrainState, Metrics]:
        grads: Any
        params: Any = state.model.params
        value, grads = gradient(state.model, batch)
        if max_norm is not None:
            scale = jnp.where(value.grad_norm < max_norm, 1.0, max_norm / value.grad_norm)
            grads = jax.tree.map(lambda g: (g * scale).astype(g.dtype), grads)
        updates, opt_state = tx.update(grads, state.opt_state, params)
        params = optax.apply_updates(params, updates)
        new = TrainState(state.step + 1, dataclasses.replace(value.model, params=params), opt_state, state.skipped)
        if not skip_nonfinite:
            return new, Metrics(value.loss, value.grad_norm, value.aux, jnp.zeros((), bool))
        finite = jnp.isfinite(value.loss) & jnp.isfinite(value.grad_norm)
        return _choose(finite, new, state), Metrics(value.loss, value.grad_norm, value.aux, ~finite)

    return TrainStep(step, tx, replicate_batch, donate, dict(compiler_options or {}))


def _choose(finite: jax.Array, new: TrainState, old: TrainState) -> TrainState:
    """The new state, or else the old one with one more step counted as skipped."""

    # A choice element by element is fused into the update, which writes in place. A branch would hold back donation.
    def one(new: Any, old: Any) -> Any:
        return old if new is old else jnp.where(finite, new, old)

    chosen = jax.tree.map(one, new, old)
    return dataclasses.replace(chosen, skipped=old.skipped + (~finite).astype(jnp.int32))


def _check_optimizer(tx: Any, what: str) -> None:
    if not (callable(getattr(tx, "init", None)) and callable(getattr(tx, "update", None))):
        raise TypeError(
            f"{what}: tx: got {tx!r}; want an optax transformation, with init and update; pass optax.adamw()"
        )


# Compared by identity: jax.lax.scan and jax.jit hash what they are given.
@dataclass(frozen=True, eq=False)
class TrainStep:
    """A jitted training step; made by `train_step`."""

    step: Callable[[TrainState, Any], tuple[TrainState, Metrics]]
    tx: Any
    replicate_batch: bool
    donate: bool
    compiler_options: dict[str, Any]
    _jitted: dict[Any, Any] = field(default_factory=dict, repr=False)

    def __call__(self, state: TrainState, batch: Any) -> tuple[TrainState, Metrics]:
        """Does one step.

        Arguments:

        - `state`: from `train_state` or the step before; gone afterwards if donated.
        - `batch`: the global batch, rows on dim 0; NumPy arrays are cut and sent to the devices.

        Raises: `ValueError` that names every leaf whose rows do not divide by the devices of the axis.
        """
        jitted = self.jitted(state)
        check_alive(state, "train_step")  # JAX 0.10.2 looks too late, and ends the process.
        if is_abstract(state):
            raise ValueError("train_step: got an abstract state; want one with values; use .lower for shapes alone")
        return jitted(state, self._place(state, batch))

    def lower(self, state: TrainState, batch: Any) -> Any:
        """Lowers the step for these arguments, abstract ones included: `.compile().as_text()` is the program."""
        return self.jitted(state).lower(state, self._place(state, batch))

    def jitted(self, state: TrainState) -> Any:
        """The `jax.jit` of the step for states of this structure."""
        if not isinstance(state, TrainState):
            raise TypeError(f"train_step: got {type(state).__name__}; want a TrainState; make one with vs.train_state")
        structure = jax.tree.structure(state)
        if structure not in self._jitted:
            wanted = jax.tree.structure(jax.eval_shape(self.tx.init, state.model.params))
            if wanted != jax.tree.structure(state.opt_state):
                raise ValueError(
                    "train_step: got a state made for another optimizer; want one made by vs.train_state(model, tx) "
                    "with the tx of this step; pass the same tx to both"
                )
            # Outputs lie as the inputs do: donated memory fits, and the next step finds what it was compiled for.
            replicated = state.model.structure.replicated
            self._jitted[structure] = jax.jit(
                self.step,
                donate_argnums=(0,) if self.donate else (),
                out_shardings=(shardings(state, replicated), replicated),
                compiler_options=self.compiler_options or None,
            )
        return self._jitted[structure]

    def _place(self, state: TrainState, batch: Any) -> Any:
        structure = state.model.structure
        return place(batch, structure.mesh, structure.axis, replicate=self.replicate_batch, what="train_step")
