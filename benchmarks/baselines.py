"""How other systems lay out a group, for comparison: how much they pad and how many blocks they cut.

In come shapes and a number of shards; out goes a `Baseline`. The rules are those that the systems' sources and the
paper (arXiv 2602.22437) state, and nothing more: no buckets, no alignment, no special cases.

| name | rule |
|---|---|
| `fsdp1` | all parameters in one flat array, its end padded to N equal parts (PyTorch FSDP1) |
| `deepspeed` | every parameter flat, each padded to N equal parts (DeepSpeed ZeRO-3) |
| `fsdp2` | every parameter cut along dim 0 into N parts of equal height, the last ones short or empty (PyTorch FSDP2) |
| `megatron` | one flat array; shards are whole multiples of the LCM of all row sizes (Megatron-FSDP; a lower bound) |
| `vescale` | the paper's algorithm as we read it: model order, prefixes by element count, halving |
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Baseline:
    """What a rule makes of a group.

    Attributes:

    - `padding_ratio`: padding over the elements of all tensors.
    - `cuts`: for each tensor the flat positions at which it is cut, in elements from its start.
    """

    padding_ratio: float
    cuts: tuple[tuple[int, ...], ...]

    def blocks_cut(self, shapes: Sequence[Shape], rows: int, cols: int) -> int:
        """How many tiles of `rows` x `cols` lie on more than one device."""
        return sum(
            _tiles_cut(shape, positions, rows, cols)
            for shape, positions in zip(shapes, self.cuts, strict=True)
            if len(shape) > 1
        )


def fsdp1(shapes: Sequence[Shape], num_shards: int) -> Baseline:
    """One flat array."""
    shard = -(-_total(shapes) // num_shards)
    return _contiguous(shapes, shard, num_shards)


def deepspeed(shapes: Sequence[Shape], num_shards: int) -> Baseline:
    """Every parameter flat on its own."""
    parts = [-(-math.prod(shape) // num_shards) for shape in shapes]
    cuts = [range(part, math.prod(shape), part) for shape, part in zip(shapes, parts, strict=True)]
    return Baseline(sum(parts) * num_shards / _total(shapes) - 1, tuple(map(tuple, cuts)))


def fsdp2(shapes: Sequence[Shape], num_shards: int) -> Baseline:
    """Every parameter along dim 0."""
    parts = [-(-shape[0] // num_shards) * math.prod(shape[1:]) for shape in shapes]
    cuts = [range(part, math.prod(shape), part) for shape, part in zip(shapes, parts, strict=True)]
    return Baseline(sum(parts) * num_shards / _total(shapes) - 1, tuple(map(tuple, cuts)))


def megatron(shapes: Sequence[Shape], num_shards: int) -> Baseline:
    """One flat array in multiples of the LCM of all rows."""
    row = math.lcm(*(math.prod(shape[1:]) for shape in shapes))
    shard = -(-_total(shapes) // (num_shards * row)) * row
    return _contiguous(shapes, shard, num_shards)


def vescale(shapes: Sequence[Shape], granularities: Sequence[int], num_shards: int, alignment: int = 1) -> Baseline:
    """The paper's algorithm: for each prefix by element count the LCM, then the smallest multiple that fits."""
    sizes = [math.prod(shape) for shape in shapes]
    slots = list(zip(sizes, granularities, strict=True))
    best: int | None = None
    modulus = alignment
    for _, granularity in [(0, alignment), *sorted(slots, reverse=True)]:
        modulus = math.lcm(modulus, granularity)
        low, high = 1, -(-sum(sizes) // modulus)
        while low < high:
            middle = (low + high) // 2
            if _greedy(slots, middle * modulus, num_shards):
                high = middle
            else:
                low = middle + 1
        if best is None or high * modulus < best:
            best = high * modulus
    assert best is not None
    offsets = _greedy(slots, best, num_shards)
    assert offsets is not None
    return Baseline(best * num_shards / sum(sizes) - 1, _cuts(offsets, sizes, best))


def _greedy(slots: Iterable[tuple[int, int]], shard: int, num_shards: int) -> list[int] | None:
    """Offsets with every slot at its earliest start where no block is cut; None when they do not fit."""
    offsets: list[int] = []
    cursor = 0
    for size, granularity in slots:
        for begin in (cursor, -(-cursor // shard) * shard + shard * (cursor % shard == 0)):
            room = shard - begin % shard
            start = begin if size <= room else begin + room % granularity
            head = room - room % granularity
            if size <= room or (head and (size <= head + shard or shard % granularity == 0)):
                break
        else:
            return None
        offsets.append(start)
        cursor = start + size
    return offsets if cursor <= shard * num_shards else None


def _total(shapes: Sequence[Shape]) -> int:
    """Elements of all tensors."""
    return sum(math.prod(shape) for shape in shapes)


def _contiguous(shapes: Sequence[Shape], shard: int, num_shards: int) -> Baseline:
    """All tensors one behind the other, cut wherever a shard ends."""
    sizes = [math.prod(shape) for shape in shapes]
    offsets = [sum(sizes[:i]) for i in range(len(sizes))]
    return Baseline(shard * num_shards / sum(sizes) - 1, _cuts(offsets, sizes, shard))


def _cuts(offsets: Sequence[int], sizes: Sequence[int], shard: int) -> tuple[tuple[int, ...], ...]:
    """Where shard boundaries fall inside each tensor."""
    return tuple(
        tuple(boundary - offset for boundary in range((offset // shard + 1) * shard, offset + size, shard))
        for offset, size in zip(offsets, sizes, strict=True)
    )


def _tiles_cut(shape: Shape, positions: Iterable[int], rows: int, cols: int) -> int:
    """How many tiles of the last two dims have elements on both sides of one of `positions`."""
    height, width = shape[-2:]
    cut: set[tuple[int, int]] = set()
    for position in positions:
        row, col = divmod(position, width)
        matrix, row = divmod(row, height)
        band = matrix * height + row - row % rows
        band_height = min(rows, height - (row - row % rows))
        above, below = row % rows > 0, row % rows + 1 < band_height
        for left in range(0, width, cols):
            if (above or left < col) and (below or min(left + cols, width) > col):
                cut.add((band, left))
    return len(cut)
