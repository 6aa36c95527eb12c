"""Pack and unpack: tensors into one flat array in slot order, and back.

Shapes: G elements of the whole buffer (1D); every tensor has its own logical shape (ND).

Both are pure functions that trace to one concatenate and to static slices. Neither knows of devices: inside
`shard_map` they work on the gathered buffer, outside on a whole one.
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from vescale_planner import Faults, GroupPlan

from ._storage import load, store


def pack(plan: GroupPlan, tensors: Mapping[str, jax.Array], dtype: DTypeLike) -> jax.Array:
    """Lays tensors into one flat array, in slot order, with zeros for padding.

    Arguments:

    - `plan`: the slots.
    - `tensors`: one array for each slot, by name, of the slot's logical shape (ND).
    - `dtype`: of the result; every tensor is cast before it is laid down.

    Returns: an array of shape `(plan.buffer_size,)`.

    Raises: `ValueError` that names every tensor which is missing, unknown or of another shape.
    """
    _check(plan, tensors)
    parts: list[jax.Array] = []
    end = 0
    for name, slot in plan.slots.items():
        if slot.offset > end:
            parts.append(jnp.zeros(slot.offset - end, dtype))
        parts.append(store(slot, tensors[name].astype(dtype)))
        end = slot.stop
    if plan.buffer_size > end or not parts:
        parts.append(jnp.zeros(plan.buffer_size - end, dtype))
    return jnp.concatenate(parts) if len(parts) > 1 else parts[0]


def unpack(plan: GroupPlan, buffer: jax.Array) -> dict[str, jax.Array]:
    """Takes the tensors out of a flat array: a static slice each, and a reshape or what the storage order needs.

    Arguments:

    - `plan`: the slots.
    - `buffer`: an array of shape `(plan.buffer_size,)`.

    Returns: the tensors by name, in slot order, of their logical shapes (ND).
    """
    return {name: load(slot, lax.slice(buffer, (slot.offset,), (slot.stop,))) for name, slot in plan.slots.items()}


def _check(plan: GroupPlan, tensors: Mapping[str, jax.Array]) -> None:
    faults = Faults("pack")
    for name, slot in plan.slots.items():
        if name not in tensors:
            faults.add(name, got="no tensor", want=f"one of shape {slot.shape}", change="pass all tensors of the plan")
        elif tuple(tensors[name].shape) != slot.shape:
            got = f"shape {tuple(tensors[name].shape)}"
            faults.add(name, got=got, want=f"shape {slot.shape}", change="plan the group anew or mend the tensor")
    for name in tensors:
        if name not in plan.slots:
            want = f"one of {list(plan.slots)}"
            faults.add(name, got="a tensor without a slot", want=want, change="leave it out or plan the group anew")
    faults.raise_if_any()
