"""Lists of equal layers kept and run as a stack: the numbers of the list, and a reason where it cannot be."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

import vescale_jax as vs
from tests.vescale_jax import models, twin

WIDTH = models.WIDTH


class Gain(nnx.Module):
    """A normalisation whose operations come before it reads its parameter."""

    def __init__(self, rngs):
        self.gain = nnx.Param(1 + 0.1 * jax.random.normal(rngs.params(), (WIDTH,)))

    def __call__(self, x):
        return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-5) * self.gain[...][None]


class Layer(nnx.Module):
    """A layer with everything that differs from layer to layer: keys, counters, statistics."""

    def __init__(self, rngs, batch_norm):
        self.norm = Gain(rngs)
        self.up = nnx.Linear(WIDTH, 7, rngs=rngs)
        self.down = nnx.Linear(7, WIDTH, rngs=rngs)
        self.drop = nnx.Dropout(0.3, rngs=rngs)
        self.batch_norm = nnx.BatchNorm(WIDTH, rngs=rngs) if batch_norm else None

    def __call__(self, x):
        y = self.drop(self.down(jax.nn.relu(self.up(self.norm(x)))))
        return x + (self.batch_norm(y) if self.batch_norm else y)


class Net(nnx.Module):
    def __init__(self, layers=3, remat=False, batch_norm=False):
        rngs = nnx.Rngs(0)
        self.embed = nnx.Embed(models.VOCABULARY, WIDTH, rngs=rngs)
        self.layers = nnx.List([Layer(rngs, batch_norm) for _ in range(layers)])
        self.norm = Gain(rngs)
        self.remat = remat

    def __call__(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = nnx.remat(lambda layer, x: layer(x))(layer, x) if self.remat else layer(x)
        return self.embed.attend(self.norm(x))


def tree(layers=3):
    keys = iter(jax.random.split(jax.random.key(1), 2 + 2 * layers))

    def normal(*shape):
        return 0.5 * jax.random.normal(next(keys), shape)

    blocks = [{"w": normal(WIDTH, WIDTH), "b": normal(WIDTH)} for _ in range(layers)]
    return {"embed": normal(models.VOCABULARY, WIDTH), "shared": normal(WIDTH, WIDTH), "layers": blocks}


def step(x, layer):
    return x + jnp.tanh(x @ layer["w"] + layer["b"][None])


def loss_of(logits):
    return lambda params, batch: models.weighted_loss(lambda tokens: logits(params, tokens), batch)


def one_after_the_other(params, tokens):
    x = params["embed"][tokens]
    for layer in params["layers"]:
        x = step(x, layer)
    return x @ params["embed"].T


def with_shared_weights(params, tokens):
    x = first = params["embed"][tokens]
    for layer in params["layers"]:
        x = step(x, layer) @ params["shared"] + first
    return x @ params["embed"].T


def hidden_states_read_later(params, tokens):
    x, states = params["embed"][tokens], []
    for layer in params["layers"]:
        x = step(x, layer)
        states.append(x)
    return sum(states) @ params["embed"].T


def an_auxiliary_sum(params, tokens):
    x, total = params["embed"][tokens], 0.0
    for layer in params["layers"]:
        x = step(x, layer)
        total = total + jnp.mean(x**2)
    return x @ params["embed"].T + total


FORMS = [one_after_the_other, with_shared_weights, hidden_states_read_later, an_auxiliary_sum]


def same(ours, theirs):
    """Losses, norms and what is left of the rest."""
    np.testing.assert_allclose(ours.losses, theirs.losses, 1e-6)
    np.testing.assert_allclose(ours.norms, theirs.norms, 1e-5)
    for a, b in zip(ours.rest, theirs.rest, strict=True):
        if not jax.dtypes.issubdtype(a.dtype, jax.dtypes.prng_key):
            np.testing.assert_allclose(a, b, 1e-5, 1e-6)


@pytest.mark.parametrize("logits", FORMS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("layers", [1, 2, 4])
def test_a_list_in_a_tree(mesh, logits, layers):
    def run(**options):
        model = vs.fully_shard(lambda: tree(layers), mesh(3), **options)
        return twin.sharded(model, loss_of(logits), twin.ADAMW, twin.BATCHES[:2])

    rolled, plain = run(rolled=("layers",), prefetch=layers % 2), run()
    same(rolled, plain)
    for i in range(layers):
        np.testing.assert_allclose(rolled.params["layers/w"][i], plain.params[f"layers/{i}/w"], 1e-4, 1e-6)


@pytest.mark.parametrize("options", [{}, {"remat": True}, {"batch_norm": True}], ids=str)
def test_a_module_with_a_list(mesh, options):
    runs = [
        twin.sharded(
            vs.fully_shard(lambda: Net(**options), mesh(2), **more), models.mean_loss, twin.ADAMW, twin.BATCHES[:2]
        )
        for more in ({}, {"rolled": ("layers",)}, {"rolled": ("layers",), "prefetch": 1})
    ]
    for run in runs[1:]:
        same(run, runs[0])


def test_linen_layers_of_setup_and_of_a_compact_module(mesh):
    class Compact(linen.Module):
        @linen.compact
        def __call__(self, tokens):
            embed = linen.Embed(models.VOCABULARY, WIDTH)
            x = embed(tokens)
            for _ in range(2):
                x = models.LinenBlock()(x)
            return embed.attend(x)

    for module, name in ((models.LinenNet(), "layers"), (Compact(), "LinenBlock")):
        variables = module.init(jax.random.key(0), jnp.zeros(1, jnp.int32))
        plain, rolled = (
            vs.fully_shard(module, mesh(2), params=variables, **more) for more in ({}, {"rolled": (name,)})
        )
        assert name in [unit.name for unit in rolled.structure.units]
        runs = [twin.sharded(m, models.mean_loss, twin.ADAMW, twin.BATCHES[:2]) for m in (rolled, plain)]
        same(*runs)
        jax.tree.map(np.testing.assert_array_equal, vs.unshard(rolled), vs.unshard(plain))


def test_values_are_those_of_the_list(mesh):
    rolled, plain = (dict(vs.fully_shard(Net, mesh(3), **more).tensors()) for more in ({"rolled": ("layers",)}, {}))
    given = dict(vs.fully_shard(Net(), mesh(3), rolled=("layers",)).tensors())
    listed = dict(vs.fully_shard(Net(), mesh(3)).tensors())
    assert len(rolled) < len(plain)
    for ours, theirs in ((rolled, plain), (given, listed)):
        for path, stack in ours.items():
            rest = path.removeprefix("layers/")
            layers = [theirs[f"layers/{i}/{rest}"] for i in range(3)] if path != rest else theirs[path]
            np.testing.assert_array_equal(stack, layers)


def test_the_module_comes_back_with_its_list(mesh):
    net = Net()
    whole = vs.unshard(vs.fully_shard(net, mesh(2), rolled=("layers",)))
    assert isinstance(whole, Net)
    jax.tree.map(np.testing.assert_array_equal, nnx.state(whole, nnx.Param), nnx.state(net, nnx.Param))


def test_the_program_is_one_loop(mesh):
    """The text does not grow with the layers, and each layer is gathered by itself."""

    def text(layers):
        model = vs.fully_shard(lambda: tree(layers), mesh(2), rolled=("layers",), abstract=True)
        batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), twin.BATCHES[0])
        state = vs.train_state(model, twin.ADAMW)
        return vs.train_step(loss_of(one_after_the_other), twin.ADAMW).lower(state, batch).as_text()

    few, many = text(3), text(12)
    assert few.count("all_gather") == many.count("all_gather")
    # What is left of the list: each layer's part is no equation of its own.
    assert len(many) < 1.05 * len(few)


def unlike_operations(params, tokens):
    x = params["embed"][tokens]
    for i, layer in enumerate(params["layers"]):
        x = step(x, layer) if i else jax.nn.gelu(step(x, layer))
    return x @ params["embed"].T


def another_constant(params, tokens):
    x = params["embed"][tokens]
    for i, layer in enumerate(params["layers"]):
        x = step(x, layer) * (1.0 + i)
    return x @ params["embed"].T


def another_order(params, tokens):
    x = params["embed"][tokens]
    for layer in params["layers"][::-1]:
        x = step(x, layer)
    return x @ params["embed"].T


def skipping_a_layer(params, tokens):
    x = params["embed"][tokens]
    for layer in params["layers"][1:]:
        x = step(x, layer)
    return x @ params["embed"].T


def two_at_once(params, tokens):
    first, second, third = params["layers"]
    bias = first["b"] + second["b"] + third["b"]
    x = params["embed"][tokens] @ (first["w"] + second["w"] + third["w"]) + bias[None]
    return x @ params["embed"].T


REASONS = {
    unlike_operations: "layer",
    another_constant: "layer",
    another_order: "another order",
    skipping_a_layer: "layer 0 is not used",
    two_at_once: "reads layers",
}


@pytest.mark.parametrize("logits", REASONS, ids=lambda f: f.__name__)
def test_what_is_no_loop_is_said_and_run_all_the_same(mesh, logits):
    plain, _ = vs.value_and_grad(loss_of(logits))(vs.fully_shard(tree, mesh(2)), twin.BATCHES[0])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        value, _ = vs.value_and_grad(loss_of(logits))(
            vs.fully_shard(tree, mesh(2), rolled=("layers",)), twin.BATCHES[0]
        )
    said = [str(w.message) for w in caught if "cannot run as one loop" in str(w.message)]
    assert said
    assert REASONS[logits] in said[0]
    assert "layers of layers" in said[0]
    np.testing.assert_allclose(value.loss, plain.loss, 1e-6)
    np.testing.assert_allclose(value.grad_norm, plain.grad_norm, 1e-5)


def test_layers_that_are_not_equal_are_named(mesh):
    params = tree()
    params["layers"][1]["w"] = jnp.zeros((WIDTH, 2))
    del params["layers"][2]["b"]
    with pytest.raises(ValueError) as error:
        vs.fully_shard(params, mesh(2), rolled=("layers",))
    assert "layers, layer 1: got w of shape (5, 2) float32, in layer 0 (5, 5) float32" in str(error.value)
    assert "layers, layer 2: got no parameter b, unlike layer 0" in str(error.value)


@pytest.mark.unchecked_annotations
@pytest.mark.parametrize(("rolled", "kind"), [(("layer",), ValueError), ("layers", TypeError), ((3,), TypeError)])
def test_wrong_patterns(mesh, rolled, kind):
    with pytest.raises(kind) as error:
        vs.fully_shard(tree(), mesh(2), rolled=rolled)
    assert "rolled" in str(error.value)


def test_optimizers_by_parameter_are_refused(mesh):
    """They would see ranks and norms of whole stacks, unlike those of the list."""
    model = vs.fully_shard(tree(), mesh(2), rolled=("layers",))
    with pytest.raises(ValueError) as error:
        vs.optimizers.per_parameter(twin.ADAMW, model)
    assert "rolled" in str(error.value)
