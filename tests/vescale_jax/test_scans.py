"""Scans: whatever a function does with stacked layers, loss and gradients are those of plain JAX."""

import functools
import warnings
from collections.abc import Callable
from fnmatch import fnmatchcase
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

import vescale_jax as vs
from tests.vescale_jax import counting
from tests.vescale_jax.stack_ways import FROZEN, ROWS, WAYS, WHOLE, Way, params_of, values_of

# The programs hold many functions and run once.
FAST = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
Evaluated = tuple[dict[str, float], dict[str, np.ndarray], list[str]]
Evaluate = Callable[..., Evaluated]


@pytest.fixture(scope="session")
def evaluate(meshes: dict[int, Mesh]) -> Evaluate:
    """Evaluates all of some ways over three devices: values, gradients by path, and what was warned about."""

    @functools.cache
    def one(whole: bool, prefetch: int) -> Evaluated:
        ways = WHOLE if whole else WAYS

        def loss(params: Any, rows: Any) -> Any:
            values = values_of(ways, params, rows)
            return vs.Mean(jnp.stack(list(values.values())).sum(), jnp.float32(1)), values

        model = vs.fully_shard(
            params_of(ways),
            meshes[3],
            stacks=("*/layers*",),
            prefetch=prefetch,
            trainable=True if whole else {FROZEN: False},
        )
        gradient = jax.jit(vs.value_and_grad(loss, has_aux=True, replicate_batch=True), compiler_options=FAST)
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            value, grads = gradient(model, ROWS)
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
    gradient = jax.jit(jax.value_and_grad(loss, has_aux=True, allow_int=True), compiler_options=FAST)
    (_, values), grads = gradient(params)
    flat, _ = jax.tree_util.tree_flatten_with_path(grads)
    return values, {jax.tree_util.keystr(path, simple=True, separator="/"): x for path, x in flat}


def check(found: Evaluated, whole: bool, name: str, way: Way) -> None:
    near: Any = {"rtol": way.rtol, "atol": way.atol}
    values, grads = plain(whole)
    np.testing.assert_allclose(found[0][name], values[name], **near)
    mine = {path: x for path, x in found[1].items() if path.startswith(f"{name}/")}
    assert mine
    for path, gradient in mine.items():
        if gradient.dtype.kind == "f" and not fnmatchcase(path, FROZEN):
            want = np.asarray(grads[path]).astype(np.float32)
            np.testing.assert_allclose(gradient.astype(np.float32), want, **near, err_msg=path)


@pytest.mark.parametrize("prefetch", [0, 1])
@pytest.mark.parametrize("name", WAYS)
def test_loss_and_gradients_are_those_of_jax(name: str, prefetch: int, evaluate: Evaluate) -> None:
    check(evaluate(False, prefetch), False, name, WAYS[name])


def test_no_stack_is_made_whole_without_need(evaluate: Evaluate) -> None:
    assert not evaluate(False, 0)[2]
    assert not evaluate(False, 1)[2]


@pytest.mark.parametrize("name", WHOLE)
def test_what_reads_all_layers_at_once_is_right_too(name: str, evaluate: Evaluate) -> None:
    check(evaluate(True, 1), True, name, WHOLE[name])


@pytest.mark.parametrize("name", WHOLE)
def test_what_reads_all_layers_at_once_is_named(name: str, evaluate: Evaluate) -> None:
    said = [text for text in evaluate(True, 1)[2] if text.startswith(f"stacks: {name}/layers/w: read by ")]
    assert said
    assert f"all 4 layers of {name}/layers are gathered at once" in said[0]


@pytest.mark.parametrize("reduce", ["each", "end"])
def test_gradients_of_whole_stacks_are_summed_in_the_dtype_of_sums(reduce: Any, meshes: dict[int, Mesh]) -> None:
    ways = {"an_operation": WHOLE["an_operation"]}
    policy = vs.MixedPrecisionPolicy(gather_dtype=jnp.bfloat16)
    model = vs.fully_shard(params_of(ways), meshes[3], stacks=("*/layers",), policy=policy)
    accumulation = vs.Accumulation(2, reduce=reduce)
    gradient = vs.value_and_grad(lambda p, rows: values_of(ways, p, rows)["an_operation"], accumulation=accumulation)
    with pytest.warns(UserWarning, match="an_operation/layers/w: read by"):
        lowered = jax.jit(gradient).lower(model, ROWS)
    assert set(counting.wire_dtypes(lowered, "all_gather")) == {"bf16"}
    assert set(counting.wire_dtypes(lowered, "reduce_scatter")) == {"f32"}


def test_microbatches_leave_no_gradient_of_a_whole_stack_out(meshes: dict[int, Mesh]) -> None:
    ways = {"an_operation": WHOLE["an_operation"]}
    model = vs.fully_shard(params_of(ways), meshes[2], stacks=("*/layers",))
    found = []
    for accumulation in (None, vs.Accumulation(3, reduce="end")):
        gradient = vs.value_and_grad(
            lambda p, rows: values_of(ways, p, rows)["an_operation"], accumulation=accumulation
        )
        with pytest.warns(UserWarning, match="an_operation/layers/w: read by"):
            found.append(jax.tree.leaves(gradient(model, {"x": np.ones_like(ROWS["x"])})[1])[0])
    # Equal rows: a third of them makes a third of the sum, and three thirds are divided by three counts.
    np.testing.assert_allclose(found[1] * 3, found[0], rtol=1e-5)
