"""Accumulation: the numbers of one batch, whatever it is cut into and whenever gradients are reduced."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import vescale_jax as vs
from tests.vescale_jax import models, twin

LAYERS = 3


def stack():
    keys = iter(jax.random.split(jax.random.key(1), 8))

    def normal(*shape):
        return 0.5 * jax.random.normal(next(keys), shape)

    width = models.WIDTH
    layers = {"w": normal(LAYERS, width, width), "b": normal(LAYERS, width)}
    return {"embed": normal(models.VOCABULARY, width), "layers": layers, "scale": normal()}


def stack_loss(params, batch):
    def layer(x, p):
        return x + jnp.tanh(x @ p["w"] + p["b"][None]), None

    x, _ = jax.lax.scan(layer, params["embed"][batch["x"]], params["layers"])
    return models.weighted_loss(lambda _: (x @ params["embed"].T) * params["scale"], batch)


MODELS = {
    "list": (models.tree, models.tree_loss, {}),
    "stack": (stack, stack_loss, {"stacks": ("layers",), "prefetch": 0}),
    "stack with look-ahead": (stack, stack_loss, {"stacks": ("layers",), "prefetch": 1}),
}


@pytest.mark.parametrize("reduce", ["each", "end"])
@pytest.mark.parametrize("form", MODELS)
@pytest.mark.parametrize("n", [1, 3, 8])
def test_the_numbers_are_those_of_one_batch(mesh, n, form, reduce):
    make, loss, options = MODELS[form]
    model = vs.fully_shard(make, mesh(n), **options)
    whole, grads = vs.value_and_grad(loss)(model, twin.BATCHES[0])
    for number in (1, 5):
        pieces = vs.value_and_grad(loss, accumulation=vs.Accumulation(number, reduce))
        value, summed = pieces(model, twin.BATCHES[0])
        np.testing.assert_allclose(value.loss, whole.loss, 1e-5)
        np.testing.assert_allclose(value.grad_norm, whole.grad_norm, 1e-5)
        for ours, theirs in zip(jax.tree.leaves(summed), jax.tree.leaves(grads), strict=True):
            assert (ours.sharding, ours.dtype) == (theirs.sharding, theirs.dtype)
            np.testing.assert_allclose(ours, theirs, 1e-4, 1e-6)


def test_gradients_are_reduced_once_at_the_end(mesh):
    model = vs.fully_shard(models.tree(), mesh(8), abstract=True)
    batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), twin.BATCHES[0])
    units = len(model.structure.units)
    for reduce, inside in (("each", 1), ("end", 0)):
        step = vs.train_step(models.tree_loss, optax.sgd(1.0), accumulation=vs.Accumulation(5, reduce))
        text = step.lower(vs.train_state(model, optax.sgd(1.0)), batch).compile().as_text()
        loops, entry = (text.partition("ENTRY")[i].count(" reduce-scatter(") for i in (0, 2))
        assert (loops, entry) == (units * inside, units * (1 - inside)), reduce


def test_metrics_are_those_of_all_rows(mesh):
    def loss(params, batch):
        weight = batch["w"]
        return models.tree_loss(params, batch), {
            "mean": vs.Mean((weight**2).sum(), weight.sum()),
            "rows": jnp.int32(len(weight)),
            "average": weight.mean(),
        }

    batch = twin.BATCHES[0]
    value, _ = vs.value_and_grad(loss, has_aux=True, accumulation=vs.Accumulation(3))(
        vs.fully_shard(models.tree(), mesh(2)), batch
    )
    np.testing.assert_allclose(value.aux["mean"], (batch["w"] ** 2).sum() / batch["w"].sum(), 1e-5)
    np.testing.assert_allclose(value.aux["average"], batch["w"].mean(), 1e-5)
    assert value.aux["rows"] == models.ROWS


def test_each_microbatch_goes_on_from_the_one_before(mesh):
    """Statistics move and keys differ, as in as many steps."""

    class Net(nnx.Module):
        def __init__(self):
            rngs = nnx.Rngs(0)
            self.embed = nnx.Embed(models.VOCABULARY, models.WIDTH, rngs=rngs)
            self.norm = nnx.BatchNorm(models.WIDTH, rngs=rngs)
            self.drop = nnx.Dropout(0.5, rngs=rngs)

        def __call__(self, tokens):
            return self.embed.attend(self.norm(self.drop(self.embed(tokens))))

    rows = 12
    same = {"x": np.tile(np.arange(rows // 3, dtype=np.int32), 3), "y": np.zeros(rows, np.int32)}
    model = vs.fully_shard(Net, mesh(1))

    def loss(net, batch):
        return models.mean_loss(net, batch), {"first": jnp.abs(net.drop(jnp.ones(64))).sum()}

    value, _ = vs.value_and_grad(loss, has_aux=True, accumulation=vs.Accumulation(3))(model, same)
    counts = [leaf for leaf in value.model.rest if getattr(leaf, "dtype", None) == jnp.uint32 and leaf.ndim == 0]
    assert max(int(c) for c in counts) == 6  # Two calls in each of three microbatches.
    once, _ = vs.value_and_grad(loss, has_aux=True)(model, jax.tree.map(lambda x: x[: rows // 3], same))
    floats = [i for i, leaf in enumerate(model.rest) if jnp.issubdtype(leaf.dtype, jnp.floating)]
    moved = [float(jnp.abs(value.model.rest[i] - model.rest[i]).sum()) for i in floats]
    first = [float(jnp.abs(once.model.rest[i] - model.rest[i]).sum()) for i in floats]
    assert all(a > b > 0 for a, b in zip(moved, first, strict=True))


def test_sums_have_the_dtype_that_was_asked_for(mesh):
    """A bfloat16 sum of many equal small numbers stops growing; a float32 sum does not."""
    rows = 1024
    batch = {"x": np.ones(rows, np.float32)}

    def loss(params, batch):
        return vs.Mean((params["w"] * batch["x"]).sum(), jnp.float32(1))

    def gradient(dtype, reduce):
        model = vs.fully_shard({"w": jnp.zeros(())}, mesh(2))
        accumulation = vs.Accumulation(rows // 2, reduce, dtype)
        return float(jax.tree.leaves(vs.value_and_grad(loss, accumulation=accumulation)(model, batch)[1])[0][0])

    for reduce in ("each", "end"):
        exact = gradient(None, reduce)
        assert exact == 1
        assert gradient(jnp.bfloat16, reduce) < exact


def test_rows_that_do_not_divide_are_refused(mesh):
    model = vs.fully_shard(models.tree(), mesh(8))
    with pytest.raises(ValueError) as error:
        vs.value_and_grad(models.tree_loss, accumulation=vs.Accumulation(4))(model, twin.BATCHES[0])
    assert "batch/x: got 120 rows; want a multiple of 32: 8 devices, 4 microbatches each" in str(error.value)
    assert "3 faults" in str(error.value)


@pytest.mark.unchecked_annotations
def test_wrong_arguments_are_named_together():
    with pytest.raises(ValueError) as error:
        vs.Accumulation(0, "never", jnp.int32)
    assert all(name in str(error.value) for name in ("microbatches: got 0", "reduce: got 'never'", "dtype: got"))
