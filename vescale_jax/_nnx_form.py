"""The form of an `nnx.Module`: its `nnx.Param` variables are the parameters, by attribute path.

Tied parameters, one variable under two paths, are one parameter under the first.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.core
from flax import nnx

from ._form import Leaf, Parts, by_path, path_name


@dataclass(frozen=True)
class NNXForm:
    """An `nnx.Module`: its `nnx.Param` variables are the parameters."""

    graphdef: Any
    params_treedef: Any
    params_paths: tuple[str, ...]
    rest_treedef: Any
    rest_paths: tuple[str, ...]

    @classmethod
    def split(cls, model: nnx.Module) -> tuple[Parts, "NNXForm"]:
        """Takes a module apart; shared variables appear once, under their first path."""
        _mark_traced_arrays(model)
        graphdef, params, rest = nnx.split(model, nnx.Param, ...)
        params_paths, params_leaves, params_treedef = _flatten_state(params)
        rest_paths, rest_leaves, rest_treedef = _flatten_state(rest)
        form = cls(graphdef, params_treedef, params_paths, rest_treedef, rest_paths)
        return Parts(by_path(params_paths, params_leaves), tuple(rest_leaves)), form

    def inside(self, params: Mapping[str, Leaf], rest: tuple[Leaf, ...]) -> nnx.Module:
        """The module itself, merged."""
        leaves = [params[path] for path in self.params_paths]
        state = jax.tree.unflatten(self.params_treedef, leaves), jax.tree.unflatten(self.rest_treedef, rest)
        return nnx.merge(self.graphdef, *state)

    whole = inside

    def rest_after(self, model: nnx.Module, rest: tuple[Leaf, ...]) -> tuple[Leaf, ...]:
        """The variables that were there before, with their new values; sown ones are dropped."""
        paths, leaves, _ = _flatten_state(nnx.split(model, nnx.Param, ...)[2])
        found = dict(zip(paths, leaves, strict=True))
        return tuple(found.get(path, old) for path, old in zip(self.rest_paths, rest, strict=True))


def _flatten_state(state: Any) -> tuple[tuple[str, ...], list[Leaf], Any]:
    flat, treedef = jax.tree_util.tree_flatten_with_path(state)
    # A variable is a node whose one child is its value: not part of the path that the user wrote.
    paths = tuple(path_name(path).removesuffix("/value").removesuffix("/.value") for path, _ in flat)
    return paths, [leaf for _, leaf in flat], treedef


def _mark_traced_arrays(model: nnx.Module) -> None:
    """Declares arrays that are plain attributes as data when the module was built while tracing.

    nnx does so by itself for concrete arrays; a traced one it takes for static, and the tracer would leak.
    """
    for _, node in nnx.iter_graph(model):
        if isinstance(node, nnx.Pytree):
            for name, value in list(vars(node).items()):
                if isinstance(value, jax.core.Tracer):
                    setattr(node, name, nnx.data(value))
