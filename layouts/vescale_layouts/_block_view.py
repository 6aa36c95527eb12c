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
For a stack of layers, `map` goes through the layers, and a function sees one layer at a time.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from vescale_planner import Block

from ._block_index import Batch, BlockIndex, block_index, choose_blocks, positions
from ._layout import Layout

_LEAST_CHUNK = 2**16


@dataclass(frozen=True, eq=False)
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

    @functools.cached_property
    def _hash(self) -> int:
        return hash((self.layout, self.blocks))

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        # Views are static in an optimizer's state, and compared at every dispatch, nearly always with themselves.
        if self is other:
            return True
        if not isinstance(other, BlockView):
            return NotImplemented
        return (self._hash, self.layout, self.blocks) == (other._hash, other.layout, other.blocks)

    @property
    def index(self) -> BlockIndex:
        """The tables: made once for equal plans and blocks."""
        return block_index(self.layout.plan, self.blocks)

    @property
    def batches(self) -> tuple[Batch, ...]:
        """What `split` returns: count, rows and cols of the blocks, and the tensors they are of."""
        return self.index.batches

    def map(self, function: Callable[..., Any], *shards: Any, replicated: Any = (), layers: int = 1) -> Any:
        """Runs a function on every device's own blocks, without communication.

        Arguments:

        - `function`: called as `function(local, *shards)`, or `function(local, *shards, replicated=...)` where that is
          given; `local` is the device's `LocalBlocks`. It returns arrays, each of which is one device's part of the
          result along dim 0.
        - `shards`: pytrees of global arrays, cut evenly over the axis along dim 0: buffers `(G,)`, per-block arrays.
          For a stack of layers they have its dims first, which the function does not see.
        - `replicated`: a pytree of arrays that every device gets whole, such as a learning rate.
        - `layers`: of a stack, how many are worked on at a time; more need more temporary memory.

        Returns: what the function returned, as global arrays, with the dims of the stack first.
        """
        stack = self.layout.stack

        def on_device(local: "LocalBlocks", shards: Any, replicated: Any) -> Any:
            more = {"replicated": replicated} if jax.tree.leaves(replicated) else {}
            if not stack:
                return function(local, *shards, **more)
            flat = jax.tree.map(lambda x: x.reshape(-1, *x.shape[len(stack) :]), shards)
            out = lax.map(
                lambda layer: function(local, *layer, **more), flat, batch_size=layers if layers > 1 else None
            )
            return jax.tree.map(lambda x: x.reshape(*stack, *x.shape[1:]), out)

        return self._on_devices(on_device, shards, replicated)

    def update(
        self,
        function: Callable[..., Any],
        shards: Sequence[jax.Array],
        of_blocks: Sequence[Any] = (),
        *,
        read: Sequence[jax.Array] = (),
        replicated: Any = (),
        chunk: int = 2**20,
    ) -> tuple[tuple[jax.Array, ...], list[Any]]:
        """`LocalBlocks.update` on every device, on global arrays; of a stack, one layer after the other, in place.

        Arguments:

        - `function`: called as `function(replicated, blocks, of_blocks)`; see `LocalBlocks.update`.
        - `shards`, `read`: buffers `(*stack, G)`.
        - `of_blocks`: for each of `batches` a pytree of arrays `(*stack, N * B, ...)`, as in `BlockArrays.data`.
        - `replicated`: a pytree of arrays that every device gets whole, such as a learning rate.
        - `chunk`: elements of blocks in a chunk, at most.

        Returns: the new shards and the new `of_blocks`.
        """
        stack = self.layout.stack

        def on_device(local: "LocalBlocks", parts: Any, replicated: Any) -> Any:
            written, read = parts
            one = functools.partial(function, replicated)
            if not stack:
                return local.update(one, *written, read=read, chunk=chunk)
            written, read = jax.tree.map(lambda x: x.reshape(-1, *x.shape[len(stack) :]), (written, read))

            def layer(i: Any, written: Any) -> Any:
                now, seen = jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, i, keepdims=False), (written, read))
                new = local.update(one, *now, read=seen, chunk=chunk)
                return jax.tree.map(lambda x, y: lax.dynamic_update_index_in_dim(x, y, i, 0), written, new)

            written = lax.fori_loop(0, math.prod(stack), layer, written)
            return jax.tree.map(lambda x: x.reshape(*stack, *x.shape[1:]), written)

        written = tuple(shards), list(of_blocks) or [()] * len(self.batches)
        return self._on_devices(on_device, (written, tuple(read)), replicated)

    def _on_devices(self, function: Callable[..., Any], parts: Any, replicated: Any) -> Any:
        """Runs a function of a device's blocks, of its parts of global arrays, and of what all devices get whole."""

        def on_device(runs: Any, parts: Any, replicated: Any) -> Any:
            return function(LocalBlocks(self, tuple(table[0] for table in runs)), parts, replicated)

        layout = self.layout
        cut, part, whole = PartitionSpec(layout.axis), layout.spec, PartitionSpec()
        # Placed, as a mesh with explicit axes wants them.
        tables = [jax.device_put(batch.runs, NamedSharding(layout.mesh, cut)) for batch in self.batches]
        mapped = jax.shard_map(
            on_device,
            mesh=layout.mesh,
            in_specs=(cut, part, whole),
            out_specs=part,
            axis_names={layout.axis},
            check_vma=False,
        )
        return mapped(tables, parts, replicated)


@dataclass(frozen=True, slots=True)
class LocalBlocks:
    """The blocks of one device, inside `BlockView.map`.

    Attributes:

    - `view`: whose blocks they are.
    - `runs`: this device's rows of each batch's table, int32 `(T', 4)`; see `Batch`.
    """

    view: BlockView
    runs: tuple[Any, ...]

    def split(self, shard: jax.Array) -> list[jax.Array]:
        """The blocks of a shard.

        Arguments:

        - `shard`: of shape `(S,)`, of any dtype.

        Returns: an array `(B, rows, cols)` for each of `view.batches`, zero where there is no element.
        """
        return [_take(shard, at) for at in self._positions()]

    def join(self, batches: Sequence[jax.Array], onto: jax.Array | None = None) -> jax.Array:
        """The inverse of `split`.

        Arguments:

        - `batches`: an array `(B, rows, cols)` for each of `view.batches`, all of one dtype.
        - `onto`: the shard `(S,)` that they are written to; needed where the view has no batches. None: zeros.

        Returns: the shard, `(S,)`. What belongs to no block is as in `onto`.
        """
        size = self.view.layout.shard_size
        out = jnp.zeros(size, batches[0].dtype) if onto is None else onto
        for at, batch in zip(self._positions(), batches, strict=True):
            out = _put(out, at, batch)
        return out

    def masks(self) -> list[jax.Array]:
        """Which elements exist: bool `(B, rows, cols)` for each of `view.batches`."""
        return [at < self.view.layout.shard_size for at in self._positions()]

    def update(
        self,
        function: Callable[..., Any],
        shards: Sequence[jax.Array],
        of_blocks: Sequence[Any] = (),
        *,
        read: Sequence[jax.Array] = (),
        chunk: int = 2**20,
    ) -> tuple[tuple[jax.Array, ...], list[Any]]:
        """Changes shards block by block, a chunk of blocks at a time, in place, so that few temporary bytes are needed.

        What `split`, a function and `join` would do, without whole batches.

        Arguments:

        - `function`: called as `function(blocks, of_blocks)` with a tuple of `(n, rows, cols)`, one for each of
          `shards` and then of `read`, and with what the n blocks have. Returns the new blocks of `shards`, and what the
          blocks have then: arrays of the same shapes and dtypes. Blocks must not depend on each other; some may be
          absent, and some done already, of which the result is dropped.
        - `shards`: arrays `(S,)` that are read and written.
        - `of_blocks`: for each of `view.batches` a pytree of arrays `(B, ...)`, such as scales.
        - `read`: arrays `(S,)` that are read only.
        - `chunk`: elements of blocks in a chunk, at most.

        Returns: the new shards, where elements in no block are as before, and the new `of_blocks`.
        """
        state: tuple[jax.Array, ...] = tuple(shards)
        found: list[Any] = []
        of_blocks = of_blocks or [()] * len(self.view.batches)
        for number, batch in enumerate(self.view.batches):
            # As many blocks in each chunk as will go into equal ones. An eighth at most, since XLA may work on many
            # groups at once; but not so few elements that there is nothing to do in parallel.
            elements = batch.count * batch.rows * batch.cols
            chunks = -(-elements // min(chunk, max(elements // 8, _LEAST_CHUNK)))
            size = -(-batch.count // chunks)

            def one(i: Any, carry: Any, number: int = number, count: int = batch.count, size: int = size) -> Any:
                state, all_have = carry
                # The last chunk begins early enough to be a whole one; what others did already, it leaves alone.
                first = jnp.minimum(i * size, count - size)
                done = first + jnp.arange(size, dtype=jnp.int32) < i * size
                at = self._at(number, first, size)
                had = jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, first, size), all_have)
                new, has = function(tuple(_take(shard, at) for shard in (*state, *read)), had)
                at = jnp.where(done[:, None, None], self.view.layout.shard_size, at)
                has = jax.tree.map(lambda x, y: jnp.where(done.reshape(-1, *[1] * (y.ndim - 1)), x, y), had, has)
                all_have = jax.tree.map(lambda x, y: lax.dynamic_update_slice_in_dim(x, y, first, 0), all_have, has)
                return tuple(_put(shard, at, blocks) for shard, blocks in zip(state, new, strict=True)), all_have

            if chunks == 1:
                at = self._at(number, 0, batch.count)
                new, has = function(tuple(_take(shard, at) for shard in (*state, *read)), of_blocks[number])
                state = tuple(_put(shard, at, blocks) for shard, blocks in zip(state, new, strict=True))
            else:
                state, has = lax.fori_loop(0, chunks, one, (state, of_blocks[number]))
            found.append(has)
        return state, found

    def _positions(self) -> list[jax.Array]:
        return [self._at(number, 0, batch.count) for number, batch in enumerate(self.view.batches)]

    def _at(self, number: int, first: Any, count: int) -> jax.Array:
        """Where the elements of some blocks of a batch lie: int32 `(count, rows, cols)`, S where there is none."""
        batch, runs, size = self.view.batches[number], self.runs[number], self.view.layout.shard_size
        return positions(jnp, batch, jnp.asarray(batch.grids), runs, size, first, count)


def _take(shard: jax.Array, at: jax.Array) -> jax.Array:
    return shard.at[at].get(mode="fill", fill_value=0)


def _put(shard: jax.Array, at: jax.Array, blocks: jax.Array) -> jax.Array:
    # Positions of absent elements are S, outside of the shard, and dropped. All others are unique.
    return shard.at[at].set(blocks, mode="drop", unique_indices=True)
