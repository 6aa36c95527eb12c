"""DBuffer: the flat array of one group as a pytree node.

Shapes: N shards, S elements a shard, G = N * S elements of the buffer (1D). For a stack of L layers the buffer is
(L, G), and tensors have the dims of the stack before their own.

The one leaf is the flat array; the layout rides along as static data. Hence `jax.jit`, donation, `jax.tree.map`,
`jax.eval_shape` and every element-wise optax transformation take a DBuffer for what it is: one array a group,
however many tensors lie in it (veScale-FSDP, section 4.3: group-level operators).
"""

import functools
import math
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from vescale_planner import Faults

from ._layout import Layout
from ._pack import unpack
from ._storage import load, store


@jax.tree_util.register_pytree_with_keys_class
class DBuffer:
    """One group's flat array with its layout.

    Arguments:

    - `data`: the array, of shape `layout.buffer_shape`, or `layout.local_shape` inside `shard_map`; what
      `jax.tree.map` makes of it otherwise.
    - `layout`: where each tensor lies in it.
    """

    __slots__ = ("data", "layout")

    def __init__(self, data: Any, layout: Layout) -> None:
        self.data = data
        self.layout = layout

    @classmethod
    def zeros(cls, layout: Layout, dtype: DTypeLike) -> "DBuffer":
        """A buffer of zeros, made shard by shard on the devices that hold it."""
        return cls(jnp.zeros(layout.buffer_shape, dtype, device=layout.sharding), layout)

    @classmethod
    def abstract(cls, layout: Layout, dtype: DTypeLike) -> "DBuffer":
        """A buffer without values: shape, dtype and sharding only."""
        return cls(jax.ShapeDtypeStruct(layout.buffer_shape, dtype, sharding=layout.sharding), layout)

    @classmethod
    def from_tensors(cls, layout: Layout, tensors: Mapping[str, Any], dtype: DTypeLike) -> "DBuffer":
        """Packs concrete tensors, shard by shard: no whole buffer is ever made.

        Arguments:

        - `layout`: where each tensor goes.
        - `tensors`: one array for each slot, by name, of the slot's logical shape (ND) behind the stack's dims.
        - `dtype`: of the buffer.

        Raises: `ValueError` that names every tensor which is missing or of another shape.
        """
        plan = layout.plan
        faults = Faults("DBuffer.from_tensors")
        for name, slot in plan.slots.items():
            shape = tuple(np.shape(tensors[name])) if name in tensors else None
            if shape != (*layout.stack, *slot.shape):
                got = "no tensor" if shape is None else f"shape {shape}"
                want = f"shape {(*layout.stack, *slot.shape)}"
                faults.add(name, got=got, want=want, change="pass the tensors that were planned")
        faults.raise_if_any()
        dtype = jnp.dtype(dtype)
        host: dict[str, np.ndarray] = {}

        def shard(index: Any) -> np.ndarray:
            out = np.zeros((layers, plan.shard_size), dtype)
            for piece in plan.pieces((index[-1].start or 0) // max(plan.shard_size, 1)):
                if piece.name not in host:
                    slot = plan.slots[piece.name]
                    tensor = np.asarray(tensors[piece.name]).reshape(layers, *slot.shape)
                    host[piece.name] = np.stack([store(slot, layer) for layer in tensor])
                run = host[piece.name][:, piece.start : piece.stop]
                out[:, piece.offset : piece.offset + piece.stop - piece.start] = run
            return out.reshape(layout.local_shape)

        layers = math.prod(layout.stack)
        return cls(jax.make_array_from_callback(layout.buffer_shape, layout.sharding, shard), layout)

    def tensors(self) -> dict[str, jax.Array]:
        """The logical tensors by name, in slot order, as slices of the whole buffer; can be traced."""
        take = functools.partial(unpack, self.layout.plan)
        for _ in self.layout.stack:
            take = jax.vmap(take)
        return take(self.data)

    def read(self) -> Iterator[tuple[str, np.ndarray]]:
        """The logical tensors on the host, one at a time, in slot order.

        Every process of the mesh has to iterate along, since shards of other processes are fetched by a collective.
        """
        plan, data = self.layout.plan, self.data
        if not data.is_fully_addressable:
            data = jax.jit(lambda x: x, out_shardings=NamedSharding(self.layout.mesh, PartitionSpec()))(data)
        if data.is_fully_replicated:
            whole = np.asarray(data.addressable_data(0))
            shards = [whole[..., k * plan.shard_size : (k + 1) * plan.shard_size] for k in range(plan.num_shards)]
        else:
            by_start = {s.index[-1].start or 0: s.data for s in data.addressable_shards}
            shards = [by_start[k * plan.shard_size] for k in range(plan.num_shards)]
        pieces: dict[str, list[np.ndarray]] = {name: [] for name in plan.slots}
        for k, shard in enumerate(shards):
            local: np.ndarray | None = None
            for piece in plan.pieces(k):
                local = np.asarray(shard) if local is None else local
                pieces[piece.name].append(local[..., piece.offset : piece.offset + piece.stop - piece.start])
        stack = self.layout.stack
        for name, slot in plan.slots.items():
            parts = pieces.pop(name)
            flat = np.concatenate(parts, axis=-1) if parts else np.zeros((*stack, 0), data.dtype)
            rows = flat.reshape(math.prod(stack), flat.shape[-1])
            layers = [load(slot, layer) for layer in rows] if stack else [load(slot, flat)]
            yield name, np.stack(layers).reshape(*stack, *slot.shape) if stack else layers[0]

    def tree_flatten_with_keys(self) -> tuple[tuple[tuple[Any, Any]], Layout]:
        """One child, the array; the layout is static."""
        return ((jax.tree_util.GetAttrKey("data"), self.data),), self.layout

    def tree_flatten(self) -> tuple[tuple[Any], Layout]:
        """One child, the array; the layout is static."""
        return (self.data,), self.layout

    @classmethod
    def tree_unflatten(cls, layout: Layout, children: tuple[Any]) -> "DBuffer":
        """Puts any leaf back: a pytree node may not judge what `jax.tree.map` made."""
        return cls(children[0], layout)

    def __repr__(self) -> str:
        dtype = getattr(self.data, "dtype", type(self.data).__name__)
        return f"DBuffer({dtype}, {self.layout!r})"
