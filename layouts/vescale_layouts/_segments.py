"""Segments: one value for every tensor of a group, spread over the local shard or summed from it.

    segments = Segments.of(layout)

    def scale(local, shard):
        norms = jnp.sqrt(lax.psum(local.total(shard * shard), layout.axis))   # (T,), one value a tensor
        return shard / local.spread(norms, 1)

    new = segments.map(scale, buffer.data)

Comes in: a layout. Goes out: what optimizers need that treat tensors each in its own way, such as trust ratios and
masks. A shard holds of a tensor one run of consecutive elements at most, so three integers a run say which element is
whose: where the run starts in the shard, which tensor it is of, and where it starts in the tensor. They are static, cut
over the axis like `BlockView`'s tables, and do not grow with S. No tensor is gathered; `total` gives this device's part
of each sum, for one `psum` of a small vector.

Shapes: N shards of S elements, a stack of L layers or none: local shards `(*stack, S)`; T tensors, at most R runs on a
shard, runs of padding included.
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from vescale_planner import GroupPlan

from ._layout import Layout

Reducer = Literal["sum", "max", "min"]
"""What is made of the elements of one tensor."""

# Up to so many runs a shard, values are chosen by comparisons, which fuse with whatever uses them.
_FEW_RUNS = 32
_FEW_PAIRS = 2**16
_CHUNK = 256


@functools.lru_cache(maxsize=1024)
def run_table(plan: GroupPlan) -> np.ndarray:
    """What lies on every shard, run by run: int32 (N, R, 3).

    A row is (start in the shard, tensor, start in the tensor's slot), ascending. Tensors are counted in slot order; T
    stands for padding. Runs that a shard lacks start at S.
    """
    numbers = {name: i for i, name in enumerate(plan.slots)}
    shards: list[list[tuple[int, int, int]]] = []
    for k in range(plan.num_shards):
        runs: list[tuple[int, int, int]] = []
        end = 0
        for piece in plan.pieces(k):
            if piece.offset > end:
                runs.append((end, len(numbers), 0))
            runs.append((piece.offset, numbers[piece.name], piece.start))
            end = piece.offset + piece.stop - piece.start
        if end < plan.shard_size:
            runs.append((end, len(numbers), 0))
        shards.append(runs)
    table = np.zeros((plan.num_shards, max(1, *map(len, shards)), 3), np.int32)
    table[:, :, 0] = plan.shard_size
    table[:, :, 1] = len(numbers)
    for k, runs in enumerate(shards):
        if runs:
            table[k, : len(runs)] = runs
    return table


@dataclass(frozen=True)
class Segments:
    """The tensors of a group as segments of its shards; hashable, holds no array. `Segments.of` makes it.

    Attributes:

    - `layout`: of the group.
    """

    layout: Layout

    @classmethod
    def of(cls, layout: Layout) -> "Segments":
        """Views a group tensor by tensor.

        Raises: `ValueError` where a slot or a shard has 2**31 elements or more.
        """
        plan = layout.plan
        largest = max([plan.shard_size, *(slot.size for slot in plan.ordered_slots)])
        if largest >= 2**31:
            raise ValueError(
                f"Segments: got a slot or shard of {largest} elements; want fewer than {2**31}; cut the tensor, or use "
                "more devices"
            )
        return cls(layout)

    @property
    def table(self) -> Any:
        """int32 (N, R, 3), to be cut over the axis along dim 0; see `run_table`."""
        table, mesh = run_table(self.layout.plan), self.layout.mesh
        if AxisType.Explicit not in mesh.axis_types:
            return table
        # Under a mesh of explicit axes an array has to lie as the shard_map wants it.
        return jax.sharding.reshard(table, NamedSharding(mesh, PartitionSpec(self.layout.axis)))

    def local(self, runs: jax.Array) -> "LocalSegments":
        """What one device sees, inside `shard_map`.

        Arguments:

        - `runs`: the device's part of `table`: int32 `(1, R, 3)`.
        """
        return LocalSegments(self.layout, runs[0, :, 0], runs[0, :, 1], runs[0, :, 2])

    def map(self, function: Callable[..., Any], *shards: Any) -> Any:
        """Runs a function on every device's own shards.

        Arguments:

        - `function`: called as `function(local, *shards)` with the device's `LocalSegments`; returns local shards.
        - `shards`: pytrees of buffers of `layout.buffer_shape`.

        Returns: what the function returned, as buffers.
        """
        spec = self.layout.spec

        def on_device(runs: jax.Array, shards: Any) -> Any:
            return function(self.local(runs), *shards)

        mapped = jax.shard_map(
            on_device,
            mesh=self.layout.mesh,
            in_specs=(PartitionSpec(self.layout.axis), spec),
            out_specs=spec,
            axis_names={self.layout.axis},
            check_vma=False,
        )
        return mapped(self.table, shards)


@dataclass(frozen=True, slots=True)
class Terms:
    """The place of a tensor's elements in a vector, as sums over its dims.

    Attributes:

    - `start`: of the tensor in the vector.
    - `dims`: any number of `(stride, size, step)`: an element at position q of the slot adds
      `q // stride % size * step`.
    - `layer_step`: from layer to layer of a stack.
    """

    start: int
    dims: tuple[tuple[int, int, int], ...] = ()
    layer_step: int = 0


@dataclass(frozen=True, slots=True)
class LocalSegments:
    """The segments of one device, inside `shard_map`.

    Attributes:

    - `layout`: of the group.
    - `starts`, `tensors`, `firsts`: int32 (R,), the columns of the device's runs; see `run_table`.
    """

    layout: Layout
    starts: jax.Array
    tensors: jax.Array
    firsts: jax.Array

    def spread(self, values: jax.Array, fill: Any) -> jax.Array:
        """Gives every element the value of its tensor.

        Arguments:

        - `values`: `(T,)`, in slot order.
        - `fill`: for padding.

        Returns: `(*stack, S)`, the same for all layers.
        """
        values = jnp.append(values, jnp.asarray(fill, values.dtype))
        found = self._spread_runs(values[self.tensors])
        stack = self.layout.stack
        return jnp.broadcast_to(found.reshape(*[1] * len(stack), -1), self.layout.local_shape) if stack else found

    def index(self, terms: "Sequence[Terms]") -> jax.Array:
        """Where each element belongs in a vector that has several values a tensor, such as one a row.

        Arguments:

        - `terms`: for each tensor, in slot order.

        Returns: int32 `(*stack, S)`; means nothing in padding.
        """
        runs = self._spread_runs(lax.iota(jnp.int32, self.starts.shape[0]))
        position = lax.iota(jnp.int32, self.layout.shard_size) + (self.firsts - self.starts)[runs]

        def spread(numbers: Sequence[int]) -> jax.Array:
            return jnp.asarray(np.array([*numbers, 0], np.int32))[self.tensors][runs]

        found = spread([term.start for term in terms])
        for k in range(max((len(term.dims) for term in terms), default=0)):
            dims = [term.dims[k] if k < len(term.dims) else (1, 1, 0) for term in terms]
            stride, size, step = (spread([dim[i] for dim in dims]) for i in range(3))
            # The stride and the size of what is no tensor are 0.
            found = found + position // jnp.maximum(stride, 1) % jnp.maximum(size, 1) * step
        if self.layout.stack:
            layers = lax.iota(jnp.int32, math.prod(self.layout.stack))
            found = found[None] + layers[:, None] * spread([term.layer_step for term in terms])[None]
            found = found.reshape(self.layout.local_shape)
        return found

    def total(self, shard: jax.Array, reducer: Reducer = "sum") -> jax.Array:
        """Reduces this device's elements of each tensor.

        Arguments:

        - `shard`: `(*stack, S)`.
        - `reducer`: `"sum"`, `"max"` or `"min"`.

        Returns: `(T,)`; 0, the lowest or the highest value for tensors without elements here. Padding is left out.
        """
        reduce, empty = _REDUCERS[reducer], _empty(reducer, shard.dtype)
        if self.layout.stack:
            shard = reduce(shard, tuple(range(len(self.layout.stack))))
        count = len(self.layout.plan.slots)
        if not self.layout.shard_size:
            return jnp.full(count, empty)
        of_runs = self._of_runs(shard, reduce, empty)
        if count * len(of_runs) <= _FEW_PAIRS:
            mine = self.tensors[None] == lax.iota(jnp.int32, count)[:, None]
            return reduce(jnp.where(mine, of_runs[None], empty), (1,))
        at = jnp.full(count + 1, empty).at[self.tensors]
        return (at.add if reducer == "sum" else at.max if reducer == "max" else at.min)(of_runs)[:count]

    def _of_runs(self, shard: jax.Array, reduce: Callable[..., jax.Array], empty: Any) -> jax.Array:
        """Reduces every run: whole chunks first, each once, then what sticks out of them at both ends of a run."""
        size, chunk = self.layout.shard_size, min(_CHUNK, self.layout.shard_size)
        stops = jnp.append(self.starts[1:], size)
        head, tail = self.starts // chunk, stops // chunk
        ends = jnp.concatenate([head, tail])
        low = jnp.concatenate([self.starts, jnp.maximum(self.starts, tail * chunk)])
        # A run within one chunk has no tail: its head is all of it.
        high = jnp.concatenate([jnp.minimum(stops, (head + 1) * chunk), jnp.where(tail > head, stops, 0)])
        at = ends[:, None] * chunk + lax.iota(jnp.int32, chunk)[None]
        inside = (at >= low[:, None]) & (at < high[:, None])
        edges = jnp.where(inside, shard.at[at].get(mode="clip"), empty)
        edges = reduce(reduce(edges, (1,)).reshape(2, -1), (0,))
        whole = size // chunk
        chunks = reduce(shard[: whole * chunk].reshape(whole, chunk), (1,))
        number = lax.iota(jnp.int32, whole)[None]
        within = (number > head[:, None]) & (number < tail[:, None])
        return reduce(jnp.stack([edges, reduce(jnp.where(within, chunks[None], empty), (1,))]), (0,))

    def _spread_runs(self, of_runs: jax.Array) -> jax.Array:
        """(R,) to (S,)."""
        at = lax.iota(jnp.int32, self.layout.shard_size)
        runs = self.starts.shape[0]
        if runs > _FEW_RUNS:
            return of_runs[jnp.searchsorted(self.starts, at, side="right", method="scan_unrolled") - 1]
        found = jnp.full(self.layout.shard_size, of_runs[0])
        for run in range(1, runs):
            found = jnp.where(at >= self.starts[run], of_runs[run], found)
        return found


_REDUCERS: dict[str, Callable[..., jax.Array]] = {"sum": jnp.sum, "max": jnp.max, "min": jnp.min}


def _empty(reducer: Reducer, dtype: Any) -> Any:
    """What a reduction over nothing gives."""
    dtype = jnp.dtype(dtype)
    if reducer == "sum":
        return jnp.zeros((), dtype)
    if jnp.issubdtype(dtype, jnp.floating):
        return jnp.asarray(-jnp.inf if reducer == "max" else jnp.inf, dtype)
    info = jnp.iinfo(dtype)
    return jnp.asarray(info.min if reducer == "max" else info.max, dtype)
