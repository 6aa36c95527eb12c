"""One of several processes: saves, restores what another number of processes wrote, or waits for one that is gone.

python two.py ACTION FOLDER PORT PROCESSES INDEX DEVICES
"""

import os
import sys
import time
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh

ROOT = Path(__file__).parents[3]
sys.path[:0] = [str(ROOT), str(ROOT / "layouts"), str(ROOT / "planner")]


def main() -> None:
    import vescale_jax as vs
    from tests.vescale_jax.checkpoint import states
    from vescale_jax.checkpoint import _write
    from vescale_jax.optimizers import adamw_8bit

    action, folder, port, processes, index, devices = sys.argv[1:]
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", int(devices))
    jax.distributed.initialize(f"localhost:{port}", int(processes), int(index))
    mesh = Mesh(np.array(jax.devices()), ("fsdp",))
    target = states.make(mesh, tx=adamw_8bit(1e-2), abstract=True, blocks=states.BLOCKS)
    with vs.checkpoint.Checkpointer(folder, timeout=5) as checkpointer:
        if action == "fall back":
            # Only the process that reads the damaged file sees it, and both go back.
            import warnings

            with warnings.catch_warnings(record=True) as heard:
                warnings.simplefilter("always")
                found = checkpointer.restore(target)
            assert sum("going back to" in str(w.message) for w in heard) == 1
            assert found is not None
            print(found.path.name, flush=True)
            return
        found = checkpointer.restore(target)
        assert found is not None
        if action == "again":
            checkpointer.save(found.state, found.extra)
            checkpointer.wait()
            print(checkpointer.steps, flush=True)
        elif action == "fail":
            if int(index) == 1:

                def fail(*args):
                    raise OSError("no room")

                _write._write_part = fail
            try:
                checkpointer.save(found.state, wait=True)
            except (OSError, RuntimeError) as error:
                print(f"{type(error).__name__}: {error}", flush=True)
        elif action == "late":
            start = time.monotonic()
            if int(index) == 1:
                print("late", flush=True)
                time.sleep(8)
                os._exit(0)
            try:
                checkpointer.save(found.state, wait=True)
            except TimeoutError as error:
                print(f"{error} after {time.monotonic() - start:.0f} s", flush=True)
            time.sleep(5)  # With the service of this process the other one would end.
            os._exit(0)


if __name__ == "__main__":
    main()
