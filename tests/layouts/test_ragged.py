"""RaggedShard: every element on exactly one device, no block cut, and counts that are checked."""

from itertools import pairwise

import pytest
from hypothesis import given, settings

from tests.layouts import drawn
from vescale_layouts import RaggedShard
from vescale_planner import Elements, GroupPlan, Rows, Slab, TensorSpec, Tile, WholeTensor, plan_group

# beartype would draw random numbers inside hypothesis' strategies.
pytestmark = pytest.mark.unchecked_annotations


def placements(plan: GroupPlan) -> dict[str, RaggedShard]:
    return {name: RaggedShard.from_slot(slot, plan.num_shards, plan.shard_size) for name, slot in plan.slots.items()}


@settings(max_examples=150)
@given(drawn.plans())
def test_a_device_holds_the_elements_that_the_plan_puts_on_its_shard(plan: GroupPlan) -> None:
    found = placements(plan)
    for device in range(plan.num_shards):
        held = {piece.name: range(piece.start, piece.stop) for piece in plan.pieces(device)}
        for name, placement in found.items():
            assert list(placement.elements(device)) == list(held.get(name, range(0))), (name, device)


@settings(max_examples=100)
@given(drawn.plans())
def test_every_element_has_one_owner_which_holds_it(plan: GroupPlan) -> None:
    for placement in placements(plan).values():
        owners = [placement.owner(element) for element in range(placement.size)]
        held = [device for device in range(plan.num_shards) for _ in placement.elements(device)]
        assert owners == held


@settings(max_examples=100)
@given(drawn.plans())
def test_devices_hold_contiguous_runs_in_order(plan: GroupPlan) -> None:
    for placement in placements(plan).values():
        runs = [run for device in range(plan.num_shards) if (run := placement.elements(device))]
        assert all(before.stop == after.start for before, after in pairwise(runs))


@pytest.mark.parametrize(
    ("block", "granularity", "units"),
    [
        (Elements(1), 1, (12, 12, 11)),
        (Rows(1), 5, (3, 3, 1)),
        (Rows(3), 15, (1, 1, 1)),
        (WholeTensor(), 35, (1, 0, 0)),
    ],
)
def test_counts_are_in_blocks(block: Elements | Rows | WholeTensor, granularity: int, units: tuple[int, ...]) -> None:
    plan = plan_group([TensorSpec("w", (7, 5), block)], num_shards=3)
    placement = placements(plan)["w"]
    assert placement.granularity == granularity
    assert sum(placement.units) == placement.num_blocks == -(-35 // granularity)
    assert placement.units == units


def test_blocks_that_start_afresh_in_every_matrix_are_counted() -> None:
    # Two matrices of 3 rows in tiles of 2 rows: 2 + 1 + 2 + 1 rows, not three blocks of 2.
    plan = plan_group([TensorSpec("w", (2, 3, 4), Tile(2, 4))], num_shards=4)
    placement = placements(plan)["w"]
    assert [len(placement.elements(device)) for device in range(4)] == [
        sum(piece.stop - piece.start for piece in plan.pieces(device)) for device in range(4)
    ]


def test_devices_may_hold_nothing() -> None:
    placement = RaggedShard(shape=(2, 3), granularity=3, units=(0, 2, 0))
    assert [len(placement.elements(k)) for k in range(3)] == [0, 6, 0]
    assert {placement.owner(k) for k in range(6)} == {1}


def test_a_short_last_block_counts_as_one() -> None:
    placement = RaggedShard(shape=(7,), granularity=4, units=(1, 1))
    assert [list(placement.elements(k)) for k in range(2)] == [[0, 1, 2, 3], [4, 5, 6]]


@pytest.mark.parametrize("shape", [(0,), (3, 0)])
def test_an_empty_tensor_lies_nowhere(shape: tuple[int, ...]) -> None:
    placement = RaggedShard(shape=shape, granularity=1, units=(0, 0))
    assert placement.num_blocks == 0
    assert not placement.elements(0)
    assert not placement.elements(1)


def test_a_scalar_lies_on_one_device() -> None:
    plan = plan_group([TensorSpec("s", ())], num_shards=5)
    assert sorted(placements(plan)["s"].units) == [0, 0, 0, 0, 1]


def test_it_prints_the_devices_that_hold_something() -> None:
    placement = RaggedShard(shape=(7, 5), granularity=5, units=(3, 0, 4))
    assert str(placement) == "RaggedShard(shape (7, 5), blocks of 5 elements; device: blocks {0: 3, 2: 4})"


@pytest.mark.parametrize(
    ("shape", "granularity", "units", "message"),
    [
        ((4,), 0, (4,), "RaggedShard: got granularity 0; want at least one element a block"),
        ((4,), 1, (), "RaggedShard: got units (); want a count of at least 0 for every device"),
        ((4,), 1, (5, -1), "RaggedShard: got units (5, -1); want a count of at least 0 for every device"),
        (
            (4, 3),
            3,
            (1, 2),
            "RaggedShard: got units (1, 2), in all 3; want 4, the blocks of 3 elements in a tensor of shape (4, 3); "
            "change the counts or the granularity",
        ),
    ],
)
def test_counts_that_cannot_be_are_refused(
    shape: tuple[int, ...], granularity: int, units: tuple[int, ...], message: str
) -> None:
    with pytest.raises(ValueError) as raised:
        RaggedShard(shape, granularity, units)
    assert str(raised.value) == message


def test_elements_and_devices_out_of_range_are_refused() -> None:
    placement = RaggedShard(shape=(4,), granularity=2, units=(1, 1))
    with pytest.raises(IndexError) as raised:
        placement.elements(2)
    assert str(raised.value) == "RaggedShard: got device 2; want 0 to 1"
    with pytest.raises(IndexError) as raised:
        placement.owner(4)
    assert str(raised.value) == "RaggedShard: got element 4; want 0 to 3, shape (4,)"


def test_whole_experts_are_never_cut() -> None:
    plan = plan_group([TensorSpec("experts", (5, 2, 3), Slab(1))], num_shards=3)
    placement = placements(plan)["experts"]
    assert all(len(placement.elements(k)) % 6 == 0 for k in range(3))
