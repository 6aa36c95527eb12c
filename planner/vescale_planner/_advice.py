"""Advice for a unit that would pad badly, each piece of it tried before it is given.

In come the tensors of a unit and a number of shards; out come the cures that help and what each leaves of the padding.
The typical patient is a small unit of mixed row lengths over many shards: its tensors cover whole shards, so S must be
a common multiple of all rows. The cures: fewer shards, with replicas over the rest of the devices (HSDP); the odd
tensors in a group of their own; tiled storage.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from ._group import plan_group
from ._specs import TensorSpec
from ._unit import plan_unit


@dataclass(frozen=True, slots=True)
class Advice:
    """One cure.

    Attributes:

    - `cure`: `"fewer_shards"`, `"more_groups"` or `"free_storage"`.
    - `text`: what to change and what it brings, in a sentence.
    - `padding_ratio`: padding over elements after the change.
    """

    cure: Literal["fewer_shards", "more_groups", "free_storage"]
    text: str
    padding_ratio: float


def advise(
    specs: Iterable[TensorSpec], num_shards: int, alignment: int = 1, *, bearable: float = 0.03
) -> tuple[Advice, ...]:
    """Cures for a unit whose row-major plan pads more than `bearable`, the best first; nothing when it does not.

    Arguments:

    - `specs`, `num_shards`, `alignment`: as for `plan_group`.
    - `bearable`: the `padding_ratio` that needs no advice.

    Only cures that at least halve the padding are returned.

    Raises `ValueError` or `TypeError` with the faults of the request, as `plan_group` does.
    """
    specs = tuple(specs)
    plan = plan_group(specs, num_shards, alignment)
    if plan.padding_ratio <= bearable:
        return ()
    cures = [
        *_fewer_shards(specs, num_shards, alignment, bearable),
        _more_groups(specs, num_shards, alignment),
        _free_storage(specs, num_shards, alignment),
    ]
    helpful = [cure for cure in cures if cure.padding_ratio <= plan.padding_ratio / 2]
    return tuple(sorted(helpful, key=lambda cure: cure.padding_ratio))


def _fewer_shards(specs: Sequence[TensorSpec], num_shards: int, alignment: int, bearable: float) -> list[Advice]:
    """The most shards that pad bearably and whose number divides `num_shards`."""
    for replicas in range(2, num_shards + 1):
        if num_shards % replicas:
            continue
        fewer = num_shards // replicas
        ratio = plan_group(specs, fewer, alignment).padding_ratio
        if ratio <= bearable:
            text = f"shard over {fewer} devices and replicate {replicas} times (HSDP): {ratio:.2%} padding"
            return [Advice("fewer_shards", text, ratio)]
    return []


def _more_groups(specs: Sequence[TensorSpec], num_shards: int, alignment: int) -> Advice:
    """Two groups instead of one."""
    plans = plan_unit(specs, num_shards, alignment)
    ratio = sum(plan.padding for plan in plans) / sum(plan.tensor_size for plan in plans)
    names = min((tuple(plan.slots) for plan in plans), key=len)
    listed = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
    return Advice("more_groups", f"give {listed} a group of their own: {ratio:.2%} padding", ratio)


def _free_storage(specs: Sequence[TensorSpec], num_shards: int, alignment: int) -> Advice:
    """Transposed and tiled storage where blocks allow it."""
    plan = plan_group(specs, num_shards, alignment, storage="free")
    tiled = sum(slot.storage == "tiled" for slot in plan.slots.values())
    text = f'storage="free": {plan.padding_ratio:.2%} padding with {plan.copied_ratio:.2%} copied'
    return Advice("free_storage", f"{text} ({tiled} tensors tiled)", plan.padding_ratio)
