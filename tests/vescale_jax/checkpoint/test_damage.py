"""Files that are cut short, changed, missing or foreign; full disks and folders that cannot be written to."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from jax.sharding import Mesh

import vescale_jax as vs
from tests.vescale_jax.checkpoint import states
from tests.vescale_jax.checkpoint.test_checkpointer import at

TREE = {"w": np.arange(200_000, dtype=np.float32), "v": np.ones(7, np.float32)}


@pytest.fixture(scope="module")
def state(meshes: dict[int, Mesh]) -> vs.TrainState:
    return states.filled(states.make(meshes[3], TREE))


@pytest.fixture(scope="module")
def whole(state: vs.TrainState, tmp_path_factory: Any) -> Path:
    return vs.checkpoint.save(tmp_path_factory.mktemp("whole") / "a", state)


def files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size * 2 // 3)


def cut_by_one(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def empty(path: Path) -> None:
    path.write_bytes(b"")


DAMAGE: dict[str, Callable[[Path], None]] = {
    "cut": cut, "cut by one": cut_by_one, "flip": flip, "empty": empty, "missing": Path.unlink,
}  # fmt: skip


@pytest.mark.parametrize("kind", DAMAGE)
def test_every_file_is_missed_and_named(kind: str, whole: Path, state: vs.TrainState, tmp_path: Path) -> None:
    """On the mesh that wrote it and on another one; whatever is not the error is the right state."""
    for name in files(whole):
        broken = tmp_path / "broken"
        shutil.copytree(whole, broken)
        DAMAGE[kind](broken / name)
        with pytest.raises(ValueError) as caught:
            vs.checkpoint.restore(broken, state)
        text = str(caught.value)
        assert str(broken / name) in text, text
        assert isinstance(caught.value, vs.checkpoint.DamagedError), text
        assert "restore an older checkpoint" in text
        with pytest.raises(vs.checkpoint.DamagedError):
            vs.checkpoint.verify(broken)
        shutil.rmtree(broken)


def test_every_byte_of_the_arrays_counts(whole: Path, state: vs.TrainState, tmp_path: Path) -> None:
    """A flipped bit anywhere is an error or changes nothing, never another number."""
    rng = np.random.default_rng(0)
    names = [name for name in files(whole) if "/c." in name]
    for _ in range(60):
        broken = tmp_path / "broken"
        shutil.copytree(whole, broken)
        name = names[rng.integers(len(names))]
        data = bytearray((broken / name).read_bytes())
        data[rng.integers(len(data))] ^= 1 << int(rng.integers(8))
        (broken / name).write_bytes(data)
        try:
            found = vs.checkpoint.restore(broken, state).state
        except vs.checkpoint.DamagedError as error:
            found = str(error)
        if isinstance(found, str):
            assert name in found
        else:
            states.assert_same(found, state)
        shutil.rmtree(broken)


def test_files_of_another_save(whole: Path, state: vs.TrainState, meshes: dict[int, Mesh], tmp_path: Path) -> None:
    other = vs.checkpoint.save(tmp_path / "other", states.filled(state, seed=1))
    for name in files(whole):
        if name.endswith("zarr.json") or "COMPLETE" in name:
            continue
        mixed = tmp_path / "mixed"
        shutil.copytree(whole, mixed)
        shutil.copy(other / name, mixed / name)
        if (other / name).read_bytes() != (whole / name).read_bytes():
            with pytest.raises(vs.checkpoint.DamagedError, match=name):
                vs.checkpoint.restore(mixed, states.make(meshes[2], TREE, abstract=True))
        shutil.rmtree(mixed)


def test_manifests_of_other_versions_and_programs(whole: Path, state: vs.TrainState, tmp_path: Path) -> None:
    import hashlib

    def message(text: str) -> str:
        changed = tmp_path / "changed"
        shutil.copytree(whole, changed)
        (changed / "manifest.json").write_text(text)
        marker = json.loads((changed / "COMPLETE").read_text())
        marker["manifest.json"] = hashlib.sha256(text.encode()).hexdigest()
        (changed / "COMPLETE").write_text(json.dumps(marker))
        with pytest.raises(ValueError) as caught:
            vs.checkpoint.restore(changed, state)
        shutil.rmtree(changed)
        assert str(changed / "manifest.json") in str(caught.value)
        return str(caught.value)

    record = json.loads((whole / "manifest.json").read_text())
    assert "got version 2 of the format; want 1" in message(json.dumps({**record, "version": 2}))
    assert "got a file of another program" in message('{"format": "something"}')
    assert "got a file of another program" in message("[1]")
    assert "a record that cannot be" in message(json.dumps({**record, "plans": [{}]}))
    assert "text that is no JSON" in message("{")


def test_no_checkpoint(state: vs.TrainState, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="got no such folder; want a complete checkpoint"):
        vs.checkpoint.restore(tmp_path / "a", state)
    with pytest.raises(ValueError, match="got a folder of none"):
        vs.checkpoint.restore(tmp_path, state)


def test_goes_back_to_the_one_before(state: vs.TrainState, tmp_path: Path) -> None:
    with vs.checkpoint.Checkpointer(tmp_path) as checkpointer:
        for i in (1, 2, 3):
            checkpointer.save(at(state, i), wait=True)
        newest = checkpointer.latest
        assert newest is not None
        cut(newest / "arrays/0000/c.0.1.0")
        with pytest.warns(UserWarning, match=r"c\.0\.1\.0: got .* going back to 000002-step-00000002"):
            found = checkpointer.restore(state)
        assert found is not None
        assert found.step == 2
        states.assert_same(found.state, at(state, 2))
        with pytest.raises(vs.checkpoint.DamagedError):
            checkpointer.restore(state, step=3)
        # Saved again, it is the newest; the damaged one is older and goes in its time.
        checkpointer.save(at(state, 3), wait=True)
        assert checkpointer.steps == (2, 3, 3)
        again = checkpointer.restore(state)
        assert again is not None
        states.assert_same(again.state, at(state, 3))
        for path in tmp_path.iterdir():
            (path / "COMPLETE").unlink()
        # A run that starts anew beside what was there does not do so in silence.
        with pytest.warns(UserWarning, match="000004-step-00000003 without COMPLETE"):
            assert checkpointer.restore(state) is None
        checkpointer.save(at(state, 4), wait=True)
        found = checkpointer.restore(state)
        assert found is not None
        assert found.step == 4


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "small"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)]
    try:
        subprocess.run(command, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("mounting a file system is not allowed here")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk(small_disk: Path, state: vs.TrainState) -> None:
    """2.4 MB a checkpoint on a disk of 4 MB: the second one fails and gives its room back, and the first one stays."""
    with vs.checkpoint.Checkpointer(small_disk) as checkpointer:
        checkpointer.save(at(state, 1), wait=True)
        checkpointer.save(at(state, 2))
        with pytest.raises(OSError, match="No space left on device") as caught:
            checkpointer.wait()
        assert f"checkpoint: {small_disk}" in str(caught.value)
        assert "free space or choose another folder" in str(caught.value)
        found = checkpointer.restore(state)
        assert found is not None
        states.assert_same(found.state, at(state, 1))
        assert [path.name for path in small_disk.iterdir()] == ["000001-step-00000001"]


def test_a_file_that_grows_too_large(tmp_path: Path) -> None:
    """A limit on the size of files stands for a full disk where mounting is not allowed."""
    program = Path(__file__).with_name("limited.py")
    done = subprocess.run(
        [sys.executable, str(program), str(tmp_path)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "free space or choose another folder" in done.stdout
    assert "still there: (1,)" in done.stdout


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_cannot_be_written_to(state: vs.TrainState, tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(OSError, match="want room and permission"):
        vs.checkpoint.save(tmp_path / "a", state)


def test_a_folder_in_a_file_system_that_is_read_only(small_disk: Path, state: vs.TrainState) -> None:
    with vs.checkpoint.Checkpointer(small_disk) as checkpointer:
        checkpointer.save(at(state, 1), wait=True)
        subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
        with pytest.raises(OSError, match="Read-only file system") as caught:
            checkpointer.save(at(state, 2), wait=True)
        assert "want room and permission to write there" in str(caught.value)
        found = checkpointer.restore(state)
        assert found is not None
        states.assert_same(found.state, at(state, 1))
