"""Exchange: logical tensors out of a model or a checkpoint, one at a time, and into a model from files of others.

Comes in: a sharded model or a checkpoint; or files that hold tensors by name, and a table of names. Goes out: tensors;
or a model with their values. What is no parameter (batch statistics, counters, random keys) is called `rest/...`.
Of random keys the data are exchanged, as unsigned integers.
"""

import functools
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Protocol, TypeAlias, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np

from vescale_jax._groups import each_group
from vescale_jax._sharded import Sharded, check_sharded, is_abstract
from vescale_jax._train import TrainState
from vescale_layouts import DBuffer, Layout, store
from vescale_planner import Faults

from ._dtypes import dtype_of, key_kind, without_keys
from ._entries import MODEL
from ._folder import resolve
from ._source import Source

REST = "rest/"


@dataclass(frozen=True, slots=True)
class Take:
    """A tensor of a file that is taken otherwise than as it is.

    Attributes:

    - `name`: in the file.
    - `index`: which layer of a tensor whose first dim counts layers. None: all of it.
    - `permute`: dims of the file's tensor (or layer) in the order wanted, such as `(1, 0)` for a transposed matrix.
    """

    name: str
    index: int | None = None
    permute: tuple[int, ...] | None = None


Names: TypeAlias = Mapping[str, Any] | Callable[[str], Any] | None
"""From the model's paths to what a file has: a name, a `Take`, or a list of these, which are stacked along a new first
dim. Paths that a mapping leaves out, and all without a table, are called alike on both sides. A function is called with
each path."""


@runtime_checkable
class Tensor(Protocol):
    """A tensor in a file: nothing is read before it is asked for."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""
        ...

    @property
    def dtype(self) -> np.dtype:
        """Its dtype."""
        ...

    def read(self) -> np.ndarray:
        """Its values, possibly as a view of the mapped file."""
        ...


@dataclass(frozen=True, slots=True)
class Lazy:
    """A logical tensor of a model or a checkpoint.

    Attributes:

    - `shape`, `dtype`: of the tensor; of the key data for random keys.
    - `values`: reads it.
    - `key`: the implementation of random keys; empty for other arrays.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    values: Callable[[], np.ndarray]
    key: str = ""

    def read(self) -> np.ndarray:
        """The values."""
        return self.values()


def chosen(names: Any, path: str) -> Any:
    """What a table has for a path; the path itself where it has nothing."""
    return names(path) if callable(names) else (names or {}).get(path, path)


def logical(source: Any, what: str) -> Iterator[tuple[str, Lazy]]:
    """The logical tensors of a model, a training state or a checkpoint, by path.

    Arguments:

    - `source`: a `Sharded`, a `TrainState`, or the path of a checkpoint or a run.
    - `what`: the public name of the caller, for messages.

    Raises: `TypeError` or `ValueError` for anything else.
    """
    if isinstance(source, str | os.PathLike):
        return _of_checkpoint(Source.open(resolve(source, what)))
    model = source.model if isinstance(source, TrainState) else source
    check_sharded(model, what)
    if is_abstract(model):
        raise ValueError(f"{what}: got an abstract model; want one with values; restore or initialise it first")
    return _of_model(model)


def _of_checkpoint(source: Source) -> Iterator[tuple[str, Lazy]]:
    for field, name in source.tensors:
        if field == MODEL:
            number, slot = source.tensors[field, name]
            item = source.manifest.stored[number]
            read = functools.partial(source.read_tensor, (field, name))
            yield name, Lazy((*item.stack, *slot.shape), dtype_of(item.dtype), read)
    values: dict[str, np.ndarray] = {}

    def value(member: str, dtype: str) -> np.ndarray:
        if not values:
            values.update(source.read_values())
        return values[member].view(dtype_of(dtype))

    for path, item in source.values.items():
        if path.startswith(f"{MODEL}/{REST}"):
            read = functools.partial(value, item.member, item.dtype)
            yield path.removeprefix(f"{MODEL}/"), Lazy(item.shape, dtype_of(item.dtype), read, item.key)


def _of_model(model: Sharded) -> Iterator[tuple[str, Lazy]]:
    for unit, group in each_group(model.structure.units):
        buffer = (model.params if group.trainable else model.frozen)[unit.name][group.name]
        tensors: dict[str, np.ndarray] = {}

        def one(name: str, tensors: dict[str, np.ndarray] = tensors, buffer: DBuffer = buffer) -> np.ndarray:
            # All tensors of a buffer come to the host together, once; they are asked for in order.
            if name not in tensors:
                tensors.update(buffer.read())
            return tensors.pop(name)

        for name, slot in group.layout.plan.slots.items():
            shape = (*group.layout.stack, *slot.shape)
            yield group.prefix + name, Lazy(shape, np.dtype(group.dtype), functools.partial(one, name))
    for path, leaf in zip(model.structure.form.rest_paths, model.rest, strict=True):
        raw = without_keys(leaf)
        read = functools.partial(np.asarray, raw)
        yield REST + path, Lazy(tuple(raw.shape), np.dtype(raw.dtype), read, key_kind(leaf))


@dataclass(frozen=True, slots=True)
class _Part:
    """What one path of the model takes from the file."""

    takes: tuple[Take, ...]
    stacked: bool

    @classmethod
    def of(cls, path: str, names: Names) -> "_Part":
        found = chosen(names, path)
        several = isinstance(found, Sequence) and not isinstance(found, str)
        parts: list[Any] = list(found) if several else [found]
        takes = tuple(take if isinstance(take, Take) else Take(take) for take in parts)
        if not all(isinstance(take.name, str) for take in takes):
            raise TypeError(
                f"import: names: {path}: got {found!r}; want a name, a Take, or a list of these; change the table"
            )
        return cls(takes, several)

    def shape(self, tensors: Mapping[str, Tensor]) -> set[tuple[int, ...]]:
        """The shapes that the takes have; one, if they fit each other."""
        found: set[tuple[int, ...]] = set()
        for take in self.takes:
            shape = tensors[take.name].shape
            shape = shape if take.index is None else shape[1:]
            if take.permute is not None and sorted(take.permute) == list(range(len(shape))):
                shape = tuple(shape[i] for i in take.permute)
            found.add((len(self.takes), *shape) if self.stacked else tuple(shape))
        return found

    def read(self, tensors: Mapping[str, Tensor], dtype: np.dtype) -> np.ndarray:
        """The values."""
        parts: list[np.ndarray] = []
        for take in self.takes:
            x = tensors[take.name].read()
            x = x if take.index is None else x[take.index]
            parts.append((x if take.permute is None else x.transpose(take.permute)).astype(dtype, copy=False))
        return np.stack(parts) if self.stacked else parts[0]


def fill_model(
    model: Sharded, tensors: Mapping[str, Tensor], names: Names, ignore: Sequence[str], cast: bool, what: str
) -> Sharded:
    """A model with the values of a file, one tensor at a time; every process reads what its devices hold.

    Arguments:

    - `model`: what `fully_shard` returned; with `abstract=True` nothing is held twice.
    - `tensors`: of the file, by name.
    - `names`: see `Names`.
    - `ignore`: patterns of names in the file that may go unused.
    - `cast`: whether floating dtypes are converted.
    - `what`: the public name of the caller, for messages.

    Raises: `ValueError` that lists every tensor which is missing, unused, or of another shape or dtype.
    """
    structure = check_sharded(model, what)
    parts: dict[str, _Part] = {}
    faults = Faults(what)
    for _, group in each_group(structure.units):
        for name, slot in group.layout.plan.slots.items():
            parts[group.prefix + name] = part = _Part.of(group.prefix + name, names)
            shape = (*group.layout.stack, *slot.shape)
            _compare(group.prefix + name, part, tensors, shape, np.dtype(group.dtype), cast, faults)
    rest: list[_Part | None] = []
    for path, leaf in zip(structure.form.rest_paths, model.rest, strict=True):
        part = _Part.of(REST + path, names)
        found = all(take.name in tensors for take in part.takes)
        rest.append(part if found or isinstance(leaf, jax.ShapeDtypeStruct) else None)
        if rest[-1] is not None:
            raw = without_keys(leaf)
            _compare(REST + path, part, tensors, tuple(raw.shape), np.dtype(raw.dtype), cast, faults)
    used = {take.name for part in (*parts.values(), *filter(None, rest)) for take in part.takes}
    for name in tensors:
        if name not in used and not any(fnmatchcase(name, pattern) for pattern in ignore):
            want = "a tensor of the file for each of the model, and no more"
            change = f"map it with names, or leave it out with ignore=({name!r},)"
            faults.add(name, got="a tensor that the model has no place for", want=want, change=change)
    faults.raise_if_any()
    buffers: tuple[dict[str, Any], dict[str, Any]] = ({}, {})
    for unit, group in each_group(structure.units):
        read = functools.partial(_read, parts, group.prefix, tensors, np.dtype(group.dtype))
        buffer = _filled(group.layout, np.dtype(group.dtype), read)
        buffers[0 if group.trainable else 1].setdefault(unit.name, {})[group.name] = buffer
    leaves = tuple(
        leaf if part is None else _placed(part, tensors, leaf) for part, leaf in zip(rest, model.rest, strict=True)
    )
    return replace(model, params=buffers[0], frozen=buffers[1], rest=leaves)


def _read(
    parts: Mapping[str, _Part], prefix: str, tensors: Mapping[str, Tensor], dtype: np.dtype, name: str
) -> np.ndarray:
    return parts[prefix + name].read(tensors, dtype)


def _compare(
    path: str,
    part: _Part,
    tensors: Mapping[str, Tensor],
    shape: tuple[int, ...],
    dtype: np.dtype,
    cast: bool,
    faults: Faults,
) -> None:
    missing = [take.name for take in part.takes if take.name not in tensors]
    if missing and not math.prod(shape):
        return  # Some formats cannot hold what has no element.
    if missing:
        want = f"one of the file's, such as {', '.join(list(tensors)[:3]) or 'none'}"
        faults.add(path, got=f"no tensor {', '.join(missing)} in the file", want=want, change="map it with names")
        return
    bad = [
        take for take in part.takes if take.index is not None and not _has_layer(tensors[take.name].shape, take.index)
    ]
    if bad:
        shapes = ", ".join(f"{take.name} of {tensors[take.name].shape}" for take in bad)
        faults.add(path, got=f"layer {bad[0].index} of {shapes}", want="a layer that is there", change="mend the table")
    elif part.shape(tensors) != {shape}:
        got = ", ".join(map(str, sorted(part.shape(tensors))))
        change = "mend the table: Take can pick a layer and permute dims, a list stacks"
        faults.add(path, got=f"shape {got}", want=f"{shape}", change=change)
    for name in dict.fromkeys(take.name for take in part.takes):
        got = np.dtype(tensors[name].dtype)
        floats = jnp.issubdtype(got, jnp.floating) and jnp.issubdtype(dtype, jnp.floating)
        if got != dtype and not (cast and floats):
            change = "pass cast=True" if floats else "convert the file, or build the model in its dtype"
            faults.add(path, got=f"{got.name} in {name}", want=dtype.name, change=change)


def _has_layer(shape: tuple[int, ...], index: int) -> bool:
    return len(shape) > 0 and -shape[0] <= index < shape[0]


def _filled(layout: Layout, dtype: np.dtype, read: Callable[[str], np.ndarray]) -> DBuffer:
    """A buffer, of which this process fills its own shards, tensor by tensor."""
    shape, dim = layout.buffer_shape, len(layout.stack)
    size = max(layout.shard_size, 1)
    indices = layout.sharding.addressable_devices_indices_map(shape)
    shards = {(index[dim].start or 0) // size for index in indices.values() if index is not None}
    host = {k: np.zeros(layout.local_shape, dtype).reshape(-1, layout.shard_size) for k in shards}
    wanted: dict[str, list[tuple[int, Any]]] = {}
    for k in shards:
        for piece in layout.plan.pieces(k):
            wanted.setdefault(piece.name, []).append((k, piece))
    for name, pieces in wanted.items():
        slot = layout.plan.slots[name]
        tensor = read(name).reshape(-1, *slot.shape)
        for i, layer in enumerate(tensor):
            run = store(slot, layer)
            for k, piece in pieces:
                host[k][i, piece.offset : piece.offset + piece.stop - piece.start] = run[piece.start : piece.stop]

    def local(index: Any) -> np.ndarray:
        return host[(index[dim].start or 0) // size].reshape(layout.local_shape)

    return DBuffer(jax.make_array_from_callback(shape, layout.sharding, local), layout)


def _placed(part: _Part, tensors: Mapping[str, Tensor], leaf: Any) -> Any:
    raw = without_keys(leaf)
    value = part.read(tensors, np.dtype(raw.dtype))
    data = jax.make_array_from_callback(value.shape, leaf.sharding, lambda index: value[index])
    kind = key_kind(leaf)
    return jax.random.wrap_key_data(data, impl=kind) if kind else data


def check_folder(path: Path, what: str) -> None:
    """Raises `ValueError` if a path is taken, or its folder is not there."""
    if path.exists() or not path.parent.is_dir():
        got = "a path that exists" if path.exists() else "a path in a folder that does not"
        raise ValueError(f"{what}: {path}: got {got}; want a new name in an existing folder; choose another")
