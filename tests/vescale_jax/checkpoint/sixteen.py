"""Restores the checkpoint `8` of a folder on 16 devices and saves it again as `16`."""

import sys
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh

ROOT = Path(__file__).parents[3]
sys.path[:0] = [str(ROOT), str(ROOT / "layouts"), str(ROOT / "planner")]

if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 16)

    import vescale_jax as vs
    from tests.vescale_jax.checkpoint import states
    from vescale_jax.optimizers import adamw_8bit

    mesh, folder = Mesh(np.array(jax.devices()), ("fsdp",)), Path(sys.argv[1])
    target = states.make(mesh, tx=adamw_8bit(1e-2), abstract=True, blocks=states.BLOCKS)
    vs.checkpoint.save(folder / "16", vs.checkpoint.restore(folder / "8", target).state)
