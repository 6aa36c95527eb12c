"""What first users do wrong, and what they are told."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import vescale_jax as vs


@pytest.fixture(scope="module")
def two(mesh):
    return mesh(2)


@pytest.fixture(scope="module")
def model(two):
    return vs.fully_shard({"emb": jnp.ones((3, 2)), "head": {"kernel": jnp.ones((2, 2))}}, two)


def loss_fn(params, batch):
    return (params["emb"].sum() + params["head"]["kernel"].sum()) * batch["x"].mean()


def refused(kind, call):
    with pytest.raises(kind) as raised:
        call()
    return str(raised.value)


def test_sharding_twice(model, two):
    text = refused(TypeError, lambda: vs.fully_shard(model, two))
    assert text.startswith("fully_shard: model: got a model that is sharded already; want ")


def test_leaves_of_different_rows(model):
    batch = {"x": np.ones((8, 3), np.float32), "y": np.ones(4, np.float32)}
    assert refused(ValueError, lambda: vs.value_and_grad(loss_fn)(model, batch)) == (
        "value_and_grad: 1 fault\n  batch: got leaves of 4, 8 rows; want the same rows, at least one, in all leaves; "
        "cut them alike; scalars are given to every device whole, other arrays a loss can close over"
    )


def test_no_rows(model):
    text = refused(ValueError, lambda: vs.value_and_grad(loss_fn)(model, {"x": np.ones((0, 3), np.float32)}))
    assert text.startswith("value_and_grad: 1 fault\n  batch: got no rows; want ")


def test_patterns_that_freeze_nothing(two):
    text = refused(ValueError, lambda: vs.fully_shard({"a": jnp.ones(2), "b": jnp.ones(2)}, two, trainable={"a": True}))
    assert text == (
        "fully_shard: 1 fault\n  trainable: got patterns that freeze nothing, since what no pattern matches is "
        'trained; want at least one False; add "*": False as the last pattern'
    )


def test_the_first_pattern_counts(two):
    model = vs.fully_shard({"a": jnp.ones(2), "b": jnp.ones(2)}, two, trainable={"a": True, "*": False})
    assert [slot for unit in model.params.values() for b in unit.values() for slot in b.layout.plan.slots] == ["a"]


def test_a_typing_mistake_in_a_pattern_is_answered_with_the_nearest_name(two):
    tree = {f"layers/{i}": {"kernel": jnp.ones(2), "bias": jnp.ones(2)} for i in range(9)}
    text = refused(ValueError, lambda: vs.fully_shard(tree, two, trainable={"layers/7/kernl": False}))
    assert "layers/7/kernel" in text


def test_another_optimizer_in_the_step(model):
    state = vs.train_state(model, optax.sgd(0.1))
    step = vs.train_step(loss_fn, optax.adam(0.1))
    text = refused(ValueError, lambda: step(state, {"x": np.ones((2, 3), np.float32)}))
    assert text == (
        "train_step: got a state made for another optimizer; want one made by vs.train_state(model, tx) with the tx of "
        "this step; pass the same tx to both"
    )


def test_an_abstract_state_in_the_step(two):
    model = vs.fully_shard({"w": jnp.ones(3)}, two, abstract=True)
    step = vs.train_step(lambda p, b: p["w"].sum() * b.mean(), optax.sgd(0.1))
    text = refused(ValueError, lambda: step(vs.train_state(model, optax.sgd(0.1)), np.ones(2, np.float32)))
    assert text == "train_step: got an abstract state; want one with values; use .lower for shapes alone"


def test_a_scalar_from_apply(model):
    text = refused(TypeError, lambda: vs.apply(loss_fn)(model, {"x": np.ones((2, 3), np.float32)}))
    assert text == (
        "apply: got a function that returns a scalar; want arrays with the batch on dim 0, or metrics; pass mean=True "
        "for metrics"
    )


def test_double_precision_parameters_are_counted_as_they_are_stored(two):
    model = vs.fully_shard({"w": np.ones(64, np.float64)}, two)
    assert vs.describe(model).groups[0].dtype == "float32"
    assert vs.describe(model).shard_bytes == sum(leaf.addressable_data(0).nbytes for leaf in jax.tree.leaves(model))


def test_a_process_that_trains_alone_is_told(mesh, monkeypatch):
    monkeypatch.setenv("JAX_NUM_PROCESSES", "2")
    with pytest.warns(UserWarning, match="one of 2 processes"):
        vs.fully_shard({"w": jnp.ones(3)}, mesh(2))
