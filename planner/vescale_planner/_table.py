"""A plan as a table that a person can read.

In comes a plan, out goes text: one line with the totals, then one line a slot in buffer order.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:  # a plan draws itself, so this module comes first
    from ._plan import GroupPlan

MOST_LINES = 60
"""Slots that are drawn; of longer plans the middle is left out."""


def draw(plan: "GroupPlan") -> str:
    """The plan as text, without a line break at the end."""
    head = (
        f"{plan.num_shards} shards x {plan.shard_size:,} elements = {plan.buffer_size:,}, of which "
        f"{plan.padding:,} padding ({plan.padding_ratio:.2%}); order: {plan.order}; "
        f"at most {plan.lower_bound_ratio - 1:.2%} above the optimum ({plan.bound.reason})"
    )
    rows = [("tensor", "shape", "block", "storage", "offset", "size", "shards", "padding after")]
    stops = [slot.offset for slot in plan.ordered_slots[1:]] + [plan.buffer_size]
    rows += [
        (
            slot.name,
            str(slot.shape),
            str(slot.spec.block),
            slot.storage,
            f"{slot.offset:,}",
            f"{slot.size:,}",
            _shards(plan, slot.offset, slot.stop),
            f"{stop - slot.stop:,}",
        )
        for slot, stop in zip(plan.ordered_slots, stops, strict=True)
    ]
    if len(rows) > MOST_LINES + 1:
        left_out = len(rows) - 1 - MOST_LINES
        half = MOST_LINES // 2
        rows = [*rows[: half + 1], (f"... {left_out} more ...", *[""] * 7), *rows[-half:]]
    widths = [max(len(row[i]) for row in rows) for i in range(8)]
    aligned = [
        [
            cell.rjust(width) if i in (4, 5, 7) else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        for row in rows
    ]
    lines = ["  ".join(row) for row in aligned]
    return "\n".join([head, *(line.rstrip() for line in lines)])


def _shards(plan: "GroupPlan", offset: int, stop: int) -> str:
    """First and last shard that hold a part of [offset, stop)."""
    if stop == offset:
        return "-"
    first, last = offset // plan.shard_size, (stop - 1) // plan.shard_size
    return str(first) if first == last else f"{first}-{last}"
