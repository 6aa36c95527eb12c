"""Shaping a unit before it is planned: how large it may be, and what becomes of its small tensors.

In come specs in model order, out come specs again. Sizes are in elements here, since a spec has no dtype; a cap in
bytes is one division away.
"""

from collections.abc import Iterable
from dataclasses import replace

from ._blocks import WholeTensor
from ._faults import Faults
from ._specs import TensorSpec


def cap_unit(specs: Iterable[TensorSpec], most_elements: int) -> tuple[tuple[TensorSpec, ...], ...]:
    """Cuts a unit into units of at most `most_elements` elements, in model order.

    A tensor that is larger on its own gets a unit to itself. What is gathered at once, and so the memory that a gather
    needs, is bounded by the cap or by the largest tensor.

    Raises `ValueError` when the cap is less than 1.
    """
    faults = Faults("cap_unit")
    if most_elements < 1:
        faults.add(
            "most_elements", got=str(most_elements), want="at least 1", change="divide a byte cap by the item size"
        )
    faults.raise_if_any()
    units: list[list[TensorSpec]] = []
    room = 0
    for spec in specs:
        if not units or spec.size > room:
            units.append([])
            room = most_elements
        units[-1].append(spec)
        room -= spec.size
    return tuple(tuple(unit) for unit in units)


def keep_small_whole(specs: Iterable[TensorSpec], most_elements: int) -> tuple[TensorSpec, ...]:
    """The same tensors, those of at most `most_elements` elements as one block each.

    A norm or a bias then lies on one shard, and what an optimizer computes from the whole of it needs no communication.
    It costs nothing in padding as long as the small tensors are short beside a shard.
    """
    return tuple(replace(spec, block=WholeTensor()) if spec.size <= most_elements else spec for spec in specs)
