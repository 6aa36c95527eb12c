"""Match: whether a checkpoint has what a state wants, before anything is read.

Comes in: the entries of the state, an open checkpoint, and patterns of what shall be left as it is. Goes out: nothing,
or one error with everything that is missing, too much, or of another shape, dtype or block, and what to do about it.
"""

import glob
from collections.abc import Collection, Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Any

import jax
import numpy as np

from vescale_planner import Block, Elements, Faults

from ._dtypes import key_kind, without_keys
from ._entries import MODEL, Blocks, Entry, Parts, Tensors, Value
from ._source import Source

_SHOWN = 24


def is_reset(path: str, reset: Sequence[str]) -> bool:
    """Whether what lies at a path is left as the target has it."""
    return any(fnmatchcase(path, pattern) for pattern in reset)


def check(found: Sequence[Entry], source: Source, reset: Sequence[str], *, model_only: bool) -> None:
    """Compares a state with a checkpoint.

    Arguments:

    - `found`: the entries of the state.
    - `source`: the checkpoint.
    - `reset`: patterns of `field/parameter` and of paths that are not restored.
    - `model_only`: whether the state is a model alone, which leaves the rest of the checkpoint aside.

    Raises: `ValueError` with all faults.
    """
    faults: dict[tuple[str, str, str, str], list[str]] = {}
    wanted: set[str] = set()
    for entry in found:
        for path, name, got, want, change in _compare(entry, source):
            wanted.add(path)
            if got and not is_reset(path, reset):
                field = path.removesuffix(name).removesuffix("/")
                faults.setdefault((field, got, want, change), []).append(name)
    there = [f"{field}/{name}" for field, name in (*source.tensors, *source.blocks)]
    there += list(source.values)
    for path in there:
        if path in wanted or is_reset(path, reset) or (model_only and not path.startswith(f"{MODEL}/")):
            continue
        field, _, name = _split(path, source)
        got, want = "a checkpoint that has it, and a state that has not", "what was saved, and no more"
        faults.setdefault((field, got, want, _MODEL if field == MODEL else _BOTH), []).append(name)
    every = {*wanted, *there}
    unused = [pattern for pattern in reset if not _used(pattern, every)]
    _raise(faults, source, unused, {path for path in every if not is_reset(path, reset)})


def _split(path: str, source: Source) -> tuple[str, str, str]:
    for field in {field for field, _ in (*source.tensors, *source.blocks)}:
        if path.startswith(f"{field}/"):
            return field, "/", path.removeprefix(f"{field}/")
    return path.rpartition("/")


def _used(pattern: str, paths: Iterable[str]) -> bool:
    return any(fnmatchcase(path, pattern) for path in paths)


def _compare(entry: Entry, source: Source) -> Iterable[tuple[str, str, str, str, str]]:
    """Path, name, what is wrong or nothing, what is wanted, and the cure, for each part of an entry."""
    if isinstance(entry, Value):
        yield (entry.path, entry.path.rpartition("/")[2], *_value_fault(entry, source))
        return
    if isinstance(entry, Parts):
        dtype = np.dtype(entry.array.dtype)
        for name, shape in entry.members:
            value = Value(f"{entry.field}/{name}", jax.ShapeDtypeStruct(shape, dtype))
            yield (value.path, name, *_value_fault(value, source))
        return
    for name in entry.names:
        full = entry.prefix + name
        fault = _tensor_fault(entry, name, source) if isinstance(entry, Tensors) else _block_fault(entry, name, source)
        yield (f"{entry.field}/{full}", full, *fault)


_FINE = ("", "", "")
_MISSING = "nothing in the checkpoint"
_MODEL = (
    "restore into the model that was saved; a list of layers goes into a stack, or back, by export and import; or {}"
)
_BOTH = "restore into the model and optimizer that were saved, or {}"


def _missing(field: str) -> tuple[str, str, str]:
    of_model = field == MODEL or field.startswith(f"{MODEL}/")
    return _MISSING, "what was saved", _MODEL if of_model else "restore with the optimizer that was saved, or {}"


def _tensor_fault(entry: Tensors, name: str, source: Source) -> tuple[str, str, str]:
    key = (entry.field, entry.prefix + name)
    number, slot = source.element_wise(key)
    if slot is None:
        return _missing(entry.field)
    item = source.manifest.stored[number]
    got, want = (*item.stack, *slot.shape), (*entry.layout.stack, *entry.layout.plan.slots[name].shape)
    return _shape_fault(got, item.dtype, want, entry.array.dtype)


def _shape_fault(got: Any, got_dtype: str, want: Any, want_dtype: Any) -> tuple[str, str, str]:
    if tuple(got) != tuple(want):
        change = "restore into the model that was saved, or {}"
        return f"shape {tuple(got)} in the checkpoint", f"{tuple(want)}", change
    if np.dtype(want_dtype).name != got_dtype:
        change = "restore in the dtype that was saved and convert it then, or export and import it"
        return f"dtype {got_dtype} in the checkpoint", np.dtype(want_dtype).name, change
    return _FINE


def _block_fault(entry: Blocks, name: str, source: Source) -> tuple[str, str, str]:
    key = (entry.field, entry.prefix + name)
    if through_tensor(entry, name, source):
        number, slot = source.element_wise(key)
        assert slot is not None
        item, target = source.manifest.stored[number], entry.layout.plan.slots[name]
        got, want = (*item.stack, *slot.shape), (*entry.layout.stack, *target.shape)
        return _shape_fault(got, item.dtype, want, entry.array.dtype)
    if key not in source.blocks:
        return _missing(entry.field)
    number, theirs = source.blocks[key]
    item = source.manifest.stored[number]
    if item.dtype != np.dtype(entry.array.dtype).name:
        return _shape_fault((), item.dtype, (), entry.array.dtype)
    index = source.index(number)
    batch, wanted = index.batches[item.number], entry.batch
    got_shape = (*item.stack, *index.shape(theirs)), (batch.rows, batch.cols), item.each
    want_shape = (*entry.layout.stack, *entry.view.index.shape(name)), (wanted.rows, wanted.cols), entry.each
    if got_shape == want_shape:
        return _FINE
    got = _words(source.block(number, theirs), *got_shape)
    want = _words(dict(entry.view.blocks)[name], *want_shape)
    change = "make the optimizer with the blocks that were saved, or {}"
    return f"{got} in the checkpoint", want, change


def through_tensor(entry: Blocks, name: str, source: Source) -> bool:
    """Whether what blocks have is a number for each of their elements, and lies otherwise in the checkpoint.

    Then it goes through the logical tensor. A matrix for each square block looks alike, hence the care: one side has to
    be a buffer, or to have single elements for blocks.
    """
    key = (entry.field, entry.prefix + name)
    if entry.each != (entry.batch.rows, entry.batch.cols) or source.element_wise(key)[1] is None:
        return False
    if key in source.tensors:
        return True
    number, theirs = source.blocks[key]
    own, other = dict(entry.view.blocks)[name], source.block(number, theirs)
    return own != other and Elements(1) in (own, other)


def _words(block: Block, grid: tuple[int, ...], cell: tuple[int, int], each: tuple[int, ...]) -> str:
    return f"{each or 'a number'} for each of {grid} blocks {block} of {cell[0]} x {cell[1]} elements"


def _value_fault(entry: Value, source: Source) -> tuple[str, str, str]:
    if entry.path not in source.values:
        return _missing(entry.path)
    item = source.values[entry.path]
    kind = key_kind(entry.array)
    if item.key != kind:
        got, want = (f"keys of {k}" if k else "an array" for k in (item.key, kind))
        return f"{got} in the checkpoint", want, "restore into the model that was saved, or {}"
    raw = without_keys(entry.array)
    raw = raw if hasattr(raw, "dtype") else np.asarray(raw)
    return _shape_fault(item.shape, item.dtype, raw.shape, raw.dtype)


def _raise(
    faults: dict[tuple[str, str, str, str], list[str]], source: Source, unused: Sequence[str], every: Collection[str]
) -> None:
    """Raises one error with all faults; `every` has all paths that are not reset yet."""
    found = Faults(f"restore from {source.folder}")
    for pattern in unused:
        want = "one that matches something of the state or of the checkpoint"
        change = "compare it with `python -m vescale_jax checkpoint show`"
        found.add("reset", got=f"the pattern {pattern!r}", want=want, change=change)
    wrong: set[str] = set()
    for i, ((field, got, want, change), names) in enumerate(faults.items()):
        paths = [f"{field}/{name}" if field else name for name in names]
        wrong.update(paths)
        if i < _SHOWN:
            some = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
            more = "" if len(names) == 1 else f" for {len(names)} of its entries ({some})"
            path = paths[0] if len(names) == 1 else field or "the state"
            found.add(path, got=got + more, want=want, change=change.replace("{}", "reset it"))
    if len(faults) > _SHOWN:
        more = f"{len(faults) - _SHOWN} more faults like these"
        found.add("...", got=more, want="none", change="mend those above first")
    if wrong:
        text = f"({', '.join(map(repr, shortest_patterns(wrong, every)))},)"
        change = f"pass reset={text} to leave all of this as the state has it"
        found.add("reset", got="no pattern for these", want="a state that fits", change=change)
    found.raise_if_any()


def shortest_patterns(wrong: Collection[str], every: Collection[str], above: str = "") -> list[str]:
    """Few patterns that match what is wrong and nothing else, since what fits shall not be lost to a pattern.

    Arguments:

    - `wrong`: paths.
    - `every`: all paths, those among them.
    - `above`: what all of these begin with.
    """
    found: list[str] = []
    parts: dict[str, list[str]] = {}
    for path in sorted(wrong):
        part, slash, _ = path.removeprefix(above).partition("/")
        parts.setdefault(above + part + slash, []).append(path)
    for start, members in parts.items():
        if not start.endswith("/"):
            found.append(glob.escape(start))
            continue
        inside = [path for path in every if path.startswith(start)]
        if len(members) == 1:
            found.append(glob.escape(members[0]))
        elif len(members) == len(inside):
            found.append(f"{glob.escape(start)}*")
        else:
            found += shortest_patterns(members, inside, start)
    return found
