"""Bases: approximate eigenvectors of a batch of statistics, kept up to date by one power iteration at a time.

Comes in: positive semi-definite matrices, float32 (n, k, k), and which of their rows exist; these come first. Goes
out: orthogonal matrices (n, k, k), eigenvectors in columns, those of large eigenvalues first. Rows that do not exist,
of edge blocks and absent ones, have the identity: no direction mixes them with rows that do.

`refreshed` is algorithm 4 of Vyas et al. (SOAP, arXiv 2409.11321).
"""

import jax

from ._givens import orthogonal_factor
from ._jacobi import eigenvectors
from ._matrices import product


def first_basis(matrices: jax.Array, real: jax.Array) -> jax.Array:
    """Eigenvectors of each matrix; see the module."""
    return eigenvectors(matrices, real)[1]


def refreshed(matrices: jax.Array, basis: jax.Array) -> jax.Array:
    """The orthogonal factor of `matrices @ basis`; see the module."""
    return orthogonal_factor(product(matrices, basis))
