"""What users write in models and losses: scans, branches, checkpoints and casts, equal to one plain device."""

from collections.abc import Callable
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


class Stacked(nnx.Module):
    """Layers stacked by vmap and run by scan."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(models.VOCABULARY, models.WIDTH, rngs=rngs)
        make = nnx.split_rngs(splits=3)(nnx.vmap(lambda rngs: models.Block(models.WIDTH, 7, rngs)))
        self.layers = make(rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        run = nnx.scan(lambda layer, x: layer(x), in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        return self.embed.attend(run(self.layers, self.embed(tokens)))


class Rematerialised(nnx.Module):
    """One layer used twice, under remat."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(models.VOCABULARY, models.WIDTH, rngs=rngs)
        self.layer = models.Block(models.WIDTH, 7, rngs)
        self.again = self.layer

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embed(tokens)
        for layer in (self.layer, self.again):
            x = nnx.remat(lambda layer, x: layer(x))(layer, x)
        return self.embed.attend(x)


@pytest.mark.parametrize("module", [Stacked, Rematerialised])
def test_transformed_nnx_layers(module: type[nnx.Module], meshes: dict[int, Mesh]) -> None:
    twin.same_module(lambda: module(nnx.Rngs(0)), meshes[3])


class LinenStacked(linen.Module):
    @linen.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        embed = linen.Embed(models.VOCABULARY, models.WIDTH)
        stack = linen.scan(linen.remat(LinenLayer), variable_axes={"params": 0}, split_rngs={"params": True}, length=3)
        x, _ = stack()(embed(tokens), None)
        return embed.attend(x)


class LinenLayer(linen.Module):
    @linen.compact
    def __call__(self, x: jax.Array, _: None) -> tuple[jax.Array, None]:
        return models.LinenBlock()(x), None


def test_scanned_linen_layers(meshes: dict[int, Mesh]) -> None:
    variables = LinenStacked().init(jax.random.key(0), jnp.zeros(2, jnp.int32))
    theirs = twin.plain(LinenStacked(), models.mean_loss, twin.ADAMW, twin.BATCHES[:2], variables=variables)
    model = vs.fully_shard(LinenStacked(), meshes[3], params=variables)
    twin.assert_same(twin.sharded(model, models.mean_loss, twin.ADAMW, twin.BATCHES[:2]), theirs)


def control_flow(params: Any, batch: Any) -> vs.Mean:
    x = params["embed"][batch["x"]]
    stack = jnp.stack([layer["w"] for layer in params["layers"]])
    x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, stack)
    x = jax.lax.cond(batch["w"].sum() > 8, lambda x: x * params["scale"], jnp.sin, x)
    x = jax.lax.fori_loop(0, 2, lambda _, x: jnp.sin(x), x)
    losses = models.cross_entropy(x @ params["embed"].T, batch)
    return vs.Mean((losses * batch["w"]).sum(), batch["w"].sum())


@jax.custom_vjp
def doubled_gradient(x: jax.Array, w: jax.Array) -> jax.Array:
    return x @ w


doubled_gradient.defvjp(lambda x, w: (x @ w, (x, w)), lambda r, g: (g @ r[1].T, 2 * r[0].T @ g))


def custom_gradient(params: Any, batch: Any) -> jax.Array:
    x = jnp.tanh(doubled_gradient(params["embed"][batch["x"]], params["layers"][0]["w"]))
    return models.cross_entropy(x @ params["embed"].T, batch).mean()


def checkpointed(params: Any, batch: Any) -> jax.Array:
    return jax.checkpoint(lambda p: models.tree_loss(p, batch)[0])(params) / 100


LOSSES: dict[str, Callable[..., Any]] = {
    "scan, cond and fori_loop": lambda p, b: control_flow(p, {**b, "w": jnp.ones_like(b["w"])}),
    "custom_vjp": custom_gradient,
    "jit": jax.jit(models.tree_loss),
    "no use of the batch": lambda p, b: jnp.sum(p["embed"] ** 2) * p["scale"],
    "no use of most parameters": lambda p, b: p["scale"] ** 2 * b["w"].mean(),
    "a sum instead of a mean": lambda p, b: vs.Mean(models.tree_loss(p, b).total, jnp.float32(b["w"].size)),
}


@pytest.mark.parametrize("name", LOSSES)
def test_losses(name: str, five: Mesh) -> None:
    loss_fn = LOSSES[name]
    theirs = twin.plain(
        models.tree(),
        loss_fn if name != "a sum instead of a mean" else lambda p, b: models.tree_loss(p, b).total / models.ROWS,
        twin.ADAMW,
        twin.BATCHES[:2],
    )
    twin.assert_same(twin.sharded(vs.fully_shard(models.tree(), five), loss_fn, twin.ADAMW, twin.BATCHES[:2]), theirs)


def test_a_checkpointed_loss(five: Mesh) -> None:
    def total(params: Any, batch: Any) -> Any:
        return checkpointed(params, batch)

    model = vs.fully_shard(models.tree(), five)
    value, grads = jax.jit(vs.value_and_grad(lambda p, b: vs.Mean(total(p, b), 1)))(model, twin.BATCHES[0])
    # The mean over devices of the sums of their rows.
    want, wanted = jax.value_and_grad(lambda p: total(p, twin.BATCHES[0]) / 5)(models.tree())
    np.testing.assert_allclose(value.loss, want, 1e-5)
    found = {f"{b.layout.plan}": b for b in jax.tree.leaves(grads, is_leaf=lambda n: hasattr(n, "read"))}
    embed = [t for b in found.values() for name, t in b.read() if name == "embed"]
    np.testing.assert_allclose(embed[0], wanted["embed"], 2e-5, 2e-6)


def test_a_device_whose_rows_count_nothing(five: Mesh) -> None:
    batch = {**twin.BATCHES[0], "w": np.where(np.arange(models.ROWS) < 20, 1, 0).astype(np.float32)}
    theirs = twin.plain(models.tree(), models.tree_loss, twin.ADAMW, [batch])
    twin.assert_same(twin.sharded(vs.fully_shard(models.tree(), five), models.tree_loss, twin.ADAMW, [batch]), theirs)


def test_nothing_counted_is_a_loss_of_zero_and_no_gradient(five: Mesh) -> None:
    def loss_fn(params: Any, batch: Any) -> vs.Mean:
        mean = models.tree_loss(params, batch)
        return vs.Mean(mean.total, 0 * mean.count)

    value, grads = jax.jit(vs.value_and_grad(loss_fn))(vs.fully_shard(models.tree(), five), twin.BATCHES[0])
    assert value.grad_norm == 0
    assert all(not np.asarray(grad).any() for grad in jax.tree.leaves(grads))
    assert value.loss == 0


def test_a_batch_smaller_than_the_mesh_is_replicated(meshes: dict[int, Mesh]) -> None:
    batches = [{name: leaf[:3] for name, leaf in twin.BATCHES[0].items()}]
    theirs = twin.plain(models.tree(), models.tree_loss, twin.ADAMW, batches)
    model = vs.fully_shard(models.tree(), meshes[8])
    twin.assert_same(twin.sharded(model, models.tree_loss, twin.ADAMW, batches, replicate_batch=True), theirs)


def test_wide_numpy_batches_and_scalars(five: Mesh) -> None:
    def loss_fn(params: Any, batch: Any) -> vs.Mean:
        mean = models.tree_loss(params, batch)
        return vs.Mean(mean.total * batch["weight"] * batch["python"], mean.count)

    wide = {
        "x": twin.BATCHES[0]["x"].astype(np.int64),
        "y": twin.BATCHES[0]["y"],
        "w": twin.BATCHES[0]["w"].astype(np.float64),
    }
    batches = [{**wide, "weight": np.float64(2.0), "python": 0.25}]
    theirs = twin.plain(models.tree(), loss_fn, twin.ADAMW, batches)
    twin.assert_same(twin.sharded(vs.fully_shard(models.tree(), five), loss_fn, twin.ADAMW, batches), theirs)


def test_float64(five: Mesh) -> None:
    with jax.enable_x64(True):
        tree = jax.tree.map(lambda x: x.astype(jnp.float64), models.tree())
        theirs = twin.plain(tree, models.tree_loss, optax.adam(1e-2), twin.BATCHES[:2])
        ours = twin.sharded(vs.fully_shard(tree, five), models.tree_loss, optax.adam(1e-2), twin.BATCHES[:2])
    assert ours.params["embed"].dtype == np.float64
    for path, value in theirs.params.items():
        np.testing.assert_allclose(ours.params[path], value, 1e-6, 1e-7, err_msg=path)
