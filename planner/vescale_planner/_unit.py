"""plan_unit: the tensors of one unit as one group, or as several where that pays.

In come the tensors that are gathered together; out come one or more plans. One group is one collective, so one is best
as long as it packs well. But a few tensors with other row lengths can spoil a large group: the attention of a GPT-OSS
layer is 0.8 % of its elements and drives the padding of the whole from 0.7 % to 88 % (16 rows, 1024 shards). In a
group of its own it harms nobody.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from ._faults import Faults
from ._freedom import Price, hope
from ._group import StorageChoice, plan_group
from ._orders import Order
from ._plan import GroupPlan
from ._specs import TensorSpec

Score = tuple[float, float]
Split = tuple[list[TensorSpec], list[TensorSpec]]

_WORTH_A_COLLECTIVE = 0.002
"""What one more group has to save: padded plus copied elements over the elements of the unit."""

_MOST_SPLITS = 8
"""Kinds, by what they weigh together, behind which a group is parted."""

_MOST_TRIED = 4
"""Splits that are planned for one more group, of those that promise the most."""


def plan_unit(
    specs: Iterable[TensorSpec],
    num_shards: int,
    alignment: int = 1,
    *,
    most_groups: int = 2,
    order: Order = "search",
    search_seconds: float = 0.05,
    storage: StorageChoice = "row_major",
    max_padding: float = 0.01,
    copy_weight: float = 1.0,
) -> tuple[GroupPlan, ...]:
    """Plans the tensors of one unit in as few groups as is sensible.

    A further group is made only when it brings the unit's padding below `max_padding`, or saves at least 0.2 % of the
    unit's elements in padding and copies. Tensors of equal shape and block stay together.

    Arguments:

    - `specs`, `num_shards`, `alignment`: as for `plan_group`.
    - `most_groups`: how many groups, and thus collectives, there may be.
    - `order`, `search_seconds`, `storage`: as for `plan_group`, for each group.
    - `max_padding`, `copy_weight`: as for `plan_group`, but for the unit as a whole and for row-major storage too.

    Raises `ValueError` or `TypeError` with the faults of the request, as `plan_group` does.
    """
    faults = Faults("plan_unit")
    if most_groups < 1:
        faults.add("most_groups", got=str(most_groups), want="at least 1", change="pass most_groups=1 or more")
    faults.raise_if_any()
    specs = tuple(specs)
    elements = sum(spec.size for spec in specs)
    price = Price(max_padding * elements, copy_weight)

    def planned(group: Sequence[TensorSpec], bearable: float) -> GroupPlan:
        return plan_group(
            group,
            num_shards,
            alignment,
            order=order,
            search_seconds=search_seconds,
            storage=storage,
            max_padding=bearable,
            copy_weight=copy_weight,
        )

    def score(plans: Sequence[GroupPlan]) -> Score:
        return price.score(sum(plan.padding for plan in plans), sum(plan.copied for plan in plans))

    def hoped(group: Sequence[TensorSpec]) -> Score:
        return hope(group, num_shards, alignment, price, storage == "free")

    best = (planned(specs, max_padding),)
    worth = _WORTH_A_COLLECTIVE * elements
    while len(best) < most_groups and score(best) >= (0.0, worth):
        first, last = best[:-1], best[-1]
        tried: list[tuple[GroupPlan, ...]] = []
        splits = _splits([spec for spec in specs if spec.name in last.slots])
        for large, small in _promising(splits, hoped, price.score(last.padding, last.copied)):
            head = (*first, planned(large, max_padding))
            # The small group may waste what the large one left over.
            left = max(max_padding * elements - sum(plan.padding for plan in head), 0.0)
            tried.append((*head, planned(small, left / max(sum(spec.size for spec in small), 1))))
        candidate = min(tried, key=score, default=best)
        old, new = score(best), score(candidate)
        if new >= old or (new[0] == old[0] and old[1] - new[1] < worth):
            break
        best = candidate
    return best


def _promising(splits: Sequence[Split], hoped: Callable[[Sequence[TensorSpec]], Score], to_beat: Score) -> list[Split]:
    """The splits that may beat a score, best hopes first."""
    ranked: list[tuple[Score, int]] = []
    for i, split in enumerate(splits):
        (large_excess, large_cost), (small_excess, small_cost) = map(hoped, split)
        ranked.append(((large_excess + small_excess, large_cost + small_cost), i))
    return [splits[i] for score, i in sorted(ranked)[:_MOST_TRIED] if score < to_beat]


def _splits(specs: Sequence[TensorSpec]) -> list[Split]:
    """Ways to part a group in two: the heaviest kinds from all lighter ones, or one kind from all others."""
    weights: Counter[tuple[object, object]] = Counter()
    for spec in specs:
        weights[spec.shape, spec.block] += spec.size
    kinds = [kind for kind, _ in weights.most_common(_MOST_SPLITS + 1)]
    # The last kind alone against all others is among the first of these already.
    parted = [set(kinds[:count]) for count in range(1, len(kinds))]
    parted += [set(weights) - {kind} for kind in kinds[1:-1]]
    return [
        (
            [spec for spec in specs if (spec.shape, spec.block) in large],
            [spec for spec in specs if (spec.shape, spec.block) not in large],
        )
        for large in parted
        if len(large) < len(weights)
    ]
