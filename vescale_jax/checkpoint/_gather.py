"""Gather: scattered elements of a stored array, read in pages.

Comes in: where the elements of a piece lie in the array on disk. Goes out: the elements. Only pages that hold one of
them are read, each once; positions are computed a part at a time, so memory is the pages and little more.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

# Positions are int64, and half a dozen arrays of them are needed at a time.
_AT_ONCE = 2**16


@dataclass(frozen=True, slots=True)
class Pages:
    """A stored array of N shards as pages of equal numbers of items; the last page of a shard may be shorter.

    Attributes:

    - `shards`: N.
    - `items`: on each shard. An item is one element, or what one block has.
    - `page`: items of a page.
    """

    shards: int
    items: int
    page: int

    @property
    def of_shard(self) -> int:
        """Pages of one shard."""
        return -(-self.items // self.page)

    def runs(self, marked: np.ndarray) -> list[tuple[int, int, int, int]]:
        """Marked pages in runs: first page, shard, first item within it, number of items."""
        found: list[tuple[int, int, int, int]] = []
        ids = np.flatnonzero(marked)
        shard = ids // self.of_shard
        breaks = np.flatnonzero((np.diff(ids) > 1) | (np.diff(shard) > 0)) + 1
        for run in np.split(ids, breaks) if len(ids) else []:
            k, first = divmod(int(run[0]), self.of_shard)
            start = first * self.page
            found.append((int(run[0]), k, start, min(start + len(run) * self.page, self.items) - start))
        return found


def gather(
    pages: Pages,
    where: Callable[[int, int], np.ndarray],
    read: Callable[[list[tuple[int, int, np.ndarray]]], None],
    out: np.ndarray,
) -> None:
    """Reads scattered items.

    Arguments:

    - `pages`: of the array.
    - `where`: for a range of places of `out`, the item that belongs there: int64, shard * items + place within the
      shard; -1 for none.
    - `read`: reads runs of items, each given by shard, first item and the array `(n, ...)` to read into.
    - `out`: (places, ...); places without an item stay as they are.
    """
    marked = np.zeros(pages.shards * pages.of_shard, bool)
    parts = [(i, min(i + _AT_ONCE, len(out))) for i in range(0, len(out), _AT_ONCE)]
    for i, j in parts:
        at = where(i, j)
        shard, item = np.divmod(at[at >= 0], pages.items)
        marked[shard * pages.of_shard + item // pages.page] = True
    start = (np.cumsum(marked) - 1) * pages.page
    scratch = np.empty((int(marked.sum()) * pages.page, *out.shape[1:]), out.dtype)
    read(
        [(shard, first, scratch[start[page] : start[page] + count]) for page, shard, first, count in pages.runs(marked)]
    )
    for i, j in parts:
        at = where(i, j)
        real = at >= 0
        shard, item = np.divmod(at[real], pages.items)
        out[i:j][real] = scratch[start[shard * pages.of_shard + item // pages.page] + item % pages.page]
