"""BlockArrays: what an optimizer keeps for every block, such as a scale, as a pytree node that knows its sharding.

Shapes: N shards, B blocks of one shape on each: an array (N * B, ...) for each shape of blocks; (L, N * B, ...) for a
stack of L layers.

Device k holds what belongs to its own blocks, in the order in which `LocalBlocks.split` returns them. Which block that
is differs from mesh to mesh; `tensors` and `from_tensors` go by the logical tensor, for checkpoints and comparisons.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from ._block_index import Batch
from ._block_view import BlockView


@jax.tree_util.register_pytree_with_keys_class
class BlockArrays:
    """Something for every block of a view, such as scales or statistics: a pytree node with one array a batch.

    Arguments:

    - `data`: for each of `view.batches` an array `(*stack, N * B, ...)`, or `(B, ...)` inside `BlockView.map`: device k
      holds what belongs to its own blocks, in their order.
    - `view`: whose blocks; static.
    """

    __slots__ = ("data", "view")

    def __init__(self, data: Sequence[Any], view: BlockView) -> None:
        self.data = tuple(data)
        self.view = view

    @classmethod
    def zeros(
        cls, view: BlockView, dtype: DTypeLike, shape: Callable[[Batch], tuple[int, ...]] | None = None
    ) -> "BlockArrays":
        """Zeros for every block, made on the devices that hold them.

        Arguments:

        - `view`: whose blocks.
        - `dtype`: of the arrays.
        - `shape`: of what one block has, by batch. None: a scalar.
        """
        stack, shards, sharding = view.layout.stack, view.layout.plan.num_shards, view.layout.sharding
        return cls(
            [
                jnp.zeros((*stack, shards * batch.count, *(shape(batch) if shape else ())), dtype, device=sharding)
                for batch in view.batches
            ],
            view,
        )

    @classmethod
    def from_tensors(cls, view: BlockView, tensors: Mapping[str, Any], dtype: DTypeLike) -> "BlockArrays":
        """The inverse of `tensors`, for any other view of the same blocks: another mesh, another grouping.

        Arguments:

        - `view`: whose blocks.
        - `tensors`: an array `(*stack, matrices, blocks down, blocks across, ...)` for each tensor, by name.
        - `dtype`: of the result.
        """
        data: list[Any] = []
        stack = view.layout.stack
        for batch in view.batches:
            more = np.shape(tensors[batch.names[0]])[len(stack) + 3 :]
            whole = np.zeros((*stack, view.layout.plan.num_shards * batch.count, *more), dtype)
            for name in batch.names:
                whole[*[slice(None)] * len(stack), view.index.order(name)[1]] = tensors[name]
            data.append(jax.device_put(whole, view.layout.sharding))
        return cls(data, view)

    def tensors(self) -> dict[str, Any]:
        """What belongs to the blocks of each tensor: `(*stack, matrices, blocks down, blocks across, ...)`, by name.

        The same on every mesh and under every grouping; can be traced. Runs of elements are one row of blocks.
        """
        found: dict[str, Any] = {}
        for name, _ in self.view.blocks:
            number, where = self.view.index.order(name)
            found[name] = self.data[number][*[slice(None)] * len(self.view.layout.stack), where]
        return found

    def shardings(self, replicated: Any) -> "BlockArrays":
        """The sharding of each array; `replicated` for what is no longer one row of blocks a device."""
        layout = self.view.layout
        dims, shards, sharding = len(layout.stack) + 1, layout.plan.num_shards, layout.sharding
        return BlockArrays(
            [
                sharding if getattr(x, "shape", ())[:dims] == (*layout.stack, shards * batch.count) else replicated
                for x, batch in zip(self.data, self.view.batches, strict=True)
            ],
            self.view,
        )

    def tree_flatten_with_keys(self) -> tuple[tuple[tuple[Any, Any], ...], BlockView]:
        """One child a batch; the view is static."""
        return tuple((jax.tree_util.SequenceKey(i), x) for i, x in enumerate(self.data)), self.view

    def tree_flatten(self) -> tuple[tuple[Any, ...], BlockView]:
        """One child a batch; the view is static."""
        return self.data, self.view

    @classmethod
    def tree_unflatten(cls, view: BlockView, children: Sequence[Any]) -> "BlockArrays":
        """Puts any leaves back: a pytree node may not judge what `jax.tree.map` made."""
        return cls(children, view)

    def __repr__(self) -> str:
        shapes = ", ".join(str(getattr(x, "shape", type(x).__name__)) for x in self.data)
        return f"BlockArrays({shapes}, {self.view.layout!r})"
