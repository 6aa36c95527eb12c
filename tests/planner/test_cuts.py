"""Cuts: the earliest legal start, against trying every start."""

import random

import pytest

from benchmarks import oracle
from vescale_planner import Cuts

pytestmark = pytest.mark.unchecked_annotations


def earliest_by_trying(cuts: Cuts, cursor: int, shard_size: int) -> int | None:
    """Legality repeats with the shard size, so two shards of starts decide."""
    starts = range(cursor, cursor + 2 * shard_size + 1)
    return next((start for start in starts if oracle.legal(cuts, start, shard_size)), None)


@pytest.mark.parametrize("seed", range(4))
def test_the_earliest_start_of_uniform_slots(seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(1500):
        cuts = Cuts.uniform(draw.randint(0, 60), draw.randint(1, 12))
        cursor, shard_size = draw.randint(0, 50), draw.randint(1, 30)
        assert cuts.first_start(cursor, shard_size) == earliest_by_trying(cuts, cursor, shard_size)


@pytest.mark.parametrize("seed", range(4))
def test_the_earliest_start_of_slots_with_periods(seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(1500):
        period = draw.randint(1, 25)
        cuts = Cuts.periodic(period * draw.randint(1, 8), draw.randint(1, 12), period)
        cursor, shard_size = draw.randint(0, 50), draw.randint(1, 120)
        assert cuts.first_start(cursor, shard_size) == earliest_by_trying(cuts, cursor, shard_size)


def test_many_candidates_take_no_time() -> None:
    """Tiles of one column in a matrix of a million: what once took seconds."""
    cuts = Cuts.periodic(1_000_003 * 50, 3, 1_000_003)
    assert cuts.first_start(7, 777_777) is None
    assert cuts.first_start(7, 1_000_003) == 7 + (1_000_003 - 7) % 3


def test_what_counts_as_uniform() -> None:
    assert Cuts.periodic(24, 4, 8) == Cuts.uniform(24, 4)
    assert Cuts.periodic(24, 5, 8) == Cuts(24, 5, 8)
    assert Cuts.periodic(24, 9, 8) == Cuts.uniform(24, 8)
    assert Cuts.uniform(5, 9) == Cuts(5, 5, 5)
    assert Cuts.uniform(0, 9) == Cuts(0, 1, 1)
    assert (Cuts(24, 5, 8).modulus, Cuts.uniform(24, 5).modulus) == (8, 5)
    assert [x for x in range(25) if Cuts(24, 5, 8).allows(x)] == [0, 5, 8, 13, 16, 21, 24]
