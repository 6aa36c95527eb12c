"""Snapshot: what this process has to write of a state, and the manifest that describes the whole.

Comes in: a state, the user's extra. Goes out: host arrays, or arrays that still lie on devices, one for each shard that
this process is the first to hold. Nothing is communicated; every process makes the same manifest.
"""

import datetime as dt
import importlib.metadata
import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np

from vescale_jax._sharded import check_alive, is_abstract
from vescale_jax._train import TrainState
from vescale_planner import Faults, GroupPlan

from ._dtypes import key_kind, stored_dtype, without_keys
from ._entries import Blocks, Parts, Tensors, Value, entries
from ._extra import encode
from ._manifest import Manifest, Stored, StoredValue
from ._plans import block_record
from ._store import Shape

# Of a file that several units share.
_PACKED_BYTES = 2**25


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What one process has to write.

    Attributes:

    - `manifest`: of the whole checkpoint, equal in all processes.
    - `shapes`: on disk, of each of `manifest.stored`.
    - `shards`: index of the stored array, index of the shard, and its data, in the order of files and of the layers in
      them; the caller may empty it as it writes.
    - `values`: members of the file of whole arrays; empty except in process 0.
    """

    manifest: Manifest
    shapes: tuple[Shape, ...]
    shards: list[tuple[int, int, Any]]
    values: dict[str, np.ndarray]


@dataclass(slots=True)
class HostMemory:
    """Host arrays that are used again for each save, so that a copy is not slowed down by fresh memory."""

    _arrays: dict[int, np.ndarray] = field(default_factory=dict[int, np.ndarray])

    def copy(self, place: int, data: jax.Array) -> np.ndarray:
        """A copy of a shard that outlives it."""
        if next(iter(data.devices())).platform != "cpu":
            return np.asarray(data)  # Memory of its own already.
        view = np.asarray(data)
        kept = self._arrays.get(place)
        if kept is None or kept.shape != view.shape or kept.dtype != view.dtype:
            kept = self._arrays[place] = np.empty(view.shape, view.dtype)
        np.copyto(kept, view)
        return kept


def snapshot(state: Any, extra: Any, what: str, memory: HostMemory | None) -> Snapshot:
    """Looks at a state.

    Arguments:

    - `state`: a `TrainState` or a `Sharded` model, with values.
    - `extra`: the user's tree; see `_extra.py`.
    - `what`: the public name of the caller, for messages.
    - `memory`: takes copies of all shards, for a state that changes while it is written. None: no copies.

    Raises: `TypeError` or `ValueError` for what cannot be saved, `RuntimeError` for a state that was donated.
    """
    found = entries(state, what)
    if is_abstract(state):
        raise ValueError(f"{what}: got an abstract state; want one with values; restore or initialise it first")
    check_alive(state, what)
    extra, extra_arrays = encode(extra, what)
    plans: dict[GroupPlan, int] = {}
    cut = [entry for entry in found if isinstance(entry, Tensors | Blocks)]
    whole = [value for entry in found if isinstance(entry, Value | Parts) for value in _values(entry)]
    _check_whole(whole, what)
    stored = _packed([_stored(entry, plans) for entry in cut])
    values = [_value(entry, i) for i, entry in enumerate(whole)]
    manifest = Manifest(
        int(_step(state)),
        _made(state),
        tuple(plans),
        tuple(stored),
        tuple(values),
        extra,
    )
    shapes = tuple(
        Shape(item.layers, entry.layout.plan.num_shards, item.width, stored_dtype(item.dtype))
        for item, entry in zip(stored, cut, strict=True)
    )
    shards = [
        (i, k, data)
        for i, (entry, shape) in enumerate(zip(cut, shapes, strict=True))
        for k, data in _shards(entry, shape)
    ]
    # What shares a file stands together, in the order of its layers.
    shards.sort(key=lambda shard: (stored[shard[0]].array, shard[1], stored[shard[0]].first))
    if memory is not None:
        for _, _, data in shards:
            data.copy_to_host_async()
        shards = [(i, k, memory.copy(place, data)) for place, (i, k, data) in enumerate(shards)]
    members: dict[str, np.ndarray] = {}
    if jax.process_index() == 0:
        raw = jax.device_get([without_keys(entry.array) for entry in whole])
        # A copy: the state may be donated before it is written.
        members = {item.member: np.array(x) for item, x in zip(values, raw, strict=True)} | extra_arrays
    return Snapshot(manifest, shapes, shards, members)


def _values(entry: Value | Parts) -> Iterator[Value]:
    """Whole arrays; what is kept for parameters in one vector is taken apart, since its order is that of a plan."""
    if isinstance(entry, Value):
        yield entry
        return
    vector, end = np.asarray(entry.array), 0
    for path, shape in entry.members:
        size = math.prod(shape)
        yield Value(f"{entry.field}/{path}", vector[end : end + size].reshape(shape))
        end += size


def _stored(entry: Tensors | Blocks, plans: dict[GroupPlan, int]) -> Stored:
    layout = entry.layout
    plan = plans.setdefault(layout.plan, len(plans))
    about = (entry.field, entry.prefix, plan, layout.stack, np.dtype(entry.array.dtype).name)
    where = ("", math.prod(layout.stack), 0, entry.width)
    if isinstance(entry, Tensors):
        names = None if len(entry.names) == len(layout.plan.slots) else entry.names
        return Stored("tensors", *about, *where, names=names)
    blocks = tuple((name, tuple(block_record(block))) for name, block in entry.view.blocks)
    return Stored("blocks", *about, *where, blocks, entry.number, entry.each)


def _packed(arrays: list[Stored]) -> list[Stored]:
    """Gives each array its place on disk: equal ones of several units are layers of one, since small files are slow."""
    packs: dict[Any, list[list[int]]] = {}
    for i, item in enumerate(arrays):
        same = replace(item, prefix="")
        runs = packs.setdefault(same, [[]])
        held = (sum(arrays[j].layers for j in runs[-1]) + item.layers) * item.width * np.dtype(item.dtype).itemsize
        if runs[-1] and held > _PACKED_BYTES:
            runs.append([])
        runs[-1].append(i)
    found = list(arrays)
    members = sorted(run for runs in packs.values() for run in runs)
    for number, run in enumerate(members):
        first, total = 0, sum(arrays[i].layers for i in run)
        for i in run:
            found[i] = replace(arrays[i], array=f"arrays/{number:04d}", layers=total, first=first)
            first += arrays[i].layers
    return found


def _value(entry: Value, number: int) -> StoredValue:
    raw = without_keys(entry.array)
    raw = raw if hasattr(raw, "dtype") else np.asarray(raw)
    return StoredValue(entry.path, f"value{number}", np.dtype(raw.dtype).name, tuple(raw.shape), key_kind(entry.array))


def _check_whole(values: list[Value], what: str) -> None:
    faults = Faults(what)
    for entry in values:
        array = entry.array
        if isinstance(array, jax.Array) and not (array.is_fully_addressable or array.is_fully_replicated):
            want = "a buffer, or an array that every device has whole"
            change = "keep it in a DBuffer, or replicate it"
            faults.add(entry.path, got="an array that is cut over processes", want=want, change=change)
    faults.raise_if_any()


def _shards(entry: Tensors | Blocks, shape: Shape) -> Iterator[tuple[int, Any]]:
    """The shards of a cut array that this process writes: of replicas the first."""
    if shape.empty:
        return
    dim = len(entry.layout.stack)
    size = entry.array.shape[dim] // shape.shards
    for shard in entry.array.addressable_shards:
        if shard.replica_id == 0:
            yield (shard.index[dim].start or 0) // size, shard.data


def _step(state: Any) -> Any:
    return state.step if isinstance(state, TrainState) else 0


def _made(state: Any) -> dict[str, Any]:
    """Facts about the run, for people."""
    structure = (state.model if isinstance(state, TrainState) else state).structure
    try:
        version = importlib.metadata.version("vescale_jax")
    except importlib.metadata.PackageNotFoundError:
        version = "unknown"
    return {
        "vescale_jax": version,
        "jax": jax.__version__,
        "time": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        "kind": type(state).__name__,
        "mesh": {str(name): size for name, size in structure.mesh.shape.items()},
        "axis": structure.axis,
        "processes": jax.process_count(),
    }
