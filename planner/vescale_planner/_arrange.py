"""Arranging: order, shard size and offsets for tensors in given storage orders.

In come specs with their storage orders; out goes an `Arrangement`. Each named order gets its smallest shard size
(`_sizes.py`), then any order is searched for (`_orders.py`); whatever meets the certificate (`_bound.py`) ends the
search.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from ._bound import lower_bound
from ._cuts import Cuts
from ._orders import NAMED_ORDERS, Order, OrderSearch, named_order
from ._place import Placing, place
from ._plan import LowerBound
from ._sizes import Budget, case_moduli, smallest_size
from ._specs import TensorSpec
from ._storage import Storage, cuts_of

PLACEMENTS_PER_SECOND = 1_000_000
"""What one second of search budget buys: about what plain Python places on an ordinary core."""

_DENSE = 20_000
"""Placements up to which every aligned shard size between the bound and the best one is tried."""


@dataclass(frozen=True, slots=True)
class Arrangement:
    """The outcome of a search: which slot where, in elements.

    Attributes:

    - `slots`: the cuts of every tensor, in model order.
    - `shard_size`: S.
    - `order`: indices of the tensors in buffer order.
    - `offsets`: their offsets, in buffer order.
    - `order_name`: how the order was found.
    - `bound`: a proven lower bound on S.
    """

    slots: tuple[Cuts, ...]
    shard_size: int
    order: tuple[int, ...]
    offsets: tuple[int, ...]
    order_name: str
    bound: LowerBound


def arrange(
    specs: Sequence[TensorSpec],
    storages: Sequence[Storage],
    num_shards: int,
    alignment: int,
    order: Order,
    search_seconds: float,
) -> Arrangement:
    """Finds order, shard size and offsets for tensors in given storage orders."""
    slots = tuple(cuts_of(spec.shape, spec.block, storage) for spec, storage in zip(specs, storages, strict=True))
    bound = lower_bound(Counter(slots), num_shards, alignment)
    if not bound.shard_size:
        indices = tuple(range(len(specs)))
        return Arrangement(slots, 0, indices, (0,) * len(specs), "default", bound)
    names = NAMED_ORDERS if order == "search" else (order,)
    best_size = -(-sum(cuts.size for cuts in slots) // alignment) * alignment + 1
    best_order, best_name = list(range(len(specs))), "default"
    for name in names:
        indices = named_order(name, specs, slots)
        size = _size_of_order([slots[i] for i in indices], num_shards, alignment, bound.shard_size, best_size)
        if size is not None:
            best_size, best_order, best_name = size, indices, name
        if best_size == bound.shard_size:
            break
    if order == "search" and best_size > bound.shard_size:
        search = OrderSearch(slots, num_shards, Budget(int(search_seconds * PLACEMENTS_PER_SECOND)))
        moduli = case_moduli(slots, bound.shard_size, alignment)
        found = smallest_size(search.fits, bound.shard_size, best_size, moduli, len(slots))
        if found is not None:
            (best_size, best_order), best_name = found, "search"
        sizes = range(bound.shard_size, best_size, alignment)
        if search.can_prove(len(sizes)):
            for size in sizes:
                indices = search.fits(size)
                if indices is not None:
                    best_size, best_order, best_name = size, indices, "search"
                    break
            bound = LowerBound(best_size, "all orders tried")
    offsets = place([slots[i] for i in best_order], best_size, best_size * num_shards)
    assert offsets is not None
    return Arrangement(slots, best_size, tuple(best_order), tuple(offsets), best_name, bound)


def _size_of_order(slots: Sequence[Cuts], num_shards: int, alignment: int, low: int, below: int) -> int | None:
    """The smallest shard size in [low, below) found for a fixed order; None without one."""
    placing = Placing(slots)

    def fits(shard_size: int) -> list[int] | None:
        return placing.offsets(shard_size, shard_size * num_shards)

    moduli = case_moduli(slots, low, alignment)
    found = smallest_size(fits, low, below, moduli, len(slots))
    best = below if found is None else found[0]
    if (best - low) // alignment * len(slots) <= _DENSE:
        for size in range(low, best, alignment):
            if fits(size) is not None:
                return size
    return best if best < below else None
