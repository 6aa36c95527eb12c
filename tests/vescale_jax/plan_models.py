"""Modules as users have them, for `python -m vescale_jax plan --module`."""

import jax
import jax.numpy as jnp
from flax import linen, nnx


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.up = nnx.Linear(24, 96, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)


class Model(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.layers = nnx.List([Block(rngs) for _ in range(2)])
        self.norm = nnx.BatchNorm(24, rngs=rngs)


def make_nnx() -> Model:
    return Model(nnx.Rngs(0))


def make_linen() -> object:
    return linen.Dense(7).init(jax.random.key(0), jnp.zeros((1, 5)))


def make_arrays() -> object:
    return {"a": jnp.zeros((3, 4)), "b": [jnp.zeros(())]}


def make_nothing() -> object:
    return {}
