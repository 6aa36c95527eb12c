"""Scans: whatever a function does with stacked layers, loss and gradients are those of plain JAX."""

import functools
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

import vescale_jax as vs
from tests.vescale_jax.stack_ways import FROZEN, ROWS, WAYS, WHOLE, Way, params_of, values_of

BFLOAT16 = vs.MixedPrecisionPolicy(gather_dtype=jnp.bfloat16)
Evaluated = tuple[dict[str, float], dict[str, np.ndarray], list[str]]
Evaluate = Callable[..., Evaluated]


@pytest.fixture(scope="session")
def evaluate(meshes: dict[int, Mesh]) -> Evaluate:
    """Evaluates all of some ways over three devices: values, gradients by path, and what was warned about."""

    @functools.cache
    def one(whole: bool, prefetch: int, reshard: bool = True, narrow: bool = False) -> Evaluated:
        ways = WHOLE if whole else WAYS

        def loss(params: Any, rows: Any) -> Any:
            values = values_of(ways, params, rows)
            return vs.Mean(jnp.stack(list(values.values())).sum(), jnp.float32(1)), values

        model = vs.fully_shard(
            params_of(ways),
            meshes[3],
            stacks=("*/layers*",),
            prefetch=prefetch,
            reshard_after_forward=reshard,
            trainable=True if whole else FROZEN,
            policy=BFLOAT16 if narrow else vs.MixedPrecisionPolicy(),
        )
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            value, grads = vs.value_and_grad(loss, has_aux=True, replicate_batch=True)(model, ROWS)
        return (
            {name: float(x) for name, x in value.aux.items()},
            dict(vs.Sharded(grads, model.frozen, model.rest, model.structure).tensors()),
            [str(warning.message) for warning in warned],
        )

    return one


@functools.cache
def plain(whole: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """What JAX makes of all ways on one device."""
    ways = WHOLE if whole else WAYS

    def loss(params: Any) -> Any:
        values = values_of(ways, params, jax.tree.map(jnp.asarray, ROWS))
        return jnp.stack(list(values.values())).sum(), values

    params = params_of(ways)
    (_, values), grads = jax.jit(jax.value_and_grad(loss, has_aux=True, allow_int=True))(params)
    flat, _ = jax.tree_util.tree_flatten_with_path(grads)
    return values, {jax.tree_util.keystr(path, simple=True, separator="/"): x for path, x in flat}


def check(found: Evaluated, whole: bool, name: str, way: Way, rtol: float = 0, atol: float = 0) -> None:
    near = {"rtol": max(way.rtol, rtol), "atol": max(way.atol, atol)}
    values, grads = plain(whole)
    np.testing.assert_allclose(found[0][name], values[name], **near)
    mine = {path: x for path, x in found[1].items() if path.startswith(f"{name}/")}
    assert mine
    for path, gradient in mine.items():
        if gradient.dtype.kind == "f" and not FROZEN.get(f"{name}/layers/[wb]", True) <= path.endswith(("/w", "/b")):
            want = np.asarray(grads[path]).astype(np.float32)
            np.testing.assert_allclose(gradient.astype(np.float32), want, **near, err_msg=path)


@pytest.mark.parametrize("prefetch", [0, 1])
@pytest.mark.parametrize("name", WAYS)
def test_loss_and_gradients_are_those_of_jax(name: str, prefetch: int, evaluate: Evaluate) -> None:
    check(evaluate(False, prefetch), False, name, WAYS[name])


def test_no_stack_is_made_whole_without_need(evaluate: Evaluate) -> None:
    assert not evaluate(False, 0)[2]
    assert not evaluate(False, 1)[2]


def test_keeping_layers_changes_no_bit(evaluate: Evaluate) -> None:
    freed, kept = evaluate(False, 1), evaluate(False, 1, reshard=False)
    assert freed[0] == kept[0]
    for path, gradient in freed[1].items():
        np.testing.assert_array_equal(gradient, kept[1][path], err_msg=path)


@pytest.mark.parametrize("name", WHOLE)
def test_what_reads_all_layers_at_once_is_right_too(name: str, evaluate: Evaluate) -> None:
    check(evaluate(True, 1), True, name, WHOLE[name])


@pytest.mark.parametrize("name", WHOLE)
def test_what_reads_all_layers_at_once_is_named(name: str, evaluate: Evaluate) -> None:
    said = [text for text in evaluate(True, 1)[2] if text.startswith(f"stacks: {name}/layers/w: read by ")]
    assert said
    assert f"all 4 layers of {name}/layers are gathered at once" in said[0]


def test_gradients_of_whole_stacks_are_summed_in_the_dtype_of_sums(evaluate: Evaluate) -> None:
    gradients = evaluate(True, 1, narrow=True)[1]
    # Three devices that agree: their sum is three times what each has, exact in float32 and rounded in bfloat16.
    third = gradients["an_operation/layers/w"] / 3
    assert (third.astype(jnp.bfloat16).astype(np.float32) == third).all()
    assert (gradients["an_operation/layers/w"].astype(jnp.bfloat16).astype(np.float32) * 3 != 3 * third * 3).any()
