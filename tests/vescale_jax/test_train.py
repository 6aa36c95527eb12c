"""Training: states born sharded, few leaves, donation, one compilation, and nothing half done after an error."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import Mesh

import vescale_jax as vs
from tests.vescale_jax import models

TX = optax.adamw(1e-2)
BATCHES = models.batches(3)


@pytest.fixture(scope="module")
def model(meshes: dict[int, Mesh]) -> vs.Sharded:
    return vs.fully_shard(models.tree(), meshes[3])


@pytest.fixture(scope="module")
def step() -> vs.TrainStep:
    """One step function for the whole file, which keeps its compiled program."""
    return vs.train_step(models.tree_loss, TX)


def new_state(meshes: dict[int, Mesh]) -> vs.TrainState:
    return vs.train_state(vs.fully_shard(models.tree(), meshes[3]), TX)


def test_the_state_is_born_sharded(model: vs.Sharded) -> None:
    state = vs.train_state(model, TX)
    for moments in (state.opt_state[0].mu, state.opt_state[0].nu):
        for ours, params in zip(jax.tree.leaves(moments), jax.tree.leaves(model.params), strict=True):
            assert (ours.shape, ours.dtype, ours.sharding) == (params.shape, params.dtype, params.sharding)
    assert state.step.sharding == model.structure.replicated
    assert state.opt_state[0].count.sharding == model.structure.replicated


def test_an_abstract_state_is_the_state_without_values(meshes: dict[int, Mesh], model: vs.Sharded) -> None:
    abstract = vs.train_state(vs.fully_shard(models.tree(), meshes[3], abstract=True), TX)
    concrete = vs.train_state(model, TX)
    assert jax.tree.structure(abstract) == jax.tree.structure(concrete)
    for ours, theirs in zip(jax.tree.leaves(abstract), jax.tree.leaves(concrete), strict=True):
        assert isinstance(ours, jax.ShapeDtypeStruct)
        assert (ours.shape, ours.dtype, ours.sharding) == (theirs.shape, theirs.dtype, theirs.sharding)


def test_leaves_are_counted_in_groups_and_not_in_parameters(meshes: dict[int, Mesh]) -> None:
    many = {"layers": [{f"p{i}": jnp.ones(3) for i in range(100)} for _ in range(2)]}
    state = vs.train_state(vs.fully_shard(many, meshes[3]), TX)
    # Two groups: a buffer and two moments each; the counts of updates, of skipped steps and of Adam.
    assert len(jax.tree.leaves(state)) == 2 * 3 + 3


def test_state_shapes_and_shardings_stay(meshes: dict[int, Mesh], step: vs.TrainStep) -> None:
    before = new_state(meshes)
    kinds = [(leaf.shape, leaf.dtype, leaf.sharding) for leaf in jax.tree.leaves(before)]
    after, _ = step(before, BATCHES[0])
    assert [(leaf.shape, leaf.dtype, leaf.sharding) for leaf in jax.tree.leaves(after)] == kinds


def test_many_steps_are_one_compilation(meshes: dict[int, Mesh], step: vs.TrainStep) -> None:
    state = new_state(meshes)
    for batch in BATCHES:
        state, _ = step(state, batch)
    assert int(state.step) == 3
    assert step.jitted(state)._cache_size() == 1


def test_metrics_are_the_same_on_every_device(meshes: dict[int, Mesh], step: vs.TrainStep) -> None:
    _, metrics = step(new_state(meshes), BATCHES[0])
    for value in (metrics.loss, metrics.grad_norm):
        assert value.dtype == jnp.float32
        copies = [np.asarray(shard.data).tobytes() for shard in value.addressable_shards]
        assert len(copies) == 3
        assert len(set(copies)) == 1


def test_a_donated_state_is_gone(meshes: dict[int, Mesh], step: vs.TrainStep) -> None:
    before = new_state(meshes)
    step(before, BATCHES[0])
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves((before.model.params, before.opt_state[0].mu)))


def test_a_state_that_is_not_donated_can_be_used_again(meshes: dict[int, Mesh]) -> None:
    before = new_state(meshes)
    keep = vs.train_step(models.tree_loss, TX, donate=False)
    first, second = keep(before, BATCHES[0])[1], keep(before, BATCHES[0])[1]
    assert first.loss == second.loss


def test_a_donated_state_that_is_used_again_is_refused_before_it_is_run(meshes: dict[int, Mesh]) -> None:
    # JAX 0.10.2 checks for deleted arrays too late: it ends the process with a segmentation fault.
    step = vs.train_step(models.tree_loss, TX)
    state = new_state(meshes)
    step._jitted[jax.tree.structure(state)] = lambda *_: pytest.fail("the program was started")
    for leaf in jax.tree.leaves((state.model.params, state.opt_state)):
        leaf.delete()
    with pytest.raises((RuntimeError, ValueError), match=r"train_step: .*donated"):
        step(state, BATCHES[0])


def test_a_batch_that_is_refused_leaves_the_state_whole(meshes: dict[int, Mesh], step: vs.TrainStep) -> None:
    state = new_state(meshes)
    with pytest.raises(ValueError, match="train_step: 3 faults"):
        step(state, {name: leaf[:7] for name, leaf in BATCHES[0].items()})
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(state))
    assert int(step(state, BATCHES[0])[0].step) == 1


def test_a_loss_that_raises_leaves_the_state_whole(meshes: dict[int, Mesh]) -> None:
    calls: list[int] = []

    def loss_fn(params: Any, batch: Any) -> Any:
        calls.append(1)
        if len(calls) == 1:
            raise RuntimeError("interrupted")
        return models.tree_loss(params, batch)

    state = new_state(meshes)
    before = dict(state.model.tensors())
    step = vs.train_step(loss_fn, TX)
    with pytest.raises(RuntimeError, match="interrupted"):
        step(state, BATCHES[0])
    for path, value in state.model.tensors():
        np.testing.assert_array_equal(value, before[path])
    assert int(step(state, BATCHES[0])[0].step) == 1


def test_a_loss_that_raises_leaves_the_users_module_usable(meshes: dict[int, Mesh]) -> None:
    def loss_fn(net: models.Net, batch: Any) -> Any:
        net.embed.embedding[...] = net.embed.embedding[...] * 0
        raise RuntimeError("interrupted")

    net = models.net()
    state = vs.train_state(vs.fully_shard(net, meshes[3]), TX)
    with pytest.raises(RuntimeError, match="interrupted"):
        vs.train_step(loss_fn, TX)(state, BATCHES[0])
    assert np.asarray(net.embed.embedding[...]).any()


def test_the_gradients_have_the_parameters_structure_and_shardings(model: vs.Sharded) -> None:
    value, grads = jax.jit(vs.value_and_grad(models.tree_loss))(model, BATCHES[0])
    assert jax.tree.structure(grads) == jax.tree.structure(model.params)
    for ours, params in zip(jax.tree.leaves(grads), jax.tree.leaves(model.params), strict=True):
        assert (ours.shape, ours.dtype, ours.sharding) == (params.shape, params.dtype, params.sharding)
    assert jax.tree.structure(value.model) == jax.tree.structure(model)


def test_gradients_are_zero_in_the_padding(model: vs.Sharded) -> None:
    _, grads = jax.jit(vs.value_and_grad(models.tree_loss))(model, BATCHES[0])
    for buffer in jax.tree.leaves(grads, is_leaf=lambda node: hasattr(node, "layout")):
        for start, stop in buffer.layout.plan.gaps:
            np.testing.assert_array_equal(buffer.data[start:stop], 0)


def test_padding_stays_zero_over_steps(meshes: dict[int, Mesh], step: vs.TrainStep) -> None:
    state = new_state(meshes)
    for batch in BATCHES:
        state, _ = step(state, batch)
    for buffer in jax.tree.leaves(state.model.params, is_leaf=lambda node: hasattr(node, "layout")):
        for start, stop in buffer.layout.plan.gaps:
            np.testing.assert_array_equal(buffer.data[start:stop], 0)


def test_the_step_can_be_lowered_for_shapes_alone(meshes: dict[int, Mesh], step: vs.TrainStep) -> None:
    state = vs.train_state(vs.fully_shard(models.tree(), meshes[3], abstract=True), TX)
    batch = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), BATCHES[0])
    assert "reduce_scatter" in step.lower(state, batch).as_text()


def test_one_step_function_serves_models_of_several_structures(meshes: dict[int, Mesh]) -> None:
    tx = optax.sgd(0.1)
    step = vs.train_step(lambda params, batch: params["w"].sum() * batch.mean(), tx)
    for shape in [(3,), (5, 2)]:
        state, _ = step(vs.train_state(vs.fully_shard({"w": jnp.ones(shape)}, meshes[2]), tx), np.ones(4, np.float32))
        assert dict(state.model.tensors())["w"].shape == shape


def test_value_and_grad_in_the_users_own_loop(model: vs.Sharded) -> None:
    @jax.jit
    def losses(model: vs.Sharded, batches: Any) -> jax.Array:
        gradient = vs.value_and_grad(models.tree_loss)

        def body(model: vs.Sharded, batch: Any) -> tuple[vs.Sharded, jax.Array]:
            value, _ = gradient(model, batch)
            return value.model, value.loss

        return jax.lax.scan(body, model, batches)[1]

    found = losses(model, jax.tree.map(lambda *leaves: np.stack(leaves), *BATCHES))
    want = [mean.total / mean.count for mean in (models.tree_loss(models.tree(), batch) for batch in BATCHES)]
    np.testing.assert_allclose(found, want, 1e-5)


def test_metrics_are_reduced_by_their_kind(meshes: dict[int, Mesh]) -> None:
    def loss_fn(params: Any, batch: Any) -> Any:
        aux = {
            "mean": vs.Mean(batch["w"].sum(), jnp.sum(batch["w"] > 0)),
            "float": batch["w"].mean(),
            "integer": jnp.sum(batch["w"] > 0),
            "vector": jnp.stack([batch["w"].mean(), 2 * batch["w"].mean()]),
            "none": None,
        }
        return params["w"].sum(), aux

    model = vs.fully_shard({"w": jnp.ones(2)}, meshes[3])
    value, _ = jax.jit(vs.value_and_grad(loss_fn, has_aux=True))(model, BATCHES[0])
    weights = BATCHES[0]["w"]
    np.testing.assert_allclose(value.aux["mean"], 1)
    np.testing.assert_allclose(value.aux["float"], weights.mean(), 1e-6)
    assert int(value.aux["integer"]) == (weights > 0).sum()
    assert value.aux["integer"].dtype == jnp.int32
    np.testing.assert_allclose(value.aux["vector"], [weights.mean(), 2 * weights.mean()], 1e-6)
    assert value.aux["none"] is None


def test_narrow_integer_metrics_do_not_overflow(meshes: dict[int, Mesh]) -> None:
    model = vs.fully_shard({"w": jnp.ones(2)}, meshes[3])
    loss_fn = lambda params, batch: (params["w"].sum(), jnp.int8(100))  # noqa: E731
    value, _ = jax.jit(vs.value_and_grad(loss_fn, has_aux=True))(model, BATCHES[0])
    assert int(value.aux) == 300


def test_apply_gives_outputs_row_by_row(meshes: dict[int, Mesh]) -> None:
    model = vs.fully_shard(models.net, meshes[3])
    found = vs.apply(lambda net, tokens: net(tokens))(model, BATCHES[0]["x"])
    np.testing.assert_allclose(found, models.net()(BATCHES[0]["x"]), 1e-5, 1e-6)
    few = vs.apply(lambda net, tokens: net(tokens), replicate_batch=True)(model, BATCHES[0]["x"][:1])
    np.testing.assert_allclose(few, found[:1], 1e-5, 1e-6)


def test_apply_reduces_means(model: vs.Sharded) -> None:
    found = vs.apply(models.tree_loss, mean=True)(model, BATCHES[0])
    want = models.tree_loss(models.tree(), BATCHES[0])
    np.testing.assert_allclose(found, want.total / want.count, 1e-5)


def test_a_trained_module_comes_back_trained(meshes: dict[int, Mesh]) -> None:
    state = vs.train_state(vs.fully_shard(models.net, meshes[3]), TX)
    step = vs.train_step(models.mean_loss, TX)
    for _ in range(3):
        state, metrics = step(state, BATCHES[0])
    net = vs.unshard(state.model)
    assert isinstance(net, nnx.Module)
    assert float(models.mean_loss(net, BATCHES[0])) < float(metrics.loss)
    assert len({leaf.device for leaf in jax.tree.leaves(nnx.state(net))}) == 1


def test_the_sharded_model_and_its_state_are_pytrees(model: vs.Sharded) -> None:
    state = vs.train_state(model, TX)
    leaves, treedef = jax.tree.flatten(state)
    again = jax.tree.unflatten(treedef, leaves)
    assert jax.tree.structure(again) == treedef
    assert hash(model.structure) == hash(again.model.structure)
