"""Equality: a few steps on a mesh leave the losses, gradient norms and parameters that one plain device leaves.

Every test trains a small model twice, with the library and without it (`twin.py`), in float32 to a tight tolerance.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from jax.sharding import AxisType, Mesh

import vescale_jax as vs
from tests.vescale_jax import models, twin
from vescale_planner import Rows, WholeTensor

# Annotations are checked in the other files; here are the most and the largest programs.
pytestmark = pytest.mark.unchecked_annotations

BATCHES = models.batches(3)
ADAMW = optax.adamw(1e-2)


@functools.cache
def tree_twin(tx: optax.GradientTransformation, steps: int) -> twin.Run:
    return twin.plain(models.tree(), models.tree_loss, tx, BATCHES[:steps])


def same_tree(mesh: Mesh, tx: optax.GradientTransformation = ADAMW, steps: int = 3, **options: Any) -> twin.Run:
    """Trains the bare pytree with and without the library; `options` go to `fully_shard`."""
    ours = twin.sharded(vs.fully_shard(models.tree(), mesh, **options), models.tree_loss, tx, BATCHES[:steps])
    twin.assert_same(ours, tree_twin(tx, steps))
    return ours


def same_module(
    make: Callable[[], Any], mesh: Mesh, loss_fn: Callable[..., Any] = models.mean_loss, tx: Any = ADAMW, **options: Any
) -> tuple[twin.Run, twin.Run]:
    """Trains an nnx module with and without the library, two steps."""
    theirs = twin.plain(make(), loss_fn, tx, BATCHES[:2])
    ours = twin.sharded(vs.fully_shard(make, mesh, **options), loss_fn, tx, BATCHES[:2])
    twin.assert_same(ours, theirs)
    return ours, theirs


@pytest.fixture(scope="module")
def five(meshes: dict[int, Mesh]) -> Mesh:
    return meshes[5]


# Every mesh, every form. The weights of the loss differ from device to device, and the embedding is tied.


@pytest.fixture(scope="module")
def net_twin() -> twin.Run:
    return twin.plain(models.net(), models.weighted_loss, ADAMW, BATCHES)


@pytest.mark.parametrize("n", [1, 2, 3, 5, 8])
def test_an_nnx_module_on_every_mesh(n: int, meshes: dict[int, Mesh], net_twin: twin.Run) -> None:
    model = vs.fully_shard(models.net, meshes[n])
    twin.assert_same(twin.sharded(model, models.weighted_loss, ADAMW, BATCHES), net_twin)


@pytest.fixture(scope="module")
def linen_twin() -> twin.Run:
    variables = models.linen_variables()
    return twin.plain(models.LinenNet(), models.weighted_loss, ADAMW, BATCHES, variables=variables)


@pytest.mark.parametrize("n", [1, 8])
def test_a_linen_module_on_every_mesh(n: int, meshes: dict[int, Mesh], linen_twin: twin.Run) -> None:
    model = vs.fully_shard(models.LinenNet(), meshes[n], params=models.linen_variables)
    twin.assert_same(twin.sharded(model, models.weighted_loss, ADAMW, BATCHES), linen_twin)


@pytest.mark.parametrize("n", [2, 8])
def test_a_bare_pytree_on_every_mesh(n: int, meshes: dict[int, Mesh]) -> None:
    same_tree(meshes[n])


# The options of fully_shard move no number.

OPTIONS: dict[str, dict[str, Any]] = {
    "tensors kept after forward": {"reshard_after_forward": False},
    "tensors kept for one unit": {"reshard_after_forward": {"layers/1": False}},
    "units across layers": {"units": lambda path: path.rsplit("/", 1)[-1]},
    "small units": {"max_unit_bytes": 64},
    "whole tensors": {"blocks": WholeTensor()},
    "blocks of rows": {"blocks": {"*w": Rows(2), "embed": Rows(4)}},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_options_change_no_number(name: str, five: Mesh) -> None:
    same_tree(five, **OPTIONS[name])


# Meshes.


def test_a_mesh_of_explicit_axis_type() -> None:
    same_tree(jax.make_mesh((4,), ("fsdp",), axis_types=(AxisType.Explicit,)), steps=2)


@pytest.mark.parametrize(("shape", "axes"), [((2, 4), ("data", "fsdp")), ((4, 2), ("fsdp", "model"))])
def test_a_mesh_of_two_axes(shape: tuple[int, int], axes: tuple[str, str]) -> None:
    same_tree(jax.make_mesh(shape, axes, axis_types=(AxisType.Auto,) * 2), steps=2)


def test_another_axis_and_another_order_of_devices(mesh: Callable[..., Mesh]) -> None:
    same_tree(Mesh(mesh(5).devices[::-1], ("dp",)), steps=2)


def test_the_step_under_a_mesh_that_is_set(meshes: dict[int, Mesh]) -> None:
    theirs = tree_twin(ADAMW, 1)
    model = vs.fully_shard(models.tree(), meshes[8])
    with jax.set_mesh(meshes[8]):
        twin.assert_same(twin.sharded(model, models.tree_loss, ADAMW, BATCHES[:1]), theirs)


# Optimizers. Lion takes signs: its tolerance covers none that flips.

OPTIMIZERS: dict[str, Callable[[], optax.GradientTransformation]] = {
    "sgd with momentum": lambda: optax.sgd(0.1, momentum=0.9, nesterov=True),
    "lion": lambda: optax.lion(1e-3),
    "clipping by the global norm": lambda: optax.chain(optax.clip_by_global_norm(0.05), optax.sgd(0.5)),
    "a schedule": lambda: optax.adamw(optax.linear_schedule(1e-2, 1e-3, 3)),
    "accumulation": lambda: optax.MultiSteps(optax.adam(1e-2), 2).gradient_transformation(),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_element_wise_optimizers_run_unchanged(name: str, five: Mesh) -> None:
    same_tree(five, OPTIMIZERS[name]())


def test_a_decay_mask_by_rank_is_obeyed_or_refused(five: Mesh) -> None:
    # The usual mask, "matrices only": buffers have one dim, and it would switch weight decay off without a word.
    def tx(decay: float) -> optax.GradientTransformation:
        return optax.adamw(1e-2, weight_decay=decay, mask=lambda params: jax.tree.map(lambda x: x.ndim > 1, params))

    theirs = twin.plain(models.tree(), models.tree_loss, tx(1.0), BATCHES[:1])
    try:
        ours = twin.sharded(vs.fully_shard(models.tree(), five), models.tree_loss, tx(1.0), BATCHES[:1])
    except (TypeError, ValueError):
        return
    twin.assert_same(ours, theirs)


@pytest.mark.parametrize("n", [1, 8])
def test_clipping_by_the_step(n: int, meshes: dict[int, Mesh]) -> None:
    tx = optax.sgd(0.5)
    theirs = twin.plain(models.tree(), models.tree_loss, tx, BATCHES, max_norm=0.05)
    model = vs.fully_shard(models.tree(), meshes[n])
    twin.assert_same(twin.sharded(model, models.tree_loss, tx, BATCHES, max_norm=0.05), theirs)


def test_a_norm_below_the_limit_is_not_clipped(five: Mesh) -> None:
    tx = optax.sgd(0.5)
    model = vs.fully_shard(models.tree(), five)
    theirs = twin.plain(models.tree(), models.tree_loss, tx, BATCHES[:2])
    twin.assert_same(twin.sharded(model, models.tree_loss, tx, BATCHES[:2], max_norm=1e3), theirs)


# Kinds of parameters.


def test_frozen_parameters_stay_bit_for_bit(five: Mesh) -> None:
    trainable = {"embed": False, "layers/0/*": False}
    theirs = twin.plain(
        models.tree(), models.tree_loss, ADAMW, BATCHES, trainable=lambda p: p != "embed" and "layers/0" not in p
    )
    model = vs.fully_shard(models.tree(), five, trainable=trainable)
    before = dict(model.tensors())
    ours = twin.sharded(model, models.tree_loss, ADAMW, BATCHES)
    twin.assert_same(ours, theirs)
    for path in ("embed", "layers/0/w", "layers/0/b"):
        assert ours.params[path].tobytes() == before[path].tobytes()


class Adapted(nnx.Module):
    """A frozen base with low-rank adapters."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(models.VOCABULARY, models.WIDTH, rngs=rngs)
        self.layers = nnx.List([nnx.LoRALinear(5, 5, lora_rank=2, rngs=rngs) for _ in range(2)])

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + jnp.tanh(layer(x))
        return self.embed.attend(x)


def test_adapters_on_a_frozen_base(meshes: dict[int, Mesh]) -> None:
    theirs = twin.plain(Adapted(nnx.Rngs(0)), models.mean_loss, ADAMW, BATCHES[:2], trainable=lambda p: "lora" in p)
    model = vs.fully_shard(lambda: Adapted(nnx.Rngs(0)), meshes[3], trainable=lambda path, shape: "lora" in path)
    trained = [path for unit in model.params.values() for b in unit.values() for path in b.layout.plan.slots]
    assert len(trained) == 4
    assert all("lora" in path for path in trained)
    twin.assert_same(twin.sharded(model, models.mean_loss, ADAMW, BATCHES[:2]), theirs)


def test_everything_frozen(five: Mesh) -> None:
    model = vs.fully_shard(models.tree(), five, trainable=False)
    state = vs.train_state(model, ADAMW)
    state, metrics = vs.train_step(models.tree_loss, ADAMW, donate=False)(state, BATCHES[0])
    assert metrics.grad_norm == 0
    loss = models.tree_loss(models.tree(), BATCHES[0])
    np.testing.assert_allclose(metrics.loss, loss.total / loss.count, 1e-6)


def test_integers_booleans_and_keys_are_used_and_never_trained(five: Mesh) -> None:
    extra = {
        "ids": jnp.arange(13, dtype=jnp.int32)[::-1],
        "bytes": jnp.arange(5, dtype=jnp.uint8),
        "mask": jnp.arange(5) % 2 == 0,
        "key": jax.random.key(3),
    }

    def loss_fn(params: Any, batch: Any) -> vs.Mean:
        weights = params["bytes"].astype(jnp.float32) * params["mask"]
        embed = params["embed"] * (1 + weights)[None]
        return models.tree_loss({**params, "embed": embed}, {**batch, "x": params["ids"][batch["x"]]})

    theirs = twin.plain(models.tree(), lambda p, b: loss_fn({**p, **extra}, b), ADAMW, BATCHES[:2])
    ours = twin.sharded(vs.fully_shard({**models.tree(), **extra}, five), loss_fn, ADAMW, BATCHES[:2])
    for name in ("ids", "bytes", "mask"):
        np.testing.assert_array_equal(ours.params.pop(name), extra[name])
    twin.assert_same(ours, theirs)


def test_one_scalar_parameter_alone(meshes: dict[int, Mesh]) -> None:
    def loss_fn(params: Any, batch: Any) -> jax.Array:
        return jnp.mean((params["scale"] * batch["w"] - 1) ** 2)

    make = lambda: {"scale": jnp.ones(()) * 3}  # noqa: E731
    theirs = twin.plain(make(), loss_fn, ADAMW, BATCHES[:2])
    twin.assert_same(twin.sharded(vs.fully_shard(make(), meshes[8]), loss_fn, ADAMW, BATCHES[:2]), theirs)


def test_a_group_without_elements_trains(meshes: dict[int, Mesh]) -> None:
    def loss_fn(params: Any, batch: Any) -> jax.Array:
        return jnp.mean(batch["w"]) * params["w"].sum() + params["none"].astype(jnp.float32).sum()

    make = lambda: {"w": jnp.ones(3), "none": jnp.ones((0, 3), jnp.bfloat16)}  # noqa: E731
    theirs = twin.plain(make(), loss_fn, ADAMW, BATCHES[:1])
    twin.assert_same(twin.sharded(vs.fully_shard(make(), meshes[3]), loss_fn, ADAMW, BATCHES[:1]), theirs)


# Models with more than parameters.


class Normed(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, axis: str | None = None) -> None:
        self.embed = nnx.Embed(models.VOCABULARY, models.WIDTH, rngs=rngs)
        self.norm = nnx.BatchNorm(models.WIDTH, momentum=0.5, axis_name=axis, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        return self.embed.attend(self.norm(self.embed(tokens)))


def test_synchronised_batch_norm(meshes: dict[int, Mesh]) -> None:
    theirs = twin.plain(Normed(nnx.Rngs(0)), models.mean_loss, ADAMW, BATCHES[:2])
    ours = twin.sharded(
        vs.fully_shard(lambda: Normed(nnx.Rngs(0), "fsdp"), meshes[3]), models.mean_loss, ADAMW, BATCHES[:2]
    )
    twin.assert_same(ours, theirs)
    for mine, other in zip(ours.rest, theirs.rest, strict=True):
        np.testing.assert_allclose(mine, other, 1e-5, 1e-6)


def test_batch_norm_that_is_not_synchronised_averages_its_statistics(meshes: dict[int, Mesh]) -> None:
    model = vs.fully_shard(lambda: Normed(nnx.Rngs(0)), meshes[3])
    ours = twin.sharded(model, models.mean_loss, ADAMW, BATCHES[:1])
    hidden = np.asarray(Normed(nnx.Rngs(0)).embed(BATCHES[0]["x"])).reshape(3, -1, models.WIDTH)
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
    theirs = twin.plain(LinenNormed(), models.mean_loss, ADAMW, BATCHES[:2], variables=variables)
    ours = twin.sharded(
        vs.fully_shard(LinenNormed("fsdp"), meshes[3], params=variables), models.mean_loss, ADAMW, BATCHES[:2]
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

    (seen,) = twin.sharded(vs.fully_shard(Counting, meshes[3]), loss_fn, ADAMW, BATCHES[:1]).rest
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
        state = vs.train_state(vs.fully_shard(lambda: Dropped(nnx.Rngs(0)), meshes[3]), ADAMW)
        step = vs.train_step(dropped, ADAMW, has_aux=True)
        found: list[int] = []
        for _ in range(2):
            state, metrics = step(state, BATCHES[0])
            found.extend(metrics.aux.tolist())
        return found

    first = masks()
    assert len(set(first)) == 6
    assert masks() == first


def test_gradients_belong_to_the_masks_that_were_drawn(meshes: dict[int, Mesh]) -> None:
    model = vs.fully_shard(lambda: Dropped(nnx.Rngs(0)), meshes[3])
    (value, grads) = jax.jit(vs.value_and_grad(dropped, has_aux=True))(model, BATCHES[0])
    masks = 2.0 * (np.asarray(value.aux)[:, None] >> np.arange(16) & 1)
    weights = BATCHES[0]["w"].reshape(3, -1).mean(1)
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
        state, metrics = step(state, BATCHES[0])
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
    ours = twin.sharded(model, models.mean_loss, ADAMW, BATCHES[:2])
    assert ours.rest == [3]


# What users write in models and losses.


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
    same_module(lambda: module(nnx.Rngs(0)), meshes[3])


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
    theirs = twin.plain(LinenStacked(), models.mean_loss, ADAMW, BATCHES[:2], variables=variables)
    model = vs.fully_shard(LinenStacked(), meshes[3], params=variables)
    twin.assert_same(twin.sharded(model, models.mean_loss, ADAMW, BATCHES[:2]), theirs)


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
        ADAMW,
        BATCHES[:2],
    )
    twin.assert_same(twin.sharded(vs.fully_shard(models.tree(), five), loss_fn, ADAMW, BATCHES[:2]), theirs)


def test_a_checkpointed_loss(five: Mesh) -> None:
    def total(params: Any, batch: Any) -> Any:
        return checkpointed(params, batch)

    model = vs.fully_shard(models.tree(), five)
    value, grads = jax.jit(vs.value_and_grad(lambda p, b: vs.Mean(total(p, b), 1)))(model, BATCHES[0])
    # The mean over devices of the sums of their rows.
    want, wanted = jax.value_and_grad(lambda p: total(p, BATCHES[0]) / 5)(models.tree())
    np.testing.assert_allclose(value.loss, want, 1e-5)
    found = {f"{b.layout.plan}": b for b in jax.tree.leaves(grads, is_leaf=lambda n: hasattr(n, "read"))}
    embed = [t for b in found.values() for name, t in b.read() if name == "embed"]
    np.testing.assert_allclose(embed[0], wanted["embed"], 2e-5, 2e-6)


def test_a_device_whose_rows_count_nothing(five: Mesh) -> None:
    batch = {**BATCHES[0], "w": np.where(np.arange(models.ROWS) < 20, 1, 0).astype(np.float32)}
    theirs = twin.plain(models.tree(), models.tree_loss, ADAMW, [batch])
    twin.assert_same(twin.sharded(vs.fully_shard(models.tree(), five), models.tree_loss, ADAMW, [batch]), theirs)


def test_nothing_counted_is_a_loss_of_zero_and_no_gradient(five: Mesh) -> None:
    def loss_fn(params: Any, batch: Any) -> vs.Mean:
        mean = models.tree_loss(params, batch)
        return vs.Mean(mean.total, 0 * mean.count)

    value, grads = jax.jit(vs.value_and_grad(loss_fn))(vs.fully_shard(models.tree(), five), BATCHES[0])
    assert value.grad_norm == 0
    assert all(not np.asarray(grad).any() for grad in jax.tree.leaves(grads))
    assert value.loss == 0


def test_a_batch_smaller_than_the_mesh_is_replicated(meshes: dict[int, Mesh]) -> None:
    batches = [{name: leaf[:3] for name, leaf in BATCHES[0].items()}]
    theirs = twin.plain(models.tree(), models.tree_loss, ADAMW, batches)
    model = vs.fully_shard(models.tree(), meshes[8])
    twin.assert_same(twin.sharded(model, models.tree_loss, ADAMW, batches, replicate_batch=True), theirs)


def test_wide_numpy_batches_and_scalars(five: Mesh) -> None:
    def loss_fn(params: Any, batch: Any) -> vs.Mean:
        mean = models.tree_loss(params, batch)
        return vs.Mean(mean.total * batch["weight"] * batch["python"], mean.count)

    wide = {"x": BATCHES[0]["x"].astype(np.int64), "y": BATCHES[0]["y"], "w": BATCHES[0]["w"].astype(np.float64)}
    batches = [{**wide, "weight": np.float64(2.0), "python": 0.25}]
    theirs = twin.plain(models.tree(), loss_fn, ADAMW, batches)
    twin.assert_same(twin.sharded(vs.fully_shard(models.tree(), five), loss_fn, ADAMW, batches), theirs)


def test_float64(five: Mesh) -> None:
    with jax.enable_x64(True):
        tree = jax.tree.map(lambda x: x.astype(jnp.float64), models.tree())
        theirs = twin.plain(tree, models.tree_loss, optax.adam(1e-2), BATCHES[:2])
        ours = twin.sharded(vs.fully_shard(tree, five), models.tree_loss, optax.adam(1e-2), BATCHES[:2])
    assert ours.params["embed"].dtype == np.float64
    for path, value in theirs.params.items():
        np.testing.assert_allclose(ours.params[path], value, 1e-6, 1e-7, err_msg=path)


# bfloat16: 8 bits, so sums of products differ by some parts in a hundred; the tolerance is that of the policy.


def test_a_bfloat16_policy_agrees_to_bfloat16s_tolerance(meshes: dict[int, Mesh]) -> None:
    policy = vs.MixedPrecisionPolicy(gather_dtype=jnp.bfloat16, output_dtype=jnp.float32)
    tx = optax.sgd(0.1)
    theirs = twin.plain(models.net(), models.weighted_loss, tx, BATCHES)
    ours = twin.sharded(vs.fully_shard(models.net, meshes[3], policy=policy), models.weighted_loss, tx, BATCHES)
    twin.assert_same(ours, theirs, rtol=2e-2, atol=5e-3)


def test_a_bfloat16_policy_does_what_casts_by_hand_do(meshes: dict[int, Mesh]) -> None:
    def by_hand(params: Any, batch: Any) -> Any:
        half = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)
        return models.tree_loss(half, {**batch, "w": batch["w"].astype(jnp.bfloat16)})

    tx = optax.sgd(0.1)
    theirs = twin.sharded(vs.fully_shard(models.tree(), meshes[3]), by_hand, tx, BATCHES[:2])
    policy = vs.MixedPrecisionPolicy(gather_dtype=jnp.bfloat16)
    ours = twin.sharded(vs.fully_shard(models.tree(), meshes[3], policy=policy), models.tree_loss, tx, BATCHES[:2])
    twin.assert_same(ours, theirs, rtol=1e-3, atol=1e-4)


def test_many_small_gradients_survive_the_sum_over_devices(meshes: dict[int, Mesh]) -> None:
    # 256 on one device and 1 on the seven others: in bfloat16 the ones would vanish.
    policy = vs.MixedPrecisionPolicy(gather_dtype=jnp.bfloat16)
    model = vs.fully_shard({"w": jnp.ones(3)}, meshes[8], policy=policy)
    batch = {"g": np.array([256.0] + [1.0] * 7, np.float32)}
    _, grads = jax.jit(vs.value_and_grad(lambda p, b: vs.Mean(jnp.sum(p["w"] * b["g"]), 1)))(model, batch)
    np.testing.assert_array_equal(np.asarray(jax.tree.leaves(grads)[0])[:3], 263 / 8)


def test_a_loss_in_bfloat16_is_summed_in_float32(meshes: dict[int, Mesh]) -> None:
    model = vs.fully_shard({"w": jnp.ones(3)}, meshes[8])
    batch = {"g": np.array([256.0] + [1.0] * 7, np.float32)}
    loss_fn = lambda p, b: vs.Mean((p["w"][0] * b["g"].sum()).astype(jnp.bfloat16), 1)  # noqa: E731
    value, _ = jax.jit(vs.value_and_grad(loss_fn))(model, batch)
    assert value.loss.dtype == jnp.float32
    assert value.loss == 263 / 8
