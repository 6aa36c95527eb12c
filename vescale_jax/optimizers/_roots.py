"""Roots: inverse roots of batches of positive semi-definite matrices, in float32.

Comes in: statistics of blocks, (n, k, k), and which of their rows belong to an element at all: an edge block is filled
up with zeros, and an absent one is nothing else. Goes out: `(A + epsilon lambda_max I)^(-1/root)` of each, lambda_max
being its own largest eigenvalue; zero in rows that do not exist, and for a matrix of zeros.

- *eigh*: by eigenvalues, each exact to float32 rounding of the largest, however bad the matrix. One LAPACK or solver
  call a matrix. The default.
- *newton*: the coupled Newton iteration of Anil et al. (arXiv 2002.09018; Guo and Higham, 2006): matrix products only,
  which suits hardware on which a batch of small eigenproblems is slow. It stops by itself where rounding takes over.

Each matrix goes its own way, whatever others are in the batch.
"""

from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ._adamw_8bit import rounded

RootMethod = Literal["eigh", "newton"]
"""How an inverse root is computed."""

TINY = float(np.finfo(np.float32).tiny)
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
    compute = _by_eigh if method == "eigh" else _by_newton
    return jnp.where(both, compute(matrices, real, root, epsilon), 0)


def product(left: jax.Array, right: jax.Array, over: tuple[int, int] = (2, 1)) -> jax.Array:
    """The matrix products of two batches, in full float32 on any hardware.

    Arguments:

    - `left`, `right`: (n, i, j).
    - `over`: the dims that are summed over: (2, 1) for X Y, (2, 2) for X Y^T, (1, 1) for X^T Y.
    """
    alone = len(left) == 1
    if alone:
        # A batch of one is no batch to XLA, and may be summed in another order.
        left, right = (jnp.concatenate([x, x]) for x in (left, right))
    dims = (((over[0],), (over[1],)), ((0,), (0,)))
    out = lax.dot_general(left, right, dims, precision=lax.Precision.HIGHEST)
    return out[:1] if alone else out


def largest(blocks: jax.Array) -> jax.Array:
    """The largest magnitude of each block: (n,)."""
    return jnp.abs(blocks).max((1, 2))


def norm(blocks: jax.Array) -> jax.Array:
    """The Frobenius norm of each block, whose squares may leave the range of float32: (n,).

    The squares of the elements, over the largest, are summed as integers of 32 bits in all: floating-point numbers are
    summed in an order that depends on how many blocks there are, and so on the mesh.
    """
    unit = jnp.maximum(largest(blocks), TINY)
    rest = jnp.square(blocks / unit[:, None, None])
    bits = 30 - (blocks.shape[1] * blocks.shape[2]).bit_length()
    total = jnp.zeros_like(unit)
    for limb in range(1, -(-32 // bits) + 1):
        rest = rest * 2.0**bits
        whole = jnp.floor(rest)
        rest = rest - whole
        total = total + whole.astype(jnp.int32).sum((1, 2)).astype(jnp.float32) * 2.0 ** (-bits * limb)
    return rounded(unit * jnp.sqrt(total))


def eigenvectors(matrices: jax.Array, real: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Eigenvalues, ascending, and eigenvectors; rows that do not exist have negative ones, and mix with no others.

    Arguments:

    - `matrices`, `real`: as for `inverse_root`.

    Returns: (n, k) and (n, k, k), vectors in columns.
    """
    # Away from 0, which real rows without gradients have as well.
    below = -jnp.maximum(_diagonal(matrices).max(1), TINY)
    diagonal = jnp.where(real, _diagonal(matrices), below[:, None])
    eye = jnp.eye(matrices.shape[-1], dtype=bool)[None]
    return jnp.linalg.eigh(jnp.where(eye, diagonal[:, :, None], matrices))


def _by_eigh(matrices: jax.Array, real: jax.Array, root: int, epsilon: float) -> jax.Array:
    values, vectors = eigenvectors(matrices, real)
    top = values[:, -1:]
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
    present = _diagonal(matrices).max(1) > 0
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
    weights, at = _diagonal(power), _diagonal(power).argmax(1)[:, None]
    found = _diagonal(product(power, matrices)) / jnp.maximum(weights, TINY)
    return jnp.take_along_axis(found, at, 1)[:, 0]


def _root(x: jax.Array, root: int) -> jax.Array:
    """By square roots, which every device rounds alike."""
    for _ in range(root.bit_length() - 1):
        x = jnp.sqrt(x)
    return x


def _diagonal(matrices: jax.Array) -> jax.Array:
    return jnp.diagonal(matrices, axis1=-2, axis2=-1)
