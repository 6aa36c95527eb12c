"""restore: a state out of a checkpoint, on any mesh, under any plan.

Comes in: the folder of a checkpoint, and a state to fill, with or without values. Goes out: a state with that one's
structure and shardings, and the values of the checkpoint. Each process reads what its own devices hold, buffer by
buffer, so host memory holds one buffer's shards, and the pages of one tensor where storage orders differ.
"""

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding

from vescale_jax._form import is_key
from vescale_jax._sharded import check_alive

from ._dtypes import dtype_of
from ._entries import MODEL, Blocks, Entry, Parts, Tensors, Value, entries
from ._errors import DamagedError
from ._extra import decode
from ._fill import fill_blocks, fill_tensors
from ._folder import resolve
from ._match import check, is_reset
from ._processes import Event
from ._source import Source


@dataclass(frozen=True, slots=True)
class Restored:
    """What was restored.

    Attributes:

    - `state`: with values, where the given one had them or would have them.
    - `extra`: the user's tree: tuples have become lists, arrays NumPy arrays.
    - `step`: steps done.
    - `path`: the folder of the checkpoint.
    """

    state: Any
    extra: Any
    step: int
    path: Path


def restore(
    path: "str | os.PathLike[str]", state: Any, *, reset: Sequence[str] = (), timeout: float = 600.0
) -> Restored:
    """Restores a state from a checkpoint; every process has to call it.

    Arguments:

    - `path`: of a checkpoint, or of the folder of a run, whose newest complete one it is then.
    - `state`: a `TrainState` or a `Sharded` model, as it shall be: on any number of devices, with any units, blocks and
      storage orders. Best an abstract one, `train_state(fully_shard(..., abstract=True), tx)`, which takes no memory. A
      model alone takes the model out of a training checkpoint.
    - `reset`: patterns of what shall not be restored, such as `"opt_state/*"`; the state, which has to have values
      then, keeps its own there.
    - `timeout`: seconds to wait for other processes, at most.

    Returns: see `Restored`.

    Raises: `ValueError` that lists everything in which state and checkpoint differ, before anything is read;
    `DamagedError` if a file that is needed is missing, cut short or changed.
    """
    event = Event.begin(timeout)
    folder = Path(event.decide("path", lambda: str(resolve(path, "restore"))))
    return together(event, "restored", lambda: read_state(folder, state, reset))


def together(event: Event, topic: str, read: Callable[[], Restored]) -> Restored:
    """Reads in every process, and fails in every process if one of them fails."""
    error: Exception | None = None
    found: Restored | None = None
    try:
        found = read()
    except Exception as mistake:
        error = mistake
    failed = event.agree(topic, error)
    if error is not None and (event.count == 1 or not isinstance(error, DamagedError)):
        raise error
    if failed:
        # Alike in every process, so that all of them go back to an older checkpoint or none does.
        kind = DamagedError if all(text.startswith("DamagedError:") for text in failed.values()) else RuntimeError
        raise kind("checkpoint: " + "; ".join(f"process {k}: {text}" for k, text in failed.items()))
    assert found is not None
    return found


def read_state(folder: Path, state: Any, reset: Sequence[str]) -> Restored:
    """What `restore` does in one process, for the folder of a checkpoint."""
    if isinstance(reset, str):
        raise TypeError(f"restore: reset: got the string {reset!r}; want a sequence of patterns; pass ({reset!r},)")
    found = entries(state, "restore")
    source = Source.open(folder)
    model_only = all(_field_of(entry) == MODEL or _field_of(entry).startswith(f"{MODEL}/") for entry in found)
    check(found, source, reset, model_only=model_only)
    arrays = source.read_values()
    leaves: list[Any] = []
    for entry in found:
        # One buffer is on its way to the devices while the next one is read, and no more than that.
        jax.block_until_ready(leaves[-2:-1])
        leaves.append(_restored(entry, source, reset, arrays))
    return Restored(
        jax.tree.unflatten(jax.tree.structure(state), leaves),
        decode(source.manifest.extra, arrays),
        source.manifest.step,
        folder,
    )


def _field_of(entry: Entry) -> str:
    return entry.path if isinstance(entry, Value) else entry.field


def _vector(entry: Parts, source: Source, reset: Sequence[str], arrays: dict[str, np.ndarray]) -> Any:
    """The vector of what is kept for some parameters, in the order of the target's plan."""
    parts: list[np.ndarray] = []
    own = any(is_reset(f"{entry.field}/{path}", reset) for path, _ in entry.members)
    kept, end = np.asarray(_own(entry.array, entry.field)) if own else None, 0
    for path, shape in entry.members:
        size = math.prod(shape)
        if kept is not None and is_reset(f"{entry.field}/{path}", reset):
            parts.append(kept[end : end + size])
        else:
            item = source.values[f"{entry.field}/{path}"]
            parts.append(arrays[item.member].view(dtype_of(item.dtype)).reshape(-1))
        end += size
    return _placed(np.concatenate(parts) if parts else np.zeros(0, entry.array.dtype), entry.array, "")


def _restored(entry: Entry, source: Source, reset: Sequence[str], arrays: dict[str, np.ndarray]) -> Any:
    if isinstance(entry, Value):
        if is_reset(entry.path, reset):
            return _own(entry.array, entry.path)
        item = source.values[entry.path]
        return _placed(arrays[item.member].view(dtype_of(item.dtype)), entry.array, item.key)
    if isinstance(entry, Parts):
        return _vector(entry, source, reset, arrays)
    kept = [name for name in entry.names if is_reset(f"{entry.field}/{entry.prefix}{name}", reset)]
    if kept and len(kept) == len(entry.names):
        return _own(entry.array, entry.field)
    return _cut(entry, source, kept)


def _own(array: Any, path: str) -> Any:
    """What the state has itself."""
    if isinstance(array, jax.ShapeDtypeStruct):
        raise ValueError(
            f"restore: reset: {path}: got an abstract state; want one with values where nothing is restored; make it "
            "without abstract=True"
        )
    check_alive(array, "restore")
    return array


def _placed(value: np.ndarray, like: Any, key: str) -> Any:
    """A whole array, on the devices where the target's is."""
    sharding = getattr(like, "sharding", None)
    if not isinstance(sharding, Sharding):
        return type(like)(value) if isinstance(like, bool | int | float) else value
    if is_key(like):
        data = jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])
        return jax.random.wrap_key_data(data, impl=key)
    return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])


def _aligned(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Zeros that start at a multiple of 64 bytes, which devices that share the host's memory take without a copy."""
    size = math.prod(shape) * dtype.itemsize
    room = np.zeros(size + 64, np.uint8)
    start = -room.ctypes.data % 64
    return room[start : start + size].view(dtype).reshape(shape)


def _cut(entry: Tensors | Blocks, source: Source, kept: Sequence[str]) -> jax.Array:
    """A cut array, shard by shard; devices that hold the same shard are given the same memory."""
    layout, shape = entry.layout, tuple(entry.array.shape)
    sharding, dtype = layout.sharding, np.dtype(entry.array.dtype)
    dim = len(layout.stack)
    size = shape[dim] // layout.plan.num_shards
    own: dict[int, Any] = {}
    if kept:
        _own(entry.array, entry.field)
        own = {(s.index[dim].start or 0) // max(size, 1): s.data for s in entry.array.addressable_shards}
    devices: dict[int, list[Any]] = {}
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        assert index is not None
        devices.setdefault((index[dim].start or 0) // max(size, 1), []).append(device)
    local = (*shape[:dim], size, *shape[dim + 1 :])
    pieces: list[jax.Array] = []
    for shard, holders in devices.items():
        out = _aligned(local, dtype)
        if kept:
            np.copyto(out, own[shard])
        if out.size:
            flat = out.reshape(-1, entry.width)
            fill = fill_tensors if isinstance(entry, Tensors) else fill_blocks
            fill(source, entry, shard, flat, kept)  # pyright: ignore[reportArgumentType]
        pieces += [jax.device_put(out, device) for device in holders]
    return jax.make_array_from_single_device_arrays(shape, sharding, pieces)
