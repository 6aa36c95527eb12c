"""`python -m vescale_jax checkpoint`: what it shows, checks and exports."""

import json
from pathlib import Path
from typing import Any

import pytest
from jax.sharding import Mesh

import vescale_jax as vs
from tests.vescale_jax.checkpoint import states
from tests.vescale_jax.checkpoint.test_checkpointer import at
from vescale_jax.__main__ import main
from vescale_jax.optimizers import adamw_8bit


@pytest.fixture(scope="module")
def run(meshes: dict[int, Mesh], tmp_path_factory: Any) -> Path:
    folder = tmp_path_factory.mktemp("run")
    state = states.make(meshes[5], tx=adamw_8bit(1e-2), blocks=states.BLOCKS)
    with vs.checkpoint.Checkpointer(folder) as checkpointer:
        for i in (10, 20):
            checkpointer.save(at(state, i), {"position": i}, wait=True)
    return folder


def test_show(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoint", "show", str(run), "--check"]) == 0
    text = capsys.readouterr().out
    assert "000001-step-00000010  step 10" in text
    assert "step 20" in text
    assert "opt_state/moments/mean/codes" in text
    assert "are as they were written" in text
    assert main(["checkpoint", "show", str(run / "000001-step-00000010"), "--tensors"]) == 0
    text = capsys.readouterr().out
    assert "step 10" in text
    assert "(3, 40, 48)" in text
    assert "tile:32,32" in text


def test_json_says_where_every_element_lies(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoint", "show", str(run), "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert (record["step"], record["extra"], record["made"]["mesh"]) == (20, {"position": 20}, {"fsdp": 5})
    rows = {(row["field"], row["path"]): row for row in record["tensors"]}
    assert rows["model", "b"]["shape"] == [5000]
    assert rows["model", "b"]["storage"] == "row_major"


def test_without_this_library(run: Path) -> None:
    """A parameter read as docs/checkpoints.md says: the manifest and zarr, nothing else."""
    import tensorstore

    folder = max(run.iterdir())
    manifest = json.loads((folder / "manifest.json").read_text())
    array = next(item for item in manifest["arrays"] if item["field"] == "model")
    slot = next(slot for slot in manifest["plans"][array["plan"]]["slots"] if slot["name"] == "a")
    assert slot["storage"] == "row_major"
    store = tensorstore.open(
        {"driver": "zarr3", "kvstore": {"driver": "file", "path": str(folder / array["array"])}}
    ).result()
    buffer = store.read().result().reshape(array["width"] * 5)
    tensor = buffer[slot["offset"] : slot["offset"] + slot["size"]].reshape(slot["shape"])
    assert tensor.tobytes() == states.numbers(0)["a"].tobytes()


def test_export(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoint", "export", str(run), str(tmp_path / "a.safetensors")]) == 0
    assert (tmp_path / "a.safetensors").stat().st_size > 4 * 5000
    assert main(["checkpoint", "export", str(run), str(tmp_path / "a.safetensors")]) == 2
    assert "got a path that exists" in capsys.readouterr().err


def test_mistakes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoint", "show", str(tmp_path / "no")]) == 2
    assert "got no such folder" in capsys.readouterr().err
