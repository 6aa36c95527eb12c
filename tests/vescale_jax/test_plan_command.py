"""`python -m vescale_jax plan`: JSON, tables, other people's modules, and messages."""

import json
from pathlib import Path

import pytest

from vescale_jax.__main__ import main
from vescale_jax._plan_command import parse_block
from vescale_planner import Elements, Rows, Slab, Tile, WholeTensor

pytestmark = pytest.mark.unchecked_annotations

MODULE = "tests.vescale_jax.plan_models"


def run_json(capsys: pytest.CaptureFixture[str], arguments: str) -> object:
    assert main(["plan", *arguments.split(), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_json_of_one_plan(capsys: pytest.CaptureFixture[str]) -> None:
    record = run_json(capsys, "--model gpt-oss-120b --group experts --block rows:128 --shards 1024")
    assert isinstance(record, dict)
    assert {"shard_size", "padding_ratio", "lower_bound_ratio", "copied_ratio", "seconds", "slots"} <= set(record)
    assert round(100 * record["padding_ratio"], 2) == 18.48
    assert record["shard_size"] == 3_686_400
    assert record["lower_bound_ratio"] == 1.0
    assert [slot["name"] for slot in record["slots"]] == [
        "mlp/experts/gate_up",
        "mlp/experts/gate_up_bias",
        "mlp/experts/down",
        "mlp/experts/down_bias",
    ]
    first = record["slots"][0]
    assert (first["offset"], first["first_device"], first["last_device"]) == (0, 0, 575)
    assert (first["storage"], first["block"]) == ("row_major", "rows:128")


def test_free_storage_reaches_both_aims_for_gpt_oss(capsys: pytest.CaptureFixture[str]) -> None:
    record = run_json(capsys, "--model gpt-oss-120b --group layer --block tile:32,32 --shards 1024")
    assert isinstance(record, dict)
    assert record["padding_ratio"] <= 0.01
    assert record["copied_ratio"] <= 0.01
    assert len(record["groups"]) == 2
    assert {slot["storage"] for slot in record["slots"]} == {"row_major", "transposed", "tiled"}


def test_json_of_a_range_is_a_list_without_slots(capsys: pytest.CaptureFixture[str]) -> None:
    records = run_json(capsys, "--model llama-3-8b --shards 8:24:8")
    assert isinstance(records, list)
    assert [record["num_shards"] for record in records] == [8, 16, 24]
    assert not any("slots" in record for record in records)


def test_tables(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model", "gpt-oss-120b", "--group", "attention", "--block", "rows:16", "--shards", "8"]) == 0
    printed = capsys.readouterr().out
    assert "8 shards x 5,898,240 elements in 1 group: 77.72% padding" in printed
    assert "attention/output" in printed
    assert "could be better: shard over 4 devices and replicate 2 times (HSDP): 0.22% padding" in printed
    assert main(["plan", "--model", "mixtral-8x7b", "--shards", "8:16:8"]) == 0
    assert "above bound" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("function", "group", "names"),
    [
        ("make_nnx", "", ["layers/0/up/bias", "layers/0/up/kernel", "layers/1/up/bias", "layers/1/up/kernel",
                          "norm/bias", "norm/scale"]),
        ("make_nnx", "--group layers/1", ["layers/1/up/bias", "layers/1/up/kernel"]),
        ("make_nnx", "--group *kernel", ["layers/0/up/kernel", "layers/1/up/kernel"]),
        ("make_linen", "", ["bias", "kernel"]),
        ("make_arrays", "", ["a", "b/0"]),
    ],
)  # fmt: skip
def test_modules(capsys: pytest.CaptureFixture[str], function: str, group: str, names: list[str]) -> None:
    kernels = "--block *kernel=rows:2" if any(name.endswith("kernel") for name in names) else ""
    record = run_json(capsys, f"--module {MODULE}:{function} --shards 3 {kernels} --block whole {group}")
    assert isinstance(record, dict)
    assert sorted(slot["name"] for slot in record["slots"]) == names
    blocks = {slot["name"]: slot["block"] for slot in record["slots"]}
    assert all(block == ("rows:2" if name.endswith("kernel") else "whole") for name, block in blocks.items())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--model gpt-2 --shards 8", "model: got 'gpt-2'; want one of llama-3-8b"),
        ("--model llama-3-8b --group experts --shards 8", "llama-3-8b: got group 'experts'; want one of embedding"),
        ("--model llama-3-8b --shards 8:x", "--shards: got '8:x'; want N or FIRST:LAST:STEP"),
        ("--model llama-3-8b --shards 0", "--shards: got '0'; want N or FIRST:LAST:STEP"),
        ("--model llama-3-8b --shards 16:8", "--shards: got '16:8'; want FIRST up to LAST; swap them"),
        ("--model llama-3-8b --shards 8 --block row:8", "--block: got 'row:8'; want elements:N, rows:N"),
        ("--model llama-3-8b --shards 8 --order best --storage tile", "plan_group: 2 faults"),
        (f"--module {MODULE}:nothing --shards 8", "want a function that exists"),
        (f"--module {MODULE} --shards 8", "want package.file:function"),
        (f"--module {MODULE}:make_nothing --shards 8", "want at least one parameter"),
        (f"--module {MODULE}:make_nnx --group layer --shards 8", "want a path or pattern below layers, norm"),
    ],
)
def test_mistakes(capsys: pytest.CaptureFixture[str], arguments: str, message: str) -> None:
    assert main(["plan", *arguments.split()]) == 2
    assert message in capsys.readouterr().err


def test_blocks_are_read_as_they_are_printed() -> None:
    for block in (Elements(8), Rows(128), Tile(32, 64), Slab(1, 2), WholeTensor()):
        assert parse_block(str(block)) == block
    assert parse_block("slab:1") == Slab(1)


@pytest.mark.parametrize(("shards", "suffix"), [("8", "png"), ("8", "svg"), ("600", "png"), ("8:64:8", "png")])
def test_pictures(capsys: pytest.CaptureFixture[str], tmp_path: Path, shards: str, suffix: str) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / f"plan.{suffix}"
    arguments = f"plan --model gpt-oss-120b --group attention --block rows:16 --shards {shards} --plot {path}"
    assert main(arguments.split()) == 0
    assert capsys.readouterr().out
    content = path.read_bytes()
    assert content.startswith(b"\x89PNG" if suffix == "png" else b"<?xml")
    assert len(content) > 5000


def test_a_picture_without_matplotlib(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    assert main(f"plan --model llama-3-8b --shards 8 --plot {tmp_path / 'plan.png'}".split()) == 2
    assert "install the extra: pip install 'vescale_jax[plot]'" in capsys.readouterr().err
