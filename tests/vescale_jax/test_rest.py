"""Models with more than parameters: batch statistics, counters and random keys, equal to one plain device."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from jax.sharding import Mesh

import vescale_jax as vs
from tests.vescale_jax import models, twin

# Annotations are checked in the other files; here are the most and the largest programs.
pytestmark = pytest.mark.unchecked_annotations


@pytest.fixture(scope="module")
def five(meshes: dict[int, Mesh]) -> Mesh:
    return meshes[5]


class Normed(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, axis: str | None = None) -> None:
        self.embed = nnx.Embed(models.VOCABULARY, models.WIDTH, rngs=rngs)
        self.norm = nnx.BatchNorm(models.WIDTH, momentum=0.5, axis_name=axis, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        return self.embed.attend(self.norm(self.embed(tokens)))


def test_synchronised_batch_norm(meshes: dict[int, Mesh]) -> None:
    theirs = twin.plain(Normed(nnx.Rngs(0)), models.mean_loss, twin.ADAMW, twin.BATCHES[:2])
    ours = twin.sharded(
        vs.fully_shard(lambda: Normed(nnx.Rngs(0), "fsdp"), meshes[3]), models.mean_loss, twin.ADAMW, twin.BATCHES[:2]
    )
    twin.assert_same(ours, theirs)
    for mine, other in zip(ours.rest, theirs.rest, strict=True):
        np.testing.assert_allclose(mine, other, 1e-5, 1e-6)


def test_batch_norm_that_is_not_synchronised_averages_its_statistics(meshes: dict[int, Mesh]) -> None:
    model = vs.fully_shard(lambda: Normed(nnx.Rngs(0)), meshes[3])
    ours = twin.sharded(model, models.mean_loss, twin.ADAMW, twin.BATCHES[:1])
    hidden = np.asarray(Normed(nnx.Rngs(0)).embed(twin.BATCHES[0]["x"])).reshape(3, -1, models.WIDTH)
    found = dict(zip(model.structure.form.rest_paths, ours.rest, strict=True))
    np.testing.assert_allclose(found["norm/mean"], 0.5 * hidden.mean((0, 1)), 1e-5, 1e-6)
    np.testing.assert_allclose(found["norm/var"], 0.5 + 0.5 * hidden.var(1).mean(0), 1e-5, 1e-6)


class LinenNormed(linen.Module):
    axis: str | None = None

    @linen.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        embed = linen.Embed(models.VOCABULARY, models.WIDTH)
        x = linen.BatchNorm(use_running_average=False, momentum=0.5, axis_name=self.axis)(embed(tokens))
        return embed.attend(x)


def test_linen_batch_norm(meshes: dict[int, Mesh]) -> None:
    variables = LinenNormed().init(jax.random.key(0), jnp.zeros(2, jnp.int32))
    theirs = twin.plain(LinenNormed(), models.mean_loss, twin.ADAMW, twin.BATCHES[:2], variables=variables)
    ours = twin.sharded(
        vs.fully_shard(LinenNormed("fsdp"), meshes[3], params=variables), models.mean_loss, twin.ADAMW, twin.BATCHES[:2]
    )
    twin.assert_same(ours, theirs)
    for mine, other in zip(ours.rest, jax.tree.leaves(theirs.rest), strict=True):
        np.testing.assert_allclose(mine, other, 1e-5, 1e-6)


class Counting(nnx.Module):
    def __init__(self) -> None:
        self.weight = nnx.Param(2 * jnp.ones(3))
        self.seen = nnx.Variable(jnp.zeros(3, jnp.int32))


def test_integers_of_the_rest_are_the_same_on_every_device_afterwards(meshes: dict[int, Mesh]) -> None:
    def loss_fn(model: Counting, batch: Any) -> jax.Array:
        # Devices see different numbers of real rows.
        model.seen[...] = model.seen[...] + jnp.sum(batch["w"] > 0)
        return model.weight[...].sum() * batch["w"].mean()

    (seen,) = twin.sharded(vs.fully_shard(Counting, meshes[3]), loss_fn, twin.ADAMW, twin.BATCHES[:1]).rest
    assert seen.is_fully_replicated
    assert len({np.asarray(shard.data).tobytes() for shard in seen.addressable_shards}) == 1


class Dropped(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.weight = nnx.Param(jax.random.normal(rngs.params(), (16,)))
        self.dropout = nnx.Dropout(0.5, rngs=rngs)


def dropped(model: Dropped, batch: Any) -> tuple[jax.Array, Any]:
    mask = model.dropout(jnp.ones(16))
    code = jnp.sum((mask > 0) * 2 ** jnp.arange(16))
    # Each device writes its mask, as a number, to its own place.
    codes = jnp.zeros(3, jnp.int32).at[jax.lax.axis_index("fsdp")].set(code.astype(jnp.int32))
    return jnp.sum(mask * model.weight[...]) * batch["w"].mean(), codes


def test_dropout_masks_differ_between_devices_and_steps_and_repeat_with_the_seed(meshes: dict[int, Mesh]) -> None:
    def masks() -> list[int]:
        state = vs.train_state(vs.fully_shard(lambda: Dropped(nnx.Rngs(0)), meshes[3]), twin.ADAMW)
        step = vs.train_step(dropped, twin.ADAMW, has_aux=True)
        found: list[int] = []
        for _ in range(2):
            state, metrics = step(state, twin.BATCHES[0])
            found.extend(metrics.aux.tolist())
        return found

    first = masks()
    assert len(set(first)) == 6
    assert masks() == first


def test_gradients_belong_to_the_masks_that_were_drawn(meshes: dict[int, Mesh]) -> None:
    model = vs.fully_shard(lambda: Dropped(nnx.Rngs(0)), meshes[3])
    (value, grads) = jax.jit(vs.value_and_grad(dropped, has_aux=True))(model, twin.BATCHES[0])
    masks = 2.0 * (np.asarray(value.aux)[:, None] >> np.arange(16) & 1)
    weights = twin.BATCHES[0]["w"].reshape(3, -1).mean(1)
    found = dict(jax.tree.leaves(grads, is_leaf=lambda node: hasattr(node, "read"))[0].read())
    np.testing.assert_allclose(found["weight"], (masks * weights[:, None]).mean(0), 1e-6)


class LinenDropped(linen.Module):
    @linen.compact
    def __call__(self) -> jax.Array:
        weight = self.param("weight", linen.initializers.ones, (16,))
        return linen.Dropout(0.5, deterministic=False)(weight)


@pytest.mark.parametrize("typed", [True, False])
def test_linen_dropout_masks_differ_between_devices_and_steps(typed: bool, meshes: dict[int, Mesh]) -> None:
    def loss_fn(model: linen.Module, batch: Any) -> tuple[jax.Array, Any]:
        out = model()
        code = jnp.sum((out > 0) * 2 ** jnp.arange(16)).astype(jnp.int32)
        return out.sum(), jnp.zeros(3, jnp.int32).at[jax.lax.axis_index("fsdp")].set(code)

    key = jax.random.key(0) if typed else jax.random.PRNGKey(0)
    params = {"params": {"weight": jnp.ones(16)}}
    state = vs.train_state(
        vs.fully_shard(LinenDropped(), meshes[3], params=params, rngs={"dropout": key}), optax.sgd(0.0)
    )
    step = vs.train_step(loss_fn, optax.sgd(0.0), has_aux=True)
    found: list[int] = []
    for _ in range(2):
        state, metrics = step(state, twin.BATCHES[0])
        found.extend(metrics.aux.tolist())
    assert len(set(found)) == 6


class Sowing(linen.Module):
    @linen.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        embed = linen.Embed(models.VOCABULARY, models.WIDTH)
        calls = self.variable("counter", "calls", lambda: jnp.zeros((), jnp.int32))
        calls.value += 1
        x = embed(tokens)
        self.sow("intermediates", "hidden", x)
        return embed.attend(x)


def test_linen_counters_count_and_sown_values_are_dropped(meshes: dict[int, Mesh]) -> None:
    model = vs.fully_shard(
        Sowing(),
        meshes[3],
        params={
            name: value
            for name, value in Sowing().init(jax.random.key(0), jnp.zeros(1, jnp.int32)).items()
            if name != "intermediates"
        },
    )
    ours = twin.sharded(model, models.mean_loss, twin.ADAMW, twin.BATCHES[:2])
    assert ours.rest == [3]
