"""What every plan must be: properties over drawn groups, and oracles over small ones."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks import oracle
from tests.planner import strategies
from tests.planner.blocks import assert_blocks_whole
from vescale_planner import Elements, Rows, TensorSpec, Tile, plan_group

# beartype would draw random numbers inside hypothesis' strategies, and slow the oracles down.
pytestmark = pytest.mark.unchecked_annotations


def group_of(sizes: list[tuple[int, int]]) -> list[TensorSpec]:
    return [TensorSpec(f"t{i}", (size,), Elements(unit)) for i, (size, unit) in enumerate(sizes)]


@settings(max_examples=150, deadline=None)
@given(strategies.groups(), st.integers(1, 12), st.integers(1, 5))
def test_every_plan_keeps_the_constraints(group: list[TensorSpec], num_shards: int, alignment: int) -> None:
    plan = plan_group(group, num_shards, alignment)
    plan.check()
    assert_blocks_whole(plan)
    assert sorted(plan.slots) == sorted(spec.name for spec in group)
    assert plan.shard_size % alignment == 0
    assert (plan.shard_size == 0) == (sum(spec.size for spec in group) == 0)
    assert plan.bound.shard_size <= plan.shard_size


@settings(max_examples=40, deadline=None)
@given(strategies.groups(4), st.integers(1, 5000))
def test_many_shards(group: list[TensorSpec], num_shards: int) -> None:
    plan = plan_group(group, num_shards, 8)
    assert_blocks_whole(plan)


@settings(max_examples=40, deadline=None)
@given(strategies.groups(), st.integers(1, 9))
def test_equal_requests_get_equal_plans(group: list[TensorSpec], num_shards: int) -> None:
    first, second = plan_group(group, num_shards), plan_group(list(group), num_shards)
    assert first == second
    assert hash(first) == hash(second)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 24), st.integers(1, 7)), min_size=1, max_size=6),
    st.integers(1, 6),
    st.integers(1, 3),
)
def test_fixed_order_is_optimal(sizes: list[tuple[int, int]], num_shards: int, alignment: int) -> None:
    plan = plan_group(group_of(sizes), num_shards, alignment, order="default")
    slots = [slot.cuts for slot in plan.slots.values()]
    assert plan.shard_size == oracle.optimum(slots, num_shards, alignment)
    assert plan.bound.shard_size <= plan.shard_size


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 20), st.integers(1, 6)), min_size=1, max_size=5), st.integers(1, 6))
def test_free_order_is_near_the_optimum(sizes: list[tuple[int, int]], num_shards: int) -> None:
    plan = plan_group(group_of(sizes), num_shards)
    best = oracle.best_of_all_orders([slot.cuts for slot in plan.slots.values()], num_shards)
    assert plan.bound.shard_size <= best <= plan.shard_size <= 1.25 * best


def test_earliest_start_is_exact() -> None:
    draw = random.Random(3)
    for _ in range(60):
        group = [draw.choice(PERIODIC) for _ in range(draw.randint(1, 4))]
        slots = [TensorSpec(str(i), shape, block) for i, (shape, block) in enumerate(group)]
        cuts = [slot.cuts for slot in plan_group(slots, 1, order="default").slots.values()]
        num_shards, shard_size = draw.randint(1, 6), draw.randint(1, 40)
        every = oracle.fits(cuts, shard_size, num_shards)
        assert every == oracle.fits_earliest(cuts, shard_size, num_shards)


PERIODIC = [((3, 5, 2), Tile(2, 2)), ((2, 7, 1), Tile(3, 1)), ((12,), Elements(5)), ((5, 3), Rows(2))]
