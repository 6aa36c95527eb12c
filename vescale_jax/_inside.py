"""Inside the step: the user's model, put together on one device from its shards.

Everything here runs while the step is traced, inside `shard_map`. Every unit is gathered by its own collective; XLA
places each gather before its first use.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from vescale_layouts import gather

from ._forms import is_key
from ._groups import each_group
from ._sharded import Buffers, Structure


def assemble(structure: Structure, params: Buffers, frozen: Buffers, rest: tuple[Any, ...]) -> Any:
    """Gathers all units and makes the user's model of them.

    Arguments:

    - `structure`: of the sharded model.
    - `params`, `frozen`: the local shards, each of shape `(S,)`.
    - `rest`: the leaves that are no parameters.

    Returns: what the loss function is given: an `nnx.Module`, a bound linen module, or a pytree.
    """
    tensors: dict[str, jax.Array] = {}
    for unit, group in each_group(structure.units):
        buffers = params if group.trainable else frozen
        gathered = gather(
            group.layout,
            buffers[unit.name][group.name].data,
            gather_dtype=group.gather_dtype,
            reduce_dtype=group.reduce_dtype,
            keep=not unit.reshard_after_forward,
        )
        tensors.update((group.prefix + name, tensor) for name, tensor in gathered.items())
    return structure.form.inside(tensors, rest)


def cast_floats(tree: Any, dtype: Any) -> Any:
    """Casts floating-point leaves and leaves the others alone; with None, all."""
    if dtype is None:
        return tree
    return jax.tree.map(lambda x: jnp.asarray(x, dtype) if jnp.issubdtype(jnp.result_type(x), jnp.floating) else x, tree)


def own_keys(rest: tuple[Any, ...], axis: str) -> tuple[Any, ...]:
    """Folds the device's index into every random key, so that devices draw different dropout masks."""
    index = lax.axis_index(axis)

    def fold(key: jax.Array) -> jax.Array:
        flat = jax.vmap(jax.random.fold_in, (0, None))(key.reshape(-1), index)
        return flat.reshape(key.shape)

    return tuple(fold(leaf) if is_key(leaf) else leaf for leaf in rest)


def changed_leaves(
    structure: Structure, before: tuple[Any, ...], after: tuple[Any, ...]
) -> tuple[dict[int, jax.Array], dict[int, jax.Array]]:
    """What of the rest a loss function changed, by index: floats, which devices have to agree on, and the others.

    Raises: `ValueError` for a random key that was replaced: devices would disagree on it.
    """
    floats: dict[int, jax.Array] = {}
    others: dict[int, jax.Array] = {}
    for i, (old, new) in enumerate(zip(before, after, strict=True)):
        if new is old:
            continue
        if is_key(new):
            raise ValueError(
                f"loss_fn: {structure.form.rest_paths[i]}: got a random key that the model replaced; want keys that "
                "stay and a counter that moves (nnx.Rngs does so); reseed between steps instead"
            )
        (floats if jnp.issubdtype(new.dtype, jnp.floating) else others)[i] = new
    return floats, others
