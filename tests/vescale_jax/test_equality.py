"""Equality: a few steps on a mesh leave the losses, gradient norms and parameters that one plain device leaves.

Every test trains a small model twice, with the library and without it (`twin.py`), in float32 to a tight tolerance.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, Mesh

import vescale_jax as vs
from tests.vescale_jax import models, twin
from vescale_planner import Rows, WholeTensor

# Annotations are checked in the other files; here are the most and the largest programs.
pytestmark = pytest.mark.unchecked_annotations


@pytest.fixture(scope="module")
def five(meshes: dict[int, Mesh]) -> Mesh:
    return meshes[5]


# Every mesh, every form. The weights of the loss differ from device to device, and the embedding is tied.


@pytest.fixture(scope="module")
def net_twin() -> twin.Run:
    return twin.plain(models.net(), models.weighted_loss, twin.ADAMW, twin.BATCHES)


@pytest.mark.parametrize("n", [1, 2, 3, 5, 8])
def test_an_nnx_module_on_every_mesh(n: int, meshes: dict[int, Mesh], net_twin: twin.Run) -> None:
    model = vs.fully_shard(models.net, meshes[n])
    twin.assert_same(twin.sharded(model, models.weighted_loss, twin.ADAMW, twin.BATCHES), net_twin)


@pytest.fixture(scope="module")
def linen_twin() -> twin.Run:
    variables = models.linen_variables()
    return twin.plain(models.LinenNet(), models.weighted_loss, twin.ADAMW, twin.BATCHES, variables=variables)


@pytest.mark.parametrize("n", [1, 8])
def test_a_linen_module_on_every_mesh(n: int, meshes: dict[int, Mesh], linen_twin: twin.Run) -> None:
    model = vs.fully_shard(models.LinenNet(), meshes[n], params=models.linen_variables)
    twin.assert_same(twin.sharded(model, models.weighted_loss, twin.ADAMW, twin.BATCHES), linen_twin)


@pytest.mark.parametrize("n", [2, 8])
def test_a_bare_pytree_on_every_mesh(n: int, meshes: dict[int, Mesh]) -> None:
    twin.same_tree(meshes[n])


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
    twin.same_tree(five, **OPTIONS[name])


# Meshes.


def test_a_mesh_of_explicit_axis_type() -> None:
    twin.same_tree(jax.make_mesh((4,), ("fsdp",), axis_types=(AxisType.Explicit,)), steps=2)


@pytest.mark.parametrize(("shape", "axes"), [((2, 4), ("data", "fsdp")), ((4, 2), ("fsdp", "model"))])
def test_a_mesh_of_two_axes(shape: tuple[int, int], axes: tuple[str, str]) -> None:
    twin.same_tree(jax.make_mesh(shape, axes, axis_types=(AxisType.Auto,) * 2), steps=2)


def test_another_axis_and_another_order_of_devices(mesh: Callable[..., Mesh]) -> None:
    twin.same_tree(Mesh(mesh(5).devices[::-1], ("dp",)), steps=2)


def test_the_step_under_a_mesh_that_is_set(meshes: dict[int, Mesh]) -> None:
    theirs = twin.tree_twin(twin.ADAMW, 1)
    model = vs.fully_shard(models.tree(), meshes[8])
    with jax.set_mesh(meshes[8]):
        twin.assert_same(twin.sharded(model, models.tree_loss, twin.ADAMW, twin.BATCHES[:1]), theirs)


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
    twin.same_tree(five, OPTIMIZERS[name]())


def test_a_decay_mask_by_rank_is_obeyed_or_refused(five: Mesh) -> None:
    # The usual mask, "matrices only": buffers have one dim, and it would switch weight decay off without a word.
    def tx(decay: float) -> optax.GradientTransformation:
        return optax.adamw(1e-2, weight_decay=decay, mask=lambda params: jax.tree.map(lambda x: x.ndim > 1, params))

    theirs = twin.plain(models.tree(), models.tree_loss, tx(1.0), twin.BATCHES[:1])
    try:
        ours = twin.sharded(vs.fully_shard(models.tree(), five), models.tree_loss, tx(1.0), twin.BATCHES[:1])
    except (TypeError, ValueError):
        return
    twin.assert_same(ours, theirs)


@pytest.mark.parametrize("n", [1, 8])
def test_clipping_by_the_step(n: int, meshes: dict[int, Mesh]) -> None:
    tx = optax.sgd(0.5)
    theirs = twin.plain(models.tree(), models.tree_loss, tx, twin.BATCHES, max_norm=0.05)
    model = vs.fully_shard(models.tree(), meshes[n])
    twin.assert_same(twin.sharded(model, models.tree_loss, tx, twin.BATCHES, max_norm=0.05), theirs)


def test_a_norm_below_the_limit_is_not_clipped(five: Mesh) -> None:
    tx = optax.sgd(0.5)
    model = vs.fully_shard(models.tree(), five)
    theirs = twin.plain(models.tree(), models.tree_loss, tx, twin.BATCHES[:2])
    twin.assert_same(twin.sharded(model, models.tree_loss, tx, twin.BATCHES[:2], max_norm=1e3), theirs)


# Kinds of parameters.


def test_frozen_parameters_stay_bit_for_bit(five: Mesh) -> None:
    trainable = {"embed": False, "layers/0/*": False}
    theirs = twin.plain(
        models.tree(),
        models.tree_loss,
        twin.ADAMW,
        twin.BATCHES,
        trainable=lambda p: p != "embed" and "layers/0" not in p,
    )
    model = vs.fully_shard(models.tree(), five, trainable=trainable)
    before = dict(model.tensors())
    ours = twin.sharded(model, models.tree_loss, twin.ADAMW, twin.BATCHES)
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
    theirs = twin.plain(
        Adapted(nnx.Rngs(0)), models.mean_loss, twin.ADAMW, twin.BATCHES[:2], trainable=lambda p: "lora" in p
    )
    model = vs.fully_shard(lambda: Adapted(nnx.Rngs(0)), meshes[3], trainable=lambda path, shape: "lora" in path)
    trained = [path for unit in model.params.values() for b in unit.values() for path in b.layout.plan.slots]
    assert len(trained) == 4
    assert all("lora" in path for path in trained)
    twin.assert_same(twin.sharded(model, models.mean_loss, twin.ADAMW, twin.BATCHES[:2]), theirs)


def test_everything_frozen(five: Mesh) -> None:
    model = vs.fully_shard(models.tree(), five, trainable=False)
    state = vs.train_state(model, twin.ADAMW)
    state, metrics = vs.train_step(models.tree_loss, twin.ADAMW, donate=False)(state, twin.BATCHES[0])
    assert metrics.grad_norm == 0
    loss = models.tree_loss(models.tree(), twin.BATCHES[0])
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

    theirs = twin.plain(models.tree(), lambda p, b: loss_fn({**p, **extra}, b), twin.ADAMW, twin.BATCHES[:2])
    ours = twin.sharded(vs.fully_shard({**models.tree(), **extra}, five), loss_fn, twin.ADAMW, twin.BATCHES[:2])
    for name in ("ids", "bytes", "mask"):
        np.testing.assert_array_equal(ours.params.pop(name), extra[name])
    twin.assert_same(ours, theirs)


def test_one_scalar_parameter_alone(meshes: dict[int, Mesh]) -> None:
    def loss_fn(params: Any, batch: Any) -> jax.Array:
        return jnp.mean((params["scale"] * batch["w"] - 1) ** 2)

    make = lambda: {"scale": jnp.ones(()) * 3}  # noqa: E731
    theirs = twin.plain(make(), loss_fn, twin.ADAMW, twin.BATCHES[:2])
    twin.assert_same(twin.sharded(vs.fully_shard(make(), meshes[8]), loss_fn, twin.ADAMW, twin.BATCHES[:2]), theirs)


def test_a_group_without_elements_trains(meshes: dict[int, Mesh]) -> None:
    def loss_fn(params: Any, batch: Any) -> jax.Array:
        return jnp.mean(batch["w"]) * params["w"].sum() + params["none"].astype(jnp.float32).sum()

    make = lambda: {"w": jnp.ones(3), "none": jnp.ones((0, 3), jnp.bfloat16)}  # noqa: E731
    theirs = twin.plain(make(), loss_fn, twin.ADAMW, twin.BATCHES[:1])
    twin.assert_same(twin.sharded(vs.fully_shard(make(), meshes[3]), loss_fn, twin.ADAMW, twin.BATCHES[:1]), theirs)


# bfloat16: 8 bits, so sums of products differ by some parts in a hundred; the tolerance is that of the policy.


def test_a_bfloat16_policy_agrees_to_bfloat16s_tolerance(meshes: dict[int, Mesh]) -> None:
    policy = vs.MixedPrecisionPolicy(gather_dtype=jnp.bfloat16, output_dtype=jnp.float32)
    tx = optax.sgd(0.1)
    theirs = twin.plain(models.net(), models.weighted_loss, tx, twin.BATCHES)
    ours = twin.sharded(vs.fully_shard(models.net, meshes[3], policy=policy), models.weighted_loss, tx, twin.BATCHES)
    twin.assert_same(ours, theirs, rtol=2e-2, atol=5e-3)


def test_a_bfloat16_policy_does_what_casts_by_hand_do(meshes: dict[int, Mesh]) -> None:
    def by_hand(params: Any, batch: Any) -> Any:
        half = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)
        return models.tree_loss(half, {**batch, "w": batch["w"].astype(jnp.bfloat16)})

    tx = optax.sgd(0.1)
    theirs = twin.sharded(vs.fully_shard(models.tree(), meshes[3]), by_hand, tx, twin.BATCHES[:2])
    policy = vs.MixedPrecisionPolicy(gather_dtype=jnp.bfloat16)
    ours = twin.sharded(vs.fully_shard(models.tree(), meshes[3], policy=policy), models.tree_loss, tx, twin.BATCHES[:2])
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
