"""The rest inside the step: what is no parameter, and has to be the same on every device afterwards.

Comes in: the rest as replicated leaves, and what the user's loss made of it. Goes out: what changed. Devices draw
different random numbers, so each folds its index into the keys; and they see different rows, so what they computed from
those is reduced: floats (batch statistics) are averaged, what was counted in integers is added up. What depends on
neither, such as the counters of `nnx.Rngs`, is equal everywhere and costs nothing.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ._form import is_key
from ._sharded import Structure

Changed = dict[int, jax.Array]
"""Leaves of the rest by index."""


def own_keys(rest: tuple[Any, ...], axis: str) -> tuple[Any, ...]:
    """Folds the device's index into every random key, so that devices draw different dropout masks."""
    return fold_keys(rest, lax.axis_index(axis))


def fold_keys(rest: tuple[Any, ...], index: Any) -> tuple[Any, ...]:
    """Folds an integer into every random key, so that equal rows draw different numbers under different integers."""

    def fold(key: jax.Array) -> jax.Array:
        flat = jax.vmap(jax.random.fold_in, (0, None))(key.reshape(-1), index)
        return flat.reshape(key.shape)

    return tuple(fold(leaf) if is_key(leaf) else leaf for leaf in rest)


def changed_leaves(structure: Structure, before: tuple[Any, ...], after: tuple[Any, ...]) -> Changed:
    """What of the rest a loss function may have changed, in the dtypes that it had.

    Raises: `ValueError` for a change of shape.
    """
    changed: Changed = {}
    for i, (old, new) in enumerate(zip(before, after, strict=True)):
        path = structure.form.rest_paths[i]
        if new is old:
            continue
        if jnp.shape(new) != jnp.shape(old):
            raise ValueError(
                f"loss_fn: {path}: got a new value of shape {jnp.shape(new)}; want the old shape {jnp.shape(old)}; "
                "return what grows as aux"
            )
        changed[i] = new if is_key(new) else jnp.asarray(new).astype(old.dtype)
    return changed


def really_changed(structure: Structure, before: tuple[Any, ...], changed: Changed) -> Changed:
    """What is left of the changed leaves when those are dropped that are the old ones, handed on by a loop.

    Raises: `ValueError` for a random key that was replaced: devices would disagree on it.
    """
    changed = {i: new for i, new in changed.items() if new is not before[i]}
    for i, new in changed.items():
        if is_key(new):
            raise ValueError(
                f"loss_fn: {structure.form.rest_paths[i]}: got a random key that the model replaced; want keys that "
                "stay and a counter that moves (nnx.Rngs does so); reseed between steps instead"
            )
    return changed


def to_sum(changed: Changed, before: tuple[Any, ...], varies: Mapping[int, bool]) -> Changed:
    """What devices have to add up: varying floats, and by how much varying integers grew."""
    return {
        i: new if jnp.issubdtype(new.dtype, jnp.floating) else new.astype(jnp.int32) - before[i].astype(jnp.int32)
        for i, new in changed.items()
        if varies[i]
    }


def settle(changed: Changed, before: tuple[Any, ...], summed: Changed, num_shards: int) -> Changed:
    """The changed leaves, equal on all devices: means of floats, integers with what all devices added to them."""
    settled = dict(changed)
    for i, total in summed.items():
        dtype = changed[i].dtype
        mean = jnp.issubdtype(dtype, jnp.floating)
        settled[i] = (total / num_shards if mean else before[i].astype(jnp.int32) + total).astype(dtype)
    return settled
