"""Bases: approximate eigenvectors of a batch of statistics, kept up to date by one power iteration at a time.

Comes in: positive semi-definite matrices, float32 (n, k, k), and which of their rows exist. Goes out: orthogonal
matrices (n, k, k), eigenvectors in columns, those of large eigenvalues first. Rows that do not exist, of edge blocks
and absent ones, have the identity: no direction mixes them with rows that do.

`refreshed` is algorithm 4 of Vyas et al. (SOAP, arXiv 2409.11321).
"""

import jax
import jax.numpy as jnp

from ._jacobi import eigenvectors
from ._matrices import product


def first_basis(matrices: jax.Array, real: jax.Array) -> jax.Array:
    """Eigenvectors of each matrix; see the module."""
    return eigenvectors(matrices, real)[1]


def refreshed(matrices: jax.Array, basis: jax.Array, real: jax.Array) -> jax.Array:
    """The orthogonal factor of `matrices @ basis`; see the module."""
    # Columns of rows that do not exist are the last, and of a product that is zero there: the factor is the identity.
    return _apart(jnp.linalg.qr(product(matrices, basis))[0], real)


def _apart(basis: jax.Array, real: jax.Array) -> jax.Array:
    """Exactly the identity where a row does not exist. Rows that do exist come first in every block."""
    both = real[:, :, None] & real[:, None, :]
    return jnp.where(both, basis, jnp.eye(basis.shape[-1], dtype=basis.dtype)[None])
