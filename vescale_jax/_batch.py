"""Batches: which rows each device gets.

Comes in: a pytree of arrays with the batch on dim 0. Goes out: the same arrays, cut over the shard axis. Scalars (a
temperature, a random key) go to every device whole.
"""

from typing import Any

import jax
import jax.core
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from vescale_planner import Faults

from ._form import path_name


def batch_specs(batch: Any, axis: str, replicate: bool) -> Any:
    """The partition spec of every leaf.

    Arguments:

    - `batch`: arrays, dim 0 the rows.
    - `axis`: over which rows are cut.
    - `replicate`: whether every device gets all rows instead.
    """
    whole = PartitionSpec()
    return jax.tree.map(lambda leaf: whole if replicate or not _shape(leaf) else PartitionSpec(axis), batch)


def place(batch: Any, mesh: Mesh, axis: str, *, replicate: bool, what: str) -> Any:
    """Puts a batch on the devices, each row once.

    Arguments:

    - `batch`: arrays, dim 0 the rows; NumPy arrays go straight to the devices that need them.
    - `mesh`, `axis`: over which rows are cut.
    - `replicate`: whether every device gets all rows instead.
    - `what`: the public name of the caller, for messages.

    Raises: `TypeError` that names every leaf which is no array, `ValueError` every leaf whose rows do not divide.
    """
    flat, treedef = jax.tree_util.tree_flatten_with_path(batch)
    types, rows = Faults(what), Faults(what)
    n = mesh.shape[axis]
    for path, leaf in flat:
        name = f"batch/{path_name(path)}".rstrip("/")
        if not hasattr(leaf, "shape") and not isinstance(leaf, bool | int | float | complex):
            got = f"a leaf of type {type(leaf).__name__}"
            types.add(name, got=got, want="an array", change="convert it or leave it out")
        elif not replicate and (shape := _shape(leaf)) and shape[0] % n:
            rows.add(
                name,
                got=f"{shape[0]} rows, shape {shape}",
                want=f"a multiple of {n}, the devices of axis {axis!r}",
                change="fill up with rows that count nothing (vs.Mean), or pass replicate_batch=True",
            )
    types.raise_if_any(TypeError)
    counts = {_shape(leaf)[0] for _, leaf in flat if _shape(leaf)}
    if not replicate and not rows and (len(counts) > 1 or 0 in counts):
        got = "no rows" if counts == {0} else f"leaves of {', '.join(map(str, sorted(counts)))} rows"
        change = "cut them alike; scalars are given to every device whole, other arrays a loss can close over"
        rows.add("batch", got=got, want="the same rows, at least one, in all leaves", change=change)
    rows.raise_if_any()
    specs = jax.tree.leaves(batch_specs(batch, axis, replicate), is_leaf=lambda s: isinstance(s, PartitionSpec))
    placed = [_put(leaf, NamedSharding(mesh, spec)) for (_, leaf), spec in zip(flat, specs, strict=True)]
    return jax.tree.unflatten(treedef, placed)


def _shape(leaf: Any) -> tuple[int, ...]:
    return tuple(leaf.shape) if hasattr(leaf, "shape") else ()


def _put(leaf: Any, sharding: NamedSharding) -> Any:
    if isinstance(leaf, jax.core.Tracer):
        # Under a mesh of explicit axes a traced array has to be laid out as the shard_map wants it.
        explicit = AxisType.Explicit in sharding.mesh.axis_types
        return jax.sharding.reshard(leaf, sharding) if explicit else leaf
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
    return jax.device_put(leaf, sharding)
