"""Places: which elements of a buffer belong to some of its parameters, as data and without a table.

Comes in: a plan, some names, and positions in the buffer. Goes out: booleans, made by comparing positions with where
slots start and end: two comparisons for each run of neighbouring slots.
"""

from collections.abc import Iterable

import jax
import jax.numpy as jnp

from vescale_planner import GroupPlan


def among(plan: GroupPlan, names: Iterable[str], position: jax.Array) -> jax.Array:
    """Whether elements belong to some parameters.

    Arguments:

    - `plan`: of the group.
    - `names`: the parameters.
    - `position`: int32, of any shape, counted from the start of the buffer.

    Returns: bool, of the same shape.
    """
    runs: list[tuple[int, int]] = []
    for slot in sorted((plan.slots[name] for name in names), key=lambda slot: slot.offset):
        if runs and runs[-1][1] == slot.offset:
            runs[-1] = runs[-1][0], slot.stop
        else:
            runs.append((slot.offset, slot.stop))
    inside = jnp.zeros(position.shape, bool)
    for start, stop in runs:
        inside = inside | ((position >= start) & (position < stop))
    return inside
