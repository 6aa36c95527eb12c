"""Batches: which rows each device gets.

Comes in: a pytree of arrays with the batch on dim 0. Goes out: the same arrays, cut over the shard axis. Scalars (a
temperature, a random key) go to every device whole.

On one process NumPy arrays are the whole batch. On several, each process hands in the rows of its own devices alone,
and no row travels between processes; global `jax.Array`s are whole on any number of processes.
"""

import functools
from typing import Any

import jax
import jax.core
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from vescale_planner import Faults

from ._form import is_key, path_name
from ._sharded import Sharded, check_sharded

_NO_NUMBERS = "OSUMm"
"""NumPy's kinds of objects, texts and dates."""


def own_rows(model: Sharded, rows: int) -> np.ndarray:
    """Which rows of a global batch this process hands in.

    A loader reads these rows of the batch and no others, and gives them to the step in this order. On one process they
    are all rows. Processes whose devices hold the same shards, as on other axes of the mesh, have the same rows.

    Arguments:

    - `model`: what `fully_shard` returned.
    - `rows`: of the global batch, a multiple of the devices of the shard axis.

    Returns: row numbers in rising order, int64 `(rows of this process,)`.

    Raises: `ValueError` if the rows do not divide.
    """
    structure = check_sharded(model, "own_rows")
    if rows % structure.num_shards:
        raise ValueError(
            f"own_rows: rows: got {rows}; want a multiple of {structure.num_shards}, the devices of axis "
            f"{structure.axis!r}; fill up with rows that count nothing (vs.Mean)"
        )
    each = rows // structure.num_shards
    positions = _own_positions(structure.mesh, structure.axis)
    return (np.array(positions, np.int64)[:, None] * each + np.arange(each)).ravel()


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

    Raises: `TypeError` that names every leaf which is no array of numbers, `ValueError` every leaf whose rows do not
    divide.
    """
    flat, treedef = jax.tree_util.tree_flatten_with_path(batch)
    types, rows = Faults(what), Faults(what)
    alone = not mesh.is_multi_process
    own = len(_own_positions(mesh, axis))
    counts: dict[int, int] = {}
    for path, leaf in flat:
        name = f"batch/{path_name(path)}".rstrip("/")
        n, where = (mesh.shape[axis], "devices") if alone or _is_global(leaf) else (own, "devices of this process")
        if not hasattr(leaf, "shape") and not isinstance(leaf, bool | int | float | complex):
            got = f"a leaf of type {type(leaf).__name__}"
            types.add(name, got=got, want="an array", change="convert it or leave it out")
        elif isinstance(leaf, np.ndarray | np.generic) and leaf.dtype.kind in _NO_NUMBERS:
            got = f"an array of dtype {leaf.dtype}"
            types.add(name, got=got, want="one of numbers", change="convert it or leave it out")
        elif not replicate and (shape := _shape(leaf)):
            # Leaves of this process and global ones are compared by the rows of all processes.
            counts[shape[0] * mesh.shape[axis] // max(n, 1)] = shape[0]
            if shape[0] % max(n, 1):
                rows.add(
                    name,
                    got=f"{shape[0]} rows, shape {shape}",
                    want=f"a multiple of {n}, the {where} of axis {axis!r}",
                    change="fill up with rows that count nothing (vs.Mean), or pass replicate_batch=True",
                )
    types.raise_if_any(TypeError)
    if not replicate and not rows and (len(counts) > 1 or 0 in counts):
        got = "no rows" if set(counts) == {0} else f"leaves of {', '.join(map(str, sorted(counts.values())))} rows"
        change = "cut them alike; scalars are given to every device whole, other arrays a loss can close over"
        rows.add("batch", got=got, want="the same rows, at least one, in all leaves", change=change)
    rows.raise_if_any()
    specs = jax.tree.leaves(batch_specs(batch, axis, replicate), is_leaf=lambda s: isinstance(s, PartitionSpec))
    placed = [_put(leaf, NamedSharding(mesh, spec)) for (_, leaf), spec in zip(flat, specs, strict=True)]
    return jax.tree.unflatten(treedef, placed)


def _shape(leaf: Any) -> tuple[int, ...]:
    return tuple(leaf.shape) if hasattr(leaf, "shape") else ()


@functools.lru_cache
def _own_positions(mesh: Mesh, axis: str) -> tuple[int, ...]:
    """Where on the axis this process has devices, in rising order."""
    along = np.moveaxis(mesh.devices, mesh.axis_names.index(axis), 0).reshape(mesh.shape[axis], -1)
    mine = jax.process_index()
    return tuple(k for k, devices in enumerate(along) if any(device.process_index == mine for device in devices))


def _is_global(leaf: Any) -> bool:
    """Whether a leaf stands for the rows of all processes."""
    if isinstance(leaf, jax.core.Tracer | jax.ShapeDtypeStruct):
        return True
    return isinstance(leaf, jax.Array) and not leaf.is_fully_addressable


def _put(leaf: Any, sharding: NamedSharding) -> Any:
    if isinstance(leaf, jax.core.Tracer):
        # Under a mesh of explicit axes a traced array has to be laid out as the shard_map wants it.
        explicit = AxisType.Explicit in sharding.mesh.axis_types
        return jax.sharding.reshard(leaf, sharding) if explicit else leaf
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
    if not sharding.mesh.is_multi_process or _is_global(leaf):
        return jax.device_put(leaf, sharding)
    if hasattr(leaf, "dtype") and is_key(leaf):
        keys = _own(np.asarray(jax.random.key_data(leaf)), sharding)
        return jax.random.wrap_key_data(keys, impl=jax.random.key_impl(leaf))
    return _own(np.asarray(leaf), sharding)


def _own(rows: np.ndarray, sharding: NamedSharding) -> jax.Array:
    """A global array of which this process has only its own rows, or the whole if it is not cut.

    `jax.device_put` would want all rows, and compare those of all processes at every step.
    """
    if not sharding.spec:
        return jax.make_array_from_callback(rows.shape, sharding, lambda _: rows)
    (axis,) = sharding.spec
    own = _own_positions(sharding.mesh, axis)
    each = rows.shape[0] // len(own)
    first = {k * each: i * each for i, k in enumerate(own)}

    def piece(index: Any) -> np.ndarray:
        start = first[index[0].start or 0]
        return rows[start : start + each]

    shape = (each * sharding.mesh.shape[axis], *rows.shape[1:])
    return jax.make_array_from_callback(shape, sharding, piece)
