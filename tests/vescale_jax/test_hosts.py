"""Several processes: who joins what, which rows are whose, who is to blame; and the same numbers as on one process."""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import vescale_jax as vs
from tests.vescale_jax import models
from vescale_jax import _batch
from vescale_jax._hosts import _job
from vescale_jax._watch import Sign, from_devices, judge, whereabouts

ROOT = Path(__file__).parents[2]
ALONE = {"PATH": "/bin", "SLURM_JOB_ID": "1", "SLURM_NTASKS": "4", "SLURM_PROCID": "0"}  # in a batch script
TOLD = {"JAX_COORDINATOR_ADDRESS": "a:1", "JAX_NUM_PROCESSES": "3", "JAX_PROCESS_ID": "2"}


def found(address: str | None = None, count: int | None = None, index: int | None = None) -> dict[str, Any]:
    return {"coordinator_address": address, "num_processes": count, "process_id": index}


@pytest.mark.parametrize(
    ("environment", "job"),
    [
        ({}, None),
        (ALONE, None),
        ({"TPU_WORKER_HOSTNAMES": "a"}, None),
        ({**TOLD, "JAX_NUM_PROCESSES": "1", "JAX_PROCESS_ID": "0"}, None),
        (TOLD, found("a:1", 3, 2)),
        ({**ALONE, "SLURM_STEP_NODELIST": "a,b"}, found()),
        ({**ALONE, "SLURM_STEP_NODELIST": "a,b", "JAX_COORDINATOR_ADDRESS": "a:1"}, found("a:1")),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, found()),
        ({"KUBERNETES_SERVICE_HOST": "k"}, None),  # some pod
        ({"KUBERNETES_SERVICE_HOST": "k", "JOB_COMPLETION_INDEX": "0"}, found()),
        ({"TPU_WORKER_HOSTNAMES": "a,b"}, found()),
        ({"TPU_ML_PLATFORM": "JAX"}, found()),
    ],
)
def test_the_job_that_the_environment_describes(environment: Mapping[str, str], job: dict[str, Any] | None) -> None:
    assert _job(environment, None) == job


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        (
            {"JAX_NUM_PROCESSES": "2"},
            "join_hosts: got JAX_NUM_PROCESSES=2 alone; want JAX_COORDINATOR_ADDRESS (host:port of process 0), "
            "JAX_NUM_PROCESSES and JAX_PROCESS_ID, all three, or a scheduler that JAX knows; set the missing ones, or "
            "none",
        ),
        ({**TOLD, "JAX_PROCESS_ID": "x"}, "join_hosts: JAX_PROCESS_ID: got 'x'; want a number; mend the variable"),
        ({**TOLD, "JAX_PROCESS_ID": "3"}, "join_hosts: JAX_PROCESS_ID: got 3 of 3; want 0 to 2; mend the variables"),
    ],
)
def test_half_a_job_is_refused(environment: Mapping[str, str], message: str) -> None:
    with pytest.raises(ValueError) as refused:
        _job(environment, None)
    assert str(refused.value) == message


def test_time_outs_are_positive() -> None:
    with pytest.raises(ValueError) as refused:
        vs.join_hosts(step_timeout=-1.0)
    want = "want a positive number of seconds; pass such a one"
    assert str(refused.value) == f"join_hosts: step_timeout: got -1.0; {want}"


def test_an_address_has_a_port() -> None:
    with pytest.raises(ValueError, match="JAX_COORDINATOR_ADDRESS: got 'a'; want host:port"):
        _job({**TOLD, "JAX_COORDINATOR_ADDRESS": "a"}, None)


def test_one_process_alone_joins_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.startswith(("JAX_", "SLURM_", "TPU_", "OMPI_", "KUBERNETES_")):
            monkeypatch.delenv(name)
    hook = sys.excepthook
    hosts = vs.join_hosts(step_timeout=0.01)
    hosts.progress(3)
    hosts.pause()
    assert (hosts.process, hosts.processes, hosts.first) == (0, 1, True)
    assert not jax.distributed.is_initialized()
    assert sys.excepthook is hook


class Device:
    """A device of another process."""

    def __init__(self, process: int) -> None:
        self.process_index = process


class Devices:
    """A mesh of such devices."""

    def __init__(self, owners: np.ndarray, names: tuple[str, ...]) -> None:
        self.devices = np.vectorize(Device, otypes=[object])(owners)
        self.axis_names = names
        self.shape = dict(zip(names, owners.shape, strict=True))


@pytest.mark.unchecked_annotations
@given(st.integers(1, 3), st.integers(1, 4), st.integers(1, 3), st.randoms())
def test_every_position_of_the_axis_has_its_owners(processes: int, size: int, others: int, random: Any) -> None:
    """Owners in any order, uneven ones too, and another axis over which shards are repeated."""
    owners = np.array([[random.randrange(processes) for _ in range(others)] for _ in range(size)])
    seen: set[int] = set()
    for process in range(processes):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(jax, "process_index", lambda process=process: process)
            mine = _batch._own_positions.__wrapped__(Devices(owners.T, ("other", "fsdp")), "fsdp")
        assert list(mine) == [k for k in range(size) if process in owners[k]]
        seen |= set(mine)
    assert seen == set(range(size))


def test_on_one_process_all_rows_are_its_own(mesh: Any) -> None:
    model = vs.fully_shard(models.tree(), mesh(3), abstract=True)
    np.testing.assert_array_equal(vs.own_rows(model, 12), np.arange(12))
    with pytest.raises(ValueError) as refused:
        vs.own_rows(model, 10)
    assert str(refused.value) == (
        "own_rows: rows: got 10; want a multiple of 3, the devices of axis 'fsdp'; fill up with rows that count "
        "nothing (vs.Mean)"
    )


def sign(step: int | None = 5, idle: float = 1, waits: bool = True, **more: Any) -> Sign:
    return Sign(1, "a", 7, step, float(idle), "train.py:3", waits, **more)


@pytest.mark.parametrize(
    ("signs", "silent", "named"),
    [
        ([sign(), sign()], [0, 0], None),
        ([sign(), sign()], [0, 11], "process 1 (pid 7 on a): no sign of life for 10 s; dead, stopped, or cut off"),
        ([sign(), sign(ended=True)], [0, 11], None),
        ([sign(), Sign(0, "", 0)], [0, 11], "process 1: no sign of life for 10 s; dead, stopped, or cut off"),
        # Before its first step a process may take its time, and in a pause.
        ([sign(None, 99), sign(None, 99)], [0, 0], None),
        ([sign(5, 99, paused=True), sign(5, 99, paused=True)], [0, 0], None),
        # The one that waits for nobody; the one that is behind; the one that has gone; the one that is late.
        ([sign(5, 31), sign(5, 31, waits=False)], [0, 0], "process 1 (pid 7 on a): stuck, no step finished for 30 s"),
        ([sign(5, 31), sign(4, 31)], [0, 0], "process 1 (pid 7 on a): stuck, no step finished for 30 s"),
        ([sign(5, 31), sign(5, ended=True)], [0, 0], "process 1 (pid 7 on a): ended while others wait for it"),
        ([sign(5, 31), sign(None)], [0, 6], "process 1 (pid 7 on a): stuck, no step finished for 30 s"),
    ],
)
def test_the_one_to_blame(signs: list[Sign], silent: list[float], named: str | None) -> None:
    said = judge(dict(enumerate(signs)), dict(enumerate(map(float, silent))), 10.0, 30.0)
    assert (said.splitlines()[0] if said else said) == named
    assert judge(dict(enumerate(signs)), dict.fromkeys(range(2), 0.0), 10.0, None) is None


def test_errors_of_collectives_are_told_from_those_of_programs() -> None:
    broken = "UNKNOWN: Gloo all-reduce failed: Connection closed by peer"
    assert from_devices(ValueError(broken))
    assert from_devices(jax.errors.JaxRuntimeError("INTERNAL: of the runtime"))
    assert not from_devices(ValueError("train_step: got 7 rows"))
    assert not from_devices(KeyError("A: B"))


def test_what_a_thread_is_at() -> None:
    frame = sys._getframe()
    at, waits = whereabouts(frame)
    assert at.startswith(f"{__file__}:{frame.f_lineno - 1} in test_what_a_thread_is_at")
    assert not waits

    def inside(_: Any) -> None:
        seen.append(whereabouts(sys._getframe().f_back))

    seen: list[tuple[str, bool]] = []
    jax.tree.map(inside, [1])
    ((at, waits),) = seen
    assert waits
    assert at.endswith("in test_what_a_thread_is_at: jax.tree.map(inside, [1])")


def test_two_processes_train_as_one_does(tmp_path: Path, mesh: Any) -> None:
    """Two processes of four devices beside one of eight; the sums of the two come in another order."""
    from tests.vescale_jax.two_processes import trained

    path = os.pathsep.join(map(str, (ROOT, ROOT / "layouts", ROOT / "planner")))
    job = ["launch", "--processes", "2", "--devices-per-process", "4", "--", "-m", "tests.vescale_jax.two_processes"]
    done = subprocess.run(
        [sys.executable, "-m", "vescale_jax", *job],
        env={**os.environ, "PYTHONPATH": path, "JAX_PLATFORMS": "cpu", "OUT": str(tmp_path)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    zero, one = (np.load(tmp_path / f"{k}.npz") for k in range(2))
    for name, want in trained(mesh(8)):
        np.testing.assert_array_equal(zero[name], one[name])
        if want.dtype.kind == "f":
            np.testing.assert_allclose(zero[name], want, 1e-5, 1e-6, err_msg=name)
        else:
            np.testing.assert_array_equal(zero[name], want)
