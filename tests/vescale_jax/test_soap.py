"""SOAP: the paper's formulas in float64, the same bits on every mesh, no collective, and finite on any gradient."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh

import vescale_jax as vs
from tests.vescale_jax import block_steps as steps
from tests.vescale_jax import counting
from vescale_jax.optimizers import describe, soap
from vescale_jax.optimizers._soap_basis import first_basis, refreshed
from vescale_planner import Elements, Tile

RATE, B1, B2, EPS, DECAY, EVERY = 1e-2, 0.9, 0.95, 1e-8, 0.1, 2


def optimizer(**changes: Any) -> optax.GradientTransformation:
    given = {"block_size": steps.TILE, "precondition_frequency": EVERY, "min_size": steps.MIN_SIZE}
    return soap(RATE, B1, B2, EPS, DECAY, **{**given, **changes})


@functools.cache
def history_of(case: str, mesh: Mesh) -> tuple[Any, list[dict[str, Any]]]:
    how = dict(steps.CASES[case])
    del how["n"]
    compiled, history = steps.run(optimizer(chunk=how.pop("chunk", 2**20)), mesh, steps.EXTREME, **how)
    assert counting.collectives(compiled) == {}
    return compiled, history


@pytest.mark.parametrize("case", steps.CASES)
def test_bits_are_the_same_on_every_mesh(case: str, meshes: dict[int, Mesh]) -> None:
    _, history = history_of(case, meshes[steps.CASES[case]["n"]])
    assert "bases/left a" in history[0]
    steps.same(history, history_of("1", meshes[1])[1])


# The formulas. An eigenvector of a small eigenvalue is a matter of rounding, and Adam depends on it. So whether a basis
# is one that algorithm 4 may give is one question, and the step in the bases that there are is another.


def test_steps_in_the_bases_are_those_of_the_paper(meshes: dict[int, Mesh]) -> None:
    _, history = history_of("1", meshes[1])
    params = {name: x.astype(np.float64) for name, x in steps.numbers(0).items()}
    means, squares = ({name: np.zeros_like(x) for name, x in params.items()} for _ in range(2))
    wanted = []
    for t, grads in enumerate(steps.EXTREME, 1):
        updates = {}
        for name, p in params.items():
            g = grads[name].astype(np.float64)
            means[name] = B1 * means[name] + (1 - B1) * g
            mean, count, parts = means[name] / (1 - B1**t), t, [(..., None, None)]
            if name in steps.TILED:
                count = t - 1
                parts = [(at, *bases) for at, bases in zip(steps.tiles(g), of_tiles(history, t - 2, name), strict=True)]
            direction = np.zeros_like(g)
            for at, a, b in parts if count else []:
                turned, of_mean = (x[at] if a is None else a.T @ x[at] @ b for x in (g, mean))
                squares[name][at] = B2 * squares[name][at] + (1 - B2) * turned**2
                step = of_mean / (np.sqrt(squares[name][at] / (1 - B2**count)) + EPS)
                direction[at] = step if a is None else a @ step @ b.T
            updates[name] = -RATE * (direction + DECAY * p)
        wanted.append(updates)
    # A coordinate in which a gradient is 0 holds the rounding of the others: up to 1e-3 of a step after a large one.
    steps.close(history, wanted, 5e-3)


def of_tiles(history: Any, step: int, name: str) -> list[Any]:
    """The bases of each tile after a step, without what does not exist; zeros before the first."""
    shape = steps.SHAPES[name]
    found = []
    for number, at in enumerate(steps.tiles(np.zeros(shape))):
        rows, cols = np.zeros(shape)[at].shape
        sides = (
            history[max(step, 0)][f"bases/{side} {name}"].reshape(-1, steps.TILE, steps.TILE)
            for side in ("left", "right")
        )
        found.append(
            [x[number, :n, :n].astype(np.float64) * (step >= 0) for x, n in zip(sides, (rows, cols), strict=True)]
        )
    return found


def test_statistics_and_bases_are_those_of_the_paper(meshes: dict[int, Mesh]) -> None:
    _, history = history_of("1", meshes[1])
    for name in steps.TILED:
        shape = steps.SHAPES[name]
        for number, at in enumerate(steps.tiles(np.zeros(shape))):
            real = np.zeros(shape)[at].shape
            for side, n in zip(("left", "right"), real, strict=True):
                sums = np.zeros((n, n))
                for t, grads in enumerate(steps.EXTREME, 1):
                    g = grads[name][at].astype(np.float64)
                    sums = B2 * sums + (1 - B2) * (g @ g.T if side == "left" else g.T @ g)
                    now, before = history[t - 1], history[t - 2]
                    size = now[f"statistics/size {name}"].reshape(-1)[number].astype(np.float64)
                    held = of_block(now, f"statistics/{side} {name}", number)[:n, :n] * size**2
                    np.testing.assert_allclose(held, sums, rtol=0, atol=1e-5 * np.abs(sums).max())
                    basis = of_block(now, f"bases/{side} {name}", number)
                    # Rows that do not exist are apart.
                    np.testing.assert_array_equal(basis[n:, :n], 0)
                    np.testing.assert_array_equal(basis[n:, n:], np.eye(steps.TILE - n))
                    basis = basis[:n, :n]
                    np.testing.assert_allclose(basis.T @ basis, np.eye(n), atol=1e-5)
                    largest = np.abs(sums).max() or 1.0
                    if t == 1:
                        values = basis.T @ sums @ basis
                        np.testing.assert_allclose(values, np.diag(np.diag(values)), atol=1e-5 * largest)
                        assert np.all(np.diff(np.diag(values)) <= 1e-5 * largest)
                    elif t % EVERY:
                        np.testing.assert_array_equal(basis, of_block(before, f"bases/{side} {name}", number)[:n, :n])
                    else:
                        # Q of a QR: what it leaves of the product is upper triangular.
                        product = sums @ of_block(before, f"bases/{side} {name}", number)[:n, :n]
                        np.testing.assert_allclose(np.tril(basis.T @ product, -1), 0, atol=1e-5 * largest)


def of_block(kept: Any, name: str, number: int) -> np.ndarray:
    return kept[name].reshape(-1, steps.TILE, steps.TILE)[number].astype(np.float64)


def test_bases_tend_to_eigenvectors() -> None:
    rng = np.random.default_rng(0)
    q = np.linalg.qr(rng.normal(size=(3, 8, 8)))[0]
    x = ((q * 3.0 ** -np.arange(8)) @ q.swapaxes(1, 2)).astype(np.float32)
    real = np.ones((3, 8), bool)
    basis, turn = np.broadcast_to(np.eye(8, dtype=np.float32), x.shape), jax.jit(refreshed)
    for _ in range(30):
        basis = turn(x, basis)
    exact = np.asarray(jax.jit(first_basis)(x, real))
    np.testing.assert_allclose(
        np.abs(np.einsum("nij,nik->njk", exact, basis)), np.broadcast_to(np.eye(8), x.shape), atol=1e-3
    )


def test_a_state_goes_on_on_another_mesh_and_says_what_it_is(meshes: dict[int, Mesh]) -> None:
    tx, (_, wanted) = optimizer(), history_of("1", meshes[1])
    (first, _), (then, _) = history_of("5", meshes[5]), history_of("2, in chunks", meshes[2])
    model, other = (steps.model_of(steps.numbers(0), meshes[n]) for n in (5, 2))
    state = vs.train_state(model, tx).opt_state
    for g in steps.EXTREME[:4]:
        _, state = first(steps.model_of(g, meshes[5]).params, state, model.params)
    state = steps.moved(state, vs.train_state(other, tx).opt_state)
    for step, g in enumerate(steps.EXTREME[4:6], 4):
        updates, state = then(steps.model_of(g, meshes[2]).params, state, other.params)
        for name, x in steps.tensors(updates):
            np.testing.assert_array_equal(x, wanted[step][f"update {name}"])
    table = describe(state, other)
    assert (table["a"].rule, table["a"].blocks, table["v"].rule) == ("soap", "tile:16,16, 12 of them", "adamw")
    assert table["a"].state_bytes == 8 * 38 * 52 + 12 * (4 + 8 * 2 * 16 * 16)
    assert table["v"].state_bytes == 8 * 33


# Through the training step.


def loss_fn(params: Any, x: jax.Array) -> jax.Array:
    return jnp.mean((jnp.tanh(x @ params["up"]) @ params["down"] - jnp.sin(3 * x[:, :8])) ** 2)


def test_training_beats_adamw_on_explicit_axes_too(meshes: dict[int, Mesh]) -> None:
    keys = jax.random.split(jax.random.key(0))
    params = {"up": jax.random.normal(keys[0], (16, 48)) / 4, "down": jax.random.normal(keys[1], (48, 8)) / 7}
    x = np.random.default_rng(0).normal(size=(120, 16)).astype(np.float32)

    def losses(mesh: Mesh, tx: Any) -> list[float]:
        state = vs.train_state(vs.fully_shard(params, mesh, blocks=Tile(16, 16)), tx)
        train, found = vs.train_step(loss_fn, tx), []
        for _ in range(30):
            state, metrics = train(state, x)
            found.append(float(metrics.loss))
        return found

    adamw = losses(meshes[8], optax.adamw(0.01, b1=0.95, b2=0.95))
    tx = soap(optax.constant_schedule(0.01), b1=0.95, b2=0.95, precondition_frequency=3, min_size=0)
    explicit = jax.make_mesh((3,), ("fsdp",), devices=jax.devices()[:3], axis_types=(AxisType.Explicit,))
    assert losses(explicit, tx)[-1] < 0.95 * adamw[-1]


# Mistakes.


def test_tiles_that_shards_may_cut_are_named_with_the_cure(meshes: dict[int, Mesh]) -> None:
    model = vs.fully_shard(steps.numbers(0), meshes[3], abstract=True, blocks={"e": Tile(16, 16), "*": Elements(1)})
    with pytest.raises(ValueError, match=r"soap\(block_size=16\): 2 faults\n  a: got blocks tile:16,16 of"):
        vs.train_state(model, optimizer())


@pytest.mark.unchecked_annotations
def test_wrong_arguments_are_named() -> None:
    wrong: Any = {"b1": 1.0, "b2": 1.0, "eps": 0, "block_size": "128", "min_size": 0.5, "precondition_frequency": 0}
    with pytest.raises(ValueError) as caught:
        soap(1e-3, **wrong)
    lines = str(caught.value).split("\n  ")
    assert lines[:2] == ["soap: 6 faults", "b1: got 1.0; want at least 0 and below 1; pass 0.95"]
    assert {line.split(":")[0] for line in lines[1:]} == set(wrong)
    with pytest.raises(ValueError, match="soap: got no params"):
        soap(1e-3).update({}, soap(1e-3).init({}))
