"""plan_group: from tensors to a plan.

In come specs, a number of shards and an alignment; out goes a `GroupPlan` that has been proved. The problem (arXiv
2602.22437): minimise the shard size S such that every tensor is one contiguous slot, slots are disjoint, and no
boundary k*S cuts a block. It is NP-hard; what is done instead is in `_sizes.py` (S for a fixed order), `_orders.py`
(the order) and `_bound.py` (when to stop).
"""

from collections.abc import Iterable, Sequence
from typing import Literal, cast, get_args

from ._arrange import Arrangement, arrange
from ._faults import Faults
from ._freedom import Price, choose_storage
from ._orders import Order
from ._plan import GroupPlan, Slot
from ._specs import TensorSpec
from ._storage import Storage

StorageChoice = Literal["row_major", "free"]
"""Whether the planner may choose storage orders."""


def plan_group(
    specs: Iterable[TensorSpec],
    num_shards: int,
    alignment: int = 1,
    *,
    order: Order = "search",
    search_seconds: float = 0.05,
    storage: StorageChoice = "row_major",
    max_padding: float = 0.01,
    copy_weight: float = 1.0,
) -> GroupPlan:
    """Plans one group: order, slots and shard size.

    Arguments:

    - `specs`: the tensors, in model order.
    - `num_shards`: N, at least 1.
    - `alignment`: the shard size is a multiple of it; elements.
    - `order`: `"default"` keeps the model's order, `"block"`, `"shape"` and `"size"` sort by granularity, shape and
      element count, largest first; `"search"` takes the best of these and of a search, and the model's order where
      that is as good.
    - `search_seconds`: what the search may cost. It is counted in placed slots and not timed, so that equal requests
      always get equal plans; about right on an ordinary core.
    - `storage`: `"row_major"` keeps every tensor as it is; `"free"` may store tensors with `Tile` blocks transposed or
      tiled, to minimise padding plus copies.
    - `max_padding`: with free storage, the `padding_ratio` that is bearable. Plans below it are compared by padded plus
      copied elements; plans above it by how far they are above.
    - `copy_weight`: with free storage, how many padded elements are as bad as one copied element.

    Raises `ValueError` or `TypeError` with all faults of the request: names used twice, numbers out of range.
    """
    specs = tuple(specs)
    numbers = {"search_seconds": search_seconds, "max_padding": max_padding, "copy_weight": copy_weight}
    _check_request(specs, num_shards, alignment, order, storage, **numbers)

    def arranged(storages: Sequence[Storage]) -> tuple[int, Arrangement]:
        found = arrange(specs, storages, num_shards, alignment, order, search_seconds)
        return found.shard_size, found

    if storage == "free":
        price = Price(max_padding * sum(spec.size for spec in specs), copy_weight)
        storages, found = choose_storage(specs, num_shards, alignment, price, arranged)
    else:
        storages: list[Storage] = ["row_major"] * len(specs)
        _, found = arranged(storages)
    plan = GroupPlan(
        num_shards,
        alignment,
        found.shard_size,
        tuple(
            Slot(specs[i], offset, found.slots[i].size, storages[i])
            for i, offset in zip(found.order, found.offsets, strict=True)
        ),
        found.order_name,
        found.bound,
    )
    plan.check()
    return plan


def _check_request(
    specs: Sequence[TensorSpec], num_shards: int, alignment: int, order: str, storage: str, **numbers: float
) -> None:
    """Raises every fault of one call of `plan_group` together; `numbers` are those that may not be negative."""
    faults = Faults("plan_group")
    for i, spec in enumerate(cast(Sequence[object], specs)):
        if not isinstance(spec, TensorSpec):
            want = "a TensorSpec"
            faults.add(f"specs[{i}]", got=repr(spec), want=want, change="pass TensorSpec(name, shape, block)")
    for name, value in (("num_shards", num_shards), ("alignment", alignment)):
        if not isinstance(cast(object, value), int) or isinstance(value, bool):
            faults.add(name, got=repr(value), want="an integer", change="pass a plain int")
    faults.raise_if_any(TypeError)
    for name, value in (("num_shards", num_shards), ("alignment", alignment)):
        if value < 1:
            faults.add(name, got=str(value), want="at least 1", change=f"pass {name}=1 or more")
    if order not in get_args(Order):
        faults.add("order", got=repr(order), want=f"one of {', '.join(get_args(Order))}", change="pass one of these")
    if storage not in get_args(StorageChoice):
        want = f"one of {', '.join(get_args(StorageChoice))}"
        faults.add("storage", got=repr(storage), want=want, change="pass one of these")
    for name, value in numbers.items():
        if not value >= 0:
            faults.add(name, got=repr(value), want="at least 0", change=f"pass {name}=0 or more")
    seen: set[str] = set()
    for spec in specs:
        if spec.name in seen:
            want = "a name used once in a group"
            faults.add(spec.name, got="the name twice", want=want, change="give each tensor its own name")
        seen.add(spec.name)
    faults.raise_if_any()
