"""Saves once, then under a limit on the size of files that the second save exceeds."""

import resource
import signal
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

    model = vs.fully_shard({"w": np.ones(100_000, np.float32)}, Mesh(np.array(jax.devices()), ("fsdp",)))
    state = vs.train_state(model, optax.sgd(1e-2))
    with vs.checkpoint.Checkpointer(sys.argv[1]) as checkpointer:
        checkpointer.save(jax.tree.map(lambda x: x + 1 if x.shape == () else x, state), wait=True)
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
        checkpointer.save(state)
        try:
            checkpointer.wait()
        except OSError as error:
            print(error)
        print("still there:", checkpointer.steps)
        checkpointer.restore(state)
