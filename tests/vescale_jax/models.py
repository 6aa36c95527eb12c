"""Small models for the tests: prime sizes, scalars, and tensors with fewer elements than the mesh has devices."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen, nnx

import vescale_jax as vs

ROWS = 120  # Divides by 1, 2, 3, 5 and 8.
VOCABULARY = 13
WIDTH = 5


class Block(nnx.Module):
    """A residual layer of prime widths."""

    def __init__(self, width: int, hidden: int, rngs: nnx.Rngs) -> None:
        self.up = nnx.Linear(width, hidden, rngs=rngs)
        self.down = nnx.Linear(hidden, width, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.down(jnp.tanh(self.up(x)))


class Net(nnx.Module):
    """Tied embedding, two layers and a scalar: tokens (rows,) to logits (rows, VOCABULARY)."""

    def __init__(self, rngs: nnx.Rngs, layers: int = 2) -> None:
        self.embed = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
        self.layers = nnx.List([Block(WIDTH, 7, rngs) for _ in range(layers)])
        self.temperature = nnx.Param(1.5 + 0.1 * jax.random.normal(rngs.params(), ()))

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.embed.attend(x) * self.temperature[...]


def net() -> Net:
    return Net(nnx.Rngs(0))


class LinenBlock(linen.Module):
    """The same layer in linen."""

    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return x + linen.Dense(x.shape[-1])(jnp.tanh(linen.Dense(7)(x)))


class LinenNet(linen.Module):
    """The same model in linen, with setup() and with layers that linen numbers."""

    def setup(self) -> None:
        self.embed = linen.Embed(VOCABULARY, WIDTH)
        self.layers = [LinenBlock() for _ in range(2)]
        self.temperature = self.param("temperature", lambda key: 1.5 + 0.1 * jax.random.normal(key, ()))

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.embed.attend(x) * self.temperature


def linen_variables() -> Any:
    return LinenNet().init(jax.random.key(0), jnp.zeros(1, jnp.int32))


def tree() -> dict[str, Any]:
    """The parameters of a small perceptron, bare."""
    keys = iter(jax.random.split(jax.random.key(1), 8))

    def normal(*shape: int) -> jax.Array:
        return 0.5 * jax.random.normal(next(keys), shape)

    layers = [{"w": normal(WIDTH, WIDTH), "b": normal(WIDTH)} for _ in range(2)]
    return {"embed": normal(VOCABULARY, WIDTH), "layers": layers, "scale": normal(), "three": normal(3)}


def tree_logits(params: Mapping[str, Any], tokens: jax.Array) -> jax.Array:
    x = params["embed"][tokens].at[:, :3].add(params["three"][None])
    for layer in params["layers"]:
        x = x + jnp.tanh(x @ layer["w"] + layer["b"][None])
    return (x @ params["embed"].T) * params["scale"]


def batches(count: int = 3, rows: int = ROWS) -> list[dict[str, np.ndarray]]:
    """Tokens, targets, and weights of which some devices hold far fewer than others."""
    rng = np.random.default_rng(0)
    weights = np.where(np.arange(rows) < rows // 3, 1.0, rng.random((count, rows)) < 0.2)
    return [
        {
            "x": rng.integers(0, VOCABULARY, rows, dtype=np.int32),
            "y": rng.integers(0, VOCABULARY, rows, dtype=np.int32),
            "w": weights[i].astype(np.float32),
        }
        for i in range(count)
    ]


def cross_entropy(logits: jax.Array, batch: Mapping[str, jax.Array]) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), batch["y"])


def mean_loss(model: Any, batch: Mapping[str, jax.Array]) -> jax.Array:
    """The mean over rows that all weigh the same."""
    return cross_entropy(model(batch["x"]), batch).mean()


def weighted_loss(model: Any, batch: Mapping[str, jax.Array]) -> vs.Mean:
    """The weighted mean, for devices whose weights differ in sum."""
    losses = cross_entropy(model(batch["x"]), batch)
    return vs.Mean((losses * batch["w"]).sum(), batch["w"].sum())


def tree_loss(params: Mapping[str, Any], batch: Mapping[str, jax.Array]) -> vs.Mean:
    return weighted_loss(lambda tokens: tree_logits(params, tokens), batch)
