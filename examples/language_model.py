"""A small decoder-only transformer in plain Flax nnx.

In: tokens (B, T) int32. Out: logits (B, T, V), those at position t for the token after t.

Rotary attention (Su et al. 2021) with normalised queries and keys (Henry et al. 2020), RMSNorm before each part
(Zhang and Sennrich 2019) and a gated MLP (Shazeer 2020). No biases. Nothing here knows how the parameters are
stored or how many devices there are.

Shapes: B rows, T tokens in a row, D width, H heads, K = D / H head width, F width of the MLP, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Sizes of a `LanguageModel`. The defaults are no powers of two, as real models' sizes are not.

    With `stack`, the layers are one module whose parameters have the layers on dim 0, and run in a loop that is
    compiled once (`nnx.scan`), however many they are.
    """

    vocabulary: int = 256
    layers: int = 3
    width: int = 180
    heads: int = 6
    mlp_width: int = 500
    stack: bool = False

    def __post_init__(self):
        if self.width % (2 * self.heads):
            raise ValueError(
                f"width {self.width} does not give {self.heads} heads of an even width, which rotary attention needs; "
                f"choose a multiple of {2 * self.heads}"
            )


def rotate(x: jax.Array, base: float = 10_000.0) -> jax.Array:
    """Rotary position embedding of x (B, T, H, K): pair i of position t turns by t * base**(-2i/K).

    Products of two rotated vectors then depend on the distance of their positions only.
    """
    _, length, _, width = x.shape
    speed = base ** (-np.arange(0, width, 2) / width)  # (K/2,)
    angle = np.arange(length)[:, None] * speed  # (T, K/2)
    cos = jnp.asarray(np.cos(angle)[None, :, None, :], x.dtype)  # (1, T, 1, K/2)
    sin = jnp.asarray(np.sin(angle)[None, :, None, :], x.dtype)
    left, right = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([left * cos - right * sin, right * cos + left * sin], axis=-1)


def linear(inputs: int, outputs: int, rngs: nnx.Rngs, scale: float = 1.0) -> nnx.Linear:
    """A matrix without bias, whose entries keep the variance of the input times `scale`."""
    init = nnx.initializers.variance_scaling(scale, "fan_in", "truncated_normal")
    return nnx.Linear(inputs, outputs, use_bias=False, kernel_init=init, rngs=rngs)


class Attention(nnx.Module):
    """Causal self-attention, (B, T, D) -> (B, T, D)."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        self.heads = config.heads
        head_width = config.width // config.heads
        self.query = linear(config.width, config.width, rngs)
        self.key = linear(config.width, config.width, rngs)
        self.value = linear(config.width, config.width, rngs)
        self.out = linear(config.width, config.width, rngs, scale=0.5 / config.layers)
        # Normalised queries and keys bound the scores, which allows the high learning rate of a short run.
        self.query_norm = nnx.RMSNorm(head_width, rngs=rngs)
        self.key_norm = nnx.RMSNorm(head_width, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        rows, length, width = x.shape
        heads = (rows, length, self.heads, width // self.heads)
        query = rotate(self.query_norm(self.query(x).reshape(heads)))
        key = rotate(self.key_norm(self.key(x).reshape(heads)))
        value = self.value(x).reshape(heads)
        mixed = jax.nn.dot_product_attention(query, key, value, is_causal=True)  # (B, T, H, K)
        return self.out(mixed.reshape(x.shape))


class GatedMLP(nnx.Module):
    """SwiGLU, (B, T, D) -> (B, T, D) through width F."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        self.gate = linear(config.width, config.mlp_width, rngs)
        self.up = linear(config.width, config.mlp_width, rngs)
        self.down = linear(config.mlp_width, config.width, rngs, scale=0.5 / config.layers)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(jax.nn.silu(self.gate(x)) * self.up(x))


class Layer(nnx.Module):
    """Attention and MLP, each added to its input, (B, T, D) -> (B, T, D)."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        self.attention_norm = nnx.RMSNorm(config.width, rngs=rngs)
        self.attention = Attention(config, rngs)
        self.mlp_norm = nnx.RMSNorm(config.width, rngs=rngs)
        self.mlp = GatedMLP(config, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


def stacked_layers(config: ModelConfig, rngs: nnx.Rngs) -> Layer:
    """All layers as one, each made with random numbers of its own."""

    @nnx.split_rngs(splits=config.layers)
    @nnx.vmap(in_axes=(0,), out_axes=0)
    def make(rngs: nnx.Rngs) -> Layer:
        return Layer(config, rngs)

    return make(rngs)


@nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
def run_stacked(x: jax.Array, layer: Layer) -> jax.Array:
    """One layer after the other."""
    return layer(x)


class LanguageModel(nnx.Module):
    """Tokens (B, T) int32 -> logits (B, T, V)."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        self.embedding = nnx.Embed(
            config.vocabulary, config.width, embedding_init=nnx.initializers.normal(1.0), rngs=rngs
        )
        self.layers = (
            stacked_layers(config, rngs)
            if config.stack
            else nnx.List([Layer(config, rngs) for _ in range(config.layers)])
        )
        self.stack = config.stack
        self.norm = nnx.RMSNorm(config.width, rngs=rngs)
        self.head = linear(config.width, config.vocabulary, rngs, scale=0.1)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embedding(tokens)
        if self.stack:
            x = run_stacked(x, self.layers)
        else:
            for layer in self.layers:
                x = layer(x)
        return self.head(self.norm(x))
