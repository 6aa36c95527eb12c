"""Fill: the shards of a target, read from a checkpoint that may lie otherwise.

Comes in: an open checkpoint, an entry of the target and the index of one of its shards. Goes out: that shard on the
host. Each piece of it is mapped to runs of elements on disk; where both sides store a tensor in one order these are as
long as the piece, otherwise they are read in pages (see `_gather.py`).

Shapes: L layers of a stack (1 if there is none), S elements on a shard; B blocks of e elements.
"""

import functools
import math
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np

from vescale_layouts import BlockIndex, store, tiles_of
from vescale_planner import Piece, Slot

from ._dtypes import as_stored, dtype_of
from ._entries import Blocks, Tensors
from ._gather import Pages, gather
from ._match import through_tensor
from ._ranges import elements_at, order_of, positions_of
from ._source import Key, Source
from ._store import finish

# Runs that are worth a read each; more are read in pages.
_MOST_RUNS = 64


def fill_tensors(source: Source, entry: Tensors, shard: int, out: np.ndarray, kept: Collection[str]) -> None:
    """Reads one shard of a buffer.

    Arguments:

    - `source`: the checkpoint.
    - `entry`: the buffer.
    - `shard`: which.
    - `out`: (L, S), written to; what belongs to no tensor stays as it is.
    - `kept`: slots that stay as they are.
    """
    raw = as_stored(out)
    slots = entry.layout.plan.slots
    reads: list[tuple[Path, Any]] = []
    whole = _same_buffer(source, entry) if not kept else None
    if whole is not None:
        # Padding comes along: nothing of the state is lost.
        finish([source.read(whole, slice(None), shard, 0, raw)])
        return
    names = set(entry.names) - set(kept)
    for piece in entry.layout.plan.pieces(shard):
        if piece.name in names:
            key = (entry.field, entry.prefix + piece.name)
            if key not in source.tensors:
                _from_blocks(source, key, slots[piece.name], piece, out)
                continue
            number, slot = source.tensors[key]
            part = raw[:, piece.offset : piece.offset + piece.stop - piece.start]
            if order_of(slot) == order_of(slots[piece.name]):
                reads += source.read_run(number, slice(None), slot.offset + piece.start, part)
            else:
                _reorder(source, number, slot, slots[piece.name], piece, part)
    finish(reads)


def _same_buffer(source: Source, entry: Tensors) -> int | None:
    """The stored array that lies exactly as a buffer does; None if there is none."""
    for name in entry.names[:1]:
        if (entry.field, entry.prefix + name) not in source.tensors:
            return None
        number, _ = source.tensors[entry.field, entry.prefix + name]
        item = source.manifest.stored[number]
        names = tuple(source.plan(number).slots) if item.names is None else item.names
        same = source.plan(number) == entry.layout.plan and item.prefix == entry.prefix and names == entry.names
        return number if same else None
    return None


def _reorder(source: Source, number: int, slot: Slot, target: Slot, piece: Piece, out: np.ndarray) -> None:
    """Reads a piece of a tensor that the checkpoint stores in another order: (L, n)."""
    shape = source.shape(number)

    def where(i: int, j: int) -> np.ndarray:
        elements = elements_at(target, np.arange(piece.start + i, piece.start + j, dtype=np.int64))
        return np.where(elements < 0, -1, slot.offset + positions_of(slot, np.maximum(elements, 0)))

    for layer in range(source.layers(number)):
        pages = Pages(shape.shards, shape.width, shape.chunk)
        gather(pages, where, _reader(source, number, layer, 1), out[layer])


def _reader(source: Source, number: int, layer: int, each: int) -> Any:
    def read(runs: list[tuple[int, int, np.ndarray]]) -> None:
        reads = [
            source.read(number, slice(layer, layer + 1), shard, first * each, out.reshape(1, -1))
            for shard, first, out in runs
        ]
        finish(reads)

    return read


def fill_blocks(source: Source, entry: Blocks, shard: int, out: np.ndarray, kept: Collection[str]) -> None:
    """Reads what belongs to the blocks of one shard.

    Arguments:

    - `source`: the checkpoint.
    - `entry`: what belongs to blocks.
    - `shard`: which.
    - `out`: (L, B * e), written to; what belongs to no block stays as it is.
    - `kept`: tensors whose blocks stay as they are.
    """
    raw = as_stored(out)
    each, batch = math.prod(entry.each), entry.batch
    if not each:
        return
    held = [batch.names[i] for i in batch.held[shard] if i >= 0]
    for name in held:
        if name in kept:
            continue
        order = _order(entry.view.index, name)
        blocks = np.flatnonzero(order // batch.count == shard)
        places = order[blocks] - shard * batch.count
        by_place = np.argsort(places)
        blocks, places = blocks[by_place], places[by_place]
        key = (entry.field, entry.prefix + name)
        if through_tensor(entry, name, source):
            _to_blocks(source, key, entry, name, blocks, out[:, places[0] * each : (places[-1] + 1) * each])
            continue
        number, theirs = source.blocks[key]
        at = _order(source.index(number), theirs)[blocks]
        # The blocks that a shard holds of a tensor are neighbours in its batch.
        first = int(places[0])
        _read_blocks(source, number, at, raw[:, first * each : (first + len(places)) * each], each)


def _logical(source: Source, key: Key) -> np.ndarray:
    """A tensor `(L, ...)` of which there is a number for each element, in a buffer or by blocks."""
    if key in source.tensors:
        number, slot = source.tensors[key]
        return source.read_tensor(key).reshape(-1, *slot.shape)
    number, name = source.blocks[key]
    item, slot = source.manifest.stored[number], source.plan(number).slots[name]
    layers, (r, c) = math.prod(item.stack), item.each
    matrices, down, across = source.index(number).shape(name)
    (_, rows, cols), _ = tiles_of(slot.shape, source.block(number, name))
    flat = np.zeros((layers, matrices * down * across * r * c), dtype_of(item.dtype))
    _read_blocks(source, number, _order(source.index(number), name), as_stored(flat), r * c)
    tiles = flat.reshape(layers, matrices, down, across, r, c).swapaxes(3, 4)
    return tiles.reshape(layers, matrices, down * r, across * c)[:, :, :rows, :cols].reshape(layers, *slot.shape)


def _from_blocks(source: Source, key: Key, slot: Slot, piece: Piece, out: np.ndarray) -> None:
    """A piece of a buffer's tensor that the checkpoint has by blocks."""
    for layer, tensor in zip(out, _logical(source, key), strict=True):
        layer[piece.offset : piece.offset + piece.stop - piece.start] = store(slot, tensor)[piece.start : piece.stop]


def _to_blocks(source: Source, key: Key, entry: Blocks, name: str, blocks: np.ndarray, out: np.ndarray) -> None:
    """What some blocks have of a tensor that lies otherwise in the checkpoint: (L, n * r * c)."""
    slot, block = entry.layout.plan.slots[name], dict(entry.view.blocks)[name]
    (matrices, rows, cols), _ = tiles_of(slot.shape, block)
    (_, down, across), (r, c) = entry.view.index.shape(name), entry.each
    tensor = _logical(source, key).reshape(-1, matrices, rows, cols)
    room = ((0, 0), (0, 0), (0, down * r - rows), (0, across * c - cols))
    tiles = np.pad(tensor, room).reshape(-1, matrices, down, r, across, c).swapaxes(3, 4)
    out[:] = tiles.reshape(len(tensor), matrices * down * across, r * c)[:, blocks].reshape(out.shape)


@functools.lru_cache(maxsize=8)
def _order(index: BlockIndex, name: str) -> np.ndarray:
    """Where the blocks of a tensor are, in logical order; asked for again for each shard."""
    return index.order(name)[1].reshape(-1)


def _read_blocks(source: Source, number: int, at: np.ndarray, out: np.ndarray, each: int) -> None:
    """Reads what belongs to some blocks, by their places in all shards' batches: (L, n * e)."""
    shape = source.shape(number)
    count = shape.width // each
    breaks = np.flatnonzero((np.diff(at) != 1) | (np.diff(at // count) != 0)) + 1
    if len(breaks) < _MOST_RUNS:
        reads: list[tuple[Path, Any]] = []
        for i, j in zip([0, *breaks], [*breaks, len(at)], strict=True):
            part = out[:, i * each : j * each]
            reads += source.read_run(number, slice(None), int(at[i]) * each, part)
        finish(reads)
        return
    pages = Pages(shape.shards, count, max(1, shape.chunk // each))
    for layer in range(source.layers(number)):
        target = out[layer].reshape(len(at), each)
        gather(pages, lambda i, j: at[i:j], _reader(source, number, layer, each), target)
