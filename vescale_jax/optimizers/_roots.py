"""Roots: inverse roots of batches of positive semi-definite matrices, in float32.

Comes in: statistics of blocks, (n, k, k), and which of their rows belong to an element at all: an edge block is filled
up with zeros, and an absent one is nothing else. Goes out: `(A + epsilon lambda_max I)^(-1/root)` of each, lambda_max
being its own largest eigenvalue; zero in rows that do not exist, and for a matrix of zeros.

- *newton*: the coupled Newton iteration of Anil et al. (arXiv 2002.09018; Guo and Higham, 2006): matrix products only.
  It stops by itself where rounding takes over. The default.
- *jacobi*: by eigenvalues, each right to float32 rounding of the largest, however bad the matrix; see `_jacobi.py`.

Neither calls LAPACK, whose eigensolver can hang where several CPU devices of one process call it at once. Each matrix
goes its own way, whatever others are in the batch.
"""

from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax

from ._jacobi import eigenvectors
from ._matrices import TINY, diagonal, largest, norm, product
from ._rounding import rounded

RootMethod = Literal["newton", "jacobi"]
"""How an inverse root is computed."""

_SQUARINGS = 9
_MOST_STEPS = 50
# The error of the coupled matrix, from where each step squares it if rounding does not interfere; and the growth of it
# that rounding may cause before.
_NEAR = 0.1
_GROWTH = 1.2


def inverse_root(matrices: jax.Array, real: jax.Array, *, root: int, epsilon: float, method: RootMethod) -> jax.Array:
    """The inverse root of each matrix of a batch.

    Arguments:

    - `matrices`: symmetric and positive semi-definite, float32 (n, k, k), with entries of about 1 or less; zero in rows
      and columns that do not exist.
    - `real`: which rows exist, bool (n, k).
    - `root`: a power of two: 4 for the power -1/4.
    - `epsilon`: added to all eigenvalues, relative to the largest.
    - `method`: see the module.

    Returns: float32 (n, k, k).
    """
    both = real[:, :, None] & real[:, None, :]
    compute = _by_newton if method == "newton" else _by_jacobi
    return jnp.where(both, compute(matrices, real, root, epsilon), 0)


def _by_jacobi(matrices: jax.Array, real: jax.Array, root: int, epsilon: float) -> jax.Array:
    values, vectors = eigenvectors(matrices, real)
    top = values[:, :1]
    damped = jnp.maximum(values, 0) + rounded(epsilon * top)
    # An absent block has no positive eigenvalue.
    inverse = jnp.where(top > 0, 1 / _root(jnp.maximum(damped, TINY), root), 0)
    return product(vectors * inverse[:, None, :], vectors, (2, 2))


def _by_newton(matrices: jax.Array, real: jax.Array, root: int, epsilon: float) -> jax.Array:
    """X and M = X^root A from X = c I, so that M tends to I: X T and T^root M, T = I + (I - M) / root."""
    eye = jnp.where(real[:, :, None], jnp.eye(matrices.shape[-1], dtype=matrices.dtype)[None], 0)
    damped = matrices + rounded(epsilon * _top(matrices))[:, None, None] * eye
    scale = (1 + root) / (2 * jnp.maximum(norm(damped), TINY))
    # A matrix of zeros is done before it begins.
    present = diagonal(matrices).max(1) > 0
    m = scale[:, None, None] * damped
    x = _root(scale, root)[:, None, None] * eye

    def going(carry: tuple[jax.Array, ...]) -> jax.Array:
        return carry[3].any() & (carry[4] < _MOST_STEPS)

    def step(carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        m, x, err, active, count = carry
        t = eye + (eye - m) / root
        power = t
        for _ in range(root.bit_length() - 1):
            power = product(power, power)
        new = product(power, m)
        found = norm(new - eye)
        better = active & (found < _GROWTH * err)
        m, x = (jnp.where(better[:, None, None], a, b) for a, b in ((new, m), (product(x, t), x)))
        active = better & ((err > _NEAR) | (found < err / 2))
        return m, x, jnp.where(better, found, err), active, count + 1

    carry = m, x, norm(m - eye), present, jnp.zeros((), jnp.int32)
    return jnp.where(present[:, None, None], lax.while_loop(going, step, carry)[1], 0)


def _top(matrices: jax.Array) -> jax.Array:
    """The largest eigenvalues, within 0.5 %: the mean of all, weighted by their 512th powers."""
    power = matrices
    for _ in range(_SQUARINGS):
        power = power / jnp.maximum(largest(power), TINY)[:, None, None]
        power = product(power, power)
    # The weights are those in one diagonal entry, the largest, which is at least 1.
    weights, at = diagonal(power), diagonal(power).argmax(1)[:, None]
    found = diagonal(product(power, matrices)) / jnp.maximum(weights, TINY)
    return jnp.take_along_axis(found, at, 1)[:, 0]


def _root(x: jax.Array, root: int) -> jax.Array:
    """By square roots, which every device rounds alike."""
    for _ in range(root.bit_length() - 1):
        x = jnp.sqrt(x)
    return x
