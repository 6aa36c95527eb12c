"""Statistics: for each block of a gradient the running sums or means of G G^T and G^T G, however large or small G is.

Comes in: blocks G, float32 (n, r, c). Goes out: `size`, (n,), and two matrices a block of which the larger entries are
about 1: what stands for L is `size^2 left`, and for R `size^2 right`. A square of a gradient may leave the range of
float32, at 1e30 as at 1e-30; the gradient over the largest of its past does not.

L and R are those of Gupta et al. (arXiv 1802.09568), with the decay of Anil et al. (arXiv 2002.09018). Rows that do not
exist are zero in G and so in both; an absent block has size 0.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from vescale_layouts import BlockArrays, BlockView

from ._matrices import TINY, largest, product
from ._rounding import rounded


class Statistics(NamedTuple):
    """Of every block; `BlockArrays` in a state, arrays where it is worked on.

    Attributes:

    - `size`: float32, a number a block.
    - `left`, `right`: float32, (r, r) and (c, c) a block.
    """

    size: Any
    left: Any
    right: Any

    @classmethod
    def zeros(cls, view: BlockView) -> "Statistics":
        """Of no gradient yet."""
        return cls(BlockArrays.zeros(view, jnp.float32), *sides(view))


def sides(view: BlockView) -> tuple[BlockArrays, BlockArrays]:
    """Zeros (r, r) and zeros (c, c) for every block."""
    return (
        BlockArrays.zeros(view, jnp.float32, lambda batch: (batch.rows, batch.rows)),
        BlockArrays.zeros(view, jnp.float32, lambda batch: (batch.cols, batch.cols)),
    )


def accumulated(statistics: Statistics, grad: jax.Array, decay: float) -> Statistics:
    """The statistics after one more gradient.

    Arguments:

    - `statistics`: before it.
    - `grad`: blocks (n, r, c).
    - `decay`: b2: means `b2 L + (1 - b2) G G^T`; 1 for sums.
    """
    size, left, right = statistics
    held = size * jnp.sqrt(jnp.diagonal(left, axis1=1, axis2=2).max(1))
    new = jnp.maximum(held, largest(grad))
    unit = jnp.maximum(new, TINY)
    # The old matrices in the new unit; nothing is kept of nothing.
    ratio = jnp.where(held > 0, size / unit, 0)[:, None, None]
    grad = grad / unit[:, None, None]

    def joined(old: jax.Array, seen: jax.Array) -> jax.Array:
        old = rounded(rounded(old * ratio) * ratio)
        return old + rounded(seen) if decay == 1 else rounded(decay * old) + rounded((1 - decay) * seen)

    return Statistics(new, joined(left, product(grad, grad, (2, 2))), joined(right, product(grad, grad, (1, 1))))


def by_batch(held: Any) -> list[Any]:
    """A tree of `BlockArrays` of one view as what `LocalBlocks.update` takes: a tree of arrays for each batch."""
    leaves, tree = jax.tree.flatten(held, is_leaf=_is_arrays)
    return [tree.unflatten(parts) for parts in zip(*(leaf.data for leaf in leaves), strict=True)]


def by_name(batches: Any, like: Any) -> Any:
    """The inverse of `by_batch`.

    Arguments:

    - `batches`: what `LocalBlocks.update` returned.
    - `like`: what `by_batch` was given: the structure and the view.
    """
    leaves, tree = jax.tree.flatten(like, is_leaf=_is_arrays)
    parts = zip(*(tree.flatten_up_to(batch) for batch in batches), strict=True)
    return tree.unflatten([BlockArrays(data, leaf.view) for data, leaf in zip(parts, leaves, strict=True)])


def _is_arrays(node: Any) -> bool:
    return isinstance(node, BlockArrays)
