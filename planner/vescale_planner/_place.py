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
    return Placing(slots).offsets(shard_size, limit)


class Placing:
    """One order of slots, prepared for many shard sizes."""

    __slots__ = ("_slots", "_total")

    def __init__(self, slots: Sequence[Cuts]) -> None:
        # Plain tuples: the search reads them a million times.
        self._slots = [(cuts.size, cuts.granularity, cuts.period) for cuts in slots]
        self._total = sum(cuts.size for cuts in slots)

    def offsets(self, shard_size: int, limit: int) -> list[int] | None:
        """As `place`."""
        offsets: list[int] = []
        cursor = 0
        # What may still be wasted; most shard sizes that are too small show it long before the last slot.
        slack = limit - self._total
        for size, granularity, period in self._slots:
            start = first_start(cursor, size, granularity, period, shard_size)
            if start is None:
                return None
            slack -= start - cursor
            if slack < 0:
                return None
            offsets.append(start)
            cursor = start + size
        return offsets
