"""The baselines reproduce the figures that are known of the systems they stand for."""

import random

import pytest

from benchmarks import baselines
from vescale_jax._model_shapes import Tensor, model_shapes
from vescale_planner import Elements, Rows, TensorSpec, Tile, plan_group

pytestmark = pytest.mark.unchecked_annotations


def shapes_of(model: str, group: str) -> list[tuple[int, ...]]:
    return [shape for _, shape in model_shapes(model).group(group)]


def specs_of(tensors: tuple[Tensor, ...], rows: int) -> list[TensorSpec]:
    return [TensorSpec(name, shape, Rows(rows)) for name, shape in tensors]


def percent(ratio: float) -> float:
    return round(100 * ratio, 2)


@pytest.mark.parametrize(("num_shards", "padding"), [(64, 32.17), (128, 32.17), (256, 32.17), (512, 164.34)])
def test_megatron_pads_fused_experts_by_a_third(num_shards: int, padding: float) -> None:
    assert percent(baselines.megatron(shapes_of("gpt-oss-120b", "layer"), num_shards).padding_ratio) == padding


@pytest.mark.parametrize(("num_shards", "padding"), [(128, 0.0), (256, 99.2)])
def test_fsdp2_doubles_when_experts_are_fewer_than_devices(num_shards: int, padding: float) -> None:
    ratio = baselines.fsdp2(shapes_of("gpt-oss-120b", "layer"), num_shards).padding_ratio
    assert round(100 * ratio, 1) == padding


def test_vescale_on_fused_experts() -> None:
    tensors = model_shapes("gpt-oss-120b").group("experts")
    shapes = [shape for _, shape in tensors]
    granularities = [spec.granularity for spec in specs_of(tensors, 128)]
    assert percent(baselines.vescale(shapes, granularities, 1024, 8).padding_ratio) == 18.48


def test_vescale_on_separate_experts() -> None:
    """DeepSeek-V3 experts at 128 rows: at most 2.54 % for any multiple of 8 up to 512."""
    tensors = model_shapes("deepseek-v3").group("experts")
    worst = max(
        plan_group(specs_of(tensors, 128), num_shards, 8, order="default").padding_ratio
        for num_shards in range(8, 513, 8)
    )
    assert worst <= 0.0254


def test_vescale_is_the_planner_without_the_search() -> None:
    draw = random.Random(11)
    for _ in range(100):
        slots = [(draw.randint(1, 40), draw.randint(1, 9)) for _ in range(draw.randint(1, 6))]
        num_shards = draw.randint(1, 9)
        theirs = baselines.vescale([(size,) for size, _ in slots], [unit for _, unit in slots], num_shards)
        group = [TensorSpec(str(i), (size,), Elements(unit)) for i, (size, unit) in enumerate(slots)]
        assert plan_group(group, num_shards, order="default").padding_ratio <= theirs.padding_ratio + 1e-12


@pytest.mark.parametrize("rule", [baselines.fsdp1, baselines.deepspeed, baselines.fsdp2, baselines.megatron])
def test_others_cut_blocks(rule: object) -> None:
    shapes = shapes_of("gpt-oss-120b", "layer")
    assert rule(shapes, 512).blocks_cut(shapes, 128, 128) > 0  # type: ignore[operator]


def test_cut_tiles_are_counted_one_by_one() -> None:
    draw = random.Random(5)
    for _ in range(50):
        shape = (draw.randint(1, 3), draw.randint(1, 7), draw.randint(1, 7))
        size = shape[0] * shape[1] * shape[2]
        positions = sorted(draw.sample(range(1, size), min(size - 1, 3))) if size > 1 else []
        rows, cols = draw.randint(1, 4), draw.randint(1, 4)
        parts: dict[tuple[int, int, int], set[int]] = {}
        for flat in range(size):
            matrix, row, col = flat // (shape[1] * shape[2]), flat // shape[2] % shape[1], flat % shape[2]
            part = sum(position <= flat for position in positions)
            parts.setdefault((matrix, row // rows, col // cols), set()).add(part)
        expected = sum(len(found) > 1 for found in parts.values())
        assert baselines.Baseline(0.0, (tuple(positions),)).blocks_cut([shape], rows, cols) == expected


def test_ours_cuts_none() -> None:
    tensors = model_shapes("gpt-oss-120b").group("layer")
    plan = plan_group([TensorSpec(name, shape, Tile(128, 128)) for name, shape in tensors], 512, 8)
    cuts = [
        tuple(
            boundary - slot.offset
            for boundary in range((slot.offset // plan.shard_size + 1) * plan.shard_size, slot.stop, plan.shard_size)
        )
        for slot in plan.slots.values()
    ]
    shapes = [slot.shape for slot in plan.slots.values()]
    assert baselines.Baseline(0.0, tuple(cuts)).blocks_cut(shapes, 128, 128) == 0
