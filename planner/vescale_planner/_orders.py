"""Orders: in which sequence the slots lie in the buffer.

In come the slots of a group as `Cuts`; out goes an order, as indices, that fits into shards of a given size. Three
named orders are those of arXiv 2602.22437 (model order, by block, by shape), one more is by element count. The search
is ours:

- Slots with equal cuts are interchangeable, so an order is a sequence of *kinds*.
- For few kinds and small counts it is exact: a dynamic programme over "how many of each kind are placed" keeps the
  smallest cursor, which is enough because an earlier cursor never hurts what follows.
- For many it is best fit: take the kind that wastes least before its start and, among those that waste nothing, the one
  with the largest blocks, so that what fits anywhere is kept for the gaps.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from ._cuts import Cuts, first_start
from ._sizes import Budget
from ._specs import TensorSpec

Order = Literal["default", "block", "shape", "size", "search"]
"""How the order of the slots is found."""

_MOST_STATES = 6000
"""Counts of placed kinds up to which the search is exact."""

_KEYS: Mapping[str, Callable[[TensorSpec, Cuts], tuple[int, ...]]] = {
    "default": lambda spec, cuts: (),
    "block": lambda spec, cuts: (-cuts.granularity,),
    "shape": lambda spec, cuts: tuple(-dim for dim in spec.shape),
    "size": lambda spec, cuts: (-cuts.size,),
}

NAMED_ORDERS = tuple(_KEYS)
"""The orders that need no search."""


def named_order(name: str, specs: Sequence[TensorSpec], slots: Sequence[Cuts]) -> list[int]:
    """Indices of the tensors in one of the named orders; ties stay in model order."""
    key = _KEYS[name]
    return sorted(range(len(specs)), key=lambda i: key(specs[i], slots[i]))


class OrderSearch:
    """Looks for any order of the slots that fits. `fits(shard_size)` is the question that `smallest_size` asks.

    Attributes:

    - `exact`: whether an answer "none" is a proof, as long as the budget lasts.
    """

    def __init__(self, slots: Sequence[Cuts], num_shards: int, budget: Budget) -> None:
        members: dict[Cuts, list[int]] = {}
        for i, cuts in enumerate(slots):
            members.setdefault(cuts, []).append(i)
        # Large blocks first: of equally good choices the first is taken.
        self._kinds = sorted(members, key=lambda cuts: (-cuts.modulus, -cuts.size))
        self._members = [members[cuts] for cuts in self._kinds]
        self._num_shards = num_shards
        self._budget = budget
        self._states = 1
        for group in self._members:
            self._states *= len(group) + 1
        self.exact = self._states <= _MOST_STATES
        self._price = self._states * len(self._kinds) // 2

    def fits(self, shard_size: int) -> list[int] | None:
        """An order that ends within the buffer, as indices of slots; None when none was found."""
        limit = shard_size * self._num_shards
        sequence = self._exact(shard_size, limit) if self.exact else self._best_fit(shard_size, limit)
        if sequence is None:
            return None
        queues = [iter(group) for group in self._members]
        return [next(queues[kind]) for kind in sequence]

    def can_prove(self, questions: int) -> bool:
        """Whether the answers to so many questions will be proofs: an exact search, and a budget that lasts."""
        return self.exact and questions * self._price < self._budget.left

    def _exact(self, shard_size: int, limit: int) -> list[int] | None:
        """The order with the smallest end, as kinds, by dynamic programming over counts."""
        if not self._budget.spend(self._price):
            return None
        kinds = [(c.size, c.granularity, c.period) for c in self._kinds]
        counts = [len(group) for group in self._members]
        strides = [1]
        for count in counts:
            strides.append(strides[-1] * (count + 1))
        ends = [limit + 1] * self._states
        came = [-1] * self._states
        ends[0] = 0
        for state in range(self._states):
            cursor = ends[state]
            if cursor > limit:
                continue
            for kind, (size, granularity, period) in enumerate(kinds):
                if state // strides[kind] % (counts[kind] + 1) == counts[kind]:
                    continue
                start = first_start(cursor, size, granularity, period, shard_size)
                after = state + strides[kind]
                if start is not None and start + size < ends[after]:
                    ends[after] = start + size
                    came[after] = kind
        if ends[-1] > limit:
            return None
        sequence: list[int] = []
        state = self._states - 1
        while state:
            sequence.append(came[state])
            state -= strides[came[state]]
        return sequence[::-1]

    def _best_fit(self, shard_size: int, limit: int) -> list[int] | None:
        """An order, as kinds, that always takes what wastes least."""
        kinds = [(c.size, c.granularity, c.period) for c in self._kinds]
        left = [len(group) for group in self._members]
        sequence: list[int] = []
        cursor = 0
        remaining = sum(size * count for (size, _, _), count in zip(kinds, left, strict=True))
        for _ in range(sum(left)):
            best, best_start = -1, limit
            for kind, (size, granularity, period) in enumerate(kinds):
                if not left[kind]:
                    continue
                start = first_start(cursor, size, granularity, period, shard_size)
                if start is not None and start < best_start:
                    best, best_start = kind, start
                    if start == cursor:
                        break
            if best < 0 or best_start + remaining > limit or not self._budget.spend(len(kinds)):
                return None
            left[best] -= 1
            remaining -= kinds[best][0]
            cursor = best_start + kinds[best][0]
            sequence.append(best)
        return sequence
