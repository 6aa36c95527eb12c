"""The schedule as a picture: compute and collectives as lanes over time.

In comes a report, out goes a file; its suffix says whether PNG or SVG. Times are the cost model's. Of a loop two turns
are drawn, and the others left out where its first turn ends its second; what they would take is in the report.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vescale_jax._plan_picture import pyplot

from ._report import Report

_LANES = ("compute", "all-gather", "reduce-scatter", "other")
_COLOURS = {
    "product": "tab:blue",
    "kernel": "tab:cyan",
    "wait": "white",
    "forward": "tab:green",
    "backward": "tab:orange",
}
_NAMES = {"product": "products", "kernel": "other kernels", "wait": "waiting", "forward": "sent in the forward pass",
          "backward": "sent in the backward pass"}  # fmt: skip

Bar = tuple[float, float]
"""Begin and width, in milliseconds."""


def draw_schedule(report: Report, path: Path, title: str) -> None:
    """Draws the schedule of a step.

    Arguments:

    - `report`: what `preflight` returned.
    - `path`: the file to write: .png or .svg.
    - `title`: above the picture.

    Raises: `ImportError` without matplotlib.
    """
    plots = pyplot()
    figure, axis = plots.subplots(figsize=(14, 3.2))
    bars = _bars(report)
    cut = _Cut.of([bar for found in bars.values() for bar in found])
    drawn = set()
    for (lane, kind), found in bars.items():
        look: dict[str, Any] = {"facecolor": _COLOURS[kind], "edgecolor": "0.6" if kind == "wait" else "none"}
        label = {} if kind in drawn else {"label": _NAMES[kind]}
        drawn.add(kind)
        placed = [(cut.moved(begin), width) for begin, width in found]
        axis.broken_barh(placed, (-_LANES.index(lane) - 0.4, 0.8), linewidth=0.3, **look, **label)
    for place, skipped in cut.gaps:
        axis.axvline(place, color="black", linestyle=":", linewidth=1)
        axis.text(place, 0.5, f" + {skipped:.1f} ms of turns", fontsize=7, va="bottom")
    axis.set_yticks([-i for i in range(len(_LANES))], _LANES)
    axis.set_xlabel(f"milliseconds (estimated; {1000 * report.timeline.seconds:.1f} in all)")
    inner = report.hidden_fraction()
    shares = ", ".join(f"{name} {share:.0%}" for name, share in inner.items() if share is not None)
    axis.set_title(f"{title}; hidden: {shares or 'nothing to hide'}", fontsize=10, pad=16)
    axis.legend(loc="upper center", bbox_to_anchor=(0.5, -0.22), ncols=5, fontsize=8, frameon=False)
    figure.savefig(path, dpi=130, bbox_inches="tight")
    plots.close(figure)


def _bars(report: Report) -> dict[tuple[str, str], list[Bar]]:
    """The bars by lane and kind."""
    bars: dict[tuple[str, str], list[Bar]] = {}
    for event in report.timeline.events:
        bars.setdefault(("compute", event.kind), []).append((1e3 * event.begin, 1e3 * (event.end - event.begin)))
    for sending in report.timeline.sendings:
        kind = sending.collective.kind
        lane = kind if kind in _LANES else "other"
        width = 1e3 * (sending.end - sending.begin)
        bars.setdefault((lane, "backward" if sending.backward else "forward"), []).append((1e3 * sending.begin, width))
    return bars


class _Cut:
    """Leaves out the stretches of time in which nothing is drawn: the turns of loops that are like those before."""

    def __init__(self, gaps: Sequence[tuple[float, float]]) -> None:
        self._empty = gaps

    @classmethod
    def of(cls, bars: Sequence[Bar]) -> "_Cut":
        end, gaps = 0.0, list[tuple[float, float]]()
        for begin, width in sorted(bars):
            if begin > end + 0.05:
                gaps.append((end, begin))
            end = max(end, begin + width)
        return cls(gaps)

    def moved(self, time: float) -> float:
        """Where a time is drawn."""
        return time - sum(last - first for first, last in self._empty if last <= time + 1e-9)

    @property
    def gaps(self) -> list[tuple[float, float]]:
        """Where something is left out, and how many milliseconds."""
        return [(self.moved(last), last - first) for first, last in self._empty]
