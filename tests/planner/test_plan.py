"""GroupPlan as a value: numbers, pieces, gaps, equality, hash, pickling, the table, and the proof."""

import copy
import pickle
from dataclasses import FrozenInstanceError, replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.planner import strategies
from vescale_planner import Elements, GroupPlan, Piece, Rows, Slot, TensorSpec, WholeTensor, plan_group

pytestmark = pytest.mark.unchecked_annotations


def small_plan() -> GroupPlan:
    specs = [
        TensorSpec("embedding", (6, 4), Rows(2)),
        TensorSpec("empty", (0, 4)),
        TensorSpec("kernel", (4, 5), Rows()),
        TensorSpec("bias", (5,)),
    ]
    return plan_group(specs, 4, alignment=2, order="default")


def test_numbers() -> None:
    plan = small_plan()
    assert (plan.num_shards, plan.alignment, plan.shard_size, plan.buffer_size) == (4, 2, 16, 64)
    assert (plan.tensor_size, plan.padding, plan.padding_ratio) == (49, 15, 15 / 49)
    assert [(slot.name, slot.offset, slot.size, slot.stop) for slot in plan.slots.values()] == [
        ("embedding", 0, 24, 24),
        ("empty", 24, 0, 24),
        ("kernel", 27, 20, 47),
        ("bias", 47, 5, 52),
    ]
    assert plan.gaps == ((24, 27), (52, 64))
    assert plan.lower_bound_ratio == 1.0


def test_pieces() -> None:
    plan = small_plan()
    assert plan.pieces(0) == (Piece("embedding", 0, 16, 0),)
    assert plan.pieces(1) == (Piece("embedding", 16, 24, 0), Piece("kernel", 0, 5, 11))
    assert plan.pieces(2) == (Piece("kernel", 5, 20, 0), Piece("bias", 0, 1, 15))
    assert plan.pieces(3) == (Piece("bias", 1, 5, 0),)
    with pytest.raises(IndexError, match="shard 4 of a plan for 4 shards"):
        plan.pieces(4)


@settings(max_examples=60)
@given(strategies.groups(), st.integers(1, 9))
def test_pieces_and_gaps_tile_the_buffer(group: list[TensorSpec], num_shards: int) -> None:
    plan = plan_group(group, num_shards)
    covered = [
        (shard * plan.shard_size + piece.offset, shard * plan.shard_size + piece.offset + piece.stop - piece.start)
        for shard in range(num_shards)
        for piece in plan.pieces(shard)
    ]
    runs = sorted([*covered, *plan.gaps])
    assert sum(stop - start for start, stop in runs) == plan.buffer_size
    assert all(left[1] == right[0] for left, right in pairwise(runs))
    for slot in plan.slots.values():
        parts = [piece for shard in range(num_shards) for piece in plan.pieces(shard) if piece.name == slot.name]
        assert sum(part.stop - part.start for part in parts) == slot.size


def test_equality_hash_and_copies() -> None:
    plan, again = small_plan(), small_plan()
    assert plan is not again
    assert plan == again
    assert len({plan, again}) == 1
    assert plan != replace(plan, num_shards=5)
    assert plan != "plan"
    assert pickle.loads(pickle.dumps(plan)) == plan
    assert copy.deepcopy(plan) == plan
    assert plan.slots["kernel"] == again.slots["kernel"]


def test_a_plan_cannot_be_changed() -> None:
    plan = small_plan()
    with pytest.raises(FrozenInstanceError):
        plan.shard_size = 3  # type: ignore[misc]
    with pytest.raises(TypeError):
        plan.slots["kernel"] = plan.slots["bias"]  # type: ignore[index]


def test_table() -> None:
    assert str(small_plan()) == (
        "4 shards x 16 elements = 64, of which 15 padding (30.61%); order: default; "
        "at most 0.00% above the optimum (divisibility)\n"
        "tensor     shape   block       storage    offset  size  shards  padding after\n"
        "embedding  (6, 4)  rows:2      row_major       0    24  0-1                 0\n"
        "empty      (0, 4)  elements:1  row_major      24     0  -                   3\n"
        "kernel     (4, 5)  rows:1      row_major      27    20  1-2                 0\n"
        "bias       (5,)    elements:1  row_major      47     5  2-3                12"
    )


def test_a_long_table_leaves_out_its_middle() -> None:
    plan = plan_group([TensorSpec(f"t{i}", (3,)) for i in range(100)], 4)
    lines = str(plan).splitlines()
    assert len(lines) == 63
    assert lines[32].strip() == "... 40 more ..."


def test_check_finds_every_violation() -> None:
    cut = Slot(TensorSpec("cut", (6,), Elements(3)), 2, 6)
    overlapping = Slot(TensorSpec("overlapping", (4,), WholeTensor()), 6, 4)
    short = Slot(TensorSpec("short", (4,)), 10, 3)
    plan = GroupPlan(2, 1, 6, (cut, overlapping, short))
    with pytest.raises(ValueError, match="4 faults") as caught:
        plan.check()
    assert str(caught.value) == (
        "GroupPlan.check: 4 faults\n"
        "  cut: got the end of shard 0 at element 4 of the slot; want a cut between blocks of at most 3 elements; "
        "plan the group again\n"
        "  overlapping: got offset 6; want a start at or behind 8, where the slot before it ends; "
        "plan the group again\n"
        "  short: got 3 elements; want 4; plan the group again\n"
        "  short: got an end at 13; want an end within the buffer's 12 elements; "
        "plan the group again"
    )


def test_a_plan_refuses_impossible_numbers() -> None:
    slot = Slot(TensorSpec("a", (2,)), 0, 2)
    with pytest.raises(ValueError, match="2 faults") as caught:
        GroupPlan(2, 4, 6, (slot, slot))
    assert str(caught.value) == (
        "GroupPlan: 2 faults\n"
        "  slots: got a name twice; want unique names; rename one of the tensors\n"
        "  shard_size: got 2 shards of 6, alignment 4; want whole aligned shards; make the plan with plan_group"
    )
