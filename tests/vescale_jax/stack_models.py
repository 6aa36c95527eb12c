"""Small models whose layers are stacked: a bare pytree, nnx and linen modules with the layers on dim 0."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen, nnx
from jax import lax

import vescale_jax as vs
from tests.vescale_jax import models

LAYERS = 4
WIDTH = models.WIDTH


def stack(layers: int = LAYERS, seed: int = 0, **more: Any) -> dict[str, Any]:
    """The parameters of some plain layers."""
    keys = jax.random.split(jax.random.key(seed), 2)
    return {
        "w": 0.5 * jax.random.normal(keys[0], (layers, WIDTH, WIDTH)),
        "b": 0.5 * jax.random.normal(keys[1], (layers, WIDTH)),
        **more,
    }


def layer(x: jax.Array, params: Any) -> jax.Array:
    """A residual layer."""
    return x + jnp.tanh(x @ params["w"] + params["b"][None])


def run(x: jax.Array, params: Any, body: Any = layer, **options: Any) -> jax.Array:
    """A stack of layers, one after the other; `options` go to `lax.scan`."""
    return lax.scan(lambda x, one: (body(x, one), None), x, params, **options)[0]


def tree(layers: int = LAYERS) -> dict[str, Any]:
    """A small network, bare."""
    keys = jax.random.split(jax.random.key(1), 2)
    embed = 0.5 * jax.random.normal(keys[0], (models.VOCABULARY, WIDTH))
    return {"embed": embed, "layers": stack(layers), "scale": jax.random.normal(keys[1], ())}


def tree_logits(params: Any, tokens: jax.Array) -> jax.Array:
    x = run(params["embed"][tokens], params["layers"])
    return (x @ params["embed"].T) * params["scale"]


def tree_loss(params: Any, batch: Any) -> vs.Mean:
    return models.weighted_loss(lambda tokens: tree_logits(params, tokens), batch)


class StackNet(nnx.Module):
    """Layers made by `nnx.vmap` and run by `nnx.scan`, with `nnx.remat` or without."""

    def __init__(self, make: Any, rngs: nnx.Rngs, remat: bool = False) -> None:
        self.embed = nnx.Embed(models.VOCABULARY, WIDTH, rngs=rngs)
        self.layers = nnx.vmap(make)(rngs.split(LAYERS))
        self.remat = remat

    def __call__(self, tokens: jax.Array) -> jax.Array:
        def forward(x: jax.Array, layer: nnx.Module) -> jax.Array:
            return layer(x)  # type: ignore[operator]

        one = nnx.remat(forward) if self.remat else forward
        scan = nnx.scan(one, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        return self.embed.attend(scan(self.embed(tokens), self.layers))


class DropoutBlock(nnx.Module):
    """A layer that drops numbers."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.dropout = nnx.Dropout(0.3, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.dropout(jnp.tanh(self.linear(x)))


class Calls(nnx.Variable):
    """A counter of calls."""


class NormBlock(nnx.Module):
    """A layer with batch statistics over all devices, and a counter."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.linear = nnx.Linear(WIDTH, WIDTH, use_bias=False, rngs=rngs)
        self.norm = nnx.BatchNorm(WIDTH, rngs=rngs, momentum=0.5)
        self.calls = Calls(jnp.zeros((), jnp.int32))

    def __call__(self, x: jax.Array) -> jax.Array:
        self.calls[...] = self.calls[...] + 1
        return x + jnp.tanh(self.norm(self.linear(x)))


def plain_net(remat: bool = False) -> StackNet:
    return StackNet(lambda rngs: models.Block(WIDTH, 7, rngs), nnx.Rngs(0), remat)


def dropout_net(remat: bool = False) -> StackNet:
    return StackNet(DropoutBlock, nnx.Rngs(0, dropout=1), remat)


def norm_net() -> StackNet:
    return StackNet(NormBlock, nnx.Rngs(0))


class LinenLayer(linen.Module):
    """A layer of a linen scan, with a loss of its own in the carry and statistics beside it."""

    @linen.compact
    def __call__(self, carry: Any, _: Any) -> tuple[Any, jax.Array]:
        x, loss = carry
        x = models.LinenBlock()(x)
        x = linen.Dropout(0.3, deterministic=not self.has_rng("dropout"))(x)
        return (x, loss + 0.01 * (x**2).mean()), x.mean()


class LinenStackNet(linen.Module):
    """A linen model over `nn.scan`, with `nn.remat` or without; tokens to logits and the layers' loss."""

    remat: bool = False

    @linen.compact
    def __call__(self, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
        embed = linen.Embed(models.VOCABULARY, WIDTH)
        kind = linen.remat(LinenLayer, prevent_cse=False) if self.remat else LinenLayer
        scanned = linen.scan(
            kind, variable_axes={"params": 0}, split_rngs={"params": True, "dropout": True}, length=LAYERS
        )
        (x, loss), means = scanned(name="layers")((embed(tokens), jnp.float32(0)), None)
        return embed.attend(x), loss + 0.01 * means.mean()


def linen_variables() -> Any:
    return LinenStackNet().init(jax.random.key(0), jnp.zeros(1, jnp.int32))


def linen_loss(model: Any, batch: Any) -> jax.Array:
    logits, loss = model(batch["x"])
    return models.cross_entropy(logits, batch).mean() + loss
