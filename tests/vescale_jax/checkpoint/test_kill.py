"""SIGKILL at random moments of training and of saving: what was complete stays so, and the run goes on as if unharmed.

The environment variable `KILLS` says how often; 30 takes some minutes.
"""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from jax.sharding import Mesh

import vescale_jax as vs
from tests.vescale_jax.checkpoint import killed, states
from vescale_jax.checkpoint._folder import saved

KILLS = int(os.environ.get("KILLS", "4"))
PROGRAM = Path(__file__).with_name("killed.py")


@pytest.mark.unchecked_annotations
def test_killed_runs_lose_nothing_but_what_was_not_complete(meshes: dict[int, Mesh], tmp_path: Path) -> None:
    rng = random.Random(0)
    unfinished = 0
    for _ in range(KILLS):
        command = [sys.executable, str(PROGRAM), str(tmp_path), "1000000"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as run:
            assert run.stdout is not None
            assert run.stdout.readline()
            # A step and a save take some hundredths of a second.
            time.sleep(rng.uniform(0, 0.3))
            run.send_signal(signal.SIGKILL)
            told = [int(line) for line in run.stdout.read().split()]
        unfinished += any(path.name.startswith(".partial") for path in tmp_path.iterdir())
        found = saved(tmp_path)
        assert found[-1].step >= max(told, default=0)
        # The removal of the oldest may have been interrupted, too.
        assert len(found) in (1, 2, 3)
        for item in found:
            vs.checkpoint.verify(item.path)
    steps = saved(tmp_path)[-1].step + 3
    subprocess.run([sys.executable, str(PROGRAM), str(tmp_path), str(steps)], check=True, stdout=subprocess.DEVNULL)
    assert not any(path.name.startswith(".") for path in tmp_path.iterdir())
    assert unfinished or KILLS < 10, "no kill fell into a save"

    state, step = killed.start(meshes[killed.DEVICES])
    for i in range(steps):
        state, _ = step(state, killed.batch(i))
    again = vs.checkpoint.restore(tmp_path, killed.start(meshes[killed.DEVICES], abstract=True)[0])
    assert again.extra == {"position": steps}
    states.assert_same(again.state, state)
