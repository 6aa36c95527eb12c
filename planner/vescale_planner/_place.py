"""Placing: one order of slots and one shard size make offsets, or show that they do not fit.

In come the `Cuts` of the slots in buffer order; out go their offsets. Each slot takes its earliest legal start, which
is exact for a fixed order: see `_cuts.py`.
"""

from collections.abc import Sequence

from ._cuts import Cuts, first_start


def place(slots: Sequence[Cuts], shard_size: int, limit: int) -> list[int] | None:
    """Offsets of `slots` in this order, or None when they do not end within `limit` elements.

    `shard_size` is at least 1.
    """
    offsets: list[int] = []
    cursor = 0
    for cuts in slots:
        start = first_start(cursor, cuts.size, cuts.granularity, cuts.period, shard_size)
        if start is None:
            return None
        cursor = start + cuts.size
        if cursor > limit:
            return None
        offsets.append(start)
    return offsets
