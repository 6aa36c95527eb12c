"""Cuts: where, within one slot, a shard boundary may fall.

In comes the size of a slot, its granularity and its period; out go answers to "may a boundary fall here?" and "where is
the earliest legal start of this slot?". Every kind of block and every storage order is reduced to these three numbers,
so that the search knows nothing of rows and tiles.

A position x strictly inside the slot is a cut when `x % period % granularity == 0`. A *uniform* slot has one period
that covers it all. The last block of a period may be short.

The earliest start is all a fixed order needs: a slot that starts earlier never hurts the next one, so placing every
slot at its earliest legal start is exact (the dynamic programme of arXiv 2602.22437 comes to the same).
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Cuts:
    """The legal cuts of one slot, all in elements.

    Attributes:

    - `size`: elements that the slot occupies.
    - `granularity`: largest block; cuts lie at its multiples from the start of each period.
    - `period`: length after which the blocks start afresh; at least `size` when there is only one period.
    """

    size: int
    granularity: int
    period: int

    @staticmethod
    def uniform(size: int, granularity: int) -> "Cuts":
        """Cuts at every multiple of `granularity`, which is lowered to `size` where a block is larger than the slot."""
        return Cuts(size, max(1, min(granularity, size)), max(1, size))

    @staticmethod
    def periodic(size: int, granularity: int, period: int) -> "Cuts":
        """Cuts at multiples of `granularity` counted afresh from every multiple of `period`."""
        granularity = min(granularity, period)
        if period >= size or period % granularity == 0:
            return Cuts.uniform(size, granularity)
        return Cuts(size, granularity, period)

    @property
    def is_uniform(self) -> bool:
        """Whether the cuts are all multiples of `granularity`."""
        return self.period >= self.size

    @property
    def modulus(self) -> int:
        """The number of elements that divides the shard size when the slot covers whole shards, in elements.

        It is always enough, and for uniform cuts it is needed. Periodic cuts can, rarely, do with less.
        """
        return self.granularity if self.is_uniform else self.period

    def allows(self, position: int) -> bool:
        """Whether a shard boundary may fall at `position`, in elements from the start of the slot."""
        return position <= 0 or position >= self.size or position % self.period % self.granularity == 0

    def first_start(self, cursor: int, shard_size: int) -> int | None:
        """The earliest legal start at or behind `cursor` (elements in the buffer), or None when there is none."""
        return first_start(cursor, self.size, self.granularity, self.period, shard_size)


def first_start(cursor: int, size: int, granularity: int, period: int, shard_size: int) -> int | None:
    """As `Cuts.first_start`, on plain numbers because the search calls it a million times.

    The head is what lies before the first boundary inside the slot. The longest legal head gives the earliest start,
    and within one shard no shorter head can succeed where it fails: that only pushes the end over one more boundary.
    """
    room = shard_size - cursor % shard_size
    if size <= room:
        return cursor
    if period < size:
        return _first_periodic_start(cursor, size, granularity, period, shard_size)
    divides = shard_size % granularity == 0
    head = room - room % granularity
    if head and (divides or size <= head + shard_size):
        return cursor + room - head
    if size <= shard_size or divides:
        return cursor + room
    head = shard_size - shard_size % granularity
    if head and size <= head + shard_size:
        return cursor + room + shard_size - head
    return None


def _first_periodic_start(cursor: int, size: int, granularity: int, period: int, shard_size: int) -> int | None:
    """`first_start` for a slot of several periods that does not fit between `cursor` and the next boundary."""
    room = shard_size - cursor % shard_size
    head = _longest_head(room, size, granularity, period, shard_size)
    if head:
        return cursor + room - head
    if size <= shard_size:
        return cursor + room
    head = _longest_head(shard_size, size, granularity, period, shard_size)
    return cursor + room + shard_size - head if head else None


def _longest_head(room: int, size: int, granularity: int, period: int, shard_size: int) -> int:
    """The longest head of at most `room` elements for which every later boundary is a cut too; 0 when there is none.

    Heads that differ by a period meet the same cuts, so one period of candidates decides. Where a boundary misses a
    cut, all shorter heads of the same period make it miss by as much until it falls into the period before: they are
    skipped.
    """
    head = room - room % period % granularity
    shortest = max(head - period, 0)
    while head > shortest:
        position = head + shard_size
        while position < size and position % period % granularity == 0:
            if shard_size % period == 0:
                return head
            position += shard_size
        if position >= size:
            return head
        back = 1 + min(position % period, head % period)
        head = head - back - (head - back) % period % granularity
    return 0
