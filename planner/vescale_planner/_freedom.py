"""Which storage order each tensor takes, where the planner is free to choose.

In come specs, a number of shards and how much padding is bearable; out goes a storage order for each tensor. Padding
costs memory and wire, a tiled tensor costs a copy when it is unpacked, and a transposed one costs nothing. What is
chosen has the smallest *score*: padding beyond `max_padding` first, then padding plus `copy_weight` times the copied
elements.

The idea: tensors of equal shape and block are one kind, so there are few choices. For every set of kinds that are tiled,
the others take the orientations whose granularities share the smallest common multiple. The lower bound on the shard size
gives each combination, in microseconds, the score to hope for, so only promising ones are planned, the best first.
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

_MOST_MASKS = 8
"""Kinds of which every set is tried as the tiled ones; of more, only sets of the smallest."""

_MOST_IN_VAIN = 6
"""Combinations that are planned in a row without a better score, before the search ends."""


@dataclass(frozen=True, slots=True)
class Price:
    """What padding and copies are worth.

    Attributes:

    - `max_padding`: padding over elements that is bearable; beyond it, padding comes before everything else.
    - `copy_weight`: padded elements that are as bad as one copied element.
    """

    max_padding: float
    copy_weight: float

    def score(self, elements: int, padding: int, copied: int) -> tuple[float, float]:
        """Smaller is better; all arguments in elements."""
        return max(padding - self.max_padding * elements, 0.0), padding + self.copy_weight * copied


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
    low = elements // num_shards
    candidates = sorted(
        ((_hoped(counts, choice, num_shards, alignment, price), i, choice) for i, choice in enumerate(_choices(counts, low))),
        key=lambda candidate: candidate[:2],
    )
    # Choices that differ only in tensors shorter than a shard come out alike: one of each sort goes first.
    seen: set[tuple[int, ...]] = set()
    repeated: list[bool] = []
    for _, _, choice in candidates:
        moduli = tuple(cuts_of(*kind, choice[kind]).modulus for kind in counts if math.prod(kind[0]) > low)
        repeated.append(moduli in seen)
        seen.add(moduli)
    candidates = [candidates[i] for i in sorted(range(len(candidates)), key=repeated.__getitem__)]
    in_vain = 0
    for hoped, _, choice in candidates:
        if hoped >= best_score:
            continue
        if in_vain == _MOST_IN_VAIN:
            break
        in_vain += 1
        storages: list[Storage] = [choice[spec.shape, spec.block] for spec in specs]
        shard_size, planned = plan(storages)
        score = price.score(elements, shard_size * num_shards - elements, _copied(counts, choice))
        if score < best_score:
            best_score, best, in_vain = score, (storages, planned), 0
    assert best is not None
    return best


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
    return price.score(elements, shard_size * num_shards - elements, _copied(counts, choice))


def _copied(counts: Mapping[Kind, int], choice: Choice) -> int:
    """Elements in tiled storage."""
    return sum(math.prod(kind[0]) * count for kind, count in counts.items() if choice[kind] == "tiled")


def _choices(counts: Mapping[Kind, int], low: int) -> Iterator[Choice]:
    """Combinations that are worth a look, without copies first; the very first is all row-major."""
    row_major: Choice = dict.fromkeys(counts, "row_major")
    yield row_major
    free = [kind for kind in counts if len(storage_choices(*kind)) > 1 and math.prod(kind[0])]
    free.sort(key=lambda kind: math.prod(kind[0]) * counts[kind])
    for mask in product((False, True), repeat=min(len(free), _MOST_MASKS)):
        tiled: Choice = {kind: "tiled" for kind, is_tiled in zip(free, mask, strict=False) if is_tiled}
        rest = [kind for kind in free if kind not in tiled]
        for orientation in _orientations(rest, low):
            yield {**row_major, **tiled, **orientation}
    for split in range(_MOST_MASKS + 1, len(free) + 1):
        tiled = {kind: "tiled" for kind in free[:split]}
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
