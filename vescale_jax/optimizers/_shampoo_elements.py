"""Elements: the element-wise parts of Shampoo and SOAP: running means, and Adam.

Comes in: gradients, and moments of the same shape, float32. Goes out: new moments and directions. Products are rounded
before they are added to anything, so that programs for different meshes give the same bits.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from ._matrices import TINY
from ._rounding import rounded


class Correction(NamedTuple):
    """Adam's bias corrections of both moments, for `gain mean / (rms + eps)`: scalars.

    Attributes:

    - `gain`: before the fraction.
    - `eps`: in its denominator.
    """

    gain: jax.Array
    eps: jax.Array


def correction(b1: float, b2: float, eps: float, means: jax.Array, squares: jax.Array) -> Correction:
    """The corrections after so many gradients; for sums (b2 = 1) there is none of the second moment.

    Arguments:

    - `means`, `squares`: how many gradients are in the first moment and in the second, float32.
    """
    root = seen(b2, squares)
    return Correction(root / (1 - b1**means), jnp.maximum(root * eps, TINY))


def seen(b2: float, squares: jax.Array) -> jax.Array:
    """The root of the weight of all gradients that are in a mean of squares; 1 for sums."""
    return jnp.sqrt(1 - b2**squares) if b2 < 1 else jnp.ones((), jnp.float32)


def new_mean(mean: jax.Array, grad: jax.Array, b1: float) -> jax.Array:
    """`b1 mean + (1 - b1) grad`."""
    return rounded(b1 * mean) + rounded((1 - b1) * grad)


def new_rms(rms: jax.Array, grad: jax.Array, b2: float) -> jax.Array:
    """`sqrt(b2 rms^2 + (1 - b2) grad^2)`, where squares may leave the range of float32; the root of sums for b2 = 1."""
    unit = jnp.maximum(jnp.maximum(rms, jnp.abs(grad)), TINY)
    old, new = jnp.square(rms / unit), jnp.square(grad / unit)
    squares = rounded(old) + rounded(new) if b2 == 1 else rounded(b2 * old) + rounded((1 - b2) * new)
    return rounded(unit * jnp.sqrt(squares))


def adam(mean: jax.Array, rms: jax.Array, by: Correction) -> jax.Array:
    """Adam's direction."""
    return rounded(by.gain * (mean / (rms + by.eps)))
