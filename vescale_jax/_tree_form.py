"""The form of a bare pytree for a pure function: every array is a parameter, except random keys."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax

from ._form import Leaf, Parts, by_path, is_key, path_name


@dataclass(frozen=True)
class TreeForm:
    """A pytree of arrays."""

    treedef: Any
    is_param: tuple[bool, ...]
    paths: tuple[str, ...]

    @classmethod
    def split(cls, tree: Any) -> tuple[Parts, "TreeForm"]:
        """Takes a pytree apart.

        Raises: see `by_path`.
        """
        flat, treedef = jax.tree_util.tree_flatten_with_path(tree)
        paths = tuple(path_name(path) for path, _ in flat)
        leaves = [leaf for _, leaf in flat]
        by_path(paths, leaves)
        is_param = tuple(not is_key(leaf) for leaf in leaves)
        params = {p: leaf for p, leaf, keep in zip(paths, leaves, is_param, strict=True) if keep}
        rest = tuple(leaf for leaf, keep in zip(leaves, is_param, strict=True) if not keep)
        return Parts(params, rest), cls(treedef, is_param, paths)

    @property
    def rest_paths(self) -> tuple[str, ...]:
        """Paths of the random keys."""
        return tuple(path for path, keep in zip(self.paths, self.is_param, strict=True) if not keep)

    def inside(self, params: Mapping[str, Leaf], rest: tuple[Leaf, ...]) -> Any:
        """The pytree."""
        others = iter(rest)
        leaves = [params[path] if keep else next(others) for path, keep in zip(self.paths, self.is_param, strict=True)]
        return jax.tree.unflatten(self.treedef, leaves)

    whole = inside

    def rest_after(self, model: Any, rest: tuple[Leaf, ...]) -> tuple[Leaf, ...]:
        """The same rest: a pure function changes nothing."""
        del model
        return rest
