"""Storage orders: the mapping from index to position, and the cuts that follow from it."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.planner.blocks import assert_blocks_whole, block_of, indices
from vescale_planner import Elements, GroupPlan, Rows, Slab, Slot, Storage, TensorSpec, Tile, TileOrder, WholeTensor
from vescale_planner._storage import cuts_of, position_of, storage_choices

pytestmark = pytest.mark.unchecked_annotations

shapes = st.one_of(
    st.tuples(st.integers(1, 3), st.integers(1, 9), st.integers(1, 9)),
    st.tuples(st.integers(1, 12), st.integers(1, 12)),
)
tiles = st.builds(Tile, st.integers(1, 6), st.integers(1, 6))
storages: st.SearchStrategy[Storage] = st.sampled_from(["row_major", "transposed", "tiled"])


@settings(max_examples=200)
@given(shapes, tiles, storages)
@example((1, 7, 7), Tile(5, 5), "tiled")
@example((2, 5, 5), Tile(3, 3), "tiled")
def test_positions_are_one_to_one(shape: tuple[int, ...], tile: Tile, storage: Storage) -> None:
    size = cuts_of(shape, tile, storage).size
    positions = {position_of(shape, tile, storage, index) for index in indices(shape)}
    assert len(positions) == len(indices(shape)) <= size
    assert min(positions) == 0
    assert max(positions) < size
    if storage != "tiled":
        assert max(positions) + 1 == size


@settings(max_examples=200)
@given(shapes, tiles, storages)
def test_no_cut_goes_through_a_block(shape: tuple[int, ...], tile: Tile, storage: Storage) -> None:
    cuts = cuts_of(shape, tile, storage)
    spans: dict[object, tuple[int, int]] = {}
    for index in indices(shape):
        block, position = block_of(TensorSpec("t", shape, tile), index), position_of(shape, tile, storage, index)
        first, last = spans.get(block, (position, position))
        spans[block] = (min(first, position), max(last, position))
    for cut in range(1, cuts.size):
        if cuts.allows(cut):
            assert not any(first < cut <= last for first, last in spans.values())


@settings(max_examples=60)
@given(shapes, tiles)
def test_a_tile_in_tiled_storage_is_one_run(shape: tuple[int, ...], tile: Tile) -> None:
    runs: dict[object, list[int]] = {}
    for index in indices(shape):
        block = block_of(TensorSpec("t", shape, tile), index)
        runs.setdefault(block, []).append(position_of(shape, tile, "tiled", index))
    for positions in runs.values():
        assert positions == list(range(positions[0], positions[0] + len(positions)))


def test_the_tiled_order_of_a_small_matrix() -> None:
    order = TileOrder.of((1, 5, 5), 2, 2)
    assert (order.bin_size, order.full, order.edge) == (4, (2, 2), (1, 1))
    drawn = [[order.position(0, row, col) for col in range(5)] for row in range(5)]
    assert drawn == [
        [0, 1, 4, 5, 16],
        [2, 3, 6, 7, 17],
        [8, 9, 12, 13, 18],
        [10, 11, 14, 15, 19],
        [20, 21, 22, 23, 24],
    ]
    assert (order.matrix_size, order.size) == (28, 28)


def test_edge_tiles_share_bins() -> None:
    """GPT-OSS: 2880 is 22.5 tiles of 128, and the edge costs 0.15 %."""
    order = TileOrder.of((128, 2880, 2880), 128, 128)
    assert (order.right_bins, order.bottom_bins) == (11, 11)
    assert order.size / (128 * 2880 * 2880) - 1 == pytest.approx(0.00148, abs=1e-5)


@pytest.mark.parametrize(
    ("shape", "block", "granularity", "period"),
    [
        ((8, 6), Elements(5), 5, 48),
        ((8, 6), Rows(2), 12, 48),
        ((2, 3, 4), Rows(2), 8, 24),
        ((7,), Rows(2), 7, 7),
        ((4, 3, 5), Slab(1), 15, 60),
        ((4, 3, 5), Slab(2, 2), 10, 60),
        ((4, 3, 5), Slab(0), 60, 60),
        ((4, 3, 5), WholeTensor(), 60, 60),
        ((2, 6, 4), Tile(2, 2), 8, 48),
        ((2, 5, 4), Tile(2, 2), 8, 20),
        ((2, 5, 4), Tile(1, 2), 2, 40),
        ((2, 5, 5), Tile(1, 2), 2, 5),
        ((5,), Tile(8, 2), 2, 5),
        ((), Tile(8, 2), 1, 1),
        ((0, 3), Rows(2), 1, 1),
    ],
)
def test_row_major_cuts(shape: tuple[int, ...], block: object, granularity: int, period: int) -> None:
    cuts = cuts_of(shape, block, "row_major")  # type: ignore[arg-type]
    assert (cuts.granularity, cuts.period) == (granularity, period)
    assert TensorSpec("t", shape, block).granularity == granularity  # type: ignore[arg-type]


def test_only_two_dimensional_blocks_have_a_choice() -> None:
    assert storage_choices((8, 8), Rows(2)) == ("row_major",)
    assert storage_choices((8,), Tile(2, 2)) == ("row_major",)
    assert storage_choices((8, 8), Tile(2, 2)) == ("row_major", "transposed", "tiled")


def test_an_index_outside_the_tensor() -> None:
    with pytest.raises(IndexError, match=r"index \(2, 0\) lies outside shape \(2, 3\)"):
        Slot(TensorSpec("t", (2, 3)), 0, 6).position((2, 0))


def test_a_plan_with_every_storage_order() -> None:
    tensors = [("a", (4, 6), "transposed"), ("b", (5, 5), "tiled"), ("c", (3, 4), "row_major")]
    slots: list[Slot] = []
    cursor = 0
    for name, shape, storage in tensors:
        size = cuts_of(shape, Tile(2, 2), storage).size  # type: ignore[arg-type]
        slots.append(Slot(TensorSpec(name, shape, Tile(2, 2)), cursor, size, storage))  # type: ignore[arg-type]
        cursor += size
    assert [slot.tile_order for slot in slots] == [None, TileOrder(1, 5, 5, 2, 2), None]
    plan = GroupPlan(1, 1, cursor, tuple(slots))
    plan.check()
    assert_blocks_whole(plan)
