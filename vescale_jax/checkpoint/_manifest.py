"""Manifest: what a checkpoint holds and where, as JSON.

Comes in: records made while saving, or the text of `manifest.json`. Goes out: the text, or checked records. Nothing
here reads arrays.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vescale_planner import GroupPlan

from ._errors import DamagedError
from ._plans import plan_of, plan_record

FORMAT = "vescale_jax checkpoint"
VERSION = 1


@dataclass(frozen=True, slots=True)
class Stored:
    """One array that is cut over devices, as it lies on disk.

    Attributes:

    - `kind`: `"tensors"`, a buffer, or `"blocks"`, something for every block of one shape.
    - `field`, `prefix`: see `_entries.py`.
    - `plan`: index of the plan.
    - `stack`: numbers of layers before the flat dim.
    - `dtype`: of the elements; see `_dtypes.py` for what lies on disk.
    - `array`: the folder of the zarr array, `(layers, shards, width)`.
    - `layers`, `first`: of the zarr array, which equal arrays of several units may share, and the first one of this.
    - `width`: elements on one shard, of one layer.
    - `blocks`: of kind `"blocks"`: `[name, block]` of every tensor of the view.
    - `number`, `each`: of kind `"blocks"`: the batch, and the shape of what a block has.
    - `names`: of kind `"tensors"`: the slots that mean something, if not all do; see `entries`.
    """

    kind: str
    field: str
    prefix: str
    plan: int
    stack: tuple[int, ...]
    dtype: str
    array: str
    layers: int
    first: int
    width: int
    blocks: tuple[tuple[str, Any], ...] = ()
    number: int = 0
    each: tuple[int, ...] = ()
    names: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class StoredValue:
    """One array that every device has whole: a member of `arrays.npz`.

    Attributes:

    - `path`: where it is in the state.
    - `member`: its name in the file.
    - `dtype`, `shape`: of the array; of the key data for random keys.
    - `key`: the implementation of random keys; empty for other arrays.
    """

    path: str
    member: str
    dtype: str
    shape: tuple[int, ...]
    key: str = ""


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a checkpoint holds.

    Attributes:

    - `step`: steps done.
    - `made`: facts about the run that wrote it: versions, time, mesh, number of processes.
    - `plans`: each different plan once.
    - `stored`, `values`: the arrays.
    - `extra`: the user's own tree; see `_extra.py`.
    """

    step: int
    made: Mapping[str, Any]
    plans: tuple[GroupPlan, ...]
    stored: tuple[Stored, ...]
    values: tuple[StoredValue, ...]
    extra: Any

    def text(self) -> str:
        """The JSON."""
        record = {
            "format": FORMAT,
            "version": VERSION,
            "step": self.step,
            "made": dict(self.made),
            "extra": self.extra,
            "plans": [plan_record(plan) for plan in self.plans],
            "arrays": [_record(stored) for stored in self.stored],
            "values": [_record(value) for value in self.values],
        }
        return json.dumps(record, indent=1) + "\n"


def _record(item: Stored | StoredValue) -> dict[str, Any]:
    found = {name: getattr(item, name) for name in item.__slots__}
    if isinstance(item, Stored) and item.kind == "tensors":
        dropped = {"blocks", "number", "each"} | ({"names"} if item.names is None else set())
        found = {k: v for k, v in found.items() if k not in dropped}
    return found


def parse(text: str, path: Path) -> Manifest:
    """Reads a manifest.

    Arguments:

    - `text`: of the file.
    - `path`: the file, for messages.

    Raises: `ValueError` for a manifest of another version or no manifest at all, `DamagedError` for one that is cut
    short.
    """
    try:
        record = json.loads(text)
    except json.JSONDecodeError as error:
        raise DamagedError.file(path, f"text that is no JSON ({error})", "the manifest that was written") from None
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        raise ValueError(
            f"checkpoint: {path}: got a file of another program; want a manifest with format {FORMAT!r}; pass a "
            "checkpoint that this library wrote, or read the file with what wrote it"
        )
    if record.get("version") != VERSION:
        raise ValueError(
            f"checkpoint: {path}: got version {record.get('version')} of the format; want {VERSION}; read it with the "
            f"release of vescale_jax that wrote it ({record.get('made', {}).get('vescale_jax', 'unknown')})"
        )
    try:
        return Manifest(
            record["step"],
            record["made"],
            tuple(plan_of(plan) for plan in record["plans"]),
            tuple(_stored(item) for item in record["arrays"]),
            tuple(StoredValue(**{**item, "shape": tuple(item["shape"])}) for item in record["values"]),
            record["extra"],
        )
    except (KeyError, TypeError, ValueError) as error:
        raise DamagedError.file(
            path, f"a record that cannot be ({error!r})", "the manifest that was written"
        ) from error


def _stored(item: Mapping[str, Any]) -> Stored:
    blocks: Sequence[Any] = item.get("blocks", ())
    return Stored(
        **{
            **item,
            "stack": tuple(item["stack"]),
            "each": tuple(item.get("each", ())),
            "names": None if item.get("names") is None else tuple(item["names"]),
            "blocks": tuple((name, block) for name, block in blocks),
        }
    )
