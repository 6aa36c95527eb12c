"""Labels: masks, labels and multipliers by the path of a parameter, for optax and for our own optimizers.

Comes in: a rule, as `fully_shard` takes them for blocks: one value, a mapping of patterns to values, or a function of
path and parameter. Goes out: a function of a tree of parameters, which optax takes for a mask or for labels; or a
transformation that scales updates. On a sharded model they need `per_parameter`, since a buffer holds many parameters.
"""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import optax
from flax import nnx
from flax.core.meta import AxisMetadata

from vescale_jax._form import path_name
from vescale_jax._rules import Rule, resolve
from vescale_layouts import DBuffer
from vescale_planner import Faults

_BOXES = (nnx.Variable, AxisMetadata)
"""What Flax puts around an array."""


def by_path(rule: Rule[Any], default: Any = None) -> Callable[[Any], Any]:
    """A mask or labels by path, for whatever in optax takes a function of the parameters.

        decay = vs.optimizers.by_path({"*/bias": False, "*/scale": False, "*": True})
        tx = vs.optimizers.per_parameter(optax.adamw(1e-3, mask=decay), model)

    Arguments:

    - `rule`: a mapping of patterns such as `"layers/*/kernel"` to values, of which the first that matches counts; a
      function called as `rule(path, parameter)`, where the parameter has the logical shape; or one value.
    - `default`: for parameters that no pattern matches.

    Returns: a function of a pytree of parameters that returns the same tree with a value for each. Paths are those of
    `fully_shard`: the box of a Flax variable has no part in them.

    Raises: the function raises `ValueError` for patterns that match nothing, for parameters without a value, and for
    buffers instead of parameters.
    """

    def values(params: Any) -> Any:
        treedef = jax.tree.structure(params, is_leaf=_is_end)
        flat = list(_named(params))
        if any(isinstance(leaf, DBuffer) for _, leaf in flat):
            raise ValueError(
                "by_path: got flat buffers, which hold many parameters; want parameters; wrap the optimizer: "
                "vs.optimizers.per_parameter(tx, model)"
            )
        faults = Faults("by_path")
        # What an outer mask took out has no value of its own, and a pattern may be for nothing else.
        names = {name: (leaf,) for name, leaf in flat if not isinstance(leaf, optax.MaskedNode)}
        found = resolve(rule, names, argument="rule", default=default, faults=faults)
        if len(names) < len(flat):
            faults = Faults("by_path")
        for name, value in found.items() if not faults else ():
            if value is None:
                change = 'add "*" as the last pattern, or pass default=...'
                faults.add(name, got="no value by any pattern", want="one for every parameter", change=change)
        faults.raise_if_any()
        return treedef.unflatten([found.get(name, leaf) for name, leaf in flat])

    return values


def scale_by_path(rule: Rule[float]) -> optax.GradientTransformation:
    """Multiplies updates by a factor for each parameter: learning rates by path.

        tx = optax.chain(optax.adamw(1e-3), vs.optimizers.scale_by_path({"embed/*": 0.1}))
        tx = vs.optimizers.per_parameter(tx, model)

    Arguments:

    - `rule`: the factor; see `by_path`. Parameters that no pattern matches have 1.

    Returns: an optax transformation without state.

    Raises: `update` raises `ValueError` as `by_path` does, and `TypeError` that names every factor which is no number.
    """
    factors = by_path(rule, 1.0)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        del params
        chosen = factors(updates)
        faults = Faults("scale_by_path")
        for name, factor in _named(chosen):
            if isinstance(factor, str | bool):
                faults.add(name, got=repr(factor), want="a factor such as 0.1", change="mend the rule")
        faults.raise_if_any(TypeError)
        return jax.tree.map(lambda factor, g: g * factor, chosen, updates), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def _named(params: Any) -> Iterator[tuple[str, Any]]:
    """Every leaf with its path, in which the box that holds it has no part."""
    for path, node in jax.tree_util.tree_leaves_with_path(
        params, is_leaf=lambda n: _is_end(n) or isinstance(n, _BOXES)
    ):
        for leaf in jax.tree.leaves(node, is_leaf=_is_end):
            yield path_name(path), leaf


def _is_end(node: Any) -> bool:
    return isinstance(node, DBuffer | optax.MaskedNode)
