"""What `--module` may name: the smallest training step, in both forms that the preflight takes."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

import vescale_jax as vs


def as_tuple(mesh: Mesh, width: int = 8) -> tuple[Any, Any, Any]:
    """Step, abstract state and abstract batch of one matrix."""
    tx = optax.sgd(0.1)
    model = vs.fully_shard(lambda: {"w": jnp.zeros((width, width))}, mesh, abstract=True)
    step = vs.train_step(lambda params, rows: jnp.mean(jnp.tanh(rows @ params["w"])), tx)
    return step, vs.train_state(model, tx), jax.ShapeDtypeStruct((mesh.size, width), jnp.float32)


def nothing(mesh: Mesh) -> None:
    """No workload."""
    del mesh
