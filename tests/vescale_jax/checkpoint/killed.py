"""Trains and saves at every step, from the newest checkpoint of a folder on; says on standard output what is complete.

python killed.py FOLDER STEPS
"""

import sys
from pathlib import Path

import jax
import numpy as np
import optax
from jax.sharding import Mesh

ROOT = Path(__file__).parents[3]
sys.path[:0] = [str(ROOT), str(ROOT / "layouts"), str(ROOT / "planner")]

DEVICES = 2
SHAPE = (500, 500)


def batch(position: int) -> np.ndarray:
    return np.random.default_rng(position).normal(size=(2 * DEVICES, SHAPE[0])).astype(np.float32)


def start(mesh: Mesh, *, abstract: bool = False):
    """The state before the first step, and the step."""
    import vescale_jax as vs

    tx = optax.adamw(1e-3)
    model = vs.fully_shard({"w": np.full(SHAPE, 0.01, np.float32)}, mesh, abstract=abstract)
    return vs.train_state(model, tx), vs.train_step(lambda params, x: (jax.numpy.tanh(x @ params["w"]) ** 2).mean(), tx)


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", DEVICES)

    import vescale_jax as vs

    state, step = start(Mesh(np.array(jax.devices()), ("fsdp",)))
    with vs.checkpoint.Checkpointer(sys.argv[1], keep=2) as checkpointer:
        found = checkpointer.restore(state)
        position = 0
        if found is not None:
            state, position = found.state, found.extra["position"]
        for i in range(position, int(sys.argv[2])):
            state, _ = step(state, batch(i))
            checkpointer.save(state, {"position": i + 1})
            # The save before is complete, since this one has waited for it.
            print(i, flush=True)
