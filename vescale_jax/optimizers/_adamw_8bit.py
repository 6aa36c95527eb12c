"""adamw_8bit: AdamW whose two moments take one byte a parameter each, and a scale for every block.

Comes in: gradients and parameters in flat buffers. Goes out: updates and a state of 8-bit codes in buffers that lie
exactly as the parameters do, with float32 scales beside the blocks. Each block is whole on one device, so decoding, the
step and encoding are local: no collective. Which parameters are coded, and in which blocks, follows from their shapes
and the blocks they were planned with, never from what one device holds; so the state and the updates are the same on
every mesh and however parameters are grouped.

Two departures from Dettmers et al. (arXiv 2110.02861). The second moment is kept as its root, which halves the decades
that a code has to span, and neither overflows nor vanishes where the square of a gradient would. And its code rounds
positive numbers to positive ones, so that no step divides by zero because of rounding.

Shapes: N shards of S elements (1D), G = N * S; B blocks of r x c in a batch (3D).
"""

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, get_args

import jax
import jax.numpy as jnp
import optax

from vescale_layouts import BlockArrays, BlockView, DBuffer, Layout
from vescale_planner import Block, Elements, Faults, Slot, Tile

from ._block_optimizer import ScalarOrSchedule, block_optimizer
from ._codes import Code, CodeName
from ._rounding import rounded
from ._rule_table import PathOf, RuleRow


class Moment8bit(NamedTuple):
    """One moment of the parameters of a group.

    Attributes:

    - `codes`: uint8, in the places of the parameters; None where no parameter of the group is coded.
    - `scales`: float32, one for every block of a coded parameter.
    - `small`: float32, the moment itself for parameters that are not coded; a block for each element or small tile.
    """

    codes: DBuffer | None
    scales: BlockArrays
    small: BlockArrays


class Moments8bit(NamedTuple):
    """Both moments of the parameters of a group.

    Attributes:

    - `mean`: of the gradient.
    - `rms`: the root of the mean of its square.
    """

    mean: Moment8bit
    rms: Moment8bit


class AdamW8bitState(NamedTuple):
    """The state of `adamw_8bit`.

    Attributes:

    - `count`: steps done, an int32 scalar.
    - `moments`: the parameters' tree, with `Moments8bit` in the place of every buffer.
    """

    count: Any
    moments: Any

    def rules(self, path_of: PathOf) -> Iterator[RuleRow]:
        """A row for each parameter; see `optimizers.describe`."""
        for keys, pair in jax.tree_util.tree_leaves_with_path(
            self.moments, is_leaf=lambda x: isinstance(x, Moments8bit)
        ):
            if not isinstance(pair, Moments8bit):
                continue
            unit, group = (str(getattr(key, "key", key)) for key in keys[-2:])
            layout = pair.mean.scales.view.layout
            layers = math.prod(layout.stack)
            for view, coded in ((pair.mean.scales.view, True), (pair.mean.small.view, False)):
                for name, block in view.blocks:
                    slot = layout.plan.slots[name]
                    size, count = layers * slot.spec.size, layers * math.prod(view.index.shape(name))
                    how = ("adamw_8bit", "at least min_size", str(block)) if coded else ("adamw", "below min_size", "")
                    cost = 2 * size + 8 * count if coded else 8 * size
                    yield RuleRow(path_of(unit, group, name), (*layout.stack, *slot.shape), *how, cost)


@dataclass(frozen=True, slots=True)
class Settings:
    """What `adamw_8bit` was called with."""

    b1: float
    b2: float
    eps: float
    block_size: int | Tile
    code: CodeName
    min_size: int
    chunk: int

    def block(self, slot: Slot) -> Block:
        """The block of a coded parameter."""
        if isinstance(self.block_size, Tile):
            return self.block_size
        return slot.spec.block if isinstance(slot.spec.block, Tile) else Elements(self.block_size)


def adamw_8bit(
    learning_rate: ScalarOrSchedule,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 1e-4,
    *,
    block_size: int | Tile = 256,
    code: CodeName = "dynamic",
    min_size: int = 4096,
    chunk: int = 2**20,
) -> optax.GradientTransformation:
    """AdamW with 8-bit state: about 2.03 bytes a parameter instead of 8.

    Pass `blocks=Elements(256)`, or a `Tile` for each matrix, to `fully_shard`, so that no shard cuts a block.

        model = vs.fully_shard(model, mesh, blocks=Elements(256))
        tx = vs.optimizers.adamw_8bit(1e-3)

    A step computes in float32: with g the gradient, m and r the decoded moments, t the number of the step,

        m = b1 m + (1 - b1) g,  r = sqrt(b2 r^2 + (1 - b2) g^2),
        update = -learning_rate (m / (1 - b1^t) / (r / sqrt(1 - b2^t) + eps) + weight_decay p),

    and then encodes m and r again, each block by its largest magnitude.

    Arguments:

    - `learning_rate`: a number, or an optax schedule.
    - `b1`, `b2`, `eps`, `weight_decay`: as in `optax.adamw`.
    - `block_size`: elements that share a scale. A number: parameters that were planned with `Tile` blocks take their
      own tile, all others runs of so many elements. A `Tile`: all parameters take it; a vector counts as one row.
    - `code`: `"dynamic"` or `"linear"`; see `_codes.py`.
    - `min_size`: parameters with fewer elements keep float32 moments; `precisions` lists them.
    - `chunk`: elements that are decoded at a time, at most; see `BlockView.update`. It bounds temporary memory.

    Returns: an optax transformation over `model.params`, for `train_state` and `train_step`. Updates have the dtype of
    the parameters.

    Raises: `ValueError` or `TypeError` for numbers out of range. `init` and `update` raise `ValueError` that names
    every parameter whose blocks its plan may cut, on this mesh or another, and what to pass to `fully_shard`.
    """
    _check(b1, b2, eps, block_size, code, min_size, chunk)
    settings = Settings(b1, b2, eps, block_size, code, min_size, chunk)

    return block_optimizer(
        "adamw_8bit",
        learning_rate,
        weight_decay,
        block_size=block_size,
        views=functools.partial(_views, settings),
        zeros=lambda buffer: _zeros(settings, buffer.layout),
        step=lambda _, count: functools.partial(_direction, settings, count),
        state=AdamW8bitState,
    )


@functools.lru_cache(maxsize=1024)
def _views(settings: Settings, layout: Layout) -> tuple[BlockView, BlockView]:
    """The blocks of the coded parameters of a group, and those of the others; the same objects for equal arguments."""
    slots = layout.plan.slots
    coded = {name: settings.block(slot) for name, slot in slots.items() if slot.spec.size >= settings.min_size}
    # One element a block where storage allows: the plan's cuts do not matter then.
    small = {
        name: Elements(1) if slot.storage == "row_major" else slot.spec.block
        for name, slot in slots.items()
        if name not in coded
    }
    return BlockView.of(layout, coded), BlockView.of(layout, small)


def _zeros(settings: Settings, layout: Layout) -> Moments8bit:
    coded, small = _views(settings, layout)

    def moment() -> Moment8bit:
        return Moment8bit(
            DBuffer.zeros(layout, jnp.uint8) if coded.batches else None,
            BlockArrays.zeros(coded, jnp.float32),
            BlockArrays.zeros(small, jnp.float32, lambda batch: (batch.rows, batch.cols)),
        )

    return Moments8bit(moment(), moment())


def _direction(settings: Settings, count: jax.Array, grad: DBuffer, moments: Moments8bit) -> tuple[Any, Moments8bit]:
    """What AdamW would add to the parameters of a group, before the learning rate and weight decay: float32 (G,)."""
    coded, small = _views(settings, grad.layout)
    done = count.astype(jnp.float32)
    # The bias corrections of both moments, put before the fraction: gain * m / (r + eps).
    root = jnp.sqrt(1 - settings.b2**done)
    corrections = root / (1 - settings.b1**done), root * settings.eps

    # The direction is written over the gradient, first that of the coded parameters, then that of the others.
    mean, rms = moments
    out = grad.data.astype(jnp.float32)
    codes: Any = mean.codes, rms.codes
    scales: Any = mean.scales.data, rms.scales.data
    rest: Any = mean.small.data, rms.small.data
    if coded.batches:
        shards = out, *(of_moment.data for of_moment in codes)
        step = functools.partial(_code, settings)
        (out, *new), pairs = coded.update(
            step, shards, list(zip(*scales, strict=True)), replicated=corrections, chunk=settings.chunk
        )
        codes, scales = (DBuffer(x, grad.layout) for x in new), zip(*pairs, strict=True)
    if small.batches:
        step = functools.partial(_keep, settings)
        (out,), pairs = small.update(
            step, (out,), list(zip(*rest, strict=True)), replicated=corrections, chunk=settings.chunk
        )
        rest = zip(*pairs, strict=True)
    new = [
        Moment8bit(of_codes, BlockArrays(of_scales, coded), BlockArrays(of_rest, small))
        for of_codes, of_scales, of_rest in zip(codes, scales, rest, strict=True)
    ]
    return out, Moments8bit(*new)


def _code(settings: Settings, corrections: Any, blocks: Any, scales: Any) -> Any:
    """One step on coded blocks: (gradient, codes, codes) to (direction, codes, codes), and the scales of both."""
    signed, unsigned = Code(settings.code, True), Code(settings.code, False)
    g, m, r = blocks
    m, r = signed.decode(m, scales[0][:, None, None]), unsigned.decode(r, scales[1][:, None, None])
    out, m, r = _adam(settings, g, m, r, *corrections)
    scales = jnp.abs(m).max((1, 2)), r.max((1, 2))
    m, r = signed.encode(m, scales[0][:, None, None]), unsigned.encode(r, scales[1][:, None, None])
    return (out, m, r), scales


def _keep(settings: Settings, corrections: Any, blocks: Any, moments: Any) -> Any:
    """One step on blocks whose moments are kept as they are."""
    out, m, r = _adam(settings, blocks[0], *moments, *corrections)
    return (out,), (m, r)


def _adam(settings: Settings, g: Any, m: Any, r: Any, gain: Any, eps: Any) -> Any:
    """One step on float32 blocks: the direction and the new moments."""
    m = rounded(settings.b1 * m) + rounded((1 - settings.b1) * g)
    # Scaled by the larger of the two, so that no square is too large or too small for float32.
    size = jnp.maximum(r, jnp.abs(g))
    unit = jnp.where(size == 0, jnp.ones_like(size), size)
    squares = rounded(settings.b2 * jnp.square(r / unit)) + rounded((1 - settings.b2) * jnp.square(g / unit))
    r = rounded(size * jnp.sqrt(squares))
    return rounded(gain * (m / (r + eps))), m, r


def _check(b1: float, b2: float, eps: float, block_size: Any, code: str, min_size: Any, chunk: Any) -> None:
    faults = Faults("adamw_8bit")
    for name, value in (("b1", b1), ("b2", b2)):
        if not 0 <= value < 1:
            faults.add(name, got=f"{value}", want="at least 0 and below 1", change="pass a decay such as 0.9")
    if not eps >= 0:
        faults.add("eps", got=f"{eps}", want="at least 0", change="pass a small number such as 1e-8")
    if not isinstance(block_size, Tile) and not (isinstance(block_size, int) and block_size >= 1):
        want = "a number of elements, or a Tile"
        faults.add("block_size", got=repr(block_size), want=want, change="pass 256, or Tile(32, 32)")
    if code not in get_args(CodeName):
        faults.add("code", got=repr(code), want="'dynamic' or 'linear'", change="pass one of these")
    if not isinstance(min_size, int) or min_size < 0:
        faults.add("min_size", got=repr(min_size), want="a number of elements", change="pass 4096, or 0 to code all")
    if not isinstance(chunk, int) or chunk < 1:
        faults.add("chunk", got=repr(chunk), want="a number of elements", change="leave it out, or pass 2**20")
    faults.raise_if_any()
