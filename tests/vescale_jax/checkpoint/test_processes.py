"""Several processes: what one number of them wrote, another one reads; and what one of them cannot do, all hear of."""

import socket
import subprocess
import sys
from pathlib import Path

import pytest
from jax.sharding import Mesh

import vescale_jax as vs
from tests.vescale_jax.checkpoint import states
from tests.vescale_jax.checkpoint.test_damage import cut
from vescale_jax.optimizers import adamw_8bit

PROGRAM = Path(__file__).with_name("two.py")


def together(action: str, folder: Path, processes: int, devices: int) -> list[str]:
    """What each process prints."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    rest = [str(folder), str(port), str(processes)]
    running = [
        subprocess.Popen(
            [sys.executable, str(PROGRAM), action, *rest, str(k), str(devices)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for k in range(processes)
    ]
    try:
        printed = [run.communicate(timeout=100) for run in running]
    finally:
        for run in running:
            run.kill()
    for run, (_, errors) in zip(running, printed, strict=True):
        assert run.returncode == 0, errors
    return [out for out, _ in printed]


@pytest.fixture
def folder(meshes: dict[int, Mesh], tmp_path: Path) -> Path:
    """A run of one process with 8 devices, saved twice."""
    state = states.filled(states.make(meshes[8], tx=adamw_8bit(1e-2), blocks=states.BLOCKS))
    with vs.checkpoint.Checkpointer(tmp_path) as checkpointer:
        for _ in range(2):
            checkpointer.save(state, {"position": 5}, wait=True)
    return tmp_path


def test_another_number_of_processes(folder: Path, meshes: dict[int, Mesh]) -> None:
    wanted = states.contents(vs.checkpoint.restore(folder, target(meshes[8])).state)
    together("again", folder, 2, 3)  # Over 6 devices.
    assert vs.checkpoint.contents(folder).made["processes"] == 2
    vs.checkpoint.verify(folder)
    found = vs.checkpoint.restore(folder, target(meshes[5]))
    states.assert_same(found.state, wanted)
    assert found.extra == {"position": 5}


def target(mesh: Mesh) -> vs.TrainState:
    return states.make(mesh, tx=adamw_8bit(1e-2), abstract=True, blocks=states.BLOCKS)


def test_all_hear_of_what_one_cannot_do(folder: Path) -> None:
    before = sorted(folder.iterdir())
    said = together("fail", folder, 2, 1)
    assert said[0].startswith("RuntimeError: checkpoint: process 1: OSError: no room")
    assert said[1].startswith("OSError: no room")
    assert [path for path in sorted(folder.iterdir()) if not path.name.startswith(".")] == before


def test_one_that_does_not_come_is_named(folder: Path) -> None:
    said = together("late", folder, 2, 1)
    assert said[0].startswith("checkpoint: process 1 of 2: got no answer within 5 s")


def test_all_go_back_if_one_sees_damage(folder: Path) -> None:
    newest = vs.checkpoint.Checkpointer(folder).latest
    assert newest is not None
    cut(newest / "arrays/0000/c.0.7.0")
    assert [line.strip() for line in together("fall back", folder, 2, 1)] == ["000001-step-00000085"] * 2
