"""Which storage order each tensor takes, where the planner is free to choose.

In come specs, a number of shards and how much padding is bearable; out goes a storage order for each tensor. Padding
costs memory and wire, a tiled tensor costs a copy when it is unpacked, and a transposed one costs nothing. What is
chosen has the smallest *score*: padding beyond `max_padding` first, then padding plus `copy_weight` times the copied
elements.

The idea: tensors of equal shape and block are one kind, so there are few choices. For every set of kinds that are
tiled, the others take the orientations whose granularities share the smallest common multiple. The lower bound on the
shard size gives each combination, in microseconds, the score to hope for, so only promising ones are planned, the best
first.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TypeVar

from ._blocks import Block
from ._bound import lower_bound
from ._cuts import Cuts
from ._specs import TensorSpec
from ._storage import Storage, cuts_of, storage_choices

Kind = tuple[tuple[int, ...], Block]
Choice = dict[Kind, Storage]
Planned = TypeVar("Planned")

_MOST_LOOKS = 5000
"""Slots of different kinds that are looked at, over all combinations."""

_MOST_IN_VAIN = 6
"""Combinations that are planned in a row without a better score, before the search ends."""


@dataclass(frozen=True, slots=True)
class Price:
    """What padding and copies are worth.

    Attributes:

    - `bearable`: padding that is bearable; beyond it, padding comes before everything else. Elements.
    - `copy_weight`: padded elements that are as bad as one copied element.
    """

    bearable: float
    copy_weight: float

    def score(self, padding: int, copied: int) -> tuple[float, float]:
        """Smaller is better; both arguments in elements."""
        return max(padding - self.bearable, 0.0), padding + self.copy_weight * copied


def choose_storage(
    specs: Sequence[TensorSpec],
    num_shards: int,
    alignment: int,
    price: Price,
    plan: Callable[[Sequence[Storage]], tuple[int, Planned]],
) -> tuple[list[Storage], Planned]:
    """The storage orders with the smallest score, and what `plan` made of them.

    Arguments:

    - `specs`, `num_shards`, `alignment`: as for `plan_group`.
    - `price`: what padding and copies are worth.
    - `plan`: plans the tensors in given storage orders; returns the shard size, in elements, and anything else.
    """
    counts = Counter((spec.shape, spec.block) for spec in specs)
    elements = sum(spec.size for spec in specs)
    best_score, best = (math.inf, math.inf), None
    in_vain = 0
    for hoped, choice in _one_of_each_sort_first(
        _promising(counts, num_shards, alignment, price), elements // num_shards
    ):
        if hoped >= best_score:
            continue
        if in_vain == _MOST_IN_VAIN:
            break
        in_vain += 1
        storages: list[Storage] = [choice[spec.shape, spec.block] for spec in specs]
        shard_size, planned = plan(storages)
        score = price.score(shard_size * num_shards - elements, _copied(counts, choice))
        if score < best_score:
            best_score, best, in_vain = score, (storages, planned), 0
    assert best is not None
    return best


def hope(
    specs: Sequence[TensorSpec], num_shards: int, alignment: int, price: Price, is_free: bool
) -> tuple[float, float]:
    """The score that a plan of these tensors can hope for, in microseconds for few kinds of tensors."""
    counts = Counter((spec.shape, spec.block) for spec in specs)
    if is_free:
        return _promising(counts, num_shards, alignment, price)[0][0]
    return _hoped(counts, dict.fromkeys(counts, "row_major"), num_shards, alignment, price)


def _promising(
    counts: Mapping[Kind, int], num_shards: int, alignment: int, price: Price
) -> list[tuple[tuple[float, float], Choice]]:
    """Combinations of storage orders with the score to hope for, best first."""
    low = sum(math.prod(shape) * count for (shape, _), count in counts.items()) // num_shards
    hoped = [(_hoped(counts, choice, num_shards, alignment, price), choice) for choice in _choices(counts, low)]
    return sorted(hoped, key=lambda candidate: candidate[0])


def _one_of_each_sort_first(
    candidates: Sequence[tuple[tuple[float, float], Choice]], low: int
) -> list[tuple[tuple[float, float], Choice]]:
    """The same candidates; those that repeat the moduli of an earlier one go last.

    Choices that differ only in tensors of at most `low` elements, which cannot cover a shard, come out alike.
    """
    seen: set[tuple[int, ...]] = set()
    first: list[tuple[tuple[float, float], Choice]] = []
    later: list[tuple[tuple[float, float], Choice]] = []
    for hoped, choice in candidates:
        moduli = tuple(cuts_of(*kind, order).modulus for kind, order in choice.items() if math.prod(kind[0]) > low)
        (later if moduli in seen else first).append((hoped, choice))
        seen.add(moduli)
    return first + later


def _hoped(
    counts: Mapping[Kind, int], choice: Choice, num_shards: int, alignment: int, price: Price
) -> tuple[float, float]:
    """The score of the lower bound: rarely beaten, and only by slots of several periods."""
    slots: Counter[Cuts] = Counter()
    for (shape, block), count in counts.items():
        cuts = cuts_of(shape, block, choice[shape, block])
        # The bound must allow for luck with periods; here it would raise hopes that hardly ever come true.
        slots[cuts if cuts.is_uniform else Cuts.uniform(cuts.size, cuts.period)] += count
    elements = sum(math.prod(shape) * count for (shape, _), count in counts.items())
    shard_size = lower_bound(slots, num_shards, alignment).shard_size
    return price.score(shard_size * num_shards - elements, _copied(counts, choice))


def _copied(counts: Mapping[Kind, int], choice: Choice) -> int:
    """Elements in tiled storage."""
    return sum(math.prod(kind[0]) * count for kind, count in counts.items() if choice[kind] == "tiled")


def _choices(counts: Mapping[Kind, int], low: int) -> Iterator[Choice]:
    """Combinations that are worth a look; the very first is all row-major.

    Every set of the kinds that are longer than `low` elements, and so can cover a shard, is tried as the tiled ones;
    then ever larger sets of all kinds, beginning with what weighs least.
    """
    row_major: Choice = dict.fromkeys(counts, "row_major")
    yield row_major
    free = [kind for kind in counts if len(storage_choices(*kind)) > 1 and math.prod(kind[0])]
    if not free:
        return
    free.sort(key=lambda kind: math.prod(kind[0]) * counts[kind])
    affordable = max(_MOST_LOOKS // (2 * len(counts)), 2)
    long = [kind for kind in free if math.prod(kind[0]) > low][: affordable.bit_length() - 1]
    for mask in product((False, True), repeat=len(long)):
        tiled: Choice = {kind: "tiled" for kind, is_tiled in zip(long, mask, strict=True) if is_tiled}
        for orientation in _orientations([kind for kind in free if kind not in tiled], low):
            yield {**row_major, **tiled, **orientation}
    for split in range(len(free), 0, -max(1, len(free) // affordable)):
        tiled = dict.fromkeys(free[:split], "tiled")
        for orientation in _orientations(free[split:], low):
            yield {**row_major, **tiled, **orientation}


def _orientations(kinds: Sequence[Kind], low: int) -> Iterator[Choice]:
    """Row-major or transposed for each kind, from the two choices for the largest of them."""
    if not kinds:
        yield {}
        return
    orders: tuple[Storage, Storage] = ("row_major", "transposed")
    largest = kinds[-1]
    for first in orders:
        choice: Choice = {largest: first}
        together = cuts_of(*largest, first).modulus
        for kind in reversed(kinds[:-1]):
            moduli = [cuts_of(*kind, order).modulus for order in orders]
            joint = [math.lcm(together, modulus) for modulus in moduli]
            # A tensor that cannot cover a shard only wants small blocks.
            pick = 0 if joint[0] <= joint[1] else 1
            if math.prod(kind[0]) <= low:
                pick = 0 if moduli[0] <= moduli[1] else 1
            else:
                together = joint[pick]
            choice[kind] = orders[pick]
        yield choice
