"""Measures the planner: optimality, speed, growth, padding, and the baselines beside it.

    python -m benchmarks.planner                      # everything, as a report
    python -m benchmarks.planner --json               # the same as JSON
    python -m benchmarks.planner --only storage       # one part
    python -m benchmarks.planner --images docs/images # the pictures of docs/planner.md as well

Needs no device. Times are those that one core spends on the process, so that a busy machine does not count.
"""

import argparse
import json
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks import baselines, oracle
from vescale_jax._model_shapes import model_shapes
from vescale_planner import Block, Cuts, Elements, GroupPlan, Rows, TensorSpec, Tile, plan_group, plan_unit

Record = dict[str, object]

BIG_MODELS = ("gpt-oss-120b", "deepseek-v3", "llama-3-70b")
EVERY_EIGHT = range(8, 1025, 8)

# Padding in per cent of the paper's algorithm for a number of rows, from our own re-computation, for these numbers of
# shards: what row-major plans must not exceed.
KNOWN_SHARDS = (64, 128, 256, 512, 1024)
KNOWN: dict[tuple[str, str, int], tuple[float, ...]] = {
    ("gpt-oss-120b", "experts", 1): (0.00, 0.01, 0.01, 0.06, 0.15),
    ("gpt-oss-120b", "experts", 16): (0.15, 0.34, 0.71, 0.71, 0.71),
    ("gpt-oss-120b", "experts", 128): (0.71, 0.71, 0.71, 6.63, 18.48),
    ("gpt-oss-120b", "layer", 1): (0.01, 0.02, 0.05, 0.14, 5.74),
    ("gpt-oss-120b", "layer", 16): (0.05, 0.23, 0.60, 1.33, 88.0),
    ("gpt-oss-120b", "layer", 128): (1.33, 2.80, 5.74, 5.74, 111.5),
    ("deepseek-v3", "experts", 128): (0.00, 0.00, 0.00, 0.00, 0.00),
    ("deepseek-v3", "layer", 1): (0.00, 0.02, 0.02, 0.16, 1.04),
    ("deepseek-v3", "layer", 16): (0.02, 0.02, 0.31, 0.31, 11.97),
    ("deepseek-v3", "layer", 128): (0.02, 0.31, 2.64, 2.64, 11.97),
    ("llama-3-70b", "layer", 1): (0.37, 0.37, 1.22, 2.94, 2.94),
    ("llama-3-70b", "layer", 16): (2.94, 9.80, 9.80, 9.80, 9.80),
    ("llama-3-70b", "layer", 128): (9.80, 9.80, 119.6, 339.2, 778.4),
}


def specs_of(model: str, group: str, block: Block) -> list[TensorSpec]:
    """A group of a known model with one block for all tensors."""
    return [TensorSpec(name, shape, block) for name, shape in model_shapes(model).group(group)]


def small_cases() -> Record:
    """Plans of small random groups against exhaustive search."""
    draw = random.Random(7)

    def case(most: int) -> tuple[list[Cuts], int]:
        units = [draw.randint(1, 12) for _ in range(draw.randint(2, most))]
        return [Cuts.uniform(unit * draw.randint(1, 12), unit) for unit in units], draw.randint(2, 12)

    def planned(slots: Sequence[Cuts], num_shards: int, fixed: bool) -> int:
        group = [TensorSpec(str(i), (cuts.size,), Elements(cuts.granularity)) for i, cuts in enumerate(slots)]
        return plan_group(group, num_shards, order="default" if fixed else "search").shard_size

    cases = [case(9) for _ in range(3000)]
    fixed = [planned(slots, n, fixed=True) / oracle.optimum_earliest(slots, n) for slots, n in cases]
    cases = [case(7) for _ in range(400)]
    free = [planned(slots, n, fixed=False) / oracle.best_of_all_orders(slots, n) for slots, n in cases]
    return {
        "fixed_order_cases": len(fixed),
        "fixed_order_optimal_share": sum(ratio == 1 for ratio in fixed) / len(fixed),
        "fixed_order_worst_ratio": max(fixed),
        "free_order_cases": len(free),
        "free_order_mean_ratio": sum(free) / len(free),
        "free_order_worst_ratio": max(free),
    }


def speed() -> Record:
    """Core seconds for all of DeepSeek-V3, identical layers planned once; the best of three."""
    model = model_shapes("deepseek-v3")

    def seconds(num_shards: int, block: Block, storage: str) -> float:
        times: list[float] = []
        for _ in range(3):
            start = time.process_time()
            for unit in model.units:
                group = [TensorSpec(name, shape, block) for name, shape in unit.tensors]
                plan_group(group, num_shards, 8, storage=storage)  # type: ignore[arg-type]
            times.append(time.process_time() - start)
        return min(times)

    record: Record = {}
    for num_shards in (1024, 10240):
        for rows in (1, 16, 128):
            record[f"rows_{rows}_at_{num_shards}"] = seconds(num_shards, Rows(rows), "row_major")
        record[f"tile_32_free_at_{num_shards}"] = seconds(num_shards, Tile(32, 32), "free")
    return record


def plan_seconds(tensors: int, num_shards: int) -> float:
    """Core seconds of one plan of tensors of random sizes."""
    draw = random.Random(tensors)
    rows = [draw.choice((512, 1536, 2048, 7168)) for _ in range(tensors)]
    group = [TensorSpec(str(i), (draw.randint(1, 64) * 16, row), Rows(16)) for i, row in enumerate(rows)]
    start = time.process_time()
    plan_group(group, num_shards, 8)
    return time.process_time() - start


def growth() -> Record:
    """Seconds of one plan over the number of tensors and of shards."""
    tensors = {str(count): plan_seconds(count, 256) for count in (50, 100, 200, 400, 800, 1600, 3200, 6400)}
    shards = {str(count): plan_seconds(800, count) for count in (8, 32, 128, 512, 2048, 8192, 32768, 131072)}
    return {"seconds_over_tensors_at_256_shards": tensors, "seconds_over_shards_with_800_tensors": shards}


def table() -> Record:
    """Row-major padding in per cent, one group for each cell, beside what was known; then with two groups."""
    record: Record = {}
    for (model, group, rows), known in KNOWN.items():
        specs = specs_of(model, group, Rows(rows))
        plans = [plan_group(specs, n, 8) for n in KNOWN_SHARDS]
        ours = [round(100 * plan.padding_ratio, 2) for plan in plans]
        record[f"{model} {group} rows {rows}"] = {
            "known": list(known),
            "one_group": ours,
            "at_most_above_optimum": [round(100 * (plan.lower_bound_ratio - 1), 2) for plan in plans],
            "two_groups": [round(100 * totals(plan_unit(specs, n, 8))[0], 2) for n in KNOWN_SHARDS],
            "worse_cells": sum(mine > other + 0.05 for mine, other in zip(ours, known, strict=True)),
        }
    return record


def figure_11() -> Record:
    """Worst padding of expert groups in model order, row-major, over every multiple of 8."""
    record: Record = {}
    for model in ("gpt-oss-120b", "deepseek-v3"):
        for rows in (1, 16, 128):
            specs = specs_of(model, "experts", Rows(rows))
            ratios = {n: plan_group(specs, n, 8, order="default").padding_ratio for n in EVERY_EIGHT}
            record[f"{model} rows {rows}"] = {
                "worst_up_to_512": max(ratio for n, ratio in ratios.items() if n <= 512),
                "worst_up_to_1024": max(ratios.values()),
                "at_1024": ratios[1024],
            }
    return record


def totals(plans: Sequence[GroupPlan]) -> tuple[float, float]:
    """Padding and copies of a unit over its elements."""
    elements = sum(plan.tensor_size for plan in plans)
    return sum(plan.padding for plan in plans) / elements, sum(plan.copied for plan in plans) / elements


def storage() -> Record:
    """Free storage for whole layers at every multiple of 8 up to 1024 shards, as one group and as up to two."""
    record: Record = {}
    for model in BIG_MODELS:
        for tile in (Tile(32, 32), Tile(128, 128)):
            record[f"{model} {tile}"] = storage_of(specs_of(model, "layer", tile))
    return record


def storage_of(specs: list[TensorSpec]) -> Record:
    """Largest and last padding and copies of one layer."""
    one = [totals((plan_group(specs, n, 8, storage="free"),)) for n in EVERY_EIGHT]
    two = [totals(plan_unit(specs, n, 8, storage="free")) for n in EVERY_EIGHT]
    return {
        "one_group_worst_padding": max(padding for padding, _ in one),
        "one_group_mean_copied": sum(copied for _, copied in one) / len(one),
        "one_group_at_1024": one[-1],
        "two_groups_worst_padding": max(padding for padding, _ in two),
        "two_groups_mean_copied": sum(copied for _, copied in two) / len(two),
        "two_groups_at_1024": two[-1],
    }


def others() -> Record:
    """Padding and cut blocks of the baselines for whole layers."""
    record: Record = {}
    for model in BIG_MODELS:
        tensors = model_shapes(model).group("layer")
        shapes = [shape for _, shape in tensors]
        for num_shards in (128, 256, 512):
            rows: Record = {}
            for name in ("fsdp1", "deepspeed", "fsdp2", "megatron"):
                result = getattr(baselines, name)(shapes, num_shards)
                rows[name] = {
                    "padding": result.padding_ratio,
                    "cut_32x32": result.blocks_cut(shapes, 32, 32),
                    "cut_128x128": result.blocks_cut(shapes, 128, 128),
                }
            for size in (32, 128):
                specs = specs_of(model, "layer", Tile(size, size))
                plans = plan_unit(specs, num_shards, 8, storage="free")
                padding, copied = totals(plans)
                cut = sum(map(boundaries_inside_blocks, plans))
                rows[f"ours_{size}"] = {"padding": padding, "copied": copied, f"cut_{size}x{size}": cut}
            record[f"{model} at {num_shards}"] = rows
    return record


def boundaries_inside_blocks(plan: GroupPlan) -> int:
    """Shard boundaries that fall where no cut is allowed; 0 for every plan."""
    return sum(
        not slot.cuts.allows(boundary - slot.offset)
        for slot in plan.slots.values()
        for boundary in range((slot.offset // plan.shard_size + 1) * plan.shard_size, slot.stop, plan.shard_size)
    )


PARTS: dict[str, Callable[[], Record]] = {
    "small_cases": small_cases,
    "speed": speed,
    "growth": growth,
    "table": table,
    "figure_11": figure_11,
    "storage": storage,
    "others": others,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--only", action="append", choices=list(PARTS), help="a part to run; may be repeated")
    parser.add_argument("--images", type=Path, help="a folder for the pictures")
    arguments = parser.parse_args()
    results = {name: PARTS[name]() for name in arguments.only or PARTS}
    if arguments.json:
        print(json.dumps(results))
    else:
        for name, record in results.items():
            print(f"{name}:")
            for key, value in record.items():
                print(f"  {key}: {value}")
    if arguments.images:
        from benchmarks.planner_images import draw_all

        draw_all(arguments.images)


if __name__ == "__main__":
    main()
