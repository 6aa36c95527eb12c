"""Plans as pictures: what lies on each device, and how padding grows with the number of shards.

In come plans or points, out goes a file; its suffix says whether PNG or SVG. matplotlib is an extra and is imported on
the first call.
"""

import importlib
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vescale_planner import GroupPlan

_MOST_IN_A_ROW = 256
"""Devices in one row of bars; more of them continue in the next row."""

_BAR = 0.84
"""Width of a bar, where the distance of two devices is 1."""

_MOST_COLOURS = 14
"""Families of tensors with a colour of their own, largest first; the others share grey."""

Box = tuple[float, float, float, float]


def draw_devices(plans: Sequence[GroupPlan], path: Path, title: str) -> None:
    """Draws one bar for each device, coloured by tensor, padding hatched; of several groups one on top of the other.

    Tensors that differ only in numbers of their path (`experts/3/up`) are one family and share a colour.

    Raises `ImportError` without matplotlib.
    """
    plots = pyplot()
    num_shards = plans[0].num_shards
    rows = math.ceil(num_shards / _MOST_IN_A_ROW)
    across = min(num_shards, _MOST_IN_A_ROW)
    colours = _colours(plans, plots)
    boxes: dict[str, list[Box]] = {family: [] for family in [*colours, "other", "padding"]}
    for family, box in _boxes(plans):
        boxes[family if family in boxes else "other"].append(box)
    legend_height = 0.2 * math.ceil(sum(bool(found) for found in boxes.values()) / 4) + 0.15
    height = 0.6 + 2.2 * rows + legend_height
    figure, axes = plots.subplots(rows, 1, figsize=(12, height), squeeze=False)
    for row in range(rows):
        axis = axes[row][0]
        first = row * across
        for family, all_boxes in boxes.items():
            here = [box for box in all_boxes if first <= math.floor(box[0] + 0.5) < first + across]
            _add_boxes(axis, here, family, colours)
        axis.set_xlim(first - 0.6, first + across - 0.4)
        axis.set_ylim(0, max(sum(plan.shard_size for plan in plans), 1))
        axis.set_ylabel("elements")
    axes[-1][0].set_xlabel("device")
    padding = sum(plan.padding for plan in plans) / max(sum(plan.tensor_size for plan in plans), 1)
    axes[0][0].set_title(f"{title}: {num_shards} shards, {padding:.2%} padding")
    figure.legend(*_legend(boxes, colours), loc="lower center", ncols=4, fontsize=8, frameon=False)
    figure.tight_layout(rect=(0, legend_height / height, 1, 1))
    figure.savefig(path, dpi=110)
    plots.close(figure)


def draw_padding(curves: Mapping[str, Sequence[tuple[int, float]]], path: Path, title: str) -> None:
    """Draws padding in per cent over the number of shards, one line for each name.

    Arguments:

    - `curves`: points (shards, padding ratio) by name.
    - `path`: the file to write.
    - `title`: above the picture.

    Raises `ImportError` without matplotlib.
    """
    plots = pyplot()
    figure, axis = plots.subplots(figsize=(9, 5.4))
    for name, points in curves.items():
        axis.plot([n for n, _ in points], [100 * ratio for _, ratio in points], label=name, linewidth=1.2)
    axis.set_yscale("symlog", linthresh=1.0)
    axis.set_ylim(bottom=0)
    axis.yaxis.set_major_formatter(plots.FuncFormatter(lambda value, _: f"{value:g} %"))
    axis.set_xlabel("shards")
    axis.set_ylabel("padding")
    axis.set_title(title)
    axis.grid(alpha=0.3)
    axis.legend(frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=3)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plots.close(figure)


def pyplot() -> Any:
    """Matplotlib's pyplot, drawing to files only."""
    try:
        matplotlib = importlib.import_module("matplotlib")
        matplotlib.use("agg")
        return importlib.import_module("matplotlib.pyplot")
    except ImportError as error:
        raise ImportError(
            "--plot: got no matplotlib; want it for pictures; install the extra: pip install 'vescale_jax[plot]'"
        ) from error


def _family(name: str) -> str:
    """A path with its numbers taken out."""
    return re.sub(r"(?<![A-Za-z_])\d+(?![A-Za-z_])", "*", name)


def _colours(plans: Sequence[GroupPlan], pyplot: Any) -> dict[str, object]:
    """A colour for each of the largest families."""
    sizes: dict[str, int] = {}
    for plan in plans:
        for slot in plan.slots.values():
            sizes[_family(slot.name)] = sizes.get(_family(slot.name), 0) + slot.size
    largest = sorted(sizes, key=lambda family: -sizes[family])[:_MOST_COLOURS]
    palette = pyplot.get_cmap("tab20").colors
    # The greys of this palette stay free for what has no colour of its own.
    colours = [colour for i, colour in enumerate(palette) if i not in (14, 15)]
    return {family: colours[i % len(colours)] for i, family in enumerate(largest)}


def _boxes(plans: Sequence[GroupPlan]) -> list[tuple[str, Box]]:
    """Family and rectangle (left, bottom, width, height) of every piece and of all padding."""
    boxes: list[tuple[str, Box]] = []
    bottom = 0
    for plan in plans:
        for shard in range(plan.num_shards):
            cursor = 0
            left = shard - _BAR / 2
            for piece in plan.pieces(shard):
                if piece.offset > cursor:
                    boxes.append(("padding", (left, bottom + cursor, _BAR, piece.offset - cursor)))
                size = piece.stop - piece.start
                boxes.append((_family(piece.name), (left, bottom + piece.offset, _BAR, size)))
                cursor = piece.offset + size
            if cursor < plan.shard_size:
                boxes.append(("padding", (left, bottom + cursor, _BAR, plan.shard_size - cursor)))
        bottom += plan.shard_size
    return boxes


def _add_boxes(axis: Any, boxes: Sequence[Box], family: str, colours: Mapping[str, object]) -> None:
    """Draws all rectangles of one family at once."""
    if not boxes:
        return
    collections = importlib.import_module("matplotlib.collections")
    corners = [[(x, y), (x + w, y), (x + w, y + h), (x, y + h)] for x, y, w, h in boxes]
    axis.add_collection(collections.PolyCollection(corners, **_look(family, colours)))


def _look(family: str, colours: Mapping[str, object]) -> dict[str, Any]:
    """How rectangles of one family are drawn."""
    if family == "padding":
        return {"facecolor": "white", "edgecolor": "black", "hatch": "//////", "linewidth": 0.0}
    return {"facecolor": colours.get(family, "0.6"), "edgecolor": "none"}


def _legend(boxes: Mapping[str, Sequence[Box]], colours: Mapping[str, object]) -> tuple[list[Any], list[str]]:
    """A patch and a name for each family that was drawn."""
    patches = importlib.import_module("matplotlib.patches")
    drawn = [family for family, found in boxes.items() if found]
    return [patches.Patch(**_look(family, colours)) for family in drawn], drawn
