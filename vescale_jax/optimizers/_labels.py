"""Labels: masks, labels and multipliers by the path of a parameter, for optax and for our own optimizers.

Comes in: a rule, as `fully_shard` takes them for blocks: one value, a mapping of patterns to values, or a function of
path and parameter. Goes out: a function of a tree of parameters, which optax takes for a mask or for labels; or a
transformation that scales updates. On a sharded model they need `per_parameter`, since a buffer holds many parameters.
"""

from collections.abc import Callable
from typing import Any

import jax
import optax

from vescale_jax._form import path_name
from vescale_jax._rules import Rule, resolve
from vescale_layouts import DBuffer
from vescale_planner import Faults


def by_path(rule: Rule[Any], default: Any = None) -> Callable[[Any], Any]:
    """A mask or labels by path, for whatever in optax takes a function of the parameters.

        decay = vs.optimizers.by_path({"*/bias": False, "*/scale": False, "*": True})
        tx = vs.optimizers.per_parameter(optax.adamw(1e-3, mask=decay), model)

    Arguments:

    - `rule`: a mapping of patterns such as `"layers/*/kernel"` to values, of which the first that matches counts; a
      function called as `rule(path, parameter)`, where the parameter has the logical shape; or one value.
    - `default`: for parameters that no pattern matches.

    Returns: a function of a pytree of parameters that returns the same tree with a value for each.

    Raises: the function raises `ValueError` for patterns that match nothing, and for buffers instead of parameters.
    """

    def values(params: Any) -> Any:
        flat, treedef = jax.tree_util.tree_flatten_with_path(params, is_leaf=_is_end)
        if any(isinstance(leaf, DBuffer) for _, leaf in flat):
            raise ValueError(
                "by_path: got flat buffers, which hold many parameters; want parameters; wrap the optimizer: "
                "vs.optimizers.per_parameter(tx, model)"
            )
        faults = Faults("by_path")
        # What an outer mask took out has no value of its own, and a pattern may be for nothing else.
        names = {path_name(path): (leaf,) for path, leaf in flat if not isinstance(leaf, optax.MaskedNode)}
        found = resolve(rule, names, argument="rule", default=default, faults=faults)
        if len(names) == len(flat):
            faults.raise_if_any()
        return treedef.unflatten([found.get(path_name(path), leaf) for path, leaf in flat])

    return values


def scale_by_path(rule: Rule[float]) -> optax.GradientTransformation:
    """Multiplies updates by a factor for each parameter: learning rates by path.

        tx = optax.chain(optax.adamw(1e-3), vs.optimizers.scale_by_path({"embed/*": 0.1}))
        tx = vs.optimizers.per_parameter(tx, model)

    Arguments:

    - `rule`: the factor; see `by_path`. Parameters that no pattern matches have 1.

    Returns: an optax transformation without state.
    """
    factors = by_path(rule, 1.0)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        del params
        return jax.tree.map(lambda factor, g: g * factor, factors(updates), updates), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def _is_end(node: Any) -> bool:
    return isinstance(node, DBuffer | optax.MaskedNode)
