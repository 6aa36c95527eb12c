"""Waiting: a zero that XLA cannot compute before some arrays are there.

Comes in: arrays. Goes out: an integer zero; what is computed with it, such as an index, comes after them.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


def zero_after(trees: Sequence[Any]) -> Any:
    """Zero, but not before the first floating-point array of each tree is there.

    XLA removes optimization barriers before it schedules, so what has to wait must need something. No compiler may take
    this for a constant: both comparisons depend on whether the number is a NaN.

    Arguments:

    - `trees`: pytrees of arrays; those without floating-point numbers are not waited for.

    Returns: an int32 scalar, or 0 where there is nothing to wait for.
    """
    found = [[x for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.floating) and x.size] for tree in trees]
    ones = [lax.slice(numbers[0].reshape(-1), (0,), (1,))[0] for numbers in found if numbers]
    waits = [((one == one) & (one != one)).astype(jnp.int32) for one in ones]
    return sum(waits, start=0)
