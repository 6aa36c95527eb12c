"""contents: what a checkpoint holds, and whether its files are whole.

Comes in: the folder of a checkpoint. Goes out: `Contents`, numbers by field and tensor; printed, it is a table.
"""

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from ._files import VALUES
from ._folder import resolve
from ._source import Source
from ._store import file_of, finish

# Elements that are read at a time by a check of all files.
_AT_ONCE = 2**24


@dataclass(frozen=True, slots=True)
class TensorRow:
    """One logical tensor, or what one tensor's blocks have.

    Attributes:

    - `field`, `path`: what it is, and of which parameter: `"opt_state/0/mu"`, `"layers/0/up/kernel"`.
    - `shape`, `dtype`: of the tensor; for blocks `(layers..., matrices, down, across, ...)`.
    - `block`: of the plan, or whose scales and the like these are.
    - `storage`: `"row_major"`, `"transposed"` or `"tiled"`; `"blocks"` for what belongs to blocks.
    - `array`: the folder of the zarr array.
    - `offset`: first element in the buffer of all shards, of a layer; -1 for what belongs to blocks.
    - `shard_size`: elements on one shard, of a layer.
    """

    field: str
    path: str
    shape: tuple[int, ...]
    dtype: str
    block: str
    storage: str
    array: str
    offset: int
    shard_size: int

    @property
    def elements(self) -> int:
        """Elements of the tensor."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Contents:
    """What a checkpoint holds; `print` shows a table by field.

    Attributes:

    - `path`: its folder.
    - `step`: steps done.
    - `made`: facts about the run that wrote it: versions, time, mesh, number of processes.
    - `tensors`: all that is cut over devices.
    - `values`: path, shape and dtype of what every device has whole.
    - `extra`: the user's own tree, as JSON.
    - `files`: files of arrays.
    - `bytes`: of all files.
    """

    path: Path
    step: int
    made: dict[str, Any]
    tensors: tuple[TensorRow, ...]
    values: tuple[tuple[str, tuple[int, ...], str], ...]
    extra: Any
    files: int
    bytes: int

    def record(self) -> dict[str, Any]:
        """All of it for JSON."""
        return {
            "path": str(self.path),
            "step": self.step,
            "made": self.made,
            "files": self.files,
            "bytes": self.bytes,
            "extra": self.extra,
            "tensors": [{name: getattr(row, name) for name in TensorRow.__slots__} for row in self.tensors],
            "values": [{"path": path, "shape": shape, "dtype": dtype} for path, shape, dtype in self.values],
        }

    def table(self, *, each: bool) -> str:
        """The table: a line a field, or a line for each tensor."""
        table = Table(caption=self._caption(), caption_justify="left")
        if each:
            for column in ("field", "tensor", "shape", "dtype", "block", "stored", "array", "offset"):
                table.add_column(column, justify="right" if column == "offset" else "left", overflow="fold")
            for row in self.tensors:
                at = f"{row.offset:,}" if row.offset >= 0 else ""
                table.add_row(row.field, row.path, str(row.shape), row.dtype, row.block, row.storage, row.array, at)
            for path, shape, dtype in self.values:
                table.add_row(path, "", str(shape), dtype, "", "whole", VALUES, "")
        else:
            for column in ("field", "tensors", "elements", "dtypes"):
                table.add_column(column, justify="left" if column in ("field", "dtypes") else "right")
            for field in dict.fromkeys(row.field for row in self.tensors):
                rows = [row for row in self.tensors if row.field == field]
                dtypes = ", ".join(dict.fromkeys(row.dtype for row in rows))
                table.add_row(field, f"{len(rows):,}", f"{sum(row.elements for row in rows):,}", dtypes)
            for path, shape, dtype in self.values:
                table.add_row(path, "", f"{math.prod(shape):,}", dtype)
        console = Console(width=150 if each else 110, color_system=None)
        with console.capture() as capture:
            console.print(table)
        return "\n".join(line.rstrip() for line in capture.get().splitlines())

    def __str__(self) -> str:
        return self.table(each=False)

    def _caption(self) -> str:
        made = ", ".join(f"{name} {value}" for name, value in self.made.items())
        return f"{self.path}: step {self.step}, {self.bytes:,} bytes in {self.files:,} files of arrays. {made}."


def contents(path: "str | os.PathLike[str]") -> Contents:
    """What a checkpoint holds; reads its manifest only.

    Arguments:

    - `path`: of a checkpoint, or of the folder of a run, whose newest complete one it is then.

    Raises: `ValueError` if there is none, `DamagedError` if its manifest is not whole.
    """
    source = Source.open(resolve(path, "contents"))
    rows: list[TensorRow] = []
    for (field, name), (number, slot) in source.tensors.items():
        item, size = source.manifest.stored[number], source.plan(number).shard_size
        shape, block = (*item.stack, *slot.shape), str(slot.spec.block)
        rows.append(TensorRow(field, name, shape, item.dtype, block, slot.storage, item.array, slot.offset, size))
    for (field, name), (number, theirs) in source.blocks.items():
        item = source.manifest.stored[number]
        shape, block = (*item.stack, *source.index(number).shape(theirs), *item.each), str(source.block(number, theirs))
        rows.append(TensorRow(field, name, shape, item.dtype, block, "blocks", item.array, -1, item.width))
    values = tuple(
        (value.path, value.shape, f"key<{value.key}>" if value.key else value.dtype) for value in source.values.values()
    )
    manifest = source.manifest
    total = sum(size for size, _ in source.files.values())
    made, files = dict(manifest.made), len(source.files)
    return Contents(source.folder, manifest.step, made, tuple(rows), values, manifest.extra, files, total)


def verify(path: "str | os.PathLike[str]") -> int:
    """Reads every byte of a checkpoint and compares all checksums.

    Arguments:

    - `path`: of a checkpoint, or of the folder of a run, whose newest complete one it is then.

    Returns: bytes of arrays read.

    Raises: `DamagedError` that names the first file which is missing, cut short or changed.
    """
    source = Source.open(resolve(path, "verify"))
    total = sum(array.nbytes for array in source.read_values().values())
    for number, item in enumerate(source.manifest.stored):
        shape = source.shape(number)
        layers = source.layers(number)
        if shape.empty or not layers:
            continue
        for shard in range(shape.shards):
            source.check(f"{item.array}/{file_of(shard)}", shape)
            step = max(1, _AT_ONCE // layers)
            for start in range(0, shape.width, step):
                out = np.empty((layers, min(step, shape.width - start)), shape.dtype)
                finish([source.read(number, slice(None), shard, start, out)])
                total += out.nbytes
    return total
