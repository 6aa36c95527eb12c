"""Matrices: products and norms of batches of matrices, in float32, with the same bits in every batch.

Comes in: batches (n, r, c). Goes out: batches, or a number for each matrix. A compiler chooses the order of sums by the
size of the batch, and so by the mesh; here it has no choice, or none that matters.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ._rounding import rounded

TINY = float(np.finfo(np.float32).tiny)


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


def diagonal(matrices: jax.Array) -> jax.Array:
    """The diagonals of a batch: (n, k)."""
    return jnp.diagonal(matrices, axis1=-2, axis2=-1)


def orthogonal(matrices: jax.Array) -> jax.Array:
    """Matrices that are nearly orthogonal, made so: a step of the iteration V (3 - V^T V) / 2."""
    return rounded(1.5 * matrices) - rounded(0.5 * product(matrices, product(matrices, matrices, (1, 1))))
