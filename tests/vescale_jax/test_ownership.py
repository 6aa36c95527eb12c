"""Whose memory it is: the user's model and what `unshard` returned live on whatever steps do, on every kind of mesh."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from jax.sharding import AxisType

import vescale_jax as vs

TX = optax.sgd(0.1)


class Normed(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.norm = nnx.BatchNorm(3, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)
        self.linear = nnx.Linear(3, 2, rngs=rngs)

    def __call__(self, x):
        return self.linear(self.drop(self.norm(x)))


class LinenNormed(linen.Module):
    @linen.compact
    def __call__(self, x):
        return linen.Dense(2)(linen.BatchNorm(use_running_average=False)(x))


def loss_fn(model, batch):
    return jnp.mean(model(batch) ** 2)


@pytest.fixture(params=[AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def four(request):
    return jax.make_mesh((4,), ("fsdp",), axis_types=(request.param,))


BATCH = np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32)


def test_the_users_model_lives_on(four):
    own = Normed(nnx.Rngs(0))
    before = [np.asarray(x) for x in jax.tree.leaves(nnx.state(own, nnx.BatchStat, nnx.Param))]
    state = vs.train_state(vs.fully_shard(own, four), TX)
    vs.train_step(loss_fn, TX)(state, BATCH)
    after = jax.tree.leaves(nnx.state(own, nnx.BatchStat, nnx.Param))
    jax.tree.map(np.testing.assert_array_equal, after, before)
    assert own(BATCH).shape == (8, 2)


def test_linen_variables_live_on(four):
    variables = LinenNormed().init(jax.random.key(0), BATCH)
    state = vs.train_state(vs.fully_shard(LinenNormed(), four, params=variables), TX)
    vs.train_step(loss_fn, TX)(state, BATCH)
    assert all(np.isfinite(np.asarray(x)).all() for x in jax.tree.leaves(variables))


def test_a_snapshot_lives_on_and_runs_by_itself(four):
    state = vs.train_state(vs.fully_shard(lambda: Normed(nnx.Rngs(0)), four), TX)
    step = vs.train_step(loss_fn, TX)
    state, _ = step(state, BATCH)
    snapshot = vs.unshard(state.model)
    state, _ = step(state, BATCH)
    snapshot.eval()
    assert np.isfinite(np.asarray(snapshot(BATCH))).all()
    assert not np.array_equal(snapshot.norm.mean[...], vs.unshard(state.model).norm.mean[...])


def test_a_gradient_inside_the_users_jit_takes_a_host_batch(four):
    model = vs.fully_shard(lambda: nnx.Linear(3, 2, rngs=nnx.Rngs(0)), four)
    gradient = vs.value_and_grad(loss_fn)
    inside, _ = jax.jit(gradient)(model, BATCH)
    outside, _ = gradient(model, BATCH)
    np.testing.assert_allclose(inside.loss, outside.loss, rtol=1e-6)


def test_steps_can_be_scanned(four):
    model = vs.fully_shard(lambda: nnx.Linear(3, 2, rngs=nnx.Rngs(0)), four)
    step = vs.train_step(loss_fn, TX, donate=False)
    state = vs.train_state(model, TX)
    _, scanned = jax.lax.scan(step, state, np.stack([BATCH, BATCH]))
    losses = []
    for _ in range(2):
        state, metrics = step(state, BATCH)
        losses.append(metrics.loss)
    np.testing.assert_allclose(scanned.loss, losses, rtol=1e-6)


@pytest.mark.parametrize("what", ["unshard", "apply", "value_and_grad"])
def test_a_model_whose_memory_a_step_took_is_refused(what, mesh):
    model = vs.fully_shard({"w": jnp.ones(3)}, mesh(2))
    jax.tree.map(lambda leaf: leaf.delete(), model.params)
    use = {
        "unshard": lambda: vs.unshard(model),
        "apply": lambda: vs.apply(lambda p, b: b)(model, BATCH),
        "value_and_grad": lambda: vs.value_and_grad(lambda p, b: p["w"].sum())(model, BATCH),
    }
    with pytest.raises(RuntimeError, match=rf"^{what}: got a state that was donated to an earlier step; want "):
        use[what]()
