"""Newton-Schulz: the matrix with the singular vectors of another, and singular values near 1.

Comes in: a batch of matrices (B, m, n). Goes out: for each X = U S V^T something like U V^T, by products of matrices
alone: X is divided by its Frobenius norm, and then, with A = X X^T, X becomes a X + (b A + c A A) X, a few times over.
With the coefficients of Keller Jordan (https://kellerjordan.github.io/posts/muon, 2024) singular values end between 0.7
and 1.2, and do not converge to 1, since a steep slope at 0 matters more.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

QUINTIC = ((3.4445, -4.7750, 2.0315),)
"""The coefficients of Keller Jordan's iteration."""


def newton_schulz(
    x: jax.Array, coefficients: Sequence[Sequence[float]], eps: float, dtype: DTypeLike = jnp.float32
) -> jax.Array:
    """Makes matrices nearly orthogonal.

    Arguments:

    - `x`: `(B, m, n)` or `(m, n)`.
    - `coefficients`: a, b, c for every step.
    - `eps`: added to the norm. It is taken in the units of `x`, though the norm is computed of `x` divided by its
      largest element, so that no square overflows or vanishes.
    - `dtype`: of the products.

    Returns: of the shape and dtype of `x`. Zeros stay zeros; there is no gradient too large or too small.
    """
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    largest = jnp.max(jnp.abs(wide), axis=(-2, -1), keepdims=True)
    unit = jnp.where(largest == 0, jnp.ones_like(largest), largest)
    wide = wide / unit
    norm = jnp.sqrt(jnp.sum(jnp.square(wide), axis=(-2, -1), keepdims=True))
    y = (wide / (norm + jnp.minimum(eps / unit, jnp.finfo(wide.dtype).max / 2))).astype(dtype)
    tall = y.shape[-2] > y.shape[-1]

    def step(y: jax.Array, a: Any, b: Any, c: Any) -> jax.Array:
        transposed = y.swapaxes(-1, -2)
        gram = transposed @ y if tall else y @ transposed
        power = b * gram + c * (gram @ gram)
        return a * y + (y @ power if tall else power @ y)

    if len(set(map(tuple, coefficients))) == 1:
        # A loop is a fifth of the program, and takes the same time.
        y = lax.fori_loop(0, len(coefficients), lambda _, y: step(y, *coefficients[0]), y)
    else:
        for triple in coefficients:
            y = step(y, *triple)
    return y.astype(x.dtype)


def in_chunks(function: Callable[[Any], Any], x: jax.Array, size: int) -> jax.Array:
    """Applies a function of batches to so many of a batch at a time, at most; bounds temporary memory."""
    if len(x) <= size:
        return function(x)
    whole = len(x) // size * size
    done = lax.map(function, x[:whole].reshape(-1, size, *x.shape[1:])).reshape(whole, *x.shape[1:])
    return jnp.concatenate([done, function(x[whole:])]) if whole < len(x) else done
