"""The certificate: each argument by an example, and that it never exceeds the optimum."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks import oracle
from vescale_planner import Cuts, LowerBound
from vescale_planner._bound import lower_bound

pytestmark = pytest.mark.unchecked_annotations


def bound_of(slots: list[Cuts], num_shards: int, alignment: int = 1) -> LowerBound:
    return lower_bound(Counter(slots), num_shards, alignment)


@pytest.mark.parametrize(
    ("slots", "num_shards", "alignment", "size", "reason"),
    [
        ([], 4, 8, 0, "no elements"),
        ([(10, 1)], 4, 1, 3, "total size"),
        ([(10, 1)], 4, 8, 8, "total size"),
        ([(1, 1), (9, 9)], 4, 1, 9, "largest block"),
        ([(5, 5)] * 5, 4, 1, 10, "2 large blocks on one shard"),
        ([(4, 4)] * 5, 2, 1, 12, "3 large blocks on one shard"),
        ([(700, 7)], 9, 1, 84, "divisibility"),
        ([(700, 7), (500, 5)], 100, 1, 35, "divisibility"),
    ],
)
def test_arguments(slots: list[tuple[int, int]], num_shards: int, alignment: int, size: int, reason: str) -> None:
    bound = bound_of([Cuts.uniform(*slot) for slot in slots], num_shards, alignment)
    assert (bound.shard_size, bound.reason) == (size, reason)


periodic = st.tuples(st.integers(1, 3), st.integers(1, 5), st.integers(1, 8)).map(
    lambda drawn: Cuts.periodic(drawn[0] * drawn[2], drawn[1], drawn[2])
)
uniform = st.tuples(st.integers(1, 20), st.integers(1, 7)).map(lambda drawn: Cuts.uniform(*drawn))


@settings(max_examples=120)
@given(st.lists(st.one_of(periodic, uniform), min_size=1, max_size=4), st.integers(1, 6))
def test_never_above_the_optimum(slots: list[Cuts], num_shards: int) -> None:
    assert bound_of(slots, num_shards).shard_size <= oracle.best_of_all_orders(slots, num_shards)


def test_large_slots_are_counted_together() -> None:
    """16 rows of 2880 and of 4096: their LCM is reached at once, not by small steps."""
    slots = [Cuts.uniform(10**9, 16 * 2880), Cuts.uniform(10**9, 16 * 4096)]
    assert bound_of(slots, 10_000).shard_size == 16 * 2880 * 64
