"""Files: small ones, written whole, hashed and forced to the disk; and what a checkpoint's folder has to hold.

Comes in: text, arrays, paths. Goes out: files, or errors that name them.
"""

import contextlib
import hashlib
import json
import os
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ._dtypes import as_stored
from ._errors import DamagedError

MANIFEST, FILES, VALUES, COMPLETE = "manifest.json", "files.json", "arrays.npz", "COMPLETE"


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Says of an error, tensorstore's included, which file could not be written, and what may help.

    Raises: `OSError`.
    """
    try:
        yield
    except (OSError, ValueError, RuntimeError) as error:
        raise OSError(
            f"checkpoint: {path}: got {reason_of(error)!r}; want room and permission to write there, and no other "
            "job that uses the folder; free space or choose another folder; complete checkpoints are untouched"
        ) from error


def reason_of(error: Exception) -> str:
    """What went wrong, without tensorstore's trail of specifications and source lines."""
    text = getattr(error, "strerror", None) or str(error)
    return text.split(" [tensorstore_spec", 1)[0].split(" [source locations", 1)[0]


def write_text(path: Path, text: str) -> str:
    """Writes a file and forces it to the disk; returns its SHA-256."""
    data = text.encode()
    with writing(path), path.open("wb") as file:
        file.write(data)
        _sync(file)
    return hashlib.sha256(data).hexdigest()


def write_arrays(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Writes arrays, of any dtype, as one uncompressed `.npz`."""
    with writing(path), path.open("wb") as file:
        np.savez(file, allow_pickle=False, **{name: as_stored(array) for name, array in arrays.items()})
        _sync(file)


def read_arrays(path: Path) -> dict[str, np.ndarray]:
    """Reads what `write_arrays` wrote, in the dtypes on disk.

    Raises: `DamagedError`; every member has a checksum.
    """
    try:
        with np.load(path, allow_pickle=False) as file:
            return dict(file)
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise DamagedError.file(
            path, f"a file that cannot be read ({error})", "the arrays that were written"
        ) from error


def hash_of(path: Path) -> str:
    """SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync_folder(path: Path) -> None:
    """Forces the names in a folder to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_marked(folder: Path) -> tuple[str, dict[str, Any]]:
    """The manifest's text and the table of files, both checked against the marker of completeness.

    Raises: `DamagedError` if one of the three is missing or has changed.
    """
    try:
        marker = json.loads((folder / COMPLETE).read_text())
    except FileNotFoundError:
        raise DamagedError.file(folder / COMPLETE, "no such file", "the marker that is written last") from None
    except (OSError, ValueError) as error:
        raise DamagedError.file(folder / COMPLETE, f"a file that cannot be read ({error})", "the marker") from error
    found: list[str] = []
    for name in (MANIFEST, FILES):
        path = folder / name
        try:
            data = path.read_bytes()
        except OSError as error:
            raise DamagedError.file(path, error.strerror or str(error), "the file that was written") from None
        if not isinstance(marker, dict) or hashlib.sha256(data).hexdigest() != marker.get(name):
            raise DamagedError.file(path, "other text than was written", f"the text whose hash is in {COMPLETE}")
        found.append(data.decode())
    return found[0], json.loads(found[1])


def _sync(file: Any) -> None:
    file.flush()
    os.fsync(file.fileno())
