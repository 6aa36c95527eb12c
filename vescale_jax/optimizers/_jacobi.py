"""Jacobi: eigenvalues and eigenvectors of batches of symmetric matrices, by plane rotations only.

Comes in: positive semi-definite matrices, float32 (n, k, k), and which of their rows exist. Goes out: eigenvalues,
largest first, and eigenvectors.

The method is the parallel cyclic one (Brent and Luk, 1985): a round rotates k / 2 pairs of rows and columns at once,
and k - 1 rounds, a sweep, meet every pair once, in the order of a round-robin tournament. The number of sweeps is
fixed, as is all else: every matrix has the same bits whatever others are in the batch. There is no call into LAPACK,
whose eigensolver waits for threads that may all be waiting in it, where several CPU devices of one process call it.

A thousand rotations leave vectors that are orthogonal to 1e-5 only. So they are made orthogonal, the matrix is taken
into their basis anew, and two more sweeps, whose rotations are tiny, finish it.
"""

import jax
import jax.numpy as jnp
from jax import lax

from ._matrices import TINY, diagonal, largest, orthogonal, product
from ._rounding import rounded

# Beyond the logarithm of k; and after the basis was made orthogonal.
_MORE_SWEEPS = 3
_LAST_SWEEPS = 2
# Of an element off the diagonal: over the root of the product of the two on it, and where the largest is 1 to 2.
_ROUNDING = 2.0**-23
_LEAST = 2.0**-24


def eigenvectors(matrices: jax.Array, real: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Eigenvalues, largest first, and eigenvectors.

    Arguments:

    - `matrices`: symmetric and positive semi-definite, of any scale, float32 (n, k, k); zero in rows and columns that
      do not exist.
    - `real`: which rows exist, bool (n, k); these come first.

    Returns: (n, k) and (n, k, k), vectors in columns. Rows that do not exist are last, have the value 0 and the
    identity, and mix with no others, even of value 0.
    """
    k = matrices.shape[-1]
    unit = _power_of_two(largest(matrices))
    # A row more does no harm: where an element off the diagonal is 0, nothing is rotated.
    a = jnp.pad(matrices / unit[:, None, None], ((0, 0), (0, k % 2), (0, k % 2)))
    eye = jnp.broadcast_to(jnp.eye(a.shape[-1], dtype=a.dtype), a.shape)
    _, vectors = _sweeps(a, eye, (k - 1).bit_length() + _MORE_SWEEPS)
    vectors = orthogonal(vectors)
    turned, vectors = _sweeps(product(vectors, product(a, vectors), (1, 1)), vectors, _LAST_SWEEPS)
    values, vectors = diagonal(turned)[:, :k], orthogonal(vectors)[:, :k, :k]
    order = jnp.argsort(jnp.where(real, -values, jnp.inf), axis=1, stable=True)
    values = jnp.take_along_axis(values, order, 1) * unit[:, None]
    return values, jnp.take_along_axis(vectors, order[:, None, :], 2)


def _sweeps(a: jax.Array, vectors: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """So many sweeps over matrices of an even number of rows: what is nearly diagonal then, and the vectors."""
    return lax.fori_loop(0, count * (a.shape[-1] - 1), lambda _, both: _round(*both), (a, vectors))


def _round(a: jax.Array, vectors: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Rotates row i and row i + k/2 of each matrix, and the columns, so that element (i, i + k/2) is 0."""
    half = a.shape[-1] // 2
    values, off = diagonal(a), diagonal(a[:, :half, half:])
    gap = values[:, half:] - values[:, :half]
    # The tangent of the smaller angle, by numbers of about 1, whose squares neither vanish nor overflow.
    unit = jnp.maximum(jnp.maximum(jnp.abs(gap), jnp.abs(2 * off)), TINY)
    x, y = jnp.abs(gap) / unit, 2 * off / unit
    tangent = y / (x + jnp.sqrt(rounded(x * x) + rounded(y * y)))
    # What is rounding, of the two or of the largest, stays: turning it would stir what others have settled, for ever.
    size = jnp.sqrt(jnp.abs(values[:, :half])) * jnp.sqrt(jnp.abs(values[:, half:]))
    done = jnp.abs(off) <= jnp.maximum(_ROUNDING * size, _LEAST)
    tangent = jnp.where(done, 0, jnp.where(gap < 0, -tangent, tangent))
    cosine = 1 / jnp.sqrt(1 + rounded(tangent * tangent))
    sine = rounded(tangent * cosine)
    a = _rotated(a, cosine[:, :, None], sine[:, :, None], 1)
    by = cosine[:, None, :], sine[:, None, :]
    return _rotated(a, *by, 2), _rotated(vectors, *by, 2)


def _rotated(x: jax.Array, cosine: jax.Array, sine: jax.Array, axis: int) -> jax.Array:
    """Rotates the two halves of an axis, and puts next to each other who meets in the next round."""
    half = x.shape[axis] // 2

    def part(y: jax.Array, first: int, end: int) -> jax.Array:
        return lax.slice_in_dim(y, first, end, axis=axis)

    one, two = part(x, 0, half), part(x, half, 2 * half)
    one, two = rounded(cosine * one) - rounded(sine * two), rounded(sine * one) + rounded(cosine * two)
    if half == 1:
        return jnp.concatenate([one, two], axis)
    # The first stays, all others move on by one place around the table.
    upper = part(one, 0, 1), part(two, 0, 1), part(one, 1, half - 1)
    return jnp.concatenate([*upper, part(two, 1, half), part(one, half - 1, half)], axis)


def _power_of_two(x: jax.Array) -> jax.Array:
    """The largest power of two that is not larger, or 2^-126 for less, so that division by it rounds nothing."""
    bits = lax.bitcast_convert_type(jnp.maximum(x, TINY), jnp.int32)
    return lax.bitcast_convert_type(bits & 0x7F800000, jnp.float32)
