"""Writing: a snapshot into a folder, this process's part of it, and the marker that completes it.

Comes in: a snapshot. Goes out: files, forced to the disk. All processes write into one folder that is not yet named as
a checkpoint; when all have, process 0 writes the manifest, the table of files and the marker, and gives the folder its
name. So a checkpoint is there whole or not at all.
"""

import json
import shutil
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from ._dtypes import as_stored
from ._files import COMPLETE, FILES, MANIFEST, VALUES, hash_of, sync_folder, write_arrays, write_text, writing
from ._processes import Event
from ._snapshot import Snapshot
from ._store import create, file_of, fingerprint

# Bytes on their way to the disk at any time.
_IN_FLIGHT = 2**27


def write(snapshot: Snapshot, folder: Path, event: Event, name: Callable[[], None]) -> None:
    """Writes a checkpoint; every process has to call it. If that fails, process 0 removes what was written.

    Arguments:

    - `snapshot`: this process's.
    - `folder`: under its unfinished name; exists.
    - `event`: to tell the other processes.
    - `name`: gives the folder its final name; called in process 0 when everything is on the disk.

    Raises: `OSError` if this process could not write, `RuntimeError` if another one could not, `TimeoutError` if one
    does not answer.
    """
    try:
        _write_and_name(snapshot, folder, event, name)
    except Exception:
        # Where a disk is full, the next save needs this room.
        if event.index == 0:
            shutil.rmtree(folder, ignore_errors=True)
        raise


def _write_and_name(snapshot: Snapshot, folder: Path, event: Event, name: Callable[[], None]) -> None:
    error: Exception | None = None
    try:
        files = _write_part(snapshot, folder, event.index)
        write_text(folder / f"part-{event.index}.json", json.dumps(files))
    except Exception as mistake:
        error = mistake
    failed = event.agree("written", error)
    if error is not None:
        raise error
    if failed:
        raise RuntimeError("checkpoint: " + "; ".join(f"process {k}: {text}" for k, text in failed.items()))

    def finish() -> None:
        files: dict[str, Any] = {}
        for k in range(event.count):
            part = folder / f"part-{k}.json"
            files |= json.loads(part.read_text())
            part.unlink()
        table = json.dumps(dict(sorted(files.items())), indent=0) + "\n"
        hashes = {MANIFEST: write_text(folder / MANIFEST, snapshot.manifest.text())}
        hashes[FILES] = write_text(folder / FILES, table)
        sync_folder(folder)
        write_text(folder / COMPLETE, json.dumps(hashes, indent=1))
        sync_folder(folder)
        name()

    event.decide("finished", finish)


def _write_part(snapshot: Snapshot, folder: Path, process: int) -> dict[str, list[Any]]:
    """Writes what this process holds; returns the size and hash of each file, by path within the folder."""
    first = process == 0
    files: dict[str, list[Any]] = {}
    if first:
        write_arrays(folder / VALUES, snapshot.values)
        files[VALUES] = [(folder / VALUES).stat().st_size, hash_of(folder / VALUES)]
    stored, shapes = snapshot.manifest.stored, snapshot.shapes
    mine = {stored[i].array for i, _, _ in snapshot.shards}
    arrays = {item.array: shape for item, shape in zip(stored, shapes, strict=True) if not shape.empty}
    # Started all at once, and finished then.
    stores = {
        name: create(folder / name, shape, first=first) for name, shape in arrays.items() if first or name in mine
    }
    for name, store in stores.items():
        with writing(folder / name):
            stores[name] = store.result()
    pending: deque[tuple[str, int, np.ndarray, Any]] = deque()
    room = _IN_FLIGHT
    spare: list[np.ndarray] = []

    def settle() -> int:
        name, k, data, written = pending.popleft()
        path = folder / name / file_of(k)
        with writing(path):
            written.result()
        files[f"{name}/{path.name}"] = [path.stat().st_size, fingerprint(path, arrays[name])]
        if data.base is None and data.flags.owndata:
            spare.append(data)
        return data.nbytes

    shards = snapshot.shards
    while shards:
        name, k = stored[shards[0][0]].array, shards[0][1]
        parts: list[np.ndarray] = []
        while shards and (stored[shards[0][0]].array, shards[0][1]) == (name, k):
            data = np.asarray(shards.pop(0)[2])
            parts.append(as_stored(data).reshape(-1, arrays[name].width))
        while pending and room < sum(part.nbytes for part in parts):
            room += settle()
        part = parts[0] if len(parts) == 1 else _joined(parts, spare)
        written = stores[name][:, k, :].write(part, can_reference_source_data_indefinitely=True)
        pending.append((name, k, part, written))
        room -= part.nbytes
    while pending:
        settle()
    for name in stores:
        sync_folder(folder / name)
    if first:
        if stores:
            sync_folder(folder / "arrays")
        for name in stores:
            path = folder / name / "zarr.json"
            files[f"{name}/zarr.json"] = [path.stat().st_size, hash_of(path)]
    return files


def _joined(parts: list[np.ndarray], spare: list[np.ndarray]) -> np.ndarray:
    """Layers one behind the other, in memory that was used before if there is some: fresh memory is slow."""
    shape = (sum(len(part) for part in parts), *parts[0].shape[1:])
    fitting = (i for i, old in enumerate(spare) if (old.shape, old.dtype) == (shape, parts[0].dtype))
    at = next(fitting, None)
    return np.concatenate(parts, out=np.empty(shape, parts[0].dtype) if at is None else spare.pop(at))
