"""soap: Adam in the eigenbasis of Shampoo's statistics, block by block, on tiles that no shard cuts.

Comes in: gradients and parameters in flat buffers. Goes out: updates and a state that lies as they do: moments in
buffers, statistics and bases beside the blocks. Each tile is whole on one device, so everything is local: no
collective. The tiles are those of the plan, so the results do not depend on the mesh or the grouping.

The method is that of Vyas et al. (arXiv 2409.11321, algorithm 3). The second moment of a tile lies in the places of the
tile, though in rotated coordinates: bases keep rows and columns that do not exist apart, so an edge tile fits as well.

Shapes: N shards of S elements (1D), G = N * S; B blocks of r x c in a batch (3D).
"""

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from vescale_layouts import DBuffer
from vescale_planner import Faults, Tile

from ._block_optimizer import ScalarOrSchedule, block_optimizer
from ._matrices import product
from ._rule_table import PathOf, RuleRow
from ._shampoo_blocks import Choice, Costs, check_numbers, filled, rule_rows, views
from ._shampoo_elements import Correction, adam, correction, new_mean, new_rms
from ._shampoo_statistics import Statistics, accumulated, by_batch, by_name, sides
from ._soap_basis import first_basis, refreshed


class Bases(NamedTuple):
    """Approximate eigenvectors of the statistics, in columns: float32, (r, r) and (c, c) a block.

    Attributes:

    - `left`, `right`: `BlockArrays` in a state, arrays where they are worked on.
    """

    left: Any
    right: Any


class SoapMoments(NamedTuple):
    """What is kept for the parameters of a group.

    Attributes:

    - `mean`: of gradients, float32 in a buffer; None without (`b1=0`).
    - `rms`: the root of the mean of their squares, likewise; of a tile in the coordinates of its bases.
    - `statistics`, `bases`: of the tiles.
    """

    mean: DBuffer | None
    rms: DBuffer
    statistics: Statistics
    bases: Bases


class SoapState(NamedTuple):
    """The state of `soap`.

    Attributes:

    - `count`: steps done, an int32 scalar.
    - `moments`: the parameters' tree, with `SoapMoments` in the place of every buffer.
    """

    count: Any
    moments: Any

    def rules(self, path_of: PathOf) -> Iterator[RuleRow]:
        """A row for each parameter; see `RuleState`."""

        def costs(held: SoapMoments) -> Costs:
            buffers = 4 if held.mean is None else 8
            return Costs(held.statistics.size.view, buffers, lambda r, c: 4 + 8 * (r * r + c * c), buffers)

        return rule_rows(self.moments, "soap", costs, path_of)


@dataclass(frozen=True, slots=True)
class Settings:
    """What `soap` was called with."""

    b1: float
    b2: float
    eps: float
    choice: Choice
    frequency: int
    chunk: int


class Scalars(NamedTuple):
    """What is the same for all blocks in one step.

    Attributes:

    - `first`: whether there is no basis yet.
    - `refresh`: whether bases get a power iteration.
    - `tiles`, `rest`: the corrections of Adam.
    """

    first: jax.Array
    refresh: jax.Array
    tiles: Correction
    rest: Correction


def soap(
    learning_rate: ScalarOrSchedule,
    b1: float = 0.95,
    b2: float = 0.95,
    eps: float = 1e-8,
    weight_decay: float = 1e-2,
    *,
    block_size: int | Tile = 128,
    precondition_frequency: int = 10,
    min_size: int = 4096,
    chunk: int = 2**20,
) -> optax.GradientTransformation:
    """SOAP on tiles of matrices, AdamW on everything else.

    Pass tiles, or rows as high as tiles are, to `fully_shard`, so that no shard cuts a tile.

        model = vs.fully_shard(model, mesh, blocks={"*/kernel": Rows(128)})
        tx = vs.optimizers.soap(3e-3)

    A step on a tile computes in float32: with G the gradient, t the number of the step, A and B the bases,

        M = b1 M + (1 - b1) G,  V = b2 V + (1 - b2) (A^T G B)^2,
        D = A ((A^T M B) / (1 - b1^t) / (sqrt(V / (1 - b2^(t - 1))) + eps)) B^T,
        update = -learning_rate (D + weight_decay W),
        L = b2 L + (1 - b2) G G^T,  R = b2 R + (1 - b2) G^T G,

    and in every `precondition_frequency`-th step A = QR(L A), B = QR(R B). The first step makes L and R, takes their
    eigenvectors for A and B, and has D = 0, as the authors do: no gradient is divided by what it alone has made.

    Arguments:

    - `learning_rate`: a number, or an optax schedule.
    - `b1`: decay of the mean of gradients; 0 for none.
    - `b2`: decay of the squares and of the statistics.
    - `eps`: of Adam.
    - `weight_decay`: decoupled, as in `optax.adamw`.
    - `block_size`: a number n: tiles of n x n, and of parameters that were planned with `Tile` their own tiles. A
      `Tile`: that for all. Tiles are of the last two dims; those at the edges are smaller.
    - `precondition_frequency`: steps from one power iteration to the next.
    - `min_size`: parameters with fewer elements, vectors, and matrices of one row or column have AdamW with `b1`, `b2`,
      `eps`; `describe` lists them.
    - `chunk`: elements of tiles that are worked on at a time, at most; it bounds temporary memory.

    Returns: an optax transformation over `model.params`, for `train_state` and `train_step`. Updates have the dtype of
    the parameters.

    Raises: `ValueError` for numbers out of range. `init` and `update` raise `ValueError` that names every parameter
    whose tiles its plan may cut, on this mesh or another, and what to pass to `fully_shard`.
    """
    numbers = (
        ("b1", b1, 0 <= b1 < 1, "at least 0 and below 1", "0.95"),
        ("b2", b2, 0 <= b2 < 1, "at least 0 and below 1", "0.95"),
        ("eps", eps, eps > 0, "a positive number", "1e-8"),
    )
    faults = Faults("soap")
    frequency = (("precondition_frequency", precondition_frequency),)
    check_numbers(faults, block_size, min_size, chunk, *frequency, numbers)
    faults.raise_if_any()
    choice = Choice(block_size, min_size)
    settings = Settings(b1, b2, eps, choice, precondition_frequency, chunk)

    return block_optimizer(
        "soap",
        learning_rate,
        weight_decay,
        block_size=block_size,
        views=functools.partial(views, choice),
        zeros=functools.partial(_zeros, settings),
        step=lambda _, count: functools.partial(_direction, settings, _scalars(settings, count)),
        state=SoapState,
    )


def _zeros(settings: Settings, buffer: DBuffer) -> SoapMoments:
    tiles = views(settings.choice, buffer.layout).tiles

    def moment() -> DBuffer:
        return DBuffer.zeros(buffer.layout, jnp.float32)

    return SoapMoments(moment() if settings.b1 > 0 else None, moment(), Statistics.zeros(tiles), Bases(*sides(tiles)))


def _scalars(settings: Settings, count: jax.Array) -> Scalars:
    b1, b2, eps = settings.b1, settings.b2, settings.eps
    step = count.astype(jnp.float32)
    return Scalars(
        count == 1,
        count % settings.frequency == 0,
        correction(b1, b2, eps, step, step - 1),
        correction(b1, b2, eps, step, step),
    )


def _direction(settings: Settings, scalars: Scalars, grad: DBuffer, moments: SoapMoments) -> tuple[Any, SoapMoments]:
    """What is added to the parameters of a group, before the learning rate and weight decay: float32, as the buffer."""
    own = views(settings.choice, grad.layout)
    g = grad.data.astype(jnp.float32)
    mean = g if moments.mean is None else new_mean(moments.mean.data, g, settings.b1)
    written, read = (filled(grad.layout, 0.0), moments.rms.data), (g, mean)
    held: Any = moments.statistics, moments.bases
    if own.tiles.batches:
        read_too = *read, filled(grad.layout, True)
        step = functools.partial(_tiles, settings)
        written, of_blocks = own.tiles.update(
            step, written, by_batch(held), read=read_too, replicated=scalars, chunk=settings.chunk
        )
        held = by_name(of_blocks, held)
    if own.rest.batches:
        step = functools.partial(_rest, settings)
        written, _ = own.rest.update(step, written, read=read, replicated=scalars.rest, chunk=settings.chunk)
    out, rms = written
    kept = None if moments.mean is None else DBuffer(mean, grad.layout)
    return out, SoapMoments(kept, DBuffer(rms, grad.layout), *held)


def _tiles(settings: Settings, scalars: Scalars, blocks: Any, held: Any) -> Any:
    """One step on tiles (n, r, c): directions, second moments, and what is kept beside."""
    statistics, (a, b) = held
    _, rms, g, mean, exist = blocks
    real = exist.any(2), exist.any(1)
    # In the first step the bases are still zero, and so is all that is made with them.
    rotated, of_mean = (product(product(a, x, (1, 1)), b) for x in (g, mean))
    rms = new_rms(rms, rotated, settings.b2)
    out = product(product(a, adam(of_mean, rms, scalars.tiles)), b, (2, 2))
    statistics = accumulated(statistics, g, settings.b2)
    matrices = statistics.left, statistics.right

    def begun() -> Bases:
        return Bases(*(first_basis(x, there) for x, there in zip(matrices, real, strict=True)))

    def turned() -> Bases:
        return Bases(*(refreshed(x, old) for x, old in zip(matrices, (a, b), strict=True)))

    bases = lax.cond(scalars.first, begun, lambda: lax.cond(scalars.refresh, turned, lambda: Bases(a, b)))
    return (out, rms), (statistics, bases)


def _rest(settings: Settings, by: Correction, blocks: Any, held: Any) -> Any:
    """AdamW on what is no tile."""
    _, rms, g, mean = blocks
    rms = new_rms(rms, g, settings.b2)
    return (adam(mean, rms, by), rms), held
