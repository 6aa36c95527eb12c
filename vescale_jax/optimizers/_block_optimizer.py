"""block_optimizer: what all optimizers for blocks have in common: counts, learning rates, weight decay, and the tree.

Comes in: how one group's state begins, and how a step makes a direction of a gradient and that state. Goes out: an
optax transformation over the buffers of a sharded model.
"""

from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import optax

from vescale_jax._sharded import is_buffer
from vescale_jax._step_aside import steps_aside
from vescale_jax._units import ROOT
from vescale_layouts import DBuffer, Layout
from vescale_planner import Faults

from ._rounding import rounded

ScalarOrSchedule = Any
"""A number, an array without dims, or a function from the count of steps done to one."""

Step: TypeAlias = Callable[[DBuffer, Any], tuple[Any, Any]]
"""From a gradient and what is kept for its group to what is added to the parameters, before the learning rate and
weight decay: float32, as the buffer; and what is kept then."""


def block_optimizer(
    name: str,
    learning_rate: ScalarOrSchedule,
    weight_decay: float,
    *,
    block_size: Any,
    views: Callable[[Layout], Any],
    zeros: Callable[[DBuffer], Any],
    step: Callable[[jax.Array, jax.Array], Step],
    state: Callable[[Any, Any], Any],
) -> optax.GradientTransformation:
    """An optimizer that works group by group, with decoupled weight decay.

    Arguments:

    - `name`: its public name.
    - `learning_rate`: a number, or an optax schedule.
    - `weight_decay`: as in `optax.adamw`.
    - `block_size`: what it was called with.
    - `views`: makes the block views of a group; raises `ValueError` with a line for each parameter at fault.
    - `zeros`: what is kept for a group at first, given its parameters.
    - `step`: makes the step of two counts, int32: of steps done before it, and with it.
    - `state`: of a count and of the parameters' tree with what is kept in the place of every buffer.

    Returns: an optax transformation, whose updates have the dtype of the parameters. `init` raises `TypeError` for a
    leaf that is no buffer, and `ValueError` that names every parameter whose blocks may be cut.
    """

    def init(params: Any) -> Any:
        _check_buffers(name, block_size, params, views)
        return state(jnp.zeros((), jnp.int32), jax.tree.map(zeros, params, is_leaf=is_buffer))

    def update(updates: Any, held: Any, params: Any = None) -> tuple[Any, Any]:
        if params is None:
            raise ValueError(f"{name}: got no params; want them, for weight decay; call update(grads, state, params)")
        rate = jnp.asarray(learning_rate(held.count) if callable(learning_rate) else learning_rate, jnp.float32)
        count = jnp.asarray(optax.safe_increment(held.count))
        one = step(held.count, count)
        grads, tree = jax.tree.flatten(updates, is_leaf=is_buffer)
        buffers, moments = tree.flatten_up_to(params), tree.flatten_up_to(held.moments)
        steps = [one(g, m) for g, m in zip(grads, moments, strict=True)]
        new = [
            DBuffer(_scaled(direction, p.data, rate, weight_decay), p.layout)
            for (direction, _), p in zip(steps, buffers, strict=True)
        ]
        return tree.unflatten(new), state(count, tree.unflatten([kept for _, kept in steps]))

    return optax.GradientTransformation(*steps_aside(init, update))


def _scaled(direction: jax.Array, params: jax.Array, rate: jax.Array, weight_decay: float) -> jax.Array:
    """The update `-rate (direction + weight_decay params)`, in the dtype of the parameters."""
    if weight_decay:
        direction = direction + rounded(weight_decay * params.astype(jnp.float32))
    return rounded(-rate * direction).astype(params.dtype)


def _check_buffers(name: str, block_size: Any, params: Any, views: Callable[[Layout], Any]) -> None:
    """Raises unless all leaves are buffers whose plans keep all blocks whole, on every mesh."""
    faults = Faults(f"{name}(block_size={block_size!r})")
    for path, leaf in jax.tree_util.tree_leaves_with_path(params, is_leaf=is_buffer):
        unit = jax.tree_util.keystr(path[:-1] or path, simple=True, separator="/")
        if not is_buffer(leaf):
            raise TypeError(
                f"{name}: {unit}: got {type(leaf).__name__}; want a buffer of a sharded model; shard the model "
                "with fully_shard and pass model.params"
            )
        try:
            views(leaf.layout)
        except ValueError as error:
            for line in str(error).split("\n  ")[1:]:
                # Rules by path do not know of groups, and names of the root unit are whole.
                whole = unit == ROOT or line.startswith(unit)
                faults.absorb(ValueError(line if whole else f"{unit}/{line}"))
    faults.raise_if_any()
