"""ArrayLeaves: a pullback as its arrays, and the arrays as a pullback again.

Comes in: what `jax.vjp` returned. Goes out: its residuals, to be sorted, kept, freed or computed again.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax


@dataclass(frozen=True)
class ArrayLeaves:
    """Which leaves of a pullback are arrays; others are static marks, such as of arguments it does not need."""

    treedef: Any
    marks: tuple[Any, ...]
    is_array: tuple[bool, ...]

    @classmethod
    def of(cls, pull: Any) -> "ArrayLeaves":
        """Looks at one pullback; those of later traces of the same function are alike."""
        leaves, treedef = jax.tree.flatten(pull)
        is_array = tuple(isinstance(leaf, jax.Array) for leaf in leaves)
        marks = tuple(None if array else leaf for leaf, array in zip(leaves, is_array, strict=True))
        return cls(treedef, marks, is_array)

    def arrays(self, pull: Any) -> list[jax.Array]:
        """The arrays among the leaves of a pullback."""
        return [leaf for leaf, array in zip(jax.tree.leaves(pull), self.is_array, strict=True) if array]

    def restore(self, arrays: Sequence[Any]) -> Any:
        """The pullback made of such arrays."""
        values = iter(arrays)
        leaves = [next(values) if array else mark for mark, array in zip(self.marks, self.is_array, strict=True)]
        return jax.tree.unflatten(self.treedef, leaves)
