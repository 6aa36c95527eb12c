"""Form: what the library needs to know of a model, whether nnx, linen or a bare pytree.

A model is taken apart into `Parts`, the parameters by path and the rest as a flat tuple; its `Form` is the static
recipe that puts both together again, inside the loss as well as at the end. Only parameters are sharded. The rest
(batch statistics, random keys, counters, tables) stays whole on every device.

Three files hold one form each: `_nnx_form`, `_linen_form` and `_tree_form`. Nothing else knows which one it has.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np

from vescale_planner import Faults

Leaf = Any
"""An array, or a `jax.ShapeDtypeStruct` where only shapes are known."""


@dataclass(frozen=True, slots=True)
class Parts:
    """A model taken apart.

    Attributes:

    - `params`: parameters by path, such as `"layers/0/attention/query/kernel"`.
    - `rest`: leaves of everything else, in the form's order.
    """

    params: dict[str, Leaf]
    rest: tuple[Leaf, ...]


@runtime_checkable
class Form(Protocol):
    """How a model is put together from its parts."""

    @property
    def rest_paths(self) -> tuple[str, ...]:
        """Paths of the leaves of the rest."""
        ...

    def inside(self, params: Mapping[str, Leaf], rest: tuple[Leaf, ...]) -> Any:
        """What the user's loss function is given: called while the step is traced."""
        ...

    def rest_after(self, model: Any, rest: tuple[Leaf, ...]) -> tuple[Leaf, ...]:
        """The rest after the loss function has used what `inside` returned."""
        ...

    def whole(self, params: Mapping[str, Leaf], rest: tuple[Leaf, ...]) -> Any:
        """The model as the user gave it, with whole parameters."""
        ...


def path_name(path: tuple[Any, ...]) -> str:
    """A key path as text: `layers/0/kernel`; a bare array, which has none, is called `array`."""
    return jax.tree_util.keystr(path, simple=True, separator="/") or "array"


def by_path(paths: Sequence[str], leaves: Sequence[Leaf]) -> dict[str, Leaf]:
    """Parameters by path.

    Raises: `ValueError` that names every path which two parameters share, `TypeError` every leaf that is no array.
    """
    faults, types = Faults("fully_shard"), Faults("fully_shard")
    for path, times in Counter(paths).items():
        if times > 1:
            change = "rename one of them: '/' parts the names in a path"
            faults.add(path, got=f"{times} parameters of this path", want="one", change=change)
    for path, leaf in zip(paths, leaves, strict=True):
        if not is_array(leaf):
            got = f"a leaf of type {type(leaf).__name__}"
            change = "wrap it in jnp.asarray, or keep it out of the tree"
            types.add(path, got=got, want="an array", change=change)
    types.raise_if_any(TypeError)
    faults.raise_if_any()
    return dict(zip(paths, leaves, strict=True))


def is_array(leaf: Any) -> bool:
    """Whether a leaf is an array with or without values."""
    return isinstance(leaf, jax.Array | np.ndarray | np.generic | jax.ShapeDtypeStruct)


def is_key(leaf: Any) -> bool:
    """Whether a leaf is an array of typed random keys."""
    return is_array(leaf) and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
