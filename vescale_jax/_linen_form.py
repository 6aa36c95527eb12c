"""The form of a linen module: the collection `params` of its variables holds the parameters.

The loss function is given the module bound to its variables, so `model(x)` and `model.method(x)` work as they do with
nnx. Random streams are given by name; each step folds a counter into them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from flax import linen

from vescale_planner import Faults

from ._form import Leaf, Parts, by_path, is_array, is_key, path_name


@dataclass(frozen=True)
class LinenForm:
    """A linen module with its variables, and random streams by name."""

    module: linen.Module
    params_treedef: Any
    params_paths: tuple[str, ...]
    rest_treedef: Any
    rest_paths: tuple[str, ...]

    @classmethod
    def split(cls, module: linen.Module, variables: Any, rngs: Mapping[str, Any]) -> tuple[Parts, "LinenForm"]:
        """Takes variables apart and unboxes them: boxes carry per-tensor shardings, which a flat buffer replaces."""
        if not isinstance(variables, Mapping) or "params" not in variables:
            keys = list(variables) if isinstance(variables, Mapping) else type(variables).__name__
            raise ValueError(
                f"fully_shard: params: got {keys}; want the variables of the linen module, a mapping with the "
                "collection 'params'; pass what module.init returns, or {'params': params}"
            )
        variables = dict(linen.meta.unbox(variables))
        flat, params_treedef = jax.tree_util.tree_flatten_with_path(variables.pop("params"))
        rngs = _typed(rngs)
        counter = {"count": np.zeros((), np.uint32)} if rngs else {}
        rest = {"collections": variables, "rngs": dict(rngs), **counter}
        rest_flat, rest_treedef = jax.tree_util.tree_flatten_with_path(rest)
        paths = tuple(path_name(path) for path, _ in flat)
        rest_paths = tuple(path_name(path).removeprefix("collections/") for path, _ in rest_flat)
        form = cls(module, params_treedef, paths, rest_treedef, rest_paths)
        return Parts(by_path(paths, [x for _, x in flat]), tuple(x for _, x in rest_flat)), form

    def inside(self, params: Mapping[str, Leaf], rest: tuple[Leaf, ...]) -> linen.Module:
        """The module bound to its variables."""
        state = jax.tree.unflatten(self.rest_treedef, rest)
        rngs = {name: jax.random.fold_in(key, state["count"]) for name, key in state["rngs"].items()}
        variables = {"params": self._params(params), **state["collections"]}
        return self.module.bind(variables, rngs=rngs or None, mutable=list(state["collections"]) or False)

    def rest_after(self, model: linen.Module, rest: tuple[Leaf, ...]) -> tuple[Leaf, ...]:
        """The collections as the module left them, and the counter one on; new collections are dropped."""
        state = jax.tree.unflatten(self.rest_treedef, rest)
        after = {name: model.variables.get(name, old) for name, old in state["collections"].items()}
        counter = {"count": state["count"] + np.uint32(1)} if "count" in state else {}
        leaves = jax.tree.leaves({"collections": after, "rngs": state["rngs"], **counter})
        return tuple(leaves) if len(leaves) == len(rest) else rest

    def whole(self, params: Mapping[str, Leaf], rest: tuple[Leaf, ...]) -> dict[str, Any]:
        """The variables, as `module.init` returns them (unboxed)."""
        return {"params": self._params(params), **jax.tree.unflatten(self.rest_treedef, rest)["collections"]}

    def _params(self, params: Mapping[str, Leaf]) -> Any:
        return jax.tree.unflatten(self.params_treedef, [params[path] for path in self.params_paths])


def _typed(rngs: Mapping[str, Any]) -> dict[str, Any]:
    """Random keys by stream, raw ones (uint32) wrapped: devices fold their index into typed keys only.

    Raises: `TypeError` that names everything which is no key.
    """
    if not isinstance(rngs, Mapping):
        raise TypeError(
            f"fully_shard: rngs: got {type(rngs).__name__}; want a mapping of streams to random keys; pass "
            "rngs={'dropout': jax.random.key(0)}"
        )
    faults = Faults("fully_shard")
    typed: dict[str, Any] = {}
    for name, key in rngs.items():
        if is_key(key):
            typed[name] = key
        elif is_array(key) and key.dtype == np.uint32 and key.ndim == 1:
            typed[name] = jax.random.wrap_key_data(key)
        else:
            faults.add(f"rngs/{name}", got=repr(key), want="a random key", change="pass jax.random.key(seed)")
    faults.raise_if_any(TypeError)
    return typed
