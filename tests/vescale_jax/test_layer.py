"""Layer: the two halves of a turn make its gradient, and little is stored between them."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vescale_jax._layer import Layer, Operands

ROWS, WIDTH = 3, 5
NUMBERS = jax.random.normal(jax.random.key(0), (8, WIDTH, WIDTH))


def body(turn: Operands) -> list[Any]:
    """A layer with a matrix, a shared matrix, a carry and a counter, gates and a key."""
    (w,), (shared, scale), (x, i), (gate, key) = turn
    x = jnp.tanh(x @ w + x @ shared) * gate[None] * (1.0 + i) + jax.random.normal(key, x.shape)
    return [x * scale, i + 1, x.sum(), jax.random.fold_in(key, 1)]


def operands() -> Operands:
    return Operands(
        [NUMBERS[0]],
        [NUMBERS[1], jnp.float32(2)],
        [NUMBERS[2, :ROWS], jnp.int32(1)],
        [NUMBERS[3, 0], jax.random.key(1)],
    )


WANTED = Operands([True], [True, False], [True, False], [True, False])


def halves(function: Callable[[Operands], list[Any]], given: Operands, wanted: Operands) -> tuple[Any, list[Any], Any]:
    """The outputs, what is stored, and the gradients for cotangents of ones."""
    layer = Layer.of(function, given.like([jax.ShapeDtypeStruct(x.shape, x.dtype) for x in given.flat]), wanted)
    outputs, stored = layer.forward(given)
    ones = [jnp.ones_like(x) for x, active in zip(outputs, layer.active, strict=True) if active]
    # The carry is not there any more in the backward half.
    return outputs, stored, layer.backward(given._replace(carry=[None] * len(given.carry)), stored, ones)


def test_gradients_are_those_of_jax() -> None:
    given = operands()
    outputs, _, found = halves(body, given, WANTED)
    want = body(given)
    np.testing.assert_allclose(outputs[0], want[0], rtol=1e-6)
    assert outputs[1] == 2

    def total(w: Any, shared: Any, x: Any, gate: Any) -> jax.Array:
        changed = Operands([w], [shared, given.shared[1]], [x, given.carry[1]], [gate, given.slices[1]])
        outputs = body(changed)
        return outputs[0].sum() + outputs[2]

    chosen = (given.tensors[0], given.shared[0], given.carry[0], given.slices[0])
    wanted = jax.grad(total, (0, 1, 2, 3))(*chosen)
    for mine, theirs in zip([x for x in found.flat if x is not None], wanted, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-6)


def test_there_is_a_gradient_for_what_is_wanted_only() -> None:
    _, _, found = halves(body, operands(), WANTED)
    assert [x is not None for x in found.flat] == WANTED.flat
    _, _, found = halves(body, operands(), Operands([False], [False, False], [True, False], [False, False]))
    assert [i for i, x in enumerate(found.flat) if x is not None] == [3]


def test_neither_parameters_nor_shared_values_nor_slices_are_stored() -> None:
    _, stored, _ = halves(body, operands(), WANTED)
    assert stored
    assert not {x.shape for x in stored} & {(WIDTH, WIDTH), (WIDTH,)}


@pytest.mark.parametrize("makes", ["cast", "transpose", "product"])
def test_what_is_made_of_parameters_alone_is_made_again(makes: str) -> None:
    def function(turn: Operands) -> list[Any]:
        (w, low), (shared, _), (x, _), _ = turn
        ways = {"cast": w.astype(jnp.bfloat16).astype(jnp.float32), "transpose": w.T, "product": w + low @ shared}
        made = ways[makes]
        return [jnp.tanh(jnp.tanh(x @ made) @ made)]

    given = operands()._replace(tensors=[NUMBERS[4], NUMBERS[5]])
    _, stored, _ = halves(function, given, WANTED._replace(tensors=[True, True]))
    assert all(x.shape == (ROWS, WIDTH) for x in stored)


def test_a_checkpoint_inside_keeps_its_meaning() -> None:
    def deep(x: Any, w: Any) -> Any:
        for _ in range(4):
            x = jnp.tanh(x @ w)
        return x

    def function(checkpoint: bool, turn: Operands) -> list[Any]:
        (w,), _, (x, _), _ = turn
        return [(jax.checkpoint(deep) if checkpoint else deep)(x, w)]

    results = [halves(lambda turn, c=c: function(c, turn), operands(), WANTED) for c in (False, True)]
    (_, plain, gradients), (_, stored, same) = results
    assert len(stored) == 1 < len(plain)
    np.testing.assert_allclose(gradients.tensors[0], same.tensors[0], rtol=1e-6)


def test_complex_numbers_have_gradients() -> None:
    def function(turn: Operands) -> list[Any]:
        (w,), (phase, _), (z, _), (along, _) = turn
        return [z * jnp.exp(1j * w[:ROWS]) * phase + along[None]]

    given = Operands(
        [NUMBERS[0]],
        [NUMBERS[1, :ROWS] * (1 + 2j), jnp.float32(1)],
        [NUMBERS[2, :ROWS] * 1j, jnp.int32(0)],
        [NUMBERS[3, 0] * 1j, jnp.int32(0)],
    )
    _, _, found = halves(function, given, WANTED)

    def plain(w: Any, phase: Any, z: Any, along: Any) -> Any:
        return function(Operands([w], [phase, 1], [z, 0], [along, 0]))[0]

    _, pull = jax.vjp(plain, given.tensors[0], given.shared[0], given.carry[0], given.slices[0])
    want = pull(jnp.ones((ROWS, WIDTH), jnp.complex64))
    for mine, theirs in zip([x for x in found.flat if x is not None], want, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-6)
