"""BlockView: the local shard as dense batches of blocks, and back; nothing leaves the device.

    view = BlockView.of(layout)                                # or .of(layout, {"kernel": Tile(32, 32)})

    def step(local, shard):
        return local.join([block - block.mean((1, 2), keepdims=True) for block in local.split(shard)])

    new = view.map(step, buffer.data)

Comes in: a layout, and a block for each tensor that its plan keeps whole. Goes out: batches (B, rows, cols), one for
each shape of blocks in the group, of the same size on every device, so that block-wise work is plain array code: a
reduction over the last two dims, or a `vmap`. Edge blocks are filled with zeros, and so are places of a batch that a
device has no block for; on the way back both are dropped. This is what veScale-FSDP (arXiv 2602.22437, section 4) gets
from ranks that loop over their own blocks, for a compiler that runs one program on all devices.

Shapes: N shards of S elements (1D), G = N * S; B blocks of r x c in a batch (3D). Runs of elements are 1 x n blocks.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from vescale_planner import Block

from ._block_index import Batch, BlockIndex, block_index, choose_blocks, positions
from ._layout import Layout


@dataclass(frozen=True, slots=True)
class BlockView:
    """The blocks of a group on the devices of its layout; hashable, holds no array. `BlockView.of` makes it.

    Attributes:

    - `layout`: of the group.
    - `blocks`: the block of each tensor that takes part, in slot order; tensors without elements do not.
    """

    layout: Layout
    blocks: tuple[tuple[str, Block], ...]

    @classmethod
    def of(cls, layout: Layout, blocks: Mapping[str, Block] | None = None) -> "BlockView":
        """Views the tensors of a group in blocks.

        Arguments:

        - `layout`: of the group.
        - `blocks`: by tensor; tensors without one stay out. They may be finer than those of the plan: a parameter
          planned with `Rows(32)` serves `Tile(32, 32)`. None: the plan's own blocks, of all tensors.

        Raises: `ValueError` that names every tensor whose block some legal plan would cut, on this mesh or another,
        and what to pass instead; also where a shard has 2**31 elements or more.
        """
        return cls(layout, choose_blocks(layout.plan, blocks))

    @property
    def index(self) -> BlockIndex:
        """The tables: made once for equal plans and blocks."""
        return block_index(self.layout.plan, self.blocks)

    @property
    def batches(self) -> tuple[Batch, ...]:
        """What `split` returns: count, rows and cols of the blocks, and the tensors they are of."""
        return self.index.batches

    def map(self, function: Callable[..., Any], *shards: Any, replicated: Any = ()) -> Any:
        """Runs a function on every device's own blocks, without communication.

        Arguments:

        - `function`: called as `function(local, *shards)`, or `function(local, *shards, replicated=...)` where that is
          given; `local` is the device's `LocalBlocks`. It returns arrays, each of which is one device's part of the
          result along dim 0.
        - `shards`: pytrees of global arrays, cut evenly over the axis along dim 0: buffers `(G,)`, per-block arrays.
        - `replicated`: a pytree of arrays that every device gets whole, such as a learning rate.

        Returns: what the function returned, as global arrays.
        """
        tables = [batch.runs for batch in self.batches]

        def on_device(runs: Any, shards: Any, replicated: Any) -> Any:
            size = self.layout.shard_size
            at = (
                positions(jnp, batch, jnp.asarray(batch.grids), rows[0], size)
                for batch, rows in zip(self.batches, runs, strict=True)
            )
            local = LocalBlocks(self, tuple(at))
            more = {"replicated": replicated} if jax.tree.leaves(replicated) else {}
            return function(local, *shards, **more)

        cut, whole = PartitionSpec(self.layout.axis), PartitionSpec()
        mapped = jax.shard_map(
            on_device,
            mesh=self.layout.mesh,
            in_specs=(cut, cut, whole),
            out_specs=cut,
            axis_names={self.layout.axis},
            check_vma=False,
        )
        return mapped(tables, shards, replicated)


@dataclass(frozen=True, slots=True)
class LocalBlocks:
    """The blocks of one device, inside `BlockView.map`.

    Attributes:

    - `view`: whose blocks they are.
    - `positions`: where the elements of each of `view.batches` lie in the shard: int32 `(B, rows, cols)`, S where a
      block has none. XLA computes them where they are read, as a rule, and keeps no such array.
    """

    view: BlockView
    positions: tuple[jax.Array, ...]

    def split(self, shard: jax.Array) -> list[jax.Array]:
        """The blocks of a shard.

        Arguments:

        - `shard`: of shape `(S,)`, of any dtype.

        Returns: an array `(B, rows, cols)` for each of `view.batches`, zero where there is no element.
        """
        return [shard.at[at].get(mode="fill", fill_value=0) for at in self.positions]

    def join(self, batches: Sequence[jax.Array], onto: jax.Array | None = None) -> jax.Array:
        """The inverse of `split`.

        Arguments:

        - `batches`: an array `(B, rows, cols)` for each of `view.batches`, all of one dtype.
        - `onto`: the shard `(S,)` that they are written to; needed where the view has no batches. None: zeros.

        Returns: the shard, `(S,)`. What belongs to no block is as in `onto`.
        """
        size = self.view.layout.shard_size
        out = jnp.zeros(size, batches[0].dtype) if onto is None else onto
        for at, batch in zip(self.positions, batches, strict=True):
            # Positions of absent elements are S, outside of the shard, and dropped.
            out = out.at[at].set(batch, mode="drop", unique_indices=True)
        return out

    def masks(self) -> list[jax.Array]:
        """Which elements exist: bool `(B, rows, cols)` for each of `view.batches`."""
        return [at < self.view.layout.shard_size for at in self.positions]

    def owners(self) -> jax.Array:
        """The block of every element of the shard: int32 `(S,)`, counted through the batches in their order.

        Where an element is in no block it is the number of all blocks. What blocks have, concatenated with one entry
        more and indexed by this, comes to lie beside the elements.
        """
        start = 0
        found: list[jax.Array] = []
        for at in self.positions:
            number = start + jnp.arange(len(at), dtype=jnp.int32)
            found.append(jnp.broadcast_to(number[:, None, None], at.shape))
            start += len(at)
        return self.join(found, onto=jnp.full(self.view.layout.shard_size, start, jnp.int32))
