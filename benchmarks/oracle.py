"""Oracles for the planner: the slow and obvious way to the optimum, for small cases.

Nothing here shares code with the search. A start is legal when no shard boundary inside the slot falls on a position
that is no cut; the optimum is the first shard size, counted upwards, for which the slots fit. Used by the tests and by
`benchmarks/planner.py`.
"""

from collections.abc import Sequence

from vescale_planner import Cuts


def legal(cuts: Cuts, start: int, shard_size: int) -> bool:
    """Whether a slot may start at `start`: every shard boundary inside it is looked at."""
    boundaries = range((start // shard_size + 1) * shard_size, start + cuts.size, shard_size)
    return all((boundary - start) % cuts.period % cuts.granularity == 0 for boundary in boundaries)


def fits(slots: Sequence[Cuts], shard_size: int, num_shards: int) -> bool:
    """Whether slots in this order fit: every reachable end is followed, not only the earliest."""
    limit = shard_size * num_shards
    ends = {0}
    for cuts in slots:
        ends = {
            start + cuts.size
            for start in range(min(ends), limit - cuts.size + 1)
            if any(end <= start for end in ends) and legal(cuts, start, shard_size)
        }
        if not ends:
            return False
    return True


def optimum(slots: Sequence[Cuts], num_shards: int, alignment: int = 1) -> int:
    """The smallest shard size for this order, in elements."""
    shard_size = alignment
    while not fits(slots, shard_size, num_shards):
        shard_size += alignment
    return shard_size


def earliest(cuts: Cuts, cursor: int, shard_size: int, limit: int) -> int | None:
    """The end of a slot that takes its first legal start from `cursor` on; None when it would exceed `limit`."""
    for start in range(cursor, limit - cuts.size + 1):
        if legal(cuts, start, shard_size):
            return start + cuts.size
    return None


def fits_earliest(slots: Sequence[Cuts], shard_size: int, num_shards: int) -> bool:
    """As `fits`, following only the earliest legal start; the tests show that it is the same. Faster."""
    cursor: int | None = 0
    for cuts in slots:
        cursor = earliest(cuts, cursor, shard_size, shard_size * num_shards)
        if cursor is None:
            return False
    return True


def optimum_earliest(slots: Sequence[Cuts], num_shards: int) -> int:
    """As `optimum`, with `fits_earliest`."""
    shard_size = 1
    while not fits_earliest(slots, shard_size, num_shards):
        shard_size += 1
    return shard_size


def fits_in_some_order(slots: Sequence[Cuts], shard_size: int, num_shards: int, cursor: int = 0) -> bool:
    """Whether any order fits: every permutation is followed until it is too long."""
    limit = shard_size * num_shards
    if cursor + sum(cuts.size for cuts in slots) > limit:
        return False
    if not slots:
        return True
    for cuts in set(slots):
        end = earliest(cuts, cursor, shard_size, limit)
        if end is not None:
            rest = list(slots)
            rest.remove(cuts)
            if fits_in_some_order(rest, shard_size, num_shards, end):
                return True
    return False


def best_of_all_orders(slots: Sequence[Cuts], num_shards: int) -> int:
    """The smallest shard size over all orders, in elements."""
    shard_size = max(1, -(-sum(cuts.size for cuts in slots) // num_shards))
    while not fits_in_some_order(slots, shard_size, num_shards):
        shard_size += 1
    return shard_size
