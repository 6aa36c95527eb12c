"""Blocks: the pieces of a tensor that are never cut.

In comes what a user writes beside a parameter, such as `Tile(32, 32)` for 8-bit Adam; out goes a small frozen value
that `_storage.py` turns into the cuts a shard boundary may make. The idea, a granularity chosen per tensor instead of
one for the whole system, is veScale-FSDP's RaggedShard (arXiv 2602.22437); blocks that start afresh in every matrix of
a batch are ours.

| block | never cut | typical use |
|---|---|---|
| `Elements(n)` | n consecutive elements | ZeRO, FSDP1 (n = 1) |
| `Rows(n)` | n rows of the tensor flattened to two dims | FSDP2 (n = 1), 32-row quantization |
| `Tile(r, c)` | an r x c tile of the last two dims | FP8 weights, 8-bit Adam, Shampoo |
| `Slab(dims, n)` | everything behind the first `dims` dims, n at a time | whole experts |
| `WholeTensor()` | the tensor | Muon |
"""

from dataclasses import dataclass


def _positive(block: str, field: str, value: object) -> None:
    """Raises when `value` is no integer of at least 1."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{block}: {field}: got {value!r}; want an integer; pass a plain int of at least 1")
    if value < 1:
        raise ValueError(f"{block}: {field}: got {value}; want at least 1; pass the number of units in one block")


@dataclass(frozen=True, slots=True)
class Elements:
    """Blocks of `count` consecutive elements in row-major order; the last one may be shorter.

    Arguments:

    - `count`: elements in one block.

    Raises `ValueError` or `TypeError` when `count` is no integer of at least 1.
    """

    count: int = 1

    def __post_init__(self) -> None:
        _positive("Elements", "count", self.count)

    def __str__(self) -> str:
        return f"elements:{self.count}"


@dataclass(frozen=True, slots=True)
class Rows:
    """Blocks of `count` rows of the tensor flattened to (everything else, last dim); a vector is one row.

    Arguments:

    - `count`: rows in one block. Rows are counted through a batch of matrices without starting afresh; use `Tile` where
      a block must not reach into the next matrix.

    Raises `ValueError` or `TypeError` when `count` is no integer of at least 1.
    """

    count: int = 1

    def __post_init__(self) -> None:
        _positive("Rows", "count", self.count)

    def __str__(self) -> str:
        return f"rows:{self.count}"


@dataclass(frozen=True, slots=True)
class Tile:
    """Blocks of `rows` x `cols` elements of the last two dims, starting afresh in every matrix of a batch.

    Tiles at the lower and right edge of a matrix are smaller. A vector of n elements counts as a 1 x n matrix.

    Arguments:

    - `rows`, `cols`: height and width of one tile, in elements.

    Raises `ValueError` or `TypeError` when one of them is no integer of at least 1.
    """

    rows: int
    cols: int

    def __post_init__(self) -> None:
        _positive("Tile", "rows", self.rows)
        _positive("Tile", "cols", self.cols)

    def __str__(self) -> str:
        return f"tile:{self.rows},{self.cols}"


@dataclass(frozen=True, slots=True)
class Slab:
    """Blocks of everything behind the first `dims` dims: `Slab(1)` on (experts, rows, cols) never cuts an expert.

    Arguments:

    - `dims`: how many leading dims may be cut between; 0 keeps the tensor whole.
    - `count`: slabs in one block.

    Raises `ValueError` or `TypeError` when `dims` is no integer of at least 0 or `count` none of at least 1.
    """

    dims: int
    count: int = 1

    def __post_init__(self) -> None:
        if self.dims != 0:
            _positive("Slab", "dims", self.dims)
        _positive("Slab", "count", self.count)

    def __str__(self) -> str:
        return f"slab:{self.dims},{self.count}"


@dataclass(frozen=True, slots=True)
class WholeTensor:
    """One block: the tensor lies on one shard."""

    def __str__(self) -> str:
        return "whole"


type_of_block = (Elements, Rows, Tile, Slab, WholeTensor)

Block = Elements | Rows | Tile | Slab | WholeTensor
"""Any of the five kinds of block."""
