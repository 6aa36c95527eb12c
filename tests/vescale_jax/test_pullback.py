"""The pullback: gradients as jax.grad's, nothing kept that is made of freed parameters alone, activations kept."""

from collections.abc import Callable
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
import pytest

from vescale_jax._pullback import value_and_pullback

# Sizes that tell what a residual is: rows and width of activations are never those of a parameter.
ROWS, VOCABULARY, WIDTH, RANK = 11, 17, 5, 2


def parameters() -> dict[str, jax.Array]:
    keys = jax.random.split(jax.random.key(0), 6)
    shapes = {
        "embed": (VOCABULARY, WIDTH),
        "w": (WIDTH, WIDTH),
        "a": (WIDTH, RANK),
        "b": (RANK, WIDTH),
        "stack": (3, WIDTH, WIDTH),
        "scale": (),
    }
    return {n: 0.3 * jax.random.normal(key, shape) for (n, shape), key in zip(shapes.items(), keys, strict=True)}


BATCH = {
    "x": np.arange(ROWS, dtype=np.int32) % VOCABULARY,
    "f": np.linspace(-1, 1, ROWS * WIDTH, dtype=np.float32).reshape(ROWS, WIDTH),
}

Loss = Callable[[dict[str, jax.Array], dict[str, jax.Array]], jax.Array]


def gradients(pull: Any, value: jax.Array, params: Any, *others: Any) -> dict[str, jax.Array]:
    """Runs a traced backward pass as a whole."""
    jaxpr, inputs = pull.trace(jnp.ones_like(value), params, *others)
    return dict(zip(sorted(params), jax.core.eval_jaxpr(jaxpr, (), *inputs), strict=True))


def run(
    loss: Loss, freed: set[str] | None = None, frozen: set[str] = frozenset()
) -> tuple[list[tuple[int, ...]], Any, str]:
    """Shapes of the residuals that are kept, the gradients, and what is computed again."""
    everything = parameters()
    trained = {name: value for name, value in everything.items() if name not in frozen}
    others = {name: value for name, value in everything.items() if name in frozen}
    kept: list[tuple[int, ...]] = []
    again: list[str] = []

    @jax.jit
    def grads(trained: Any, others: Any, batch: Any) -> Any:
        value, _, _, pull = value_and_pullback(
            lambda p, f, rest, batch: (loss({**p, **f}, batch), ()),
            set(everything) if freed is None else freed,
            trained,
            others,
            (),
            batch,
        )
        kept.extend(residual.shape for residual in pull.kept if residual is not None)
        again.append(str(pull.recompute))
        return value, gradients(pull, value, trained, others, (), batch)

    value, found = grads(trained, others, BATCH)
    want_value, want = jax.jit(jax.value_and_grad(lambda p: loss({**p, **others}, BATCH)))(trained)
    np.testing.assert_allclose(value, want_value, 1e-5, 1e-6)
    # bfloat16 rounds at other places in another order.
    rtol, atol = (3e-2, 3e-3) if loss is cast else (1e-5, 1e-6)
    for name, grad in want.items():
        np.testing.assert_allclose(found[name], grad, rtol, atol, err_msg=name)
    return kept, found, again[0]


def first(p: dict[str, jax.Array], batch: Any) -> jax.Array:
    """What the first layer gives: gradients have to flow back through all that follows."""
    return jnp.tanh(p["embed"][batch["x"]] + batch["f"])


def tied(p: dict[str, jax.Array], batch: Any) -> jax.Array:
    return jnp.mean(jax.nn.logsumexp(first(p, batch) @ p["embed"].T, axis=-1))


def cast(p: dict[str, jax.Array], batch: Any) -> jax.Array:
    x = first(p, batch).astype(jnp.bfloat16)
    return jnp.mean(jnp.tanh(x @ p["w"].astype(jnp.bfloat16)).astype(jnp.float32))


def merged_adapter(p: dict[str, jax.Array], batch: Any) -> jax.Array:
    return jnp.mean(jnp.tanh(first(p, batch) @ (p["w"] + p["a"] @ p["b"])))


def inside_jit(p: dict[str, jax.Array], batch: Any) -> jax.Array:
    x = jax.jit(lambda p, x: jnp.tanh(x @ (2 * p["w"]).T))(p, first(p, batch))
    return jnp.mean(jax.jit(jnp.sin)(p["w"]) @ x.T)


def inside_checkpoint(p: dict[str, jax.Array], batch: Any) -> jax.Array:
    layer = jax.checkpoint(lambda w, x: jnp.tanh(x @ jnp.sin(w).T))
    return jnp.mean(layer(p["w"], layer(p["w"], first(p, batch))))


def checkpoint_that_saves(p: dict[str, jax.Array], batch: Any) -> jax.Array:
    layer = jax.checkpoint(lambda w, x: jnp.tanh(x @ jnp.sin(w).T), policy=jax.checkpoint_policies.everything_saveable)
    return jnp.mean(layer(p["w"], first(p, batch)))


def scaled(p: dict[str, jax.Array], batch: Any) -> jax.Array:
    return jnp.mean(jnp.tanh(first(p, batch) @ (p["w"] * p["scale"])))


@jax.custom_vjp
def product(x: jax.Array, w: jax.Array) -> jax.Array:
    return x @ jnp.sin(w)


product.defvjp(lambda x, w: (x @ jnp.sin(w), (x, jnp.sin(w))), lambda r, g: (g @ r[1].T, r[0].T @ g))


def custom(p: dict[str, jax.Array], batch: Any) -> jax.Array:
    return jnp.mean(product(first(p, batch), p["w"]))


def scanned(p: dict[str, jax.Array], batch: Any) -> jax.Array:
    x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), first(p, batch), p["stack"])
    return jnp.mean(x)


def scanned_and_cast(p: dict[str, jax.Array], batch: Any) -> jax.Array:
    x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ jnp.sin(w).T), None), first(p, batch), p["stack"])
    return jnp.mean(x)


def branched(p: dict[str, jax.Array], batch: Any) -> jax.Array:
    x = jax.lax.cond(batch["x"][0] == 0, lambda x: jnp.tanh(x @ p["w"]), lambda x: x, first(p, batch))
    return jnp.mean(x)


PARAMETERS_ONLY = [
    tied,
    cast,
    merged_adapter,
    inside_jit,
    inside_checkpoint,
    checkpoint_that_saves,
    scaled,
    custom,
    scanned,
]


def of_parameters(shape: tuple[int, ...]) -> bool:
    """Whether no dim counts rows, so that a residual may be made of parameters alone."""
    return ROWS not in shape and len(shape) > 1


@pytest.mark.parametrize("loss", PARAMETERS_ONLY, ids=lambda loss: loss.__name__)
def test_what_is_made_of_parameters_only_is_not_kept(loss: Loss) -> None:
    kept, _, _ = run(loss)
    assert [shape for shape in kept if of_parameters(shape)] == []


@pytest.mark.parametrize("loss", [scanned_and_cast, branched], ids=lambda loss: loss.__name__)
def test_gradients_of_loops_and_branches_are_right(loss: Loss) -> None:
    run(loss)


def test_activations_are_kept_and_not_computed_again() -> None:
    kept, _, again = run(tied)
    assert any(ROWS in shape for shape in kept)
    assert "tanh" not in again
    assert "dot_general" not in again


def test_a_merged_adapter_is_merged_again() -> None:
    _, _, again = run(merged_adapter)
    assert "dot_general" in again
    assert "tanh" not in again


def test_frozen_parameters_are_freed_too() -> None:
    kept, grads, _ = run(merged_adapter, frozen={"w", "embed", "stack", "scale"})
    assert [shape for shape in kept if of_parameters(shape)] == []
    assert sorted(grads) == ["a", "b"]


def test_parameters_that_are_not_freed_are_kept() -> None:
    kept, _, _ = run(merged_adapter, freed=set())
    assert (WIDTH, WIDTH) in kept


def test_only_what_is_freed_is_computed_again() -> None:
    kept, _, again = run(merged_adapter, freed={"embed"})
    assert (WIDTH, WIDTH) in kept
    assert "dot_general" not in again


def test_a_loss_that_closes_over_arrays() -> None:
    table = jnp.linspace(0, 1, WIDTH)
    run(lambda p, batch: jnp.mean(jnp.tanh((batch["f"] + table[None]) @ p["w"])))


def test_a_loss_that_ignores_parameters_has_zero_gradients() -> None:
    _, grads, _ = run(lambda p, batch: jnp.mean(batch["f"]))
    assert all(not np.asarray(grad).any() for grad in grads.values())


def test_a_residual_that_is_a_constant() -> None:
    run(lambda p, batch: jnp.sum(p["w"] / np.float32(3)))


def test_a_loss_that_ignores_the_batch() -> None:
    kept, _, _ = run(lambda p, batch: jnp.sum(jnp.sin(p["w"]) ** 2))
    assert [shape for shape in kept if of_parameters(shape)] == []


def test_what_else_is_returned_has_no_gradient() -> None:
    params = {"w": jnp.ones(3)}
    value, aux, varies, pull = value_and_pullback(
        lambda p, f, r, b: (jnp.sum(p["w"] ** 2), {"double": 2 * p["w"], "rest": r}), {"w"}, params, {}, (7,), ()
    )
    np.testing.assert_array_equal(aux["double"], [2, 2, 2])
    assert aux["rest"] == (7,)
    assert varies == {"double": False, "rest": (False,)}
    np.testing.assert_array_equal(gradients(pull, value, params, {}, (7,), ())["w"], [2, 2, 2])


def test_what_differs_from_device_to_device_is_known() -> None:
    rest = (jax.random.key(0), jnp.ones(3))
    returned = {
        "rows": lambda p, r, b: b.sum(),
        "count": lambda p, r, b: r[1] + 1,
        "mask": lambda p, r, b: jax.random.bernoulli(r[0], 0.5, (3,)),
        "weight": lambda p, r, b: p["w"] * r[1],
        "both": lambda p, r, b: jax.jit(lambda x, y: (x + 1, y))(r[1], b)[1],
        "one of both": lambda p, r, b: jax.jit(lambda x, y: (x + 1, y))(r[1], b)[0],
    }
    _, _, varies, _ = value_and_pullback(
        lambda p, f, r, b: (jnp.sum(p["w"]), {name: make(p, r, b) for name, make in returned.items()}),
        {"w"},
        {"w": jnp.ones(3)},
        {},
        rest,
        jnp.ones(2),
    )
    assert varies == {"rows": True, "count": False, "mask": True, "weight": False, "both": True, "one of both": False}
