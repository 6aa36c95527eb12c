"""Source: a complete checkpoint, opened for reading.

Comes in: a folder. Goes out: what is in it by field and parameter, and reads of any part, each file checked against the
table of files before its first use. Nothing here depends on the mesh that wrote it.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from vescale_layouts import BlockIndex, block_index, load
from vescale_planner import Block, GroupPlan, Slot

from ._dtypes import dtype_of, stored_dtype
from ._errors import DamagedError
from ._files import MANIFEST, VALUES, hash_of, read_arrays, read_marked
from ._manifest import Manifest, Stored, StoredValue, parse
from ._plans import block_of
from ._store import Shape, file_of, fingerprint, finish, open_for_reading, read_into

Key = tuple[str, str]
"""Field and parameter path."""


@dataclass(frozen=True, slots=True, eq=False)
class Source:
    """A checkpoint.

    Attributes:

    - `folder`: of the checkpoint.
    - `manifest`: what it holds.
    - `files`: size and hash of each file, by path within the folder.
    - `tensors`: by field and parameter, the stored array and the slot in it.
    - `blocks`: by field and parameter, the stored array and the name in it.
    - `values`: by path.
    """

    folder: Path
    manifest: Manifest
    files: Mapping[str, Any]
    tensors: Mapping[Key, tuple[int, Slot]]
    blocks: Mapping[Key, tuple[int, str]]
    values: Mapping[str, StoredValue]
    _stores: dict[str, Any] = field(default_factory=dict[str, Any])
    _checked: set[str] = field(default_factory=set[str])

    @classmethod
    def open(cls, folder: Path) -> "Source":
        """Opens a checkpoint; reads no array.

        Raises: `DamagedError` if it is not complete, `ValueError` if it is of another format.
        """
        text, files = read_marked(folder)
        manifest = parse(text, folder / MANIFEST)
        tensors: dict[Key, tuple[int, Slot]] = {}
        blocks: dict[Key, tuple[int, str]] = {}
        for i, item in enumerate(manifest.stored):
            plan = manifest.plans[item.plan]
            if item.kind == "tensors":
                names = plan.slots if item.names is None else item.names
                tensors |= {(item.field, item.prefix + name): (i, plan.slots[name]) for name in names}
            else:
                names = _index(plan, item).batches[item.number].names
                blocks |= {(item.field, item.prefix + name): (i, name) for name in names}
        return cls(folder, manifest, files, tensors, blocks, {value.path: value for value in manifest.values})

    def plan(self, number: int) -> GroupPlan:
        """The plan of a stored array."""
        return self.manifest.plans[self.manifest.stored[number].plan]

    def index(self, number: int) -> BlockIndex:
        """The blocks of a stored array of kind `"blocks"`."""
        return _index(self.plan(number), self.manifest.stored[number])

    def block(self, number: int, name: str) -> Block:
        """The block of one tensor in a stored array of kind `"blocks"`."""
        return dict(self.index(number).blocks)[name]

    def shape(self, number: int) -> Shape:
        """The shape of a stored array on disk, where it may be some layers of a larger one."""
        item = self.manifest.stored[number]
        return Shape(item.layers, self.plan(number).num_shards, item.width, stored_dtype(dtype_of(item.dtype)))

    def layers(self, number: int) -> int:
        """Layers of a stored array; 1 if it is no stack."""
        return math.prod(self.manifest.stored[number].stack)

    def element_wise(self, key: Key) -> tuple[int, Slot | None]:
        """The stored array with a number for each element of a tensor, in a buffer or by blocks, and the tensor's slot.

        The slot is None if there is no such array.
        """
        if key in self.tensors:
            return self.tensors[key]
        if key not in self.blocks:
            return -1, None
        number, name = self.blocks[key]
        item = self.manifest.stored[number]
        batch = self.index(number).batches[item.number]
        return number, self.plan(number).slots[name] if item.each == (batch.rows, batch.cols) else None

    def read(self, number: int, layers: slice, shard: int, start: int, out: np.ndarray) -> tuple[Path, Any]:
        """Starts to read a run of elements of one shard; see `read_into`. Returns what `finish` takes."""
        item, shape = self.manifest.stored[number], self.shape(number)
        stop = self.layers(number) if layers.stop is None else layers.stop
        layers = slice(item.first + (layers.start or 0), item.first + stop)
        path = self.folder / item.array / file_of(shard)
        self.check(f"{item.array}/{path.name}", shape)
        if item.array not in self._stores:
            self.check(f"{item.array}/zarr.json")
            self._stores[item.array] = open_for_reading(self.folder / item.array, shape)
        return path, read_into(self._stores[item.array], layers, shard, start, out)

    def read_run(self, number: int, layers: slice, start: int, out: np.ndarray) -> list[tuple[Path, Any]]:
        """Starts to read a run of elements `(layers, n)` of a whole array, over as many shards as it takes."""
        width, done = self.shape(number).width, 0
        reads: list[tuple[Path, Any]] = []
        while done < out.shape[1]:
            shard, within = divmod(start + done, width)
            count = min(width - within, out.shape[1] - done)
            reads.append(self.read(number, layers, shard, within, out[:, done : done + count]))
            done += count
        return reads

    def check(self, name: str, shape: Shape | None = None) -> None:
        """Compares a file with the table of files, once.

        Arguments:

        - `name`: path within the folder.
        - `shape`: of the array, for the file of a shard. None: a file that is hashed whole.

        Raises: `DamagedError`.
        """
        if name in self._checked:
            return
        path = self.folder / name
        if name not in self.files:
            raise DamagedError.file(
                path, "a file that was not written with this checkpoint", "the files of the manifest"
            )
        size, wanted = self.files[name]
        try:
            found = path.stat().st_size
            if found != size:
                raise DamagedError.file(path, f"{found} bytes", f"{size}")
            if (fingerprint(path, shape) if shape is not None else hash_of(path)) != wanted:
                raise DamagedError.file(
                    path, "other contents than were written", "the file that belongs to this checkpoint"
                )
        except OSError as error:
            raise DamagedError.file(path, error.strerror or str(error), f"a file of {size} bytes") from None
        self._checked.add(name)

    def read_values(self) -> dict[str, np.ndarray]:
        """The arrays that every device has whole, and those of the user's extra, by member, as on disk."""
        self.check(VALUES)
        return read_arrays(self.folder / VALUES)

    def read_tensor(self, key: Key) -> np.ndarray:
        """One whole logical tensor, `(*stack, *shape)`.

        Arguments:

        - `key`: field and parameter, one of `tensors`.
        """
        number, slot = self.tensors[key]
        item, shape = self.manifest.stored[number], self.shape(number)
        flat = np.empty((self.layers(number), slot.size), shape.dtype)
        if flat.size:
            finish(self.read_run(number, slice(None), slot.offset, flat))
        flat = flat.view(dtype_of(item.dtype))
        if slot.storage == "row_major" or not len(flat):
            return flat.reshape((*item.stack, *slot.shape))
        return np.stack([load(slot, layer) for layer in flat]).reshape((*item.stack, *slot.shape))


def _index(plan: GroupPlan, item: Stored) -> BlockIndex:
    return block_index(plan, tuple((name, block_of(list(block))) for name, block in item.blocks))
