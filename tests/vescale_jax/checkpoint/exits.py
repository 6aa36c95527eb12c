"""Saves a state and ends at once, without waiting; with a second argument the writing fails."""

import sys
from pathlib import Path

import jax
import numpy as np
import optax
from jax.sharding import Mesh

ROOT = Path(__file__).parents[3]
sys.path[:0] = [str(ROOT), str(ROOT / "layouts"), str(ROOT / "planner")]

if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 2)

    import vescale_jax as vs
    from vescale_jax.checkpoint import _write

    real = _write._write_part

    def late(*args):
        import time

        time.sleep(1)
        if len(sys.argv) > 2:
            raise OSError("no room")
        return real(*args)

    _write._write_part = late
    model = vs.fully_shard({"w": np.ones(1000, np.float32)}, Mesh(np.array(jax.devices()), ("fsdp",)))
    vs.checkpoint.Checkpointer(sys.argv[1]).save(vs.train_state(model, optax.sgd(1e-2)))
