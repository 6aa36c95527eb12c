"""muon: orthogonalised momentum for matrices, AdamW for everything else, on the flat buffers of a sharded model.

Comes in: gradients and parameters in flat buffers. Goes out: updates and a state that lies as the parameters do.
Momentum and AdamW are local. Matrices travel to a device that owns them whole for the iteration, and back: twice their
bytes in all, whatever the number of devices; see `_muon_work.py`.

Muon is Keller Jordan's (https://kellerjordan.github.io/posts/muon, 2024); weight decay and the scale that matches
AdamW's are those of Liu et al. (arXiv 2502.16982). The formulas are those of `optax.contrib.muon`.

Shapes: N shards of S elements, G = N * S; for a stack of L layers (L, G).
"""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.typing import DTypeLike

from vescale_jax._sharded import is_buffer
from vescale_jax._step_aside import steps_aside
from vescale_layouts import DBuffer, Layout
from vescale_planner import Faults

from ._block_optimizer import ScalarOrSchedule
from ._muon_adam import Adam, adam_step, adam_zeros
from ._muon_orthogonal import Iteration, orthogonalise
from ._muon_rules import Ruling, rulings
from ._muon_state import MuonMoments, MuonState, is_moments
from ._muon_work import Source, work_of
from ._newton_schulz import QUINTIC


@dataclass(frozen=True, slots=True)
class Settings:
    """What `muon` was called with, beside what `Iteration` has."""

    beta: float
    nesterov: bool
    momentum_dtype: Any


def muon(
    learning_rate: ScalarOrSchedule,
    beta: float = 0.95,
    weight_decay: float = 0.0,
    *,
    nesterov: bool = True,
    consistent_rms: float | None = 0.2,
    ns_coeffs: Sequence[Any] = QUINTIC[0],
    ns_steps: int = 5,
    eps: float = 1e-8,
    rules: Any = None,
    adam_learning_rate: ScalarOrSchedule | None = None,
    adam_b1: float = 0.9,
    adam_b2: float = 0.999,
    adam_weight_decay: float = 0.0,
    momentum_dtype: DTypeLike = jnp.float32,
    exchange_dtype: DTypeLike = jnp.float32,
    compute_dtype: DTypeLike = jnp.float32,
    chunk: int = 2**24,
    turn_layers: int | None = None,
) -> optax.GradientTransformation:
    """Muon for matrices and AdamW for the rest.

        tx = vs.optimizers.muon(2e-3, weight_decay=0.1, rules={"*/qkv/kernel": Matrix(split_cols=3)})
        state = vs.train_state(model, tx)
        print(vs.optimizers.describe(tx, model))

    For a matrix, with g the gradient, m the momentum, t the number of the step and NS the Newton-Schulz iteration,

        m = beta m + (1 - beta) g,  u = beta m / (1 - beta^(t+1)) + (1 - beta) g / (1 - beta^t),
        update = -learning_rate (scale NS(u) + weight_decay p);

    u = m / (1 - beta^t) without `nesterov`. Which parameters are matrices follows from their paths and logical shapes.

    Arguments:

    - `learning_rate`: a number, or an optax schedule.
    - `beta`, `nesterov`, `weight_decay`: of the matrices, as in `optax.contrib.muon`.
    - `consistent_rms`: scale = `consistent_rms * sqrt(max(rows, cols))`; 0.2 makes updates as large as those of AdamW,
      so that both can share a learning rate (arXiv 2502.16982). None: `sqrt(max(1, cols / rows))`, for rows in and
      columns out. Both by the matrix that is orthogonalised, after splits.
    - `ns_coeffs`: a, b, c; or such a triple for every step.
    - `ns_steps`: of the iteration; only for one triple.
    - `eps`: added to norms, and to the divisor of AdamW.
    - `rules`: which parameters are taken how: a mapping of patterns of paths to `Matrix`, `"muon"`, `"adamw"` or None,
      or a function of path and shape. None, and what no pattern matches: vectors, biases, scales, embeddings and heads
      take AdamW, all else Muon; see `_muon_rules.py`. Shapes are those of one layer of a stack.
    - `adam_learning_rate`: None: the same. `adam_b1`, `adam_b2`, `adam_weight_decay`: as in `optax.adamw`.
    - `momentum_dtype`: in which momentum is kept.
    - `exchange_dtype`: in which matrices travel; bfloat16 halves the bytes.
    - `compute_dtype`: of the products of the iteration; bfloat16 is what Muon was proposed with.
    - `chunk`: elements of equal matrices in a layer, such as experts, that are worked on at a time, at most.
    - `turn_layers`: of a stack that lies in one buffer, the layers that each device is sent at a time. None: all, by
      one all_to_all there and one back, which takes twice the bytes of the shards in temporary memory. A number that
      divides the layers a device gets bounds that; the exchange is in a loop then.

    Returns: an optax transformation over `model.params`, for `train_state` and `train_step`. Updates have the dtype of
    the parameters.

    Raises: `ValueError` for numbers and dtypes out of range, `TypeError` for arrays instead of numbers, as
    `optax.inject_hyperparams` makes of all arguments. `init` raises `ValueError` that names every pattern which matches
    nothing and every `Matrix` that does not fit its parameter.
    """
    _check(beta, eps, adam_b1, adam_b2, ns_steps, chunk, turn_layers)
    kept, sent, computed = _dtypes(
        {"momentum_dtype": momentum_dtype, "exchange_dtype": exchange_dtype, "compute_dtype": compute_dtype}
    )
    coefficients = _coefficients(ns_coeffs, ns_steps)
    iteration = Iteration(coefficients, eps, consistent_rms, sent, computed, chunk, turn_layers)
    settings = Settings(beta, nesterov, kept)
    adam = Adam(adam_b1, adam_b2, eps, adam_weight_decay)

    def init(params: Any) -> MuonState:
        found = _rulings(params, rules)
        moments = jax.tree.map_with_path(
            lambda path, buffer: _zeros(settings, buffer.layout, found[_keys(path)]), params, is_leaf=is_buffer
        )
        return MuonState(jnp.zeros((), jnp.int32), moments)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, MuonState]:
        if params is None:
            raise ValueError("muon: got no params; want them, for weight decay; call update(grads, state, params)")
        rate, adam_rate = (
            jnp.asarray(r(state.count) if callable(r) else r, jnp.float32)
            for r in (learning_rate, learning_rate if adam_learning_rate is None else adam_learning_rate)
        )
        count = jnp.asarray(optax.safe_increment(state.count))
        grads, tree = jax.tree.flatten(updates, is_leaf=is_buffer)
        buffers, moments = tree.flatten_up_to(params), tree.flatten_up_to(state.moments)
        momenta = [_momentum(settings, g, m) for g, m in zip(grads, moments, strict=True)]
        found = [source_of(m) for m in moments]
        work = work_of(tuple(source for source in found if source is not None))
        direction, t = functools.partial(_direction, settings), count.astype(jnp.float32)
        taken = [(g.data, m) for g, m in zip(grads, momenta, strict=True) if m is not None]
        done = orthogonalise(work, iteration, direction, t, -rate, *zip(*taken, strict=True)) if taken else []
        orthogonal = iter(done)
        new: list[Any] = []
        for g, p, m, momentum in zip(grads, buffers, moments, momenta, strict=True):
            wide = p.data.astype(jnp.float32)
            kept = None if momentum is None else DBuffer(momentum.astype(momentum_dtype), p.layout)
            # In place: gradients become updates but for weight decay, which is given back to AdamW's parameters.
            out = g.data if kept is None else next(orthogonal)
            decay = 0.0 if kept is None else rate * weight_decay
            out, mean, rms = adam_step(adam, count, adam_rate, decay, out, wide, m)
            out = out.astype(jnp.float32) - decay * wide
            data = out.astype(p.data.dtype)
            new.append((DBuffer(data, p.layout), MuonMoments(kept, mean, rms, m.layout, m.rulings)))
        return tree.unflatten([x for x, _ in new]), MuonState(count, tree.unflatten([m for _, m in new]))

    return optax.GradientTransformation(*steps_aside(init, update))


def source_of(moments: MuonMoments) -> Source | None:
    """The matrices of a group; None if it has none."""
    matrices = tuple((ruling.name, ruling.matrix) for ruling in moments.rulings if ruling.matrix is not None)
    return Source(moments.layout, matrices) if matrices else None


def muon_work(state: Any) -> Any:
    """Which device orthogonalises what, and what travels: printed, it says so in words.

    Arguments:

    - `state`: the optimizer's state, or any pytree with it inside, such as a `TrainState`; abstract ones will do.

    Returns: a `Work`; see `_muon_work.py`.
    """
    found = [source_of(m) for m in jax.tree.leaves(state, is_leaf=is_moments) if is_moments(m)]
    return work_of(tuple(source for source in found if source is not None))


# Momentum, for matrices.


def _momentum(settings: Settings, grad: DBuffer, moments: MuonMoments) -> jax.Array | None:
    """The new momentum of a group, float32 (G,); None without matrices."""
    if moments.momentum is None:
        return None
    return settings.beta * moments.momentum.data.astype(jnp.float32) + (1 - settings.beta) * grad.data.astype(
        jnp.float32
    )


def _direction(settings: Settings, t: jax.Array, g: jax.Array, m: jax.Array) -> jax.Array:
    """What is to be made orthogonal, in step t."""
    beta = settings.beta
    if not settings.nesterov:
        return m / (1 - beta**t)
    return beta * m / (1 - beta ** (t + 1)) + (1 - beta) * g.astype(jnp.float32) / (1 - beta**t)


def _zeros(settings: Settings, layout: Layout, found: tuple[Ruling, ...]) -> MuonMoments:
    """The state of a group."""
    has_matrices = any(ruling.matrix is not None for ruling in found)
    momentum = DBuffer.zeros(layout, settings.momentum_dtype) if has_matrices else None
    mean, rms = (adam_zeros(layout, found) for _ in range(2))
    return MuonMoments(momentum, mean, rms, layout, found)


# What goes in.


def _keys(path: Any) -> tuple[str, ...]:
    return tuple(str(getattr(key, "key", key)) for key in path)


def _rulings(params: Any, rules: Any) -> dict[tuple[str, ...], tuple[Ruling, ...]]:
    """What becomes of the parameters of each group, by the names of unit and group."""
    paths: dict[str, str] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    members: dict[tuple[str, ...], list[str]] = {}
    for keys, buffer in jax.tree_util.tree_leaves_with_path(params, is_leaf=is_buffer):
        where = _keys(keys)
        if not is_buffer(buffer):
            raise TypeError(
                f"muon: {'/'.join(where)}: got {type(buffer).__name__}; want a buffer of a sharded model; shard the "
                "model with fully_shard and pass model.params"
            )
        for name, slot in buffer.layout.plan.slots.items():
            # Names are relative to their unit where all of them start with its name.
            unit = "" if where[0] == "root" or name.startswith(f"{where[0]}/") else f"{where[0]}/"
            path = unit + name
            paths[path], shapes[path] = name, slot.shape
            members.setdefault(where, []).append(path)
    faults = Faults("muon")
    found = rulings(paths, shapes, rules, faults)
    faults.raise_if_any()
    return {where: tuple(found[path] for path in inside) for where, inside in members.items()}


def _coefficients(given: Sequence[Any], steps: int) -> tuple[tuple[float, ...], ...]:
    triples = (
        [tuple(triple) for triple in given] if given and isinstance(given[0], Sequence) else [tuple(given)] * steps
    )
    if not triples or any(len(triple) != 3 for triple in triples):
        raise ValueError(
            f"muon: ns_coeffs: got {given!r} for {steps} steps; want a, b, c, or such a triple for each of at least "
            "one step; leave it out, or pass three numbers"
        )
    return tuple(tuple(float(number) for number in triple) for triple in triples)


def _dtypes(given: Mapping[str, Any]) -> list[Any]:
    faults = Faults("muon")
    for name, dtype in given.items():
        try:
            known = jnp.issubdtype(jnp.dtype(dtype), jnp.floating)
        except TypeError:
            known = False
        if not known:
            faults.add(name, got=repr(dtype), want="a floating-point dtype", change="pass one such as jnp.bfloat16")
    faults.raise_if_any()
    return [jnp.dtype(dtype) for dtype in given.values()]


def _check(beta: float, eps: float, b1: float, b2: float, steps: Any, chunk: Any, turn_layers: Any) -> None:
    faults = Faults("muon")
    numbers = {"beta": beta, "eps": eps, "adam_b1": b1, "adam_b2": b2}
    numbers |= {"ns_steps": steps, "chunk": chunk, "turn_layers": turn_layers}
    for name, value in numbers.items():
        if isinstance(value, jax.Array):
            change = (
                "inject rates and decays alone: optax.inject_hyperparams(lambda learning_rate: muon(learning_rate))"
            )
            faults.add(name, got="a JAX array", want="a Python number", change=change)
    faults.raise_if_any(TypeError)
    for name, value in (("beta", beta), ("adam_b1", b1), ("adam_b2", b2)):
        if not 0 <= value < 1:
            faults.add(name, got=f"{value}", want="at least 0 and below 1", change="pass a decay such as 0.95")
    if not eps >= 0:
        faults.add("eps", got=f"{eps}", want="at least 0", change="pass a small number such as 1e-8")
    if not isinstance(chunk, int) or chunk < 1:
        faults.add("chunk", got=repr(chunk), want="a number of elements", change="leave it out, or pass 2**24")
    if turn_layers is not None and (not isinstance(turn_layers, int) or turn_layers < 1):
        faults.add("turn_layers", got=repr(turn_layers), want="a number of layers", change="leave it out, or pass 1")
    faults.raise_if_any()
