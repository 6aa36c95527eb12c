"""Free storage, several groups, advice, caps and small tensors: what shapes a unit."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.planner import strategies
from tests.planner.blocks import assert_blocks_whole
from vescale_planner import (
    Elements,
    Rows,
    TensorSpec,
    Tile,
    WholeTensor,
    advise,
    cap_unit,
    keep_small_whole,
    part_of,
    plan_group,
    plan_unit,
    storage_savings,
)

pytestmark = pytest.mark.unchecked_annotations


def mixed_rows(tile: Tile) -> list[TensorSpec]:
    """Kernels of several row lengths, as in a small transformer layer."""
    shapes = {"query": (96, 80), "output": (80, 96), "up": (4, 80, 160), "down": (4, 160, 80), "norm": (80,)}
    return [TensorSpec(name, shape, tile) for name, shape in shapes.items()]


@settings(max_examples=60)
@given(strategies.groups(5), st.integers(1, 9), st.sampled_from([0.0, 0.05, 1.0]))
def test_free_storage_keeps_the_constraints(group: list[TensorSpec], num_shards: int, max_padding: float) -> None:
    plan = plan_group(group, num_shards, storage="free", max_padding=max_padding)
    plan.check()
    assert_blocks_whole(plan)


@settings(max_examples=40)
@given(strategies.groups(5), st.integers(1, 9))
def test_free_storage_is_never_worse(group: list[TensorSpec], num_shards: int) -> None:
    fixed = plan_group(group, num_shards)
    free = plan_group(group, num_shards, storage="free", max_padding=1e9)
    assert free.padding + free.copied <= fixed.padding


def test_transposing_makes_row_lengths_equal() -> None:
    group = [TensorSpec("up", (4096, 2880), Tile(32, 32)), TensorSpec("down", (2880, 4096), Tile(32, 32))]
    fixed, free = plan_group(group, 128), plan_group(group, 128, storage="free", copy_weight=1e9, max_padding=1.0)
    assert fixed.padding_ratio > 1
    assert (free.padding_ratio, free.copied) == (0.0, 0)
    assert [slot.storage for slot in free.slots.values()].count("transposed") == 1
    assert storage_savings(free) == {
        slot.name: fixed.padding for slot in free.slots.values() if slot.storage == "transposed"
    }


def test_what_is_bearable_decides_between_padding_and_copies() -> None:
    group = mixed_rows(Tile(8, 8))
    thrifty = plan_group(group, 32, storage="free", max_padding=0.02)
    lazy = plan_group(group, 32, storage="free", max_padding=10.0, copy_weight=100.0)
    assert thrifty.padding_ratio <= 0.02
    assert thrifty.copied > 0
    assert lazy.copied == 0
    assert lazy.padding_ratio > thrifty.padding_ratio


def test_a_second_group_heals_a_mixed_unit() -> None:
    group = [TensorSpec("experts", (64, 288, 288), Rows(16)), TensorSpec("output", (288, 400), Rows(16))]
    (one,) = plan_unit(group, 512, 8, most_groups=1)
    first, second = plan_unit(group, 512, 8)
    assert first.padding + second.padding < one.padding / 2
    assert sorted([*first.slots, *second.slots]) == ["experts", "output"]


def test_no_second_group_without_need() -> None:
    assert len(plan_unit([TensorSpec("a", (64, 8), Rows()), TensorSpec("b", (32,))], 4)) == 1
    assert [plan.buffer_size for plan in plan_unit([], 4)] == [0]
    with pytest.raises(ValueError, match="most_groups: got 0; want at least 1; pass most_groups=1 or more"):
        plan_unit([], 4, most_groups=0)


@settings(max_examples=30)
@given(strategies.groups(5), st.integers(1, 9), st.integers(1, 3))
def test_units_hold_every_tensor_once(group: list[TensorSpec], num_shards: int, most_groups: int) -> None:
    plans = plan_unit(group, num_shards, most_groups=most_groups)
    assert 1 <= len(plans) <= most_groups
    assert sorted(name for plan in plans for name in plan.slots) == sorted(spec.name for spec in group)
    for plan in plans:
        assert_blocks_whole(plan)


def test_advice_names_cures_that_were_tried() -> None:
    advice = advise(mixed_rows(Tile(16, 16)), 64, 8)
    assert {cure.cure for cure in advice} >= {"fewer_shards", "free_storage"}
    assert [cure.padding_ratio for cure in advice] == sorted(cure.padding_ratio for cure in advice)
    fewer = next(cure for cure in advice if cure.cure == "fewer_shards")
    assert fewer.text.startswith("shard over ")
    assert fewer.padding_ratio <= 0.03
    assert advise([TensorSpec("a", (64, 8))], 8) == ()


def test_a_cap_cuts_units_in_model_order() -> None:
    specs = [TensorSpec(name, (size,)) for name, size in (("a", 4), ("b", 4), ("c", 20), ("d", 3), ("e", 0), ("f", 5))]
    assert [[spec.name for spec in unit] for unit in cap_unit(specs, 8)] == [["a", "b"], ["c"], ["d", "e", "f"]]
    assert cap_unit([], 8) == ()
    with pytest.raises(ValueError, match="most_elements: got 0; want at least 1"):
        cap_unit(specs, 0)


def test_small_tensors_stay_whole() -> None:
    kernel, norm = TensorSpec("kernel", (8, 8), Rows()), TensorSpec("norm", (8,))
    assert keep_small_whole([kernel, norm], 8) == (kernel, TensorSpec("norm", (8,), WholeTensor()))


@pytest.mark.parametrize(
    ("shape", "block", "dim", "parts", "expected"),
    [
        ((8, 6), Rows(2), 0, 4, TensorSpec("t", (2, 6), Rows(2))),
        ((8, 6), Rows(2), 1, 3, TensorSpec("t", (8, 2), Elements(4))),
        ((8, 6), Elements(3), -1, 3, TensorSpec("t", (8, 2), Elements(6))),
        ((4, 6, 5), Rows(2), 1, 3, TensorSpec("t", (4, 2, 5), Elements(10))),
        ((4, 6, 5), Rows(3), 1, 3, TensorSpec("t", (4, 2, 5), Elements(30))),
        ((4, 6), WholeTensor(), 1, 3, TensorSpec("t", (4, 2), WholeTensor())),
        ((0, 6), Rows(2), 1, 3, TensorSpec("t", (0, 2), Rows(2))),
    ],
)
def test_parts_of_another_axis(
    shape: tuple[int, ...], block: object, dim: int, parts: int, expected: TensorSpec
) -> None:
    part = part_of(TensorSpec("t", shape, block), dim, parts)  # type: ignore[arg-type]
    assert part == expected
    if dim and part.size and not isinstance(part.block, WholeTensor):
        assert part.granularity % math.prod(part.shape[dim:]) == 0


def test_parts_that_do_not_exist() -> None:
    spec = TensorSpec("t", (8, 6))
    with pytest.raises(
        ValueError, match=r"t: got 4 parts of dim 1 of shape .*; want a divisor of 6; shard another dim"
    ):
        part_of(spec, 1, 4)
    with pytest.raises(ValueError, match=r"t: got dim 2 of shape .*; want a dim below 2; pass another dim"):
        part_of(spec, 2, 1)
