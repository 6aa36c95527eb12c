"""launch: output, exit status, signals; and faults of processes, each of which ends the whole job in time, by name."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from vescale_jax._job import environment_of

ROOT = Path(__file__).parents[2]
JOB = Path(__file__).with_name("job.py")
TIMEOUT = 3
MARGIN = 10
"""Seconds after a time-out within which a job has to have ended; see `join_hosts`."""


def environment(**more: str) -> dict[str, str]:
    path = os.pathsep.join(map(str, (ROOT, ROOT / "layouts", ROOT / "planner")))
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("JAX_", "XLA_"))}
    return {**kept, "PYTHONPATH": path, "JAX_PLATFORMS": "cpu", **more}


def launch(*arguments: str, **more: str) -> "subprocess.CompletedProcess[str]":
    """Runs a job to its end."""
    return subprocess.run(
        [sys.executable, "-m", "vescale_jax", "launch", *arguments],
        env=environment(**more),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_the_environment_of_a_process() -> None:
    told = environment_of(1, 3, 4321, 2, 30.0, {"HOME": "there", "JAX_PROCESS_ID": "7"})
    assert told["HOME"] == "there"
    assert (told["JAX_COORDINATOR_ADDRESS"], told["JAX_NUM_PROCESSES"], told["JAX_PROCESS_ID"]) == (
        "127.0.0.1:4321", "3", "1",
    )  # fmt: skip
    assert (told["JAX_NUM_CPU_DEVICES"], told["JAX_LOCAL_DEVICE_IDS"]) == ("2", "2,3")
    assert "JAX_NUM_CPU_DEVICES" not in environment_of(1, 3, 4321, None, 30.0, {})


def test_output_arguments_and_statuses() -> None:
    code = (
        "import os, sys, time; k = os.environ['JAX_PROCESS_ID']; print('out', k, sys.argv[1:]);"
        "print('error', k, file=sys.stderr); time.sleep(0.3 * int(k)); sys.exit(3 * int(k))"
    )
    done = launch("--processes", "2", "--", "-c", code, "--flag", "--")
    assert done.returncode == 3
    assert sorted(done.stdout.splitlines()) == ["[1] out 1 ['--flag', '--']", "out 0 ['--flag', '--']"]
    lines = done.stderr.splitlines()
    assert sorted(lines[:2]) == ["[1] error 1", "error 0"]
    assert re.fullmatch(r"launch: process 1 \(pid \d+\) ended with status 3; it ends the job", lines[2])
    assert lines[3:] == ["launch: last lines of process 1 on stderr:", "  | error 1"]


def test_a_process_that_stays_stopped_ends_the_job_and_so_does_a_signal() -> None:
    code = "import os, time; os.environ['JAX_PROCESS_ID'] == '1' and os.kill(os.getpid(), 19); time.sleep(60)"
    began = time.monotonic()
    done = launch("--timeout", "0.5", "--", "-c", code)
    assert done.returncode == 1
    assert re.search(r"process 1 \(pid \d+\) was stopped by SIGSTOP; it ends the job", done.stderr)
    assert time.monotonic() - began < 30

    code = "import sys, time; print('up', flush=True); time.sleep(60)"
    command = [sys.executable, "-m", "vescale_jax", "launch", "--", "-c", code]
    with subprocess.Popen(command, env=environment(), cwd=ROOT, stdout=-1, stderr=-1, text=True) as job:
        assert job.stdout is not None
        assert sorted([job.stdout.readline(), job.stdout.readline()]) == ["[1] up\n", "up\n"]
        job.send_signal(signal.SIGTERM)
        _, errors = job.communicate(timeout=30)
        assert job.returncode == 128 + signal.SIGTERM
        assert errors.endswith("launch: ended by SIGTERM\n")

    # One that ends with an error of its own by the signal has not ended the job.
    code = "import os, time; print('up', flush=True); time.sleep(60)"
    with subprocess.Popen([*command[:-1], code], env=environment(), cwd=ROOT, stdout=-1, stderr=-1, text=True) as job:
        assert job.stdout is not None
        assert sorted([job.stdout.readline(), job.stdout.readline()]) == ["[1] up\n", "up\n"]
        job.send_signal(signal.SIGINT)
        _, errors = job.communicate(timeout=30)
        assert job.returncode == 128 + signal.SIGINT
        assert errors.endswith("launch: ended by SIGINT\n")
        assert "it ends the job" not in errors


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "launch: got no script; want one; write it behind --, such as -- examples/train_lm.py"),
        (("--processes", "0", "--", "x.py"), "launch: --processes: got 0; want a positive number; pass one"),
        (("--timeout", "-1", "--", "x.py"), "launch: --timeout: got -1.0; want a positive number; pass one"),
    ],
)
def test_mistakes_are_one_message(arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    from vescale_jax.__main__ import main

    assert main(["launch", *arguments]) == 2
    assert capsys.readouterr().err == message + "\n"


def test_a_killed_process_ends_the_job() -> None:
    began = time.monotonic()
    done = launch("--devices-per-process", "1", "--timeout", "60", "--", str(JOB), FAULT="kill", VICTIM="1")
    assert done.returncode == 128 + signal.SIGKILL
    assert re.search(
        r"^launch: process 1 \(pid \d+\) was killed by SIGKILL; it ends the job$", done.stderr, re.MULTILINE
    )
    assert time.monotonic() - began < 60


def test_a_stuck_process_is_named_with_what_it_is_at() -> None:
    more = {"FAULT": "sleep", "VICTIM": "1", "STEP_TIMEOUT": "4"}
    done = launch("--devices-per-process", "1", "--timeout", "30", "--", str(JOB), **more)
    assert done.returncode == 70
    said = r"vescale_jax: process 0 ends the job: process 1 \(pid \d+ on .+\): stuck, no step finished for 4 s\n"
    assert re.search(said, done.stderr)
    assert re.search(r"  process 0: step 10 done \d+ s ago, waits at .*job.py:\d+ in main: ", done.stderr)
    assert re.search(r"  process 1: step 10 done \d+ s ago, is at .*job.py:\d+ in fail: time.sleep\(600\)", done.stderr)


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[list["subprocess.Popen[str]"]]:
    """Room for processes without a launcher, as under a scheduler; ended afterwards."""
    started: list[subprocess.Popen[str]] = []
    yield started
    for process in started:
        process.kill()
        process.communicate()


def start(pair: list["subprocess.Popen[str]"], more: Mapping[str, str]) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    for k in range(2):
        told = {"JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": str(k)}
        told |= {"VESCALE_JAX_TIMEOUT": str(TIMEOUT), "JAX_NUM_CPU_DEVICES": "1", **more}
        pair.append(
            subprocess.Popen(
                [sys.executable, str(JOB)],
                env=environment(**told),
                cwd=ROOT,
                stdout=subprocess.DEVNULL,
                stderr=-1,
                text=True,
            )
        )


@pytest.mark.parametrize(("fault", "victim"), [("stop", 1), ("stop", 0), ("kill", 1)])
def test_a_process_that_is_gone_ends_the_others(pair: list["subprocess.Popen[str]"], fault: str, victim: int) -> None:
    start(pair, {"FAULT": fault, "VICTIM": str(victim)})
    os.waitid(os.P_PID, pair[victim].pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
    began = time.monotonic()
    _, errors = pair[1 - victim].communicate(timeout=60)
    assert TIMEOUT - 2 < time.monotonic() - began < TIMEOUT + MARGIN
    assert pair[1 - victim].returncode == 70
    who = f"process {victim}( \\(pid {pair[victim].pid} on .+\\))?"
    what = "(: no sign of life|, the coordinator: no answer) for 3 s; dead, stopped, or cut off"
    assert re.search(rf"process {1 - victim} ends the job: {who}{what}", errors)


def test_processes_end_when_their_launcher_is_killed() -> None:
    command = [sys.executable, "-m", "vescale_jax", "launch", "--devices-per-process", "1", "--", str(JOB)]
    more = environment(FAULT="sleep", VICTIM="1")
    with subprocess.Popen(command, env=more, cwd=ROOT, stdout=-1, stderr=-1, text=True) as job:
        assert job.stdout is not None
        while "now sleep" not in (line := job.stdout.readline()):
            assert line
        job.kill()
        # Both pipes are at their end once no process holds them.
        job.communicate(timeout=30)


def test_an_exception_ends_the_others(pair: list["subprocess.Popen[str]"]) -> None:
    start(pair, {"FAULT": "raise", "VICTIM": "0"})
    outputs = [process.communicate(timeout=60)[1] for process in pair]
    assert [process.returncode for process in pair] == [1, 70]
    assert "ValueError: no such row" in outputs[0]
    said = rf"process 1 ends the job: process 0 \(pid {pair[0].pid} on .+\): failed with ValueError: no such row"
    assert re.search(said, outputs[1])
