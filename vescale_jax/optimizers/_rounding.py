"""Rounding: float32 products that have the same bits in every program."""

from typing import Any

import jax.numpy as jnp
import numpy as np


def rounded(product: Any) -> Any:
    """A product, rounded to float32 before anything is added to it.

    Compilers may otherwise fuse the two into one operation with one rounding, in some programs and not in others, and
    codes would differ in their last bit from mesh to mesh. They cannot see through a clip, which changes no finite
    number.
    """
    largest = np.finfo(np.float32).max
    return jnp.clip(product, -largest, largest)
