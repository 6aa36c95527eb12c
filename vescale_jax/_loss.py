"""Mean: a loss or metric that is averaged over all devices, whatever each of them counted.

Devices hold different numbers of real tokens. The mean of their means is then wrong; a loss that returns what it summed
and how many there were is right, and equals the mean on one device.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.flatten_util import ravel_pytree


class Mean(NamedTuple):
    """A mean as its two sums on this device.

    Arguments:

    - `total`: the sum, a scalar.
    - `count`: how many were summed, or the sum of their weights; a scalar.

    Example:

        def loss_fn(model, batch):
            losses = cross_entropy(model(batch["x"]), batch["y"])   # (rows, tokens)
            return vs.Mean((losses * batch["mask"]).sum(), batch["mask"].sum())
    """

    total: Any
    count: Any


def as_mean(loss: Any) -> Mean:
    """Reads what a loss function returned: a `Mean`, or a scalar that weighs the same on every device.

    Raises: `TypeError` if it is neither.
    """
    if isinstance(loss, Mean):
        total, count = jnp.asarray(loss.total), jnp.asarray(loss.count)
    elif hasattr(loss, "shape") or isinstance(loss, float):
        total, count = jnp.asarray(loss), jnp.asarray(1)
    else:
        raise TypeError(
            f"loss_fn: got {type(loss).__name__}; want a scalar or vs.Mean(total, count); return (loss, aux) only with "
            "has_aux=True"
        )
    if total.shape != () or count.shape != () or not jnp.issubdtype(total.dtype, jnp.floating):
        raise TypeError(
            f"loss_fn: got a loss of shape {total.shape} and dtype {total.dtype} with a count of shape {count.shape}; "
            "want scalars; sum or average over this device's rows"
        )
    wide = jnp.promote_types(total.dtype, jnp.float32)
    return Mean(total.astype(wide), count.astype(wide))


def is_mean(node: Any) -> bool:
    """Whether a node of a tree is a `Mean`."""
    return isinstance(node, Mean)


def ratio(mean: Mean) -> jax.Array:
    """Total / count, and 0 where nothing was counted."""
    return jnp.where(mean.count == 0, 0, mean.total / jnp.where(mean.count == 0, 1, mean.count))


def read_aux(aux: Any) -> Any:
    """Reads the metrics that a function returned, each `Mean` as `as_mean` does.

    Raises: `TypeError` for metrics that are neither floating-point nor integers.
    """
    dtypes: set[str] = set()
    types: set[str] = set()
    for leaf in jax.tree.leaves(aux):
        dtype = (
            leaf.dtype if hasattr(leaf, "dtype") else jnp.result_type(leaf) if isinstance(leaf, int | float) else None
        )
        if dtype is None:
            types.add(type(leaf).__name__)
        elif not any(jnp.issubdtype(dtype, kind) for kind in (jnp.floating, jnp.integer)):
            dtypes.add(str(dtype))
    if dtypes or types:
        kinds = [f"{what} {', '.join(sorted(names))}" for what, names in (("dtype", dtypes), ("type", types)) if names]
        raise TypeError(
            f"loss_fn: got aux of {' and '.join(kinds)}; want vs.Mean, floats (averaged over the devices) or integers "
            "(summed over them); convert it"
        )
    return jax.tree.map(lambda node: as_mean(node) if is_mean(node) else node, aux, is_leaf=is_mean)


def sum_over_devices(tree: Any, axis: str) -> Any:
    """Sums every leaf over the devices: one all-reduce for all floats, and one for integers if there are any.

    Arguments:

    - `tree`: scalars and small arrays.
    - `axis`: the mesh axis, inside `shard_map`.

    Returns: the sums; floats at least in float32, integers in 32 bits.
    """
    leaves, treedef = jax.tree.flatten(tree)
    leaves = [jnp.asarray(leaf) for leaf in leaves]
    is_float = [jnp.issubdtype(leaf.dtype, jnp.floating) for leaf in leaves]
    floats = [x.astype(jnp.promote_types(x.dtype, jnp.float32)) for x, f in zip(leaves, is_float, strict=True) if f]
    integers = [x.astype(jnp.promote_types(x.dtype, jnp.int32)) for x, f in zip(leaves, is_float, strict=True) if not f]
    sums = {True: iter(_sum_flat(floats, axis)), False: iter(_sum_flat(integers, axis))}
    return jax.tree.unflatten(treedef, [next(sums[f]) for f in is_float])


def _sum_flat(leaves: list[jax.Array], axis: str) -> list[jax.Array]:
    """One all-reduce for many small arrays."""
    if not leaves:
        return []
    flat, unravel = ravel_pytree(leaves)
    return unravel(lax.psum(flat, axis))


def finish_aux(summed: Any, num_shards: int) -> Any:
    """Makes metrics of their sums over devices: a `Mean` becomes its ratio, floats averages, integers stay sums."""

    def one(node: Any) -> Any:
        if is_mean(node):
            return ratio(node)
        return node if jnp.issubdtype(node.dtype, jnp.integer) else node / num_shards

    return jax.tree.map(one, summed, is_leaf=is_mean)
