"""Train a language model, sharded over all devices, on Python's standard library or on text of yours.

    python examples/train_lm.py [--data PATH] [--steps N] [--optimizer NAME] [--checkpoint FOLDER [--resume]] ...
    python -m vescale_jax launch --processes 2 -- examples/train_lm.py ...

The model is plain Flax (language_model.py). Everything that shards it stands in `main`: `vs.join_hosts`,
`vs.fully_shard`, `vs.train_state` and `vs.train_step`. Without an accelerator the devices are 8 virtual ones on the
CPU, those of all processes together. On several processes each reads the rows of its own devices, and process 0 prints.

In: text (see text.py). Out: progress on the terminal; at the end the held-out loss in bits per byte beside that of
byte bigram and trigram models fitted on the same text, a sample of generated text, and the loss curve as
`loss.png` in the folder `--out`.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import jax
import ngrams
import numpy as np
import optimizers
import text
from checkpoints import Checkpoints, History
from evaluation import evaluate, generate, held_out_loss, loss_fn
from flax import nnx
from jax.sharding import Mesh
from language_model import LanguageModel, ModelConfig
from report import TrainingProgress, printable, result_table, save_loss_curve
from rich.console import Console

import vescale_jax as vs

HEAD_WIDTH = 30
MLP_RATIO = 500 / 180
CLIP_NORM = 1.0
CPU_DEVICES = 8
CURVE_POINTS = 8  # held-out losses taken along the way, each on a part of the held-out text
CURVE_BATCHES = 40
MOST_SKIPPED = 20  # steps in a row without a finite loss, after which training is of no use
PROMPT = b"\ndef "
SAMPLE_BYTES = 400


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a small language model.")
    parser.add_argument("--data", type=Path, help="text file or folder; the standard library's sources if not given")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for loss.png")
    parser.add_argument("--steps", type=int, default=1400)
    parser.add_argument("--batch", type=int, default=16, help="rows in a batch")
    parser.add_argument("--length", type=int, default=64, help="tokens in a row")
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--width", type=int, default=180, help=f"a multiple of the head width, {HEAD_WIDTH}")
    parser.add_argument("--stack", action="store_true", help="run the layers in a loop (nnx.scan), gathered one by one")
    parser.add_argument("--optimizer", choices=optimizers.LEARNING_RATES, default="adamw")
    parser.add_argument("--lr", type=float, help="learning rate at its highest; the optimizer's own if not given")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--checkpoint", type=Path, metavar="FOLDER", help="where to save; all processes have to see it")
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint, if there is one")
    parser.add_argument(
        "--save-every", type=int, default=200, metavar="N", help="steps from one checkpoint to the next"
    )
    parser.add_argument("--step-timeout", type=float, default=300, help="seconds after which a process counts as stuck")
    return parser.parse_args(arguments)


def model_config(layers: int, width: int, stack: bool = False) -> ModelConfig:
    """Sizes of the model from the two that can be asked for."""
    if width % HEAD_WIDTH:
        raise ValueError(
            f"--width {width} is no multiple of the head width, {HEAD_WIDTH}; choose {6 * HEAD_WIDTH}, say"
        )
    return ModelConfig(
        vocabulary=text.VOCABULARY,
        layers=layers,
        width=width,
        heads=width // HEAD_WIDTH,
        mlp_width=round(width * MLP_RATIO),
        stack=stack,
    )


def all_devices(hosts: vs.Hosts) -> Mesh:
    """One axis over the devices of all processes; without accelerators, over 8 virtual ones on the CPU."""
    if jax.config.jax_num_cpu_devices < 1:  # neither JAX_NUM_CPU_DEVICES nor `launch` has said how many
        jax.config.update("jax_num_cpu_devices", max(CPU_DEVICES // hosts.processes, 1))
    return Mesh(np.array(jax.devices()), ("fsdp",))


@dataclass(frozen=True)
class Data:
    """What this process trains and measures on: the rows of its own devices.

    Attributes:
        batches: of the training text.
        rows: numbers of this process's rows in a batch.
        held_out: batches of all held-out text.
    """

    batches: text.TrainingBatches
    rows: np.ndarray
    held_out: list[dict[str, np.ndarray]]

    @classmethod
    def of(cls, corpus: text.Corpus, model: vs.Sharded, shape: tuple[int, int], seed: int) -> Data:
        rows = vs.own_rows(model, shape[0])
        held_out = list(text.held_out_batches(corpus.held_out, *shape, chosen=rows))
        return cls(text.TrainingBatches(corpus.train, *shape, seed=seed), rows, held_out)

    @property
    def probe(self) -> list[dict[str, np.ndarray]]:
        """Some of the held-out batches, from all over the text."""
        return self.held_out[:: -(-len(self.held_out) // CURVE_BATCHES)]


def train(
    state: vs.TrainState,
    step: vs.TrainStep,
    measure: Callable[[vs.Sharded, dict], dict[str, jax.Array]],
    data: Data,
    steps: int,
    console: Console,
    hosts: vs.Hosts,
    history: History | None = None,
    checkpoints: Checkpoints | None = None,
) -> tuple[vs.TrainState, History]:
    """Run the steps that are left. Returns the state, and the losses of all steps in bits per byte.

    The losses along the way are measured on a part of the held-out text.
    """
    history = History() if history is None else history
    every = max(steps // CURVE_POINTS, 1)
    done = int(state.step) + int(state.skipped)
    batches = data.batches
    with TrainingProgress(console, steps, batches.rows * batches.length, done) as progress:
        for i in range(done, steps):
            state, metrics = step(state, batches.batch(i, data.rows))
            history.losses.append(float(metrics.loss) / math.log(2))
            hosts.progress(i + 1)
            check_skipped(history.losses, metrics, console)
            progress.advance(history.losses[-1])
            if (i + 1) % every == 0:
                hosts.pause()
                history.held_out[i + 1] = evaluate(partial(measure, state.model), data.probe)
                hosts.progress(i + 1)
            if checkpoints is not None:
                checkpoints.save(state, history, i + 1, last=i + 1 == steps)
    hosts.pause()
    return state, history


def check_skipped(losses: list[float], metrics: vs.Metrics, console: Console) -> None:
    """Says that a step was skipped, and gives up if none of the last ones had a finite loss and gradient."""
    if not bool(metrics.skipped):
        return
    console.print(f"step {len(losses)} skipped: loss {float(metrics.loss)}, gradient norm {float(metrics.grad_norm)}")
    if len(losses) >= MOST_SKIPPED and not np.isfinite(losses[-MOST_SKIPPED:]).any():
        raise SystemExit(f"{MOST_SKIPPED} steps in a row had no finite loss; try a lower --lr")


def main() -> None:
    began = time.perf_counter()
    arguments = parse_arguments()
    hosts = vs.join_hosts(step_timeout=arguments.step_timeout)
    console = Console(quiet=not hosts.first)
    mesh = all_devices(hosts)
    # Rows go to the devices in equal numbers.
    shape = -(-arguments.batch // mesh.size) * mesh.size, arguments.length

    corpus = text.read_corpus(arguments.data)
    console.print(
        f"text: {len(corpus.train):,} bytes of {len(corpus.train_files)} files to train on, "
        f"{len(corpus.held_out):,} of {len(corpus.held_out_files)} held out"
    )

    config = model_config(arguments.layers, arguments.width, arguments.stack)
    chosen = optimizers.choose(arguments.optimizer, arguments.steps, arguments.lr)
    model = vs.fully_shard(
        lambda: LanguageModel(config, rngs=nnx.Rngs(arguments.seed)),
        mesh,
        blocks=chosen.blocks,
        stacks=("layers",) if arguments.stack else (),
    )
    state = vs.train_state(model, chosen.optimizer)
    step = vs.train_step(loss_fn, chosen.optimizer, max_norm=CLIP_NORM)
    measure = vs.apply(held_out_loss, mean=True)
    logits = vs.apply(lambda model, tokens: model(tokens), replicate_batch=True)
    description = vs.describe(model)
    console.print(f"model: {description.parameters:,} parameters, {config}", soft_wrap=True)
    console.print(str(description), markup=False, highlight=False, soft_wrap=True)

    data = Data.of(corpus, model, shape, arguments.seed)
    with Checkpoints(arguments.checkpoint, arguments.save_every, arguments) as checkpoints:
        state, history = checkpoints.start(state, arguments.resume)
        if history.losses:
            console.print(f"resumed after step {len(history.losses)}")
        state, history = train(state, step, measure, data, arguments.steps, console, hosts, history, checkpoints)

    console.print("held-out text ...")
    loss = evaluate(partial(measure, state.model), data.held_out)
    sample = generate(partial(logits, state.model), PROMPT, SAMPLE_BYTES, (1, arguments.length))[0]
    if hosts.first:
        report(console, corpus, arguments.out, history, loss, sample)
        console.print(f"{arguments.out / 'loss.png'} written; {time.perf_counter() - began:.0f} s in all")


def report(console: Console, corpus: text.Corpus, folder: Path, history: History, loss: float, sample: bytes) -> None:
    """Show what the model writes and how it does beside n-grams of the same text; draw the loss curve."""
    baselines = {
        name: ngrams.fit(corpus.train, corpus.held_out, order).bits_per_byte(corpus.held_out)
        for name, order in (("byte bigram", 2), ("byte trigram", 3))
    }
    console.rule("sample")
    console.print(printable(sample), markup=False, highlight=False, soft_wrap=True)
    console.rule()
    console.print(result_table({**baselines, "this model": loss}))
    folder.mkdir(parents=True, exist_ok=True)
    save_loss_curve(folder / "loss.png", history.losses, history.held_out, baselines)


if __name__ == "__main__":
    main()
