"""Accumulation: one step's batch worked on piece by piece, for batches whose activations do not fit.

Comes in: the evaluation of one microbatch on one device, and the device's rows. Goes out: the sums over all
microbatches. Gradients are either reduced for each microbatch and added up as shards, or added up whole on every device
and reduced once: that takes the memory of a whole model of gradients and saves all reduce-scatters but one a unit.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from vescale_layouts import DBuffer
from vescale_planner import Faults

from ._form import path_name
from ._rest import Changed, fold_keys
from ._sharded import Buffers


@dataclass(frozen=True, slots=True)
class Accumulation:
    """How a step's batch is cut, and its gradients added up.

    Arguments:

    - `microbatches`: pieces of equal size, worked on one after the other.
    - `reduce`: `"each"`: gradients are reduced for each microbatch, and shards are added up. `"end"`: every device adds
      up whole gradients, which are reduced once; they take the bytes of all parameters in `dtype`.
    - `dtype`: in which gradients are added up. None: float32, or the parameter's dtype if wider.

    Raises: `ValueError` for numbers or names out of range.
    """

    microbatches: int
    reduce: Literal["each", "end"] = "each"
    dtype: DTypeLike | None = None

    def __post_init__(self) -> None:
        faults = Faults("Accumulation")
        if isinstance(self.microbatches, bool) or not isinstance(self.microbatches, int) or self.microbatches < 1:
            got, want = repr(self.microbatches), "a positive number"
            faults.add("microbatches", got=got, want=want, change="pass 1 for one batch a step")
        if self.reduce not in get_args(Literal["each", "end"]):
            faults.add("reduce", got=repr(self.reduce), want="'each' or 'end'", change="pass one of these")
        if self.dtype is not None and not jnp.issubdtype(self.dtype, jnp.floating):
            faults.add("dtype", got=str(self.dtype), want="a floating-point dtype", change="pass jnp.float32")
        faults.raise_if_any()

    def dtype_for(self, stored: Any) -> Any:
        """In which gradients of parameters of a dtype are added up."""
        return jnp.promote_types(stored, jnp.float32) if self.dtype is None else jnp.dtype(self.dtype)


Evaluation = tuple[Any, Changed, Buffers]
"""Of one microbatch: sums that are added up; what of the rest changed, with it; gradients."""


def accumulate(
    accumulation: Accumulation,
    evaluate: Callable[[tuple[Any, ...], Any], Evaluation],
    dtypes: Mapping[str, Mapping[str, Any]],
    rest: tuple[Any, ...],
    batch: Any,
) -> Evaluation:
    """Evaluates microbatch after microbatch.

    Arguments:

    - `accumulation`: how many.
    - `evaluate`: a function of the rest and of one microbatch.
    - `dtypes`: of the stored parameters, by unit and group.
    - `rest`: of the model; each microbatch is given what the one before made of it, and random keys of its own.
    - `batch`: the device's rows.

    Returns: as `evaluate` does, for all rows.
    """
    number = accumulation.microbatches
    pieces = _cut(batch, number)

    def piece(index: Any) -> Any:
        return jax.tree.map(
            lambda x, cut: lax.dynamic_index_in_dim(x, index, 0, keepdims=False) if cut else x, pieces, _is_cut(batch)
        )

    def one(rest: tuple[Any, ...], index: Any) -> Evaluation:
        sums, changed, grads = evaluate(fold_keys(rest, index), piece(index))
        wide = {
            unit: {
                name: DBuffer(g.data.astype(accumulation.dtype_for(dtypes[unit][name])), g.layout)
                for name, g in of.items()
            }
            for unit, of in grads.items()
        }
        return sums, changed, wide

    sums_like, changed_like, grads_like = jax.eval_shape(one, rest, 0)
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), (sums_like, grads_like))

    def turn(state: Any, index: Any) -> tuple[Any, None]:
        rest, sums, grads = state
        more, changed, more_grads = one(rest, index)
        rest = tuple(changed.get(i, leaf) for i, leaf in enumerate(rest))
        sums, grads = jax.tree.map(jnp.add, (sums, grads), (more, more_grads))
        return (rest, sums, grads), None

    (last, sums, grads), _ = lax.scan(turn, (rest, *zeros), jnp.arange(number, dtype=jnp.int32))
    return sums, {i: last[i] for i in changed_like}, grads


def check_rows(batch: Any, devices: int, accumulation: Accumulation, what: str) -> None:
    """Raises `ValueError` that names every leaf whose rows do not divide by devices and microbatches."""
    number = accumulation.microbatches
    faults = Faults(what)
    for path, leaf in jax.tree_util.tree_leaves_with_path(batch):
        if jnp.ndim(leaf) and leaf.shape[0] % (devices * number):
            faults.add(
                f"batch/{path_name(path)}".rstrip("/"),
                got=f"{leaf.shape[0]} rows",
                want=f"a multiple of {devices * number}: {devices} devices, {number} microbatches each",
                change="fill up with rows that count nothing (vs.Mean), or choose another number of microbatches",
            )
    faults.raise_if_any()


def _is_cut(batch: Any) -> Any:
    return jax.tree.map(lambda x: jnp.ndim(x) > 0, batch)


def _cut(batch: Any, number: int) -> Any:
    return jax.tree.map(lambda x: x.reshape(number, -1, *x.shape[1:]) if jnp.ndim(x) else x, batch)
