"""redistribute: tensors of a group moved from one placement to another.

Comes in: what the devices hold of a group, and how it lies. Goes out: the same tensors lying otherwise. There are three
placements: a `Layout` (shards; owners of whole tensors are layouts too, see `plan_owners`), `Replicated` (every device
holds the whole buffer) and `Partial` (every device holds a whole buffer of summands).

| from | to | by |
|---|---|---|
| layout | layout | one all_to_all, or an exact exchange where that would mostly carry padding; see `exchange_of` |
| layout | replicated | one all_gather |
| replicated | layout, replicated | nothing: local slices |
| partial | layout | one reduce-scatter |
| partial | replicated | one all-reduce |

Shapes: N shards of S elements, G = N * S of a whole buffer; for a stack of layers all have its dims first.
"""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.core
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from vescale_planner import GroupPlan

from ._collectives import sum_dtype
from ._dbuffer import DBuffer
from ._layout import Layout
from ._pack import pack, unpack
from ._redistribute_exchange import Exchange, exchange_of
from ._redistribute_runs import runs_between


@dataclass(frozen=True, slots=True)
class Replicated:
    """Every device holds the whole buffer.

    Arguments:

    - `layout`: its slots and its mesh; its shards do not matter.
    """

    layout: Layout


@dataclass(frozen=True, slots=True)
class Partial:
    """Every device holds a whole buffer; the tensors are the sums over the devices.

    Arguments:

    - `layout`: its slots and its mesh; its shards do not matter.
    """

    layout: Layout


Placement = Layout | Replicated | Partial
"""How a group lies on the devices of a mesh axis."""


def redistribute(buffer: DBuffer, target: Layout | Replicated, *, source: Placement | None = None) -> DBuffer:
    """Moves a group's tensors to another placement; can be traced.

    Arguments:

    - `buffer`: of shape `(*stack, G)`; `(N, *stack, G)` where the source is `Partial`, cut over dim 0.
    - `target`: how they shall lie: over the same mesh axis, with the same tensors.
    - `source`: how they lie. None: as the buffer's layout says.

    Returns: a buffer with the target's layout, zero in the padding. It is replicated if the target is.

    Raises: `ValueError` that names every tensor which source and target do not share, or what else differs.
    """
    source = buffer.layout if source is None else source
    _check(_layout(source), _layout(target))
    data = buffer.data
    if not isinstance(data, jax.core.Tracer):
        data = jax.device_put(data, NamedSharding(_layout(source).mesh, _spec(source)))
    return DBuffer(_mover(source, target)(data), _layout(target))


def redistribute_shard(
    x: jax.Array,
    source: Placement,
    target: Layout | Replicated,
    *,
    reduce_dtype: DTypeLike | None = None,
    slack: float = 2.0,
) -> jax.Array:
    """Moves a group's tensors to another placement, inside `jax.shard_map`, manual over the layouts' axis.

    Arguments:

    - `x`: what this device holds: `(*stack, S)` of a layout, `(*stack, G)` otherwise.
    - `source`, `target`: how the tensors lie and shall lie.
    - `reduce_dtype`: in which partial sums are added up. None: float32, or the dtype of `x` if wider.
    - `slack`: see `exchange_of`.

    Returns: what this device holds afterwards, of the dtype of `x`, zero in the padding.

    Raises: `ValueError` that names every tensor which source and target do not share, or what else differs.
    """
    before, after = _layout(source), _layout(target)
    _check(before, after)
    if isinstance(source, Layout):
        if isinstance(target, Layout):
            return x if before.plan == after.plan else _exchange(before, after, slack)(x, after.axis)
        if before.plan.num_shards > 1 and before.buffer_size:
            x = lax.all_gather(x, before.axis, axis=x.ndim - 1, tiled=True)
        return _repack(before.plan, after.plan, x)
    x = _repack(before.plan, after.plan, x)
    alone = after.plan.num_shards == 1 or not after.buffer_size
    if isinstance(source, Replicated):
        if isinstance(target, Replicated) or alone:
            return x
        start = lax.axis_index(after.axis) * after.shard_size
        return lax.dynamic_slice_in_dim(x, start, after.shard_size, x.ndim - 1)
    if alone:
        return x
    summed = x.astype(sum_dtype(x.dtype) if reduce_dtype is None else reduce_dtype)
    if isinstance(target, Layout):
        summed = lax.psum_scatter(summed, after.axis, scatter_dimension=x.ndim - 1, tiled=True)
    else:
        summed = lax.psum(summed, after.axis)
    return summed.astype(x.dtype)


def _layout(placement: Placement) -> Layout:
    return placement if isinstance(placement, Layout) else placement.layout


def _spec(placement: Placement) -> PartitionSpec:
    layout = _layout(placement)
    if isinstance(placement, Layout):
        return layout.spec
    return PartitionSpec(layout.axis) if isinstance(placement, Partial) else PartitionSpec()


@functools.lru_cache(maxsize=256)
def _mover(source: Placement, target: Layout | Replicated) -> Any:
    """The jitted move of a global array; the same object for equal placements."""
    layout = _layout(target)

    def on_device(x: jax.Array) -> jax.Array:
        return redistribute_shard(x[0] if isinstance(source, Partial) else x, source, target)

    mapped = jax.shard_map(
        on_device,
        mesh=layout.mesh,
        in_specs=_spec(source),
        out_specs=_spec(target),
        axis_names={layout.axis},
        check_vma=False,
    )
    return jax.jit(mapped)


@functools.lru_cache(maxsize=256)
def _exchange(source: Layout, target: Layout, slack: float) -> Exchange:
    return exchange_of(runs_between(source.plan, target.plan), target.mesh.devices.flat[0].platform, slack=slack)


def _repack(source: GroupPlan, target: GroupPlan, x: jax.Array) -> jax.Array:
    """A whole buffer of one plan as that of another: (*stack, G) -> (*stack, G')."""
    if source == target:
        return x
    flat = x.reshape(-1, source.buffer_size)
    packed = jax.vmap(lambda layer: pack(target, unpack(source, layer), layer.dtype))(flat)
    return packed.reshape(*x.shape[:-1], target.buffer_size)


def _check(source: Layout, target: Layout) -> None:
    """What the plans alone do not say: mesh, axis and stack."""
    for what in ("mesh", "axis", "stack"):
        got, want = getattr(target, what, ()), getattr(source, what, ())
        if got != want:
            raise ValueError(
                f"redistribute: got a target with {what} {got}; want that of the source, {want}; "
                "plan and bind both for the same mesh axis"
            )
    runs_between(source.plan, target.plan)
