"""The Checkpointer: keeps the last, writes in a thread, reports what went wrong there, goes on from the newest."""

import dataclasses
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

import vescale_jax as vs
from tests.vescale_jax.checkpoint import states
from vescale_jax.checkpoint import _write

TREE = {"w": np.arange(1000, dtype=np.float32), "v": np.ones(7, np.float32)}


def at(state: vs.TrainState, step: int) -> vs.TrainState:
    return dataclasses.replace(state, step=jnp.full_like(state.step, step))


@pytest.fixture
def state(meshes: dict[int, Mesh]) -> vs.TrainState:
    return states.make(meshes[3], TREE)


def test_keeps_the_last_and_finds_the_newest(state: vs.TrainState, tmp_path: Path) -> None:
    folder = tmp_path / "not" / "there"
    with vs.checkpoint.Checkpointer(folder, keep=2) as checkpointer:
        assert checkpointer.restore(state) is None
        assert (checkpointer.latest, checkpointer.steps) == (None, ())
        path = [checkpointer.save(at(state, 10 * i), {"position": i}) for i in range(1, 6)][-1]
        checkpointer.wait()
        assert checkpointer.steps == (40, 50)
        assert checkpointer.latest == path
        found = checkpointer.restore(state)
        assert found is not None
        assert (found.step, found.extra, found.path, int(found.state.step)) == (50, {"position": 5}, path, 50)
        older = checkpointer.restore(state, step=40)
        assert older is not None
        assert older.extra == {"position": 4}
        with pytest.raises(ValueError, match=r"got step 30; want one of \[40, 50\]"):
            checkpointer.restore(state, step=30)
        # A run that went back: what it saves now is the newest, and what it had left is older.
        checkpointer.save(at(state, 20), {"position": 2}, wait=True)
        assert checkpointer.steps == (50, 20)
        again = checkpointer.restore(state)
        assert again is not None
        assert again.step == 20
    assert sorted(path.name for path in folder.iterdir()) == ["000005-step-00000050", "000006-step-00000020"]


def test_what_is_written_is_the_state_at_the_call(state: vs.TrainState, tmp_path: Path, monkeypatch: Any) -> None:
    """The state may be donated as soon as `save` returns."""
    go = threading.Event()
    real = _write._write_part

    def late(*args: Any) -> Any:
        assert go.wait(60)
        return real(*args)

    monkeypatch.setattr(_write, "_write_part", late)
    state = states.filled(state)
    wanted = states.contents(state)
    step = jax.jit(lambda s: jax.tree.map(lambda x: x * 0, s), donate_argnums=0)
    with vs.checkpoint.Checkpointer(tmp_path) as checkpointer:
        for _ in range(2):  # The second save uses the host memory of the first one.
            go.clear()
            held = states.filled(state)
            checkpointer.save(held)
            assert checkpointer.steps == () or len(checkpointer.steps) == 1
            step(held)
            go.set()
            checkpointer.wait()
            found = checkpointer.restore(state)
            assert found is not None
            states.assert_same(found.state, wanted)


def test_an_error_of_the_thread_is_raised_at_the_next_call(
    state: vs.TrainState, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any) -> Any:
        raise OSError("no room")

    for call in ("save", "wait", "close", "restore"):
        checkpointer = vs.checkpoint.Checkpointer(tmp_path / call)
        with monkeypatch.context() as patch:
            patch.setattr(_write, "_write_part", fail)
            checkpointer.save(state)
            with pytest.raises(OSError, match="no room"):
                getattr(checkpointer, call)(*([state] if call in ("save", "restore") else []))
        # It is told once, and the next save works.
        checkpointer.save(at(state, 3), wait=True)
        assert checkpointer.steps == (3,)
    with monkeypatch.context() as patch:
        patch.setattr(_write, "_write_part", fail)
        checkpointer, error = vs.checkpoint.Checkpointer(tmp_path / "with"), KeyError("of the loop")
        checkpointer.save(state)
        checkpointer.__exit__(KeyError, error, None)
    assert "The last save failed, too: no room" in error.__notes__


def test_leftovers_of_a_killed_run_are_swept(state: vs.TrainState, tmp_path: Path) -> None:
    for name in (".partial-000001-step-00000001", ".gone-000001-step-00000001"):
        (tmp_path / name / "arrays").mkdir(parents=True)
    (tmp_path / "notes.txt").write_text("mine")
    with vs.checkpoint.Checkpointer(tmp_path) as checkpointer:
        assert checkpointer.latest is None
        checkpointer.save(at(state, 1), wait=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["000001-step-00000001", "notes.txt"]


def test_a_program_that_ends_finishes_its_save_or_says_so(tmp_path: Path) -> None:
    program = Path(__file__).with_name("exits.py")
    done = subprocess.run(
        [sys.executable, str(program), str(tmp_path / "a")], capture_output=True, text=True, timeout=120, check=True
    )
    assert vs.checkpoint.Checkpointer(tmp_path / "a").steps == (0,)
    vs.checkpoint.verify(tmp_path / "a")
    done = subprocess.run(
        [sys.executable, str(program), str(tmp_path / "b"), "fail"],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert "was not written: no room" in done.stderr


@pytest.mark.unchecked_annotations
def test_misuse(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="keep: got 0; want at least 1"):
        vs.checkpoint.Checkpointer(tmp_path, keep=0)
    with pytest.raises(ValueError, match="timeout: got 0; want a positive number"):
        vs.checkpoint.Checkpointer(tmp_path, timeout=0)
    for address in ("gs://bucket/run", "file:///run"):
        with pytest.raises(ValueError, match="want a path of a file system"):
            vs.checkpoint.Checkpointer(address)


def test_a_run_is_no_checkpoint_and_no_file(state: vs.TrainState, tmp_path: Path) -> None:
    """What holds no run by mistake would let a run start anew."""
    one = vs.checkpoint.save(tmp_path / "a", state)
    (tmp_path / "b").write_text("mine")
    for path, message in ((one, "got a checkpoint; want the folder of a run"), (tmp_path / "b", "got a file")):
        checkpointer = vs.checkpoint.Checkpointer(path)
        for call in (checkpointer.save, checkpointer.restore):
            with pytest.raises(ValueError, match=message):
                call(state)
