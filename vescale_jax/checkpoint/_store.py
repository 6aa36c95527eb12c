"""Store: one array that is cut over devices, as zarr version 3 on disk, through tensorstore.

Comes in: what each device holds, `(layers, width)`. Goes out: one file a device, and reads of any run of elements. A
file holds its elements in chunks with a CRC-32C each, so that a small part can be read, and a changed byte is noticed.

Shapes: L layers of a stack (1 if there is none), N shards, W elements on a shard: an array (L, N, W).
"""

import math
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ._errors import DamagedError
from ._files import reason_of

# Large enough that checksums and tables cost nothing, small enough that little is read in vain.
_CHUNK_BYTES = 2**18
_INDEX_ENTRY, _CRC = 16, 4
_SAMPLES = 16


@dataclass(frozen=True, slots=True)
class Shape:
    """The shape of a stored array.

    Attributes:

    - `layers`, `shards`, `width`: L, N and W.
    - `dtype`: on disk.
    """

    layers: int
    shards: int
    width: int
    dtype: np.dtype

    @property
    def chunks(self) -> int:
        """Chunks of one layer in a file."""
        return max(1, math.ceil(self.width * self.dtype.itemsize / _CHUNK_BYTES))

    @property
    def chunk(self) -> int:
        """Elements of a chunk; the last one of a layer may hold fewer, and is filled up."""
        return -(-self.width // self.chunks)

    @property
    def file_bytes(self) -> int:
        """Of the file of one shard."""
        chunks = self.layers * self.chunks
        return chunks * (self.chunk * self.dtype.itemsize + _CRC + _INDEX_ENTRY) + _CRC

    @property
    def empty(self) -> bool:
        """Whether there is nothing to store."""
        return not self.layers * self.shards * self.width


def file_of(shard: int) -> str:
    """The file of one shard, in the folder of the array."""
    return f"c.0.{shard}.0"


def _spec(folder: Path, shape: Shape) -> dict[str, Any]:
    checked = [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}]
    chunks: dict[str, Any] = {"chunk_shape": [1, 1, shape.chunk], "codecs": checked, "index_codecs": checked}
    return {
        "driver": "zarr3",
        "kvstore": {"driver": "file", "path": f"{folder.resolve()}/"},
        "metadata": {
            "shape": [shape.layers, shape.shards, shape.width],
            "data_type": shape.dtype.name,
            "fill_value": False if shape.dtype.kind == "b" else [0.0, 0.0] if shape.dtype.kind == "c" else 0,
            "chunk_grid": {
                "name": "regular",
                "configuration": {"chunk_shape": [shape.layers, 1, shape.chunks * shape.chunk]},
            },
            # One folder an array, however many devices there are.
            "chunk_key_encoding": {"name": "default", "configuration": {"separator": "."}},
            "codecs": [{"name": "sharding_indexed", "configuration": chunks}],
            "dimension_names": ["layer", "shard", "element"],
        },
        # What is missing would otherwise be read as zeros, and zeros would not be written.
        "fill_missing_data_reads": False,
        "store_data_equal_to_fill_value": True,
    }


def create(folder: Path, shape: Shape, *, first: bool) -> Any:
    """Starts to make an array for writing.

    Arguments:

    - `folder`: of the array; made by the process that is first.
    - `shape`: of the array.
    - `first`: whether this process writes the description. The others write files only, and need not wait for it.

    Returns: a future.
    """
    import tensorstore

    how = {"create": True} if first else {"open": True, "assume_metadata": True}
    return tensorstore.open({**_spec(folder, shape), **how})


def open_for_reading(folder: Path, shape: Shape) -> Any:
    """Opens an array.

    Raises: `DamagedError` if there is none, or one of another shape.
    """
    import tensorstore

    try:
        return tensorstore.open({**_spec(folder, shape), "open": True}).result()
    except ValueError as error:
        want = f"the description of an array {(shape.layers, shape.shards, shape.width)} of {shape.dtype}"
        raise DamagedError.file(folder / "zarr.json", reason_of(error), want) from error


def read_into(store: Any, layers: slice, shard: int, start: int, out: np.ndarray) -> Any:
    """Starts to read a run of elements.

    Arguments:

    - `store`: from `open_for_reading`.
    - `layers`: which.
    - `shard`, `start`: where the run starts.
    - `out`: (layers, n), in the dtype on disk; written to.

    Returns: a future; see `finish`.
    """
    import tensorstore

    return tensorstore.array(out).write(store[layers, shard, start : start + out.shape[1]])


def finish(reads: list[tuple[Path, Any]]) -> None:
    """Waits for reads.

    Arguments:

    - `reads`: the file and the future of each; emptied.

    Raises: `DamagedError` that names the file which is missing, cut short or changed.
    """
    first: Exception | None = None
    for path, read in reads:
        try:
            read.result()
        except ValueError as error:
            first = first or DamagedError.file(path, reason_of(error), "the bytes that were written")
    reads.clear()
    if first is not None:
        raise first


def fingerprint(path: Path, shape: Shape) -> str:
    """A hash of the checksums of some chunks of a file: differs between files of different contents.

    Arguments:

    - `path`: the file of one shard.
    - `shape`: of its array.

    Raises: `DamagedError` for a file of another size, or whose table of chunks makes no sense.
    """
    size = path.stat().st_size
    if size != shape.file_bytes:
        raise DamagedError.file(path, f"{size} bytes", f"{shape.file_bytes}")
    count = shape.layers * shape.chunks
    found = 0
    with path.open("rb") as file:
        file.seek(size - _CRC - count * _INDEX_ENTRY)
        table = file.read(count * _INDEX_ENTRY)
        for i in sorted({count * k // _SAMPLES for k in range(_SAMPLES)} | {count - 1}):
            start, length = struct.unpack_from("<QQ", table, i * _INDEX_ENTRY)
            if start + length > size:
                raise DamagedError.file(
                    path, "a table of chunks that points outside of it", "the bytes that were written"
                )
            file.seek(start + length - _CRC)
            found = zlib.crc32(file.read(_CRC), found)
    return f"{found:08x}"
