"""The pictures of `docs/planner.md`; `python -m benchmarks.planner --images docs/images` makes them."""

import math
from collections.abc import Collection
from pathlib import Path

import matplotlib as mpl

mpl.use("agg")
from matplotlib import pyplot as plt

from benchmarks import baselines
from benchmarks.planner import BIG_MODELS, EVERY_EIGHT, growth, specs_of, totals
from vescale_jax._plan_picture import draw_devices, draw_padding
from vescale_planner import Rows, TensorSpec, Tile, plan_group, plan_unit

Curve = list[tuple[int, float]]


def draw_all(folder: Path) -> None:
    """Draws every picture into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    devices(folder)
    figure_11(folder)
    beside_baselines(folder)
    copies(folder)
    growing(folder)


def devices(folder: Path) -> None:
    """What lies on each of 8 and of 1024 devices."""
    plan = plan_group(specs_of("gpt-oss-120b", "attention", Rows(16)), 8, 8)
    draw_devices((plan,), folder / "planner-devices-8.png", "GPT-OSS-120B attention, 16 rows")
    plan = plan_group(specs_of("deepseek-v3", "layer", Rows(16)), 1024, 8)
    draw_devices((plan,), folder / "planner-devices-1024.png", "DeepSeek-V3 layer, 16 rows")


def figure_11(folder: Path) -> None:
    """The paper's Figure 11: padding of expert groups in model order."""
    curves: dict[str, Curve] = {}
    for model in ("gpt-oss-120b", "deepseek-v3"):
        for rows in (1, 16, 128):
            specs = specs_of(model, "experts", Rows(rows))
            curves[f"{model}, {rows} rows"] = [
                (n, plan_group(specs, n, 8, order="default").padding_ratio) for n in EVERY_EIGHT
            ]
    draw_padding(curves, folder / "planner-figure-11.png", "Experts of one layer, row-major, model order")


def beside_baselines(folder: Path) -> None:
    """Padding of a whole GPT-OSS layer: ours and the baselines."""
    specs = specs_of("gpt-oss-120b", "layer", Tile(32, 32))
    shapes = [spec.shape for spec in specs]
    granularities = [TensorSpec(spec.name, spec.shape, Rows(32)).granularity for spec in specs]
    curves: dict[str, Curve] = {
        "FSDP2 (cuts blocks)": [(n, baselines.fsdp2(shapes, n).padding_ratio) for n in EVERY_EIGHT],
        "Megatron-FSDP (cuts blocks)": [(n, baselines.megatron(shapes, n).padding_ratio) for n in EVERY_EIGHT],
        "veScale's algorithm, 32 rows": [
            (n, baselines.vescale(shapes, granularities, n, 8).padding_ratio) for n in EVERY_EIGHT
        ],
        "ours, free storage, one group": [
            (n, plan_group(specs, n, 8, storage="free").padding_ratio) for n in EVERY_EIGHT
        ],
        "ours, row-major, up to two groups": [(n, totals(plan_unit(specs, n, 8))[0]) for n in EVERY_EIGHT],
        "ours, free storage, up to two groups": [
            (n, totals(plan_unit(specs, n, 8, storage="free"))[0]) for n in EVERY_EIGHT
        ],
    }
    draw_padding(curves, folder / "planner-baselines.png", "GPT-OSS-120B layer, 32 x 32 tiles")


def copies(folder: Path) -> None:
    """How much padding a share of copied elements buys, for 128 x 128 tiles."""
    figure, axes = plt.subplots(1, 2, figsize=(11, 4.2), sharey=True)
    for axis, num_shards in zip(axes, (256, 1024), strict=True):
        for model in BIG_MODELS:
            specs = specs_of(model, "layer", Tile(128, 128))
            points = {
                totals(plan_unit(specs, num_shards, 8, storage="free", max_padding=bearable))
                for bearable in (0.001, 0.003, 0.01, 0.02, 0.03, 0.06, 0.12, 0.25, 0.5, 1.0)
            }
            steps = _front(points)
            axis.plot([100 * c for _, c in steps], [100 * p for p, _ in steps], "o-", label=model, markersize=4)
        axis.set_title(f"{num_shards} shards")
        axis.set_xlabel("copied, % of elements")
        axis.grid(alpha=0.3)
    axes[0].set_yscale("symlog", linthresh=1.0)
    axes[0].set_ylabel("padding, %")
    axes[0].legend(frameon=False)
    figure.suptitle("Whole layers, 128 x 128 tiles, up to two groups")
    figure.tight_layout()
    figure.savefig(folder / "planner-copies.png", dpi=110)
    plt.close(figure)


def _front(points: Collection[tuple[float, float]]) -> list[tuple[float, float]]:
    """The points (padding, copied) that no other beats in both, by copies."""
    front = [p for p in points if not any(q != p and q[0] <= p[0] and q[1] <= p[1] for q in points)]
    return sorted(front, key=lambda point: point[1])


def growing(folder: Path) -> None:
    """Seconds over tensors and over shards, beside |T|^2 m log E log(|T| m) scaled to the first point."""
    measured = growth()
    figure, axes = plt.subplots(1, 2, figsize=(11, 4.2))
    for axis, (title, seconds) in zip(axes, measured.items(), strict=True):
        assert isinstance(seconds, dict)
        counts = [int(count) for count in seconds]
        over_tensors = "over_tensors" in title
        bound = [_complexity(count, 256) if over_tensors else _complexity(800, count) for count in counts]
        axis.plot(counts, list(seconds.values()), "o-", label="measured")
        scaled = [value / bound[0] * seconds[str(counts[0])] for value in bound]
        axis.plot(counts, scaled, "--", label="the paper's bound, scaled to the first point")
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set_xlabel("tensors (256 shards)" if over_tensors else "shards (800 tensors)")
        axis.set_ylabel("seconds")
        axis.grid(alpha=0.3)
        axis.legend(frameon=False)
    figure.suptitle("Time of one row-major plan with search")
    figure.tight_layout()
    figure.savefig(folder / "planner-growth.png", dpi=110)
    plt.close(figure)


def _complexity(tensors: int, num_shards: int) -> float:
    """The paper's bound, up to a factor; elements grow with the tensors."""
    return tensors**2 * num_shards * math.log(tensors * 1.5e6) * math.log(tensors * num_shards)
