"""Plans for people and for programs: rich tables and JSON records.

In come the plans of one unit, out goes what `python -m vescale_jax plan` prints.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from rich.box import SIMPLE_HEAD
from rich.table import Table

from vescale_planner import GroupPlan, Slot, storage_savings

_MOST_ROWS = 60
"""Slots that a table shows; of more, the middle is left out. JSON has them all."""


@dataclass(frozen=True, slots=True)
class Planned:
    """The plans of one unit, and what making them took. Sizes in elements, summed over the groups.

    Attributes:

    - `plans`: one for each group.
    - `seconds`: wall time of planning.
    """

    plans: tuple[GroupPlan, ...]
    seconds: float

    @property
    def tensor_size(self) -> int:
        """Elements of all tensors."""
        return sum(plan.tensor_size for plan in self.plans)

    @property
    def padding_ratio(self) -> float:
        """Padding over elements."""
        return sum(plan.padding for plan in self.plans) / self.tensor_size if self.tensor_size else 0.0

    @property
    def copied_ratio(self) -> float:
        """Elements in tiled storage over elements."""
        return sum(plan.copied for plan in self.plans) / self.tensor_size if self.tensor_size else 0.0

    @property
    def shard_size(self) -> int:
        """Elements on one device."""
        return sum(plan.shard_size for plan in self.plans)

    @property
    def lower_bound_ratio(self) -> float:
        """`shard_size` over the proven lower bound for these groups as stored."""
        bound = sum(plan.bound.shard_size for plan in self.plans)
        return self.shard_size / bound if bound else 1.0


def as_json(planned: Planned, with_slots: bool) -> dict[str, object]:
    """A record with plain values only; see `docs/planner.md` for the keys."""
    first = planned.plans[0]
    record: dict[str, object] = {
        "num_shards": first.num_shards,
        "alignment": first.alignment,
        "shard_size": planned.shard_size,
        "buffer_size": planned.shard_size * first.num_shards,
        "tensor_size": planned.tensor_size,
        "padding_ratio": planned.padding_ratio,
        "lower_bound": sum(plan.bound.shard_size for plan in planned.plans),
        "lower_bound_ratio": planned.lower_bound_ratio,
        "copied_ratio": planned.copied_ratio,
        "seconds": planned.seconds,
        "groups": [
            {
                "shard_size": plan.shard_size,
                "tensors": len(plan.slots),
                "padding_ratio": plan.padding_ratio,
                "copied_ratio": plan.copied_ratio,
                "order": plan.order,
                "lower_bound": plan.bound.shard_size,
                "lower_bound_reason": plan.bound.reason,
            }
            for plan in planned.plans
        ],
    }
    if with_slots:
        record["slots"] = [slot for i, plan in enumerate(planned.plans) for slot in _slots_as_json(i, plan)]
    return record


def _slots_as_json(group: int, plan: GroupPlan) -> list[dict[str, object]]:
    """A record for each slot, in buffer order."""
    saved = storage_savings(plan)
    return [
        {
            "name": slot.name,
            "group": group,
            "shape": list(slot.shape),
            "block": str(slot.spec.block),
            "storage": slot.storage,
            "offset": slot.offset,
            "size": slot.size,
            "granularity": slot.granularity,
            "first_device": _devices(plan, slot)[0],
            "last_device": _devices(plan, slot)[1],
            "padding_after": after,
            "padding_saved_by_storage": saved.get(slot.name, 0),
        }
        for slot, after in zip(plan.slots.values(), _padding_after(plan), strict=True)
    ]


def _devices(plan: GroupPlan, slot: Slot) -> tuple[int | None, int | None]:
    """First and last device that hold a part of the slot."""
    if not slot.size:
        return None, None
    return slot.offset // plan.shard_size, (slot.stop - 1) // plan.shard_size


def _padding_after(plan: GroupPlan) -> list[int]:
    """Elements of padding behind each slot."""
    starts = [*(slot.offset for slot in plan.ordered_slots[1:]), plan.buffer_size]
    return [start - slot.stop for slot, start in zip(plan.slots.values(), starts, strict=True)]


def summary(planned: Planned) -> str:
    """The totals, in a sentence or two."""
    first = planned.plans[0]
    groups = "1 group" if len(planned.plans) == 1 else f"{len(planned.plans)} groups"
    return (
        f"{first.num_shards} shards x {planned.shard_size:,} elements in {groups}: "
        f"{planned.padding_ratio:.2%} padding, {planned.copied_ratio:.2%} copied, "
        f"at most {planned.lower_bound_ratio - 1:.2%} above the optimum; {planned.seconds:.3f} s"
    )


def slot_table(plan: GroupPlan) -> Table:
    """One row for each slot, in buffer order."""
    caption = f"order: {plan.order}; bound: {plan.bound.reason}; sizes in elements"
    table = Table(caption=caption, caption_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("tensor", overflow="fold")
    for column in ("shape", "block", "storage"):
        table.add_column(column, no_wrap=True)
    for column in ("offset", "first", "last", "padding after", "storage saves"):
        table.add_column(column, justify="right", no_wrap=True)
    saved = storage_savings(plan)
    rows = [
        (
            slot.name,
            str(slot.shape),
            str(slot.spec.block),
            slot.storage,
            f"{slot.offset:,}",
            *("-" if device is None else str(device) for device in _devices(plan, slot)),
            f"{after:,}" if after else "",
            f"{saved[slot.name]:,}" if saved.get(slot.name) else "",
        )
        for slot, after in zip(plan.slots.values(), _padding_after(plan), strict=True)
    ]
    half = _MOST_ROWS // 2
    folded = len(rows) - _MOST_ROWS
    for i, row in enumerate(rows):
        if folded <= 0 or i < half or i >= len(rows) - half:
            table.add_row(*row)
        elif i == half:
            table.add_row(f"... {folded} more ...")
    return table


def overview(planned: Sequence[Planned]) -> Table:
    """One row for each number of shards."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    columns = ("shards", "shard size", "padding", "above bound", "copied", "groups", "order", "seconds")
    for column in columns:
        table.add_column(column, justify="right")
    for plan in planned:
        table.add_row(
            str(plan.plans[0].num_shards),
            f"{plan.shard_size:,}",
            f"{plan.padding_ratio:.2%}",
            f"{plan.lower_bound_ratio - 1:.2%}",
            f"{plan.copied_ratio:.2%}",
            str(len(plan.plans)),
            ", ".join(group.order for group in plan.plans),
            f"{plan.seconds:.3f}",
        )
    return table
