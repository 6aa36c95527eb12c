"""Prints the temporary memory of a step over 8 wide layers, in layers, without and with resharding after forward."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

import vescale_jax as vs

WIDTH, LAYERS = 64, 8


def build():
    keys = jax.random.split(jax.random.key(0), LAYERS)
    return {"layers": [{"w": jax.random.normal(key, (WIDTH, WIDTH))} for key in keys]}


def loss_fn(params, batch):
    # One row a device: what is kept of activations is nothing beside a layer's parameters.
    for layer in params["layers"]:
        batch = jnp.tanh(batch @ layer["w"])
    return batch.mean()


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    mesh = Mesh(np.array(jax.devices()), ("fsdp",))
    for reshard in (False, True):
        model = vs.fully_shard(build, mesh, abstract=True, reshard_after_forward=reshard)
        state = vs.train_state(model, optax.sgd(0.1))
        compiled = vs.train_step(loss_fn, optax.sgd(0.1)).lower(state, jnp.ones((8, WIDTH))).compile()
        print(compiled.memory_analysis().temp_size_in_bytes / (4 * WIDTH * WIDTH))
