"""The smallest shard size for which a question is answered "yes".

In come a question (does this order, or any order, fit into shards of this size?), a lower bound and the moduli that are
worth a try; out goes the smallest size found. The structure is that of arXiv 2602.22437: a slot that covers whole
shards (case 3) needs S to be a multiple of its granularity, so S is looked for among the multiples of the LCM over the
slots that are guessed to be of that kind, and there feasibility is nearly monotone, so halving works. Prefixes of the
slots by element count are guessed first, which is within a factor of two of the optimum; then the LCMs of other sets.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from ._cuts import Cuts

Found = TypeVar("Found")

_FEW = 4000
"""Placed slots that may go into trying multiples one by one, from below; where there are more, halving is used."""

_MOST_SETS = 48
"""LCMs that are tried at most."""


class Budget:
    """What a search may cost, in placed slots: counted and not timed, so that equal requests get equal plans."""

    __slots__ = ("left",)

    def __init__(self, placements: int) -> None:
        self.left = placements

    def spend(self, placements: int) -> bool:
        """Takes `placements` from what is left; False once nothing is left."""
        self.left -= placements
        return self.left > 0


def case_moduli(slots: Iterable[Cuts], low: int, alignment: int) -> list[int]:
    """Moduli of the shard size to try, best guesses first.

    Only slots longer than `low` can cover a whole shard of at least `low` elements.
    """
    large = sorted({(-cuts.size, cuts.modulus) for cuts in slots if cuts.size > low})
    moduli = [alignment]
    for _, modulus in large:
        moduli.append(math.lcm(moduli[-1], modulus))
    prefixes = list(dict.fromkeys(moduli))
    others = {alignment}
    for modulus in dict.fromkeys(modulus for _, modulus in large):
        others |= {math.lcm(other, modulus) for other in others}
        if len(others) > 4 * _MOST_SETS:
            break
    return (prefixes + sorted(others.difference(prefixes)))[:_MOST_SETS]


def smallest_size(
    fits: Callable[[int], Found | None], low: int, below: int, moduli: Sequence[int], slots: int
) -> tuple[int, Found] | None:
    """The smallest size in [low, below) that was found to fit, with the answer of `fits`; None without one.

    Arguments:

    - `fits`: the question; anything but None means that the slots fit into shards of this size.
    - `low`, `below`: sizes in between are tried; elements.
    - `moduli`: only their multiples are tried.
    - `slots`: how many slots the question places, which tells its price.
    """
    few = max(4, _FEW // max(slots, 1))
    best: tuple[int, Found] | None = None
    for modulus in moduli:
        first, last = -(-low // modulus), (below - 1) // modulus
        found = _scan(fits, modulus, first, last) if last - first < few else _halve(fits, modulus, first, last)
        if found is not None:
            best = found
            below = found[0]
    return best


def _scan(fits: Callable[[int], Found | None], modulus: int, first: int, last: int) -> tuple[int, Found] | None:
    """The smallest multiple that fits, from `first` to `last`."""
    for multiple in range(first, last + 1):
        answer = fits(multiple * modulus)
        if answer is not None:
            return multiple * modulus, answer
    return None


def _halve(fits: Callable[[int], Found | None], modulus: int, first: int, last: int) -> tuple[int, Found] | None:
    """The smallest multiple that fits, if feasibility is monotone between; else some multiple that does."""
    answer = fits(last * modulus)
    if answer is None:
        return None
    best = (last * modulus, answer)
    while first < last:
        middle = (first + last) // 2
        answer = fits(middle * modulus)
        if answer is None:
            first = middle + 1
        else:
            best = (middle * modulus, answer)
            last = middle
    return best
