"""AdamW for the parameters of a group that are no matrices; nothing leaves the device.

Comes in: gradients and parameters of whole groups, flat. Goes out: updates in the places of AdamW's parameters, and
their moments. Where most of a group is AdamW's, the moments are buffers like any other. Where most of it are matrices,
there is room for AdamW's own elements only, found by the tables of a `BlockView`.

Shapes: see `_muon.py`.
"""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from vescale_layouts import BlockArrays, BlockView, DBuffer, Layout, LocalBlocks
from vescale_planner import Elements

from ._muon_places import among
from ._muon_rules import Ruling
from ._muon_state import MuonMoments


@dataclass(frozen=True, slots=True)
class Adam:
    """The numbers of `optax.adamw`."""

    b1: float
    b2: float
    eps: float
    weight_decay: float


def adam_zeros(layout: Layout, found: tuple[Ruling, ...]) -> Any:
    """A moment of the parameters of a group that AdamW takes; None if it takes none."""
    names = tuple(ruling.name for ruling in found if ruling.matrix is None)
    if not names:
        return None
    if 2 * sum(layout.plan.slots[name].size for name in names) >= layout.plan.tensor_size:
        return DBuffer.zeros(layout, jnp.float32)
    return BlockArrays.zeros(_view(layout, names), jnp.float32, lambda batch: (batch.rows, batch.cols))


def adam_step(
    adam: Adam,
    count: jax.Array,
    rate: jax.Array,
    decay: Any,
    buffer: jax.Array,
    params: jax.Array,
    moments: MuonMoments,
) -> tuple[jax.Array, Any, Any]:
    """One step for a group: gradients become updates.

    Arguments:

    - `adam`: the numbers.
    - `count`: of this step, from 1.
    - `rate`: the learning rate.
    - `decay`: what times the parameters is added to the updates, since it will be taken off all of the buffer.
    - `buffer`: `(*stack, G)`, gradients in the places of AdamW's parameters.
    - `params`: `(*stack, G)`, float32.
    - `moments`: of the group.

    Returns: `buffer` with updates in these places, and both new moments.
    """
    mean, rms = moments.mean, moments.rms
    if mean is None:
        return buffer, None, None
    t = count.astype(jnp.float32)
    # The bias corrections of both moments, put before the fraction: gain * m / (r + eps).
    root = jnp.sqrt(1 - adam.b2**t)
    scalars = root / (1 - adam.b1**t), root * adam.eps, rate, jnp.asarray(decay, jnp.float32)
    if isinstance(mean, DBuffer):
        update, m, r = _step(adam, scalars, buffer, params, mean.data, rms.data)
        layout, names = moments.layout, [ruling.name for ruling in moments.rulings if ruling.matrix is None]
        if len(names) < len(moments.rulings):
            position = jax.lax.broadcasted_iota(jnp.int32, layout.buffer_shape, len(layout.stack))
            update = jnp.where(among(layout.plan, names, position), update, buffer)
        return update, DBuffer(m, mean.layout), DBuffer(r, mean.layout)
    if not mean.view.batches:  # Tensors without elements.
        return buffer, mean, rms
    buffer, m, r = _on_blocks(adam, mean.view, scalars, (buffer, params), mean.data, rms.data)
    return buffer, BlockArrays(m, mean.view), BlockArrays(r, mean.view)


@functools.lru_cache(maxsize=1024)
def _view(layout: Layout, names: tuple[str, ...]) -> BlockView:
    """Some parameters of a group, one element a block where storage allows: the plan's cuts do not matter then."""
    slots = layout.plan.slots
    return BlockView.of(
        layout,
        {name: Elements(1) if slots[name].storage == "row_major" else slots[name].spec.block for name in names},
    )


def _on_blocks(adam: Adam, view: BlockView, scalars: Any, buffers: Any, mean: Any, rms: Any) -> tuple[Any, Any, Any]:
    """One step where a group is mostly matrices. All layers of a stack at once, and written in place."""
    dims, axis = len(view.layout.stack), view.layout.axis

    def on_device(buffers: Any, moments: Any, scalars: Any) -> Any:
        device = lax.axis_index(axis)
        local = LocalBlocks(view, tuple(jnp.asarray(batch.runs)[device] for batch in view.batches))
        out, p = (x.reshape(-1, x.shape[-1]) for x in buffers)
        mean, rms = ([x.reshape(-1, *x.shape[dims:]) for x in moment] for moment in moments)
        blocks = (jax.vmap(local.split)(x) for x in (out, p))
        steps = [_step(adam, scalars, g, p, m, r) for g, p, m, r in zip(*blocks, mean, rms, strict=True)]
        update, m, r = zip(*steps, strict=True)
        out = jax.vmap(lambda blocks, onto: local.join(blocks, onto=onto))(list(update), out)
        back = [[x.reshape(*view.layout.stack, *x.shape[1:]) for x in moment] for moment in (m, r)]
        return out.reshape(buffers[0].shape), *back

    part, whole = view.layout.spec, PartitionSpec()
    mapped = jax.shard_map(
        on_device,
        mesh=view.layout.mesh,
        in_specs=(part, part, whole),
        out_specs=part,
        axis_names={axis},
        check_vma=False,
    )
    return mapped(tuple(buffers), (tuple(mean), tuple(rms)), scalars)


def _step(adam: Adam, scalars: Any, g: Any, p: Any, m: Any, r: Any) -> tuple[Any, Any, Any]:
    """The update in the dtype of the gradient, and both moments, the second as its root."""
    gain, eps, rate, decay = scalars
    wide = g.astype(jnp.float32)
    m = adam.b1 * m + (1 - adam.b1) * wide
    # Scaled by the larger of the two, so that no square is too large or too small for float32.
    size = jnp.maximum(r, jnp.abs(wide))
    unit = jnp.where(size == 0, jnp.ones_like(size), size)
    r = size * jnp.sqrt(adam.b2 * jnp.square(r / unit) + (1 - adam.b2) * jnp.square(wide / unit))
    update = decay * p - rate * (gain * (m / (r + eps)) + adam.weight_decay * p)
    return update.astype(g.dtype), m, r
