"""The example's training script: training lowers the loss, goes on where it was interrupted, and on other processes."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx
from rich.console import Console

import vescale_jax as vs

ROOT = Path(__file__).parents[2]
CONSOLE = Console(quiet=True)
ALONE = vs.Hosts(0, 1)


@pytest.fixture(scope="session")
def train_lm(example):
    return example("train_lm")


@pytest.fixture(scope="session")
def run(train_lm, example, mesh):
    """`run(steps, ...)`: trains a table from byte to logits, which compiles fast, on a small text."""
    text, evaluation, optimizers = (example(name) for name in ("text", "evaluation", "optimizers"))
    words = np.frombuffer(b"never odd or even. " * 50, np.uint8)
    corpus = text.Corpus(words, words[:200], (), ())
    tx = optimizers.choose("adamw", 30, 0.3).optimizer
    step = vs.train_step(evaluation.loss_fn, tx, max_norm=train_lm.CLIP_NORM)
    measure = vs.apply(evaluation.held_out_loss, mean=True)

    def train(steps, checkpoints=None, resume=False, devices=8):
        state = vs.train_state(vs.fully_shard(lambda: nnx.Embed(256, 256, rngs=nnx.Rngs(0)), mesh(devices)), tx)
        data = train_lm.Data.of(corpus, state.model, (8, 16), 0)
        history = None
        if checkpoints is not None:
            state, history = checkpoints.start(state, resume)
        return train_lm.train(state, step, measure, data, steps, CONSOLE, ALONE, history, checkpoints)

    return train


def test_training_lowers_the_loss_on_all_devices(run, train_lm):
    state, history = run(30)
    assert history.losses[0] == pytest.approx(8, rel=0.05)
    assert history.losses[-1] < 0.5 * history.losses[0]
    assert history.held_out[30 // train_lm.CURVE_POINTS * train_lm.CURVE_POINTS] < 0.5 * history.losses[0]
    assert int(state.step) == 30


def test_interrupted_and_resumed_is_uninterrupted_bit_for_bit(run, train_lm, example, tmp_path):
    arguments = train_lm.parse_arguments(["--steps", "30", "--batch", "8"])
    checkpoints = lambda: example("checkpoints").Checkpoints(tmp_path, 4, arguments)  # noqa: E731
    whole, history = run(10)
    with checkpoints() as first:
        run(6, first)
    shutil.rmtree(first.checkpointer.latest)  # that of step 6; step 4 is left
    with checkpoints() as second:
        assert second.checkpointer.steps == (4,)
        resumed, continued = run(10, second, resume=True)
    assert (continued.losses, continued.held_out) == (history.losses, history.held_out)
    for ours, theirs in zip(jax.tree.leaves(resumed), jax.tree.leaves(whole), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_a_checkpoint_is_not_mixed_with_another_run(run, train_lm, example, tmp_path):
    checkpoints = example("checkpoints").Checkpoints
    arguments = train_lm.parse_arguments(["--steps", "30"])
    with checkpoints(tmp_path, 4, arguments) as first:
        run(2, first)
    with pytest.raises(ValueError, match=r"holds another run; add --resume to go on with it$"):
        run(2, checkpoints(tmp_path, 4, arguments))
    other = train_lm.parse_arguments(["--steps", "31", "--seed", "2"])
    with pytest.raises(
        ValueError, match=r"was made with --seed 0, --steps 30; give the same, or another --checkpoint$"
    ):
        run(2, checkpoints(tmp_path, 4, other), resume=True)


def test_training_that_has_lost_its_numbers_gives_up(train_lm):
    metrics = vs.Metrics(np.float32(np.nan), np.float32(np.nan), (), np.bool_(True))
    losses = [1.0] + [float("nan")] * (train_lm.MOST_SKIPPED - 1)
    train_lm.check_skipped(losses, metrics, CONSOLE)
    with pytest.raises(SystemExit, match="20 steps in a row had no finite loss; try a lower --lr"):
        train_lm.check_skipped([*losses, float("nan")], metrics, CONSOLE)
    train_lm.check_skipped([*losses, 1.0], metrics._replace(skipped=np.bool_(False)), CONSOLE)


def test_the_model_can_be_asked_for_by_two_sizes(train_lm):
    config = train_lm.model_config(layers=2, width=90)
    assert (config.layers, config.width, config.heads, config.mlp_width) == (2, 90, 3, 250)
    with pytest.raises(ValueError, match=r"--width 100 is no multiple"):
        train_lm.model_config(layers=2, width=100)


def test_two_processes_train_and_one_goes_on(tmp_path):
    """Two processes of four devices save; one of eight devices resumes, and ends as it would have alone."""
    words = tmp_path / "words.txt"
    words.write_text("never odd or even. " * 200)
    sizes = ["--layers", "1", "--width", "60", "--batch", "8", "--length", "16", "--steps", "6", "--data", str(words)]
    script = [str(ROOT / "examples" / "train_lm.py"), *sizes, "--save-every", "3"]

    def out(name, *command):
        path = os.pathsep.join(map(str, (ROOT, ROOT / "layouts", ROOT / "planner")))
        done = subprocess.run(
            [sys.executable, *command, "--out", str(tmp_path / name)],
            env={**os.environ, "PYTHONPATH": path, "JAX_PLATFORMS": "cpu"},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert (tmp_path / name / "loss.png").read_bytes().startswith(b"\x89PNG")
        return done.stdout

    folder = tmp_path / "run"
    launch = ["-m", "vescale_jax", "launch", "--processes", "2", "--"]
    shown = out("two", *launch, *script, "--checkpoint", str(folder))
    # Only process 0 prints; what gloo itself says of its connections is left out.
    assert not [line for line in shown.splitlines() if line.startswith("[1]") and "Gloo" not in line]
    _, last = sorted(folder.glob("*-step-*"))
    shutil.rmtree(last)
    again = out("one", *script, "--checkpoint", str(folder), "--resume")
    assert "resumed after step 3" in again
    results = [re.findall(r"this model\s+\S (\S+)", text) for text in (shown, again)]
    assert results[0] == results[1]
    assert len(results[0]) == 1
