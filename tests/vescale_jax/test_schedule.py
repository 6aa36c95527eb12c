"""The backward pass unit by unit: in which order units are gathered and reduced, and what waits for what."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vescale_jax._pullback import value_and_pullback
from vescale_jax._schedule import run_backward

LAYERS = 5
STACK = [f"l{i}" for i in range(LAYERS)]
WAYS: dict[str, list[str]] = {
    "layers": STACK,
    "a root at both ends": ["root", *STACK, "root"],
    "one unit twice": ["l0", "l1", "l0", "l2"],
    "nothing used": [],
}


def backward(names: list[str]) -> tuple[list[tuple[str, str, Any]], dict[str, jax.Array], dict[str, jax.Array]]:
    """Runs the backward pass of layers of these names: what happened, the gradients, and those of JAX."""
    units = ["root", *STACK]
    params = {name: 0.3 * jax.random.normal(jax.random.key(i), (4, 4)) for i, name in enumerate(units)}
    x = jnp.ones((2, 4))

    def loss(p: Any, x: jax.Array) -> jax.Array:
        for name in names:
            x = jnp.tanh(x @ p[name])
        return x.sum()

    value, _, _, pull = value_and_pullback(lambda p, f, r, b: (loss(p, b), ()), set(params), params, {}, (), x)
    jaxpr, inputs = pull.trace(jnp.ones_like(value), params, {}, (), x)
    events: list[tuple[str, str, Any]] = []
    found: dict[str, jax.Array] = {}

    def fetch(unit: str, after: str, left_so_far: object) -> dict[str, jax.Array]:
        events.append(("gather", unit, after))
        return {unit: params[unit]}

    def finish(unit: str, grads: dict[str, jax.Array]) -> str:
        events.append(("reduce", unit, None))
        found.update(grads)
        return f"{unit} reduced"

    paths = sorted(params)
    start = len(inputs) - len(paths) - 1
    missing = {start + i: path for i, path in enumerate(paths)}
    unit_of = {path: path for path in paths}
    run_backward(jaxpr, inputs, missing, paths, unit_of, fetch, finish, "start")
    return events, found, jax.grad(loss)(params, x)


@pytest.mark.parametrize("way", WAYS)
def test_every_gradient_is_reduced_once(way: str) -> None:
    events, found, want = backward(WAYS[way])
    assert sorted(unit for what, unit, _ in events if what == "reduce") == sorted(want)
    for path, grad in want.items():
        np.testing.assert_allclose(found[path], grad, rtol=1e-5, atol=1e-6)


def test_a_gather_waits_for_the_unit_two_before() -> None:
    events, _, _ = backward(STACK)
    # The first layer is not needed: nothing before it has a gradient.
    assert [event for event in events if event[0] == "gather"] == [
        ("gather", "l4", "start"),
        ("gather", "l3", "start"),
        ("gather", "l2", "l4 reduced"),
        ("gather", "l1", "l3 reduced"),
    ]


def test_each_unit_is_reduced_before_the_second_next_is_gathered() -> None:
    events, _, _ = backward(STACK)
    order = [f"{what} {unit}" for what, unit, _ in events]
    for i in range(2, LAYERS - 1):
        assert order.index(f"reduce l{i + 1}") < order.index(f"gather l{i - 1}")


def test_a_unit_that_is_needed_to_the_end_holds_nobody_up() -> None:
    events, _, _ = backward(WAYS["a root at both ends"])
    gathers = [(unit, after) for what, unit, after in events if what == "gather"]
    assert gathers[:4] == [("root", "start"), ("l4", "start"), ("l3", "start"), ("l2", "l4 reduced")]
    assert events[-1][:2] == ("reduce", "root")
