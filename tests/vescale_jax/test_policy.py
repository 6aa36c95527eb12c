"""MixedPrecisionPolicy: dtypes of any spelling, checked at once, and seen by the model."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh

import vescale_jax as vs
from tests.vescale_jax import models


def test_the_default_changes_no_dtype() -> None:
    assert dataclasses.astuple(vs.MixedPrecisionPolicy()) == (None, None, None, None, True)


@pytest.mark.parametrize("dtype", ["bfloat16", jnp.bfloat16, np.dtype(jnp.bfloat16)])
def test_equal_policies_are_equal_however_they_are_spelt(dtype: Any) -> None:
    policy = vs.MixedPrecisionPolicy(gather_dtype=dtype)
    assert policy == vs.MixedPrecisionPolicy(gather_dtype="bfloat16")
    assert hash(policy) == hash(vs.MixedPrecisionPolicy(gather_dtype="bfloat16"))


@pytest.mark.unchecked_annotations
def test_all_faults_are_named_at_once() -> None:
    with pytest.raises(ValueError) as raised:
        vs.MixedPrecisionPolicy(param_dtype=jnp.int32, gather_dtype="int8", reduce_dtype="foo")
    assert str(raised.value) == (
        "MixedPrecisionPolicy: 3 faults\n"
        "  param_dtype: got int32; want a floating-point dtype; pass jnp.bfloat16 or None\n"
        "  gather_dtype: got int8; want a floating-point dtype; pass jnp.bfloat16 or None\n"
        "  reduce_dtype: got 'foo'; want a dtype; pass one such as jnp.bfloat16"
    )


@pytest.fixture(scope="module")
def seen(meshes: dict[int, Mesh]) -> dict[str, Any]:
    """What a loss function and an optimizer meet under a policy that names every dtype."""
    seen: dict[str, Any] = {}

    def loss_fn(params: Any, batch: Any) -> Any:
        seen["params"] = {str(leaf.dtype) for leaf in jax.tree.leaves(params) if leaf.ndim}
        seen["batch"] = {name: str(leaf.dtype) for name, leaf in batch.items()}
        seen["integers"] = str(params["table"].dtype)
        params = {**params, "table": None}
        return models.tree_loss(params, batch), {"metric": params["scale"], "count": jnp.int32(1)}

    policy = vs.MixedPrecisionPolicy(jnp.float16, jnp.bfloat16, jnp.float32, jnp.float32)
    made = {**models.tree(), "table": jnp.arange(4, dtype=jnp.int16)}
    model = vs.fully_shard(made, meshes[3], policy=policy)
    value, grads = jax.jit(vs.value_and_grad(loss_fn, has_aux=True))(model, models.batches(1)[0])
    seen.update(model=model, value=value, grads=grads)
    return seen


def test_parameters_are_stored_in_the_param_dtype(seen: dict[str, Any]) -> None:
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(seen["model"].params)} == {"float16"}


def test_gradients_have_the_stored_dtype(seen: dict[str, Any]) -> None:
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(seen["grads"])} == {"float16"}


def test_the_model_sees_the_gather_dtype(seen: dict[str, Any]) -> None:
    assert seen["params"] == {"bfloat16", "int16"}


def test_floating_inputs_are_cast_and_integers_are_not(seen: dict[str, Any]) -> None:
    assert seen["batch"] == {"x": "int32", "y": "int32", "w": "bfloat16"}


def test_integer_parameters_are_never_cast(seen: dict[str, Any]) -> None:
    assert seen["integers"] == "int16"


def test_the_loss_is_float32_and_metrics_have_the_output_dtype(seen: dict[str, Any]) -> None:
    assert seen["value"].loss.dtype == jnp.float32
    assert seen["value"].aux["metric"].dtype == jnp.float32
    assert seen["value"].aux["count"].dtype == jnp.int32


def test_inputs_are_left_alone_on_request(meshes: dict[int, Mesh]) -> None:
    seen: list[Any] = []

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        seen.append(batch["w"].dtype)
        return params["scale"].astype(jnp.float32) * batch["w"].mean()

    policy = vs.MixedPrecisionPolicy(gather_dtype=jnp.bfloat16, cast_inputs=False)
    model = vs.fully_shard({"scale": jnp.ones(())}, meshes[2], policy=policy)
    jax.jit(vs.value_and_grad(loss_fn))(model, {"w": np.ones(4, np.float32)})
    assert seen == [jnp.float32]


def test_optimizer_state_has_the_stored_dtype(meshes: dict[int, Mesh]) -> None:
    policy = vs.MixedPrecisionPolicy(gather_dtype=jnp.bfloat16)
    state = vs.train_state(vs.fully_shard(models.tree, meshes[3], policy=policy), optax.adam(1e-3))
    assert {leaf.dtype for leaf in jax.tree.leaves((state.opt_state[0].mu, state.opt_state[0].nu))} == {
        np.dtype("float32")
    }
