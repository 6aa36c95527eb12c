"""The certificate: a proven lower bound on the shard size, for any order of the slots.

In come the `Cuts` of a group; out goes a `LowerBound` with its argument. Every argument holds for every order and every
placement, so a plan that meets the bound is optimal and the search may stop:

1. *Total.* N shards hold all elements.
2. *Blocks.* Of any (k-1)*N + 1 blocks, k lie on one shard; so S is at least the k smallest of the largest ones.
3. *Divisibility.* A slot longer than S crosses a boundary. When it crosses one only, at most `S // g * g` elements lie
   before it and S behind it; when it crosses two, they are S apart and both are cuts, so g divides S.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence

from ._cuts import Cuts
from ._plan import LowerBound

_MOST_ROUNDS = 200


def lower_bound(kinds: Mapping[Cuts, int], num_shards: int, alignment: int) -> LowerBound:
    """A shard size, in elements, that no plan can undercut.

    Arguments:

    - `kinds`: the slots of the group, equal ones counted.
    - `num_shards`, `alignment`: as for `plan_group`.
    """
    total = sum(cuts.size * count for cuts, count in kinds.items())
    if not total:
        return LowerBound(0, "no elements")
    size = _align(-(-total // num_shards), alignment)
    reason = "total size"
    block, together = _largest_blocks(kinds, num_shards)
    if _align(block, alignment) > size:
        size = _align(block, alignment)
        reason = "largest block" if together == 1 else f"{together} large blocks on one shard"
    divisible = _divisible(list(kinds), size, alignment)
    return LowerBound(divisible, "divisibility") if divisible > size else LowerBound(size, reason)


def _align(size: int, alignment: int) -> int:
    """`size` rounded up to a multiple of `alignment`."""
    return -(-size // alignment) * alignment


def _largest_blocks(kinds: Mapping[Cuts, int], num_shards: int) -> tuple[int, int]:
    """Argument 2 at its strongest: the elements of k blocks that must share a shard, and k."""
    blocks: Counter[int] = Counter()
    for cuts, count in kinds.items():
        whole, rest = divmod(cuts.size, cuts.period) if cuts.size else (0, 0)
        for length, times in ((cuts.period, whole * count), (rest, count)):
            blocks[cuts.granularity] += length // cuts.granularity * times
            blocks[length % cuts.granularity] += times
    descending = sorted(((size, count) for size, count in blocks.items() if size and count), reverse=True)
    best = (0, 0)
    for together in (1, 2, 3, 4):
        among = (together - 1) * num_shards + 1
        taken = _smallest_of_largest(descending, among, together)
        best = max(best, (taken, -together))
    return best[0], -best[1]


def _smallest_of_largest(descending: Sequence[tuple[int, int]], among: int, together: int) -> int:
    """Sum of the `together` smallest among the `among` largest blocks; 0 when there are fewer blocks."""
    seen = 0
    total = 0
    for size, count in descending:
        # Ranks seen+1 .. seen+count have this size; those above among - together count.
        total += size * max(0, min(seen + count, among) - max(seen, among - together))
        seen += count
        if seen >= among:
            return total
    return 0


def _divisible(kinds: Sequence[Cuts], size: int, alignment: int) -> int:
    """Argument 3: the smallest shard size from `size` on that no slot forbids, or a size before it.

    Each round jumps to where the slots are content again; a size reached so is a bound even when the rounds run out.
    """
    large = [
        (cuts.size, cuts.granularity if cuts.is_uniform else math.gcd(cuts.granularity, cuts.period))
        for cuts in kinds
        if cuts.size > size
    ]
    for _ in range(_MOST_ROUNDS):
        wanted = size
        for length, unit in large:
            if size % unit and length > size + size // unit * unit:
                half = (length // unit + 1) // 2
                crossing_once = max(half * unit, length - half * unit)
                wanted = max(wanted, min(_align(size, unit), crossing_once))
        # All slots of two shards or more together: their LCM divides S, until S is half as long as the shortest.
        twice = [(length, unit) for length, unit in large if length >= 2 * size]
        together = math.lcm(alignment, *(unit for _, unit in twice))
        wanted = max(wanted, min([_align(size, together), *(length // 2 + 1 for length, _ in twice)]))
        if wanted == size:
            return size
        size = _align(wanted, alignment)
    return size
