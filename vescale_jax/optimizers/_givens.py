"""Givens: the orthogonal factors of batches of square matrices, by plane rotations only.

Comes in: matrices (n, k, k), singular or not, float32. Goes out: Q of their QR factorisations, (n, k, k).

Rotations of neighbouring rows make the matrix triangular, many at once (Sameh and Kuck, 1978): the element in row i and
column j goes in round k - 1 - i + 2 j, so that all pairs of a round begin at even rows, or all at odd ones. There is no
call into LAPACK, whose QR waits for threads that may all be waiting in it, where several CPU devices of one process
call it. Nothing is summed but by matrix products: every matrix has the same bits whatever others are in the batch.
"""

import jax
import jax.numpy as jnp
from jax import lax

from ._matrices import TINY, orthogonal
from ._rounding import rounded


def orthogonal_factor(matrices: jax.Array) -> jax.Array:
    """Q of a QR factorisation of each matrix.

    Rows of zeros at the end, with columns of zeros, have the identity, exactly.

    Arguments:

    - `matrices`: float32 (n, k, k).
    """
    k = matrices.shape[-1]
    a = jnp.pad(matrices, ((0, 0), (0, k % 2), (0, k % 2)))
    eye = jnp.broadcast_to(jnp.eye(a.shape[-1], dtype=a.dtype), a.shape)
    both = jnp.concatenate([a, eye], 2)
    both = lax.fori_loop(0, a.shape[-1] - 1, lambda i, both: _round(_round(both, 2 * i, 0), 2 * i + 1, 1), both)
    # Turned over after the products: a product of what is turned over may be summed in another order.
    return orthogonal(both[:, :k, a.shape[-1] : a.shape[-1] + k]).swapaxes(1, 2)


def _round(x: jax.Array, number: jax.Array, first: int) -> jax.Array:
    """Rotates pairs of rows, the first of which is `first`, so that one element of each lower row is 0.

    Arguments:

    - `x`: (n, k, 2 k), of an even k: what is left of the matrices, and what has been done to the identity.
    - `number`: of the round.
    """
    n, k, width = x.shape
    pairs = k // 2 - first
    rows = x[:, first : k - first].reshape(n, pairs, 2, width)
    upper, lower = rows[:, :, 0], rows[:, :, 1]
    row = first + 1 + 2 * jnp.arange(pairs)
    column = (row - (k - 1) + number) // 2
    at = jnp.clip(column, 0, k - 1)[None, :, None]
    a, b = jnp.take_along_axis(upper, at, 2), jnp.take_along_axis(lower, at, 2)
    unit = jnp.maximum(jnp.maximum(jnp.abs(a), jnp.abs(b)), TINY)
    a, b = a / unit, b / unit
    length = jnp.sqrt(rounded(a * a) + rounded(b * b))
    turned = ((column >= 0) & (column < row))[None, :, None] & (b != 0)
    cosine, sine = jnp.where(turned, a / length, 1), jnp.where(turned, b / length, 0)
    upper, lower = rounded(cosine * upper) + rounded(sine * lower), rounded(cosine * lower) - rounded(sine * upper)
    rows = jnp.stack([upper, lower], 2).reshape(n, 2 * pairs, width)
    return jnp.concatenate([x[:, :first], rows, x[:, k - first :]], 1) if first else rows
