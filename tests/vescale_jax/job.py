"""A job of a few steps for `test_launch.py`. FAULT and VICTIM in the environment say what which process does at one."""

import os
import signal
import sys
import time

import jax

import vescale_jax as vs

STEPS = 40


def fail(how: str) -> None:
    sys.stdout.write(f"now {how}\n")
    sys.stdout.flush()
    match how:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "raise":
            raise ValueError("no such row")
        case "sleep":
            time.sleep(600)


def main() -> None:
    hosts = vs.join_hosts(step_timeout=float(os.environ.get("STEP_TIMEOUT", "60")))
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    sharding = NamedSharding(Mesh(np.array(jax.devices()), ("fsdp",)), PartitionSpec("fsdp"))
    x = jax.make_array_from_callback((len(jax.devices()),), sharding, lambda _: np.ones(1, np.float32))
    step = jax.jit(lambda x: x + x.sum() / x.size).lower(x).compile()
    for i in range(STEPS):
        x = jax.block_until_ready(step(x))
        hosts.progress(i)
        if i == 10 and hosts.process == int(os.environ.get("VICTIM", "-1")):
            fail(os.environ["FAULT"])
        # The faults are to find the others at work.
        time.sleep(0.02)
    sys.stderr.write(f"process {hosts.process} of {hosts.processes} ends with {len(jax.devices())} devices\n")
    assert float(x.addressable_data(0)[0]) == 2.0**STEPS


if __name__ == "__main__":
    main()
