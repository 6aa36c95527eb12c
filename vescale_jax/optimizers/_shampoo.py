"""shampoo: block-wise Shampoo, whose blocks are tiles that no shard cuts, with grafting.

Comes in: gradients and parameters in flat buffers. Goes out: updates and a state that lies as they do: moments in
buffers, statistics and their roots beside the blocks. Each tile is whole on one device, so everything is local: no
collective. Matrices are cut into tiles, as Anil et al. (arXiv 2002.09018) and Shi et al. (arXiv 2309.06497) do to keep
statistics small; here the tiles are those of the plan, so the results do not depend on the mesh or the grouping.

Shapes: N shards of S elements (1D), G = N * S; B blocks of r x c in a batch (3D).
"""

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import optax
from jax import lax

from vescale_layouts import BlockArrays, BlockView, DBuffer
from vescale_planner import Faults, Tile

from ._block_optimizer import ScalarOrSchedule, block_optimizer
from ._matrices import TINY, largest, norm, product
from ._roots import RootMethod, inverse_root
from ._rounding import rounded
from ._rule_table import PathOf, RuleRow
from ._shampoo_blocks import Choice, Costs, check_numbers, filled, rule_rows, views
from ._shampoo_elements import Correction, adam, correction, new_mean, new_rms, seen
from ._shampoo_statistics import Statistics, accumulated, by_batch, by_name, sides

Grafting = Literal["none", "sgd", "adagrad", "adam"]
"""The method whose step gives every block the length of its step."""


class Roots(NamedTuple):
    """The inverse roots of the statistics, as of their last refresh.

    Attributes:

    - `size`: float32, a number a block, by which L and R were divided: they were `size^2` times what the roots are of.
    - `left`, `right`: float32, (r, r) and (c, c) a block.
    """

    size: Any
    left: Any
    right: Any


class ShampooMoments(NamedTuple):
    """What is kept for the parameters of a group.

    Attributes:

    - `mean`: of gradients, float32 in a buffer; None without (`b1=0`).
    - `graft`: the root of the sum or mean of their squares, likewise; None where grafting needs none.
    - `velocity`: the sum of directions of the tiles, likewise; None without momentum.
    - `rest`: that root for parameters on AdamW, where `graft` is not the same anyway.
    - `statistics`, `roots`: of the tiles.
    """

    mean: DBuffer | None
    graft: DBuffer | None
    velocity: DBuffer | None
    rest: BlockArrays | None
    statistics: Statistics
    roots: Roots


class ShampooState(NamedTuple):
    """The state of `shampoo`.

    Attributes:

    - `count`: steps done, an int32 scalar.
    - `moments`: the parameters' tree, with `ShampooMoments` in the place of every buffer.
    """

    count: Any
    moments: Any

    def rules(self, path_of: PathOf) -> Iterator[RuleRow]:
        """A row for each parameter; see `RuleState`."""

        def costs(held: ShampooMoments) -> Costs:
            buffers = 4 * sum(x is not None for x in (held.mean, held.graft, held.velocity))
            rest = buffers if held.rest is None else buffers + 4
            return Costs(held.statistics.size.view, buffers, lambda r, c: 8 + 8 * (r * r + c * c), rest)

        return rule_rows(self.moments, "shampoo", costs, path_of)


@dataclass(frozen=True, slots=True)
class Settings:
    """What `shampoo` was called with."""

    b1: float
    b2: float
    eps: float
    momentum: float
    grafting: Grafting
    choice: Choice
    frequency: int
    root: int
    roots: RootMethod
    matrix_epsilon: float
    chunk: int


class Scalars(NamedTuple):
    """What is the same for all blocks in one step.

    Attributes:

    - `refresh`: whether roots are computed again.
    - `adam`: the corrections of Adam.
    - `unbiased`: of the mean alone.
    - `weight`: the root of the weight of all gradients in the statistics.
    """

    refresh: jax.Array
    adam: Correction
    unbiased: jax.Array
    weight: jax.Array


def shampoo(
    learning_rate: ScalarOrSchedule,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 1e-4,
    *,
    momentum: float = 0.0,
    grafting: Grafting = "adam",
    block_size: int | Tile = 128,
    precondition_frequency: int = 10,
    root: int = 4,
    roots: RootMethod = "newton",
    matrix_epsilon: float = 1e-6,
    min_size: int = 4096,
    chunk: int = 2**20,
) -> optax.GradientTransformation:
    """Shampoo on tiles of matrices, AdamW on everything else.

    Pass tiles, or rows as high as tiles are, to `fully_shard`, so that no shard cuts a tile.

        model = vs.fully_shard(model, mesh, blocks={"*/kernel": Rows(128)})
        tx = vs.optimizers.shampoo(1e-3)

    A step on a tile computes in float32: with G the gradient, t the number of the step, and all means corrected for
    their bias (Shi et al., arXiv 2309.06497, algorithm 2; Gupta et al., arXiv 1802.09568, for b2 = 1, b1 = 0),

        L = b2 L + (1 - b2) G G^T,  R = b2 R + (1 - b2) G^T G,  M = b1 M + (1 - b1) G,
        U = L'^(-1/root) M R'^(-1/root),  P = U |D| / |U|,  V = momentum V + P,
        update = -learning_rate (V + weight_decay W),

    where L' = L + matrix_epsilon lambda_max(L) I, computed anew in every `precondition_frequency`-th step, the first
    included, R' likewise, and D is what the grafted method would do.

    Arguments:

    - `learning_rate`: a number, or an optax schedule.
    - `b1`: decay of the mean of gradients; 0 for none.
    - `b2`: decay of the statistics and of the squares that grafting and AdamW keep; 1 for sums.
    - `eps`: of Adam and AdaGrad.
    - `weight_decay`: decoupled, as in `optax.adamw`.
    - `momentum`: of the directions of tiles.
    - `grafting`: D is M / (sqrt(mean of G^2) + eps) for `"adam"`, the same with the sum for `"adagrad"`, M for `"sgd"`.
      `"none"`: P is U.
    - `block_size`: a number n: tiles of n x n, and of parameters that were planned with `Tile` their own tiles. A
      `Tile`: that for all. Tiles are of the last two dims; those at the edges are smaller.
    - `precondition_frequency`: steps from one computation of the roots to the next.
    - `root`: a power of two. 4 is Shampoo's; 2 is often better in practice (arXiv 2309.06497, section 4).
    - `roots`: `"newton"`, matrix products only, which needs a `matrix_epsilon` of at least 1e-7, or `"jacobi"`, by
      eigenvalues, which takes any and is slower. See `_roots.py`.
    - `matrix_epsilon`: relative to the largest eigenvalue, so that the scale of gradients does not matter.
    - `min_size`: parameters with fewer elements, vectors, and matrices of one row or column have AdamW with `b1`, `b2`,
      `eps`; `describe` lists them.
    - `chunk`: elements of tiles that are worked on at a time, at most; it bounds temporary memory.

    Returns: an optax transformation over `model.params`, for `train_state` and `train_step`. Updates have the dtype of
    the parameters.

    Raises: `ValueError` for numbers out of range. `init` and `update` raise `ValueError` that names every parameter
    whose tiles its plan may cut, on this mesh or another, and what to pass to `fully_shard`.
    """
    numbers = (
        ("b1", b1, 0 <= b1 < 1, "at least 0 and below 1", "0.9"),
        ("b2", b2, 0 <= b2 <= 1, "at least 0 and at most 1", "0.999"),
        ("eps", eps, eps > 0, "a positive number", "1e-8"),
        ("momentum", momentum, 0 <= momentum < 1, "at least 0 and below 1", "0.9"),
        ("grafting", grafting, grafting in get_args(Grafting), f"one of {get_args(Grafting)}", "'adam'"),
        ("root", root, root in (1, 2, 4, 8), "1, 2, 4 or 8", "4"),
        ("roots", roots, roots in get_args(RootMethod), f"one of {get_args(RootMethod)}", "'newton'"),
        (
            "matrix_epsilon",
            matrix_epsilon,
            matrix_epsilon >= (1e-7 if roots == "newton" else 1e-30),
            "a positive number, of at least 1e-7 for 'newton'",
            "1e-6",
        ),
    )
    faults = Faults("shampoo")
    frequency = (("precondition_frequency", precondition_frequency),)
    check_numbers(faults, block_size, min_size, chunk, *frequency, numbers)
    faults.raise_if_any()
    choice = Choice(block_size, min_size)
    settings = Settings(
        b1, b2, eps, momentum, grafting, choice, precondition_frequency, root, roots, matrix_epsilon, chunk
    )

    return block_optimizer(
        "shampoo",
        learning_rate,
        weight_decay,
        block_size=block_size,
        views=functools.partial(views, choice),
        zeros=functools.partial(_zeros, settings),
        step=lambda done, count: functools.partial(_direction, settings, _scalars(settings, done, count)),
        state=ShampooState,
    )


def _zeros(settings: Settings, buffer: DBuffer) -> ShampooMoments:
    own = views(settings.choice, buffer.layout)

    def kept(wanted: bool) -> DBuffer | None:
        return DBuffer.zeros(buffer.layout, jnp.float32) if wanted else None

    rest = BlockArrays.zeros(own.rest, jnp.float32, lambda batch: (batch.rows, batch.cols))
    return ShampooMoments(
        kept(settings.b1 > 0),
        kept(settings.grafting in ("adagrad", "adam")),
        kept(settings.momentum > 0),
        None if settings.grafting == "adam" else rest,
        Statistics.zeros(own.tiles),
        Roots(BlockArrays.zeros(own.tiles, jnp.float32), *sides(own.tiles)),
    )


def _scalars(settings: Settings, done: jax.Array, count: jax.Array) -> Scalars:
    b1, b2, eps = settings.b1, settings.b2, settings.eps
    step = count.astype(jnp.float32)
    return Scalars(
        done % settings.frequency == 0,
        correction(b1, b2, eps, step, step),
        1 / (1 - b1**step),
        seen(b2, step),
    )


def _direction(
    settings: Settings, scalars: Scalars, grad: DBuffer, moments: ShampooMoments
) -> tuple[Any, ShampooMoments]:
    """What is added to the parameters of a group, before the learning rate and weight decay: float32, as the buffer."""
    own = views(settings.choice, grad.layout)
    g = grad.data.astype(jnp.float32)
    mean = g if moments.mean is None else new_mean(moments.mean.data, g, settings.b1)
    graft = None
    out = rounded(scalars.unbiased * mean)
    if moments.graft is not None:
        # Adam's step is AdamW's too: what is no tile is done.
        sums = settings.grafting == "adagrad"
        graft = new_rms(moments.graft.data, g, 1.0 if sums else settings.b2)
        by = Correction(scalars.unbiased, jnp.asarray(settings.eps, jnp.float32)) if sums else scalars.adam
        out = adam(mean, graft, by)
    out, velocity, statistics, roots = _on_tiles(settings, own.tiles, scalars, (out, g, mean), moments)
    rest = moments.rest
    if rest is not None and own.rest.batches:
        out, rest = _on_rest(settings, own.rest, scalars, (out, g, mean), rest)

    def kept(data: Any) -> DBuffer | None:
        return None if data is None else DBuffer(data, grad.layout)

    return out, ShampooMoments(
        kept(mean) if moments.mean is not None else None, kept(graft), kept(velocity), rest, statistics, roots
    )


def _on_tiles(settings: Settings, view: BlockView, scalars: Scalars, buffers: Any, moments: ShampooMoments) -> Any:
    """Shampoo on the tiles: writes directions over what the grafted method would do there."""
    out, g, mean = buffers
    velocity = None if moments.velocity is None else moments.velocity.data
    if not view.batches:
        return out, velocity, moments.statistics, moments.roots
    held = moments.statistics, moments.roots

    written = (out,) if velocity is None else (out, velocity)
    read = (g, mean) if settings.grafting in ("adagrad", "adam") else (g,)
    exist = filled(view.layout, True)
    new, of_blocks = view.update(
        functools.partial(_tiles, settings),
        written,
        by_batch(held),
        read=(*read, exist),
        replicated=scalars,
        chunk=settings.chunk,
    )
    return *(*new, None)[:2], *by_name(of_blocks, held)


def _tiles(settings: Settings, scalars: Scalars, blocks: Any, held: Any) -> Any:
    """One step on tiles (n, r, c): directions and what is kept."""
    statistics, roots = held
    out, *more, exist = blocks
    velocity = more.pop(0) if settings.momentum else None
    # Without an adaptive method to graft, what was written so far is the mean.
    g, mean = more[0], more[1] if len(more) > 1 else out
    statistics = accumulated(statistics, g, settings.b2)
    real = exist.any(2), exist.any(1)

    def fresh(statistics: Statistics, _: Roots) -> Roots:
        left, right = (
            inverse_root(x, there, root=settings.root, epsilon=settings.matrix_epsilon, method=settings.roots)
            for x, there in zip((statistics.left, statistics.right), real, strict=True)
        )
        return Roots(rounded(statistics.size / scalars.weight), left, right)

    roots = lax.cond(scalars.refresh, fresh, lambda _, old: old, statistics, roots)
    size = largest(mean)
    u = product(product(roots.left, mean / jnp.maximum(size, TINY)[:, None, None]), roots.right)
    if settings.grafting == "none":
        length = rounded(size * _per_size(settings.root, roots.size))
    else:
        length = rounded(norm(out) / jnp.maximum(norm(u), TINY))
    out = rounded(u * length[:, None, None])
    if velocity is None:
        return (out,), (statistics, roots)
    velocity = rounded(settings.momentum * velocity) + out
    return (velocity, velocity), (statistics, roots)


def _per_size(root: int, size: jax.Array) -> jax.Array:
    """`size^(-4/root)`: what two roots of matrices `size^2` times as large are smaller by; 0 for absent blocks."""
    inverse = jnp.where(size > 0, 1 / jnp.maximum(size, TINY), 0)
    if root == 8:
        return jnp.sqrt(inverse)
    out = inverse
    for _ in range(4 // root - 1):
        out = rounded(out * inverse)
    return out


def _on_rest(settings: Settings, view: BlockView, scalars: Scalars, buffers: Any, rms: BlockArrays) -> Any:
    """AdamW on what is no tile."""
    out, g, mean = buffers

    def one(by: Correction, blocks: Any, rms: Any) -> Any:
        _, g, mean = blocks
        new = new_rms(rms, g, settings.b2)
        return (adam(mean, new, by),), new

    (out,), of_blocks = view.update(
        one, (out,), by_batch(rms), read=(g, mean), replicated=scalars.adam, chunk=settings.chunk
    )
    return out, by_name(of_blocks, rms)
