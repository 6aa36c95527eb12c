"""Train a language model, sharded over all devices, on Python's standard library or on text of yours.

    python examples/train_lm.py [--data PATH] [--steps N] ...

The model is plain Flax (language_model.py). Everything that shards it stands in `main`: `vs.fully_shard`,
`vs.train_state` and `vs.train_step`. Without an accelerator the devices are 8 virtual ones on the CPU.

In: text (see text.py). Out: progress on the terminal; at the end the held-out loss in bits per byte beside that of
byte bigram and trigram models fitted on the same text, a sample of generated text, and the loss curve as
`loss.png` in the folder `--out`.

Shapes: B rows in a batch, T predicted tokens in a row, V vocabulary.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ngrams
import numpy as np
import optax
import text
from flax import nnx
from jax.sharding import Mesh
from language_model import LanguageModel, ModelConfig
from report import TrainingProgress, printable, result_table, save_loss_curve
from rich.console import Console

import vescale_jax as vs

HEAD_WIDTH = 30
MLP_RATIO = 500 / 180
WARMUP_SHARE = 0.05
WEIGHT_DECAY = 0.1
CLIP_NORM = 1.0
CPU_DEVICES = 8
CURVE_POINTS = 8  # held-out losses taken along the way, each on a part of the held-out text
CURVE_BATCHES = 40
PROMPT = b"\ndef "
SAMPLE_BYTES = 400


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a small language model.")
    parser.add_argument("--data", type=Path, help="text file or folder; the standard library's sources if not given")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for loss.png")
    parser.add_argument("--steps", type=int, default=1400)
    parser.add_argument("--batch", type=int, default=16, help="rows in a batch")
    parser.add_argument("--length", type=int, default=64, help="tokens in a row")
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--width", type=int, default=180, help=f"a multiple of the head width, {HEAD_WIDTH}")
    parser.add_argument("--lr", type=float, default=4e-3, help="learning rate at its highest")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def model_config(layers: int, width: int) -> ModelConfig:
    """Sizes of the model from the two that can be asked for."""
    if width % HEAD_WIDTH:
        raise ValueError(f"--width {width} is no multiple of the head width; choose one of {HEAD_WIDTH}")
    return ModelConfig(
        vocabulary=text.VOCABULARY,
        layers=layers,
        width=width,
        heads=width // HEAD_WIDTH,
        mlp_width=round(width * MLP_RATIO),
    )


def adamw(steps: int, learning_rate: float) -> optax.GradientTransformation:
    """AdamW under a learning rate that rises for a while and then falls to zero in a line."""
    warmup = max(round(steps * WARMUP_SHARE), 1)
    schedule = optax.join_schedules(
        [
            optax.linear_schedule(0.0, learning_rate, warmup),
            optax.linear_schedule(learning_rate, 0.0, max(steps - warmup, 1)),
        ],
        [warmup],
    )
    # A short memory of squared gradients, since a short run's gradients change fast.
    return optax.adamw(schedule, b1=0.9, b2=0.95, weight_decay=WEIGHT_DECAY)


def loss_fn(model: LanguageModel, batch: dict[str, jax.Array]) -> vs.Mean:
    """Mean of the token losses in nats, as its sum and the number of tokens; each counts by its weight, if given."""
    inputs, targets = batch["tokens"][:, :-1], batch["tokens"][:, 1:]
    logits = model(inputs).astype(jnp.float32)  # (B, T, V)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)  # (B, T)
    weights = batch.get("weights")
    if weights is None:
        weights = jnp.ones_like(losses)
    return vs.Mean((losses * weights).sum(), weights.sum())


def held_out_loss(model: LanguageModel, batch: dict[str, jax.Array]) -> dict[str, Any]:
    """Mean token loss in nats and the number of tokens, both over all devices once `vs.apply` has reduced them."""
    loss = loss_fn(model, batch)
    return {"loss": loss, "tokens": loss.count.astype(jnp.int32)}


def evaluate(measure: Callable[[dict], dict[str, jax.Array]], batches: Iterable[dict[str, np.ndarray]]) -> float:
    """Bits per byte over all batches, each token counted once; `measure` gives loss and tokens of one batch."""
    losses, tokens = zip(*((float(m["loss"]), int(m["tokens"])) for m in map(measure, batches)), strict=True)
    return float(np.average(losses, weights=tokens) / math.log(2))


def generate(
    logits: Callable[[np.ndarray], jax.Array],
    prompt: bytes,
    count: int,
    shape: tuple[int, int],
    seed: int = 0,
    temperature: float = 0.8,
) -> list[bytes]:
    """Continue the prompt by `count` bytes, in B independent samples.

    The model only ever sees tokens of the one shape (B, T), so nothing is compiled twice: the window holds the
    latest T bytes at most, and what follows them is padding that a causal model cannot see.
    """
    rows, length = shape
    random = np.random.default_rng(seed)
    texts = np.tile(np.frombuffer(prompt, np.uint8).astype(np.int32), (rows, 1))
    for _ in range(count):
        window = texts[:, -length:]
        padded = np.pad(window, ((0, 0), (0, length - window.shape[1])))
        scores = np.asarray(logits(padded)[:, window.shape[1] - 1], np.float32)  # (B, V)
        # The largest score plus Gumbel noise is a draw from the softmax.
        drawn = (scores / temperature + random.gumbel(size=scores.shape)).argmax(axis=-1)
        texts = np.concatenate([texts, drawn[:, None].astype(np.int32)], axis=1)
    return [bytes(row.astype(np.uint8)) for row in texts]


def train(
    state: vs.TrainState,
    step: vs.TrainStep,
    measure: Callable[[vs.Sharded, dict], dict[str, jax.Array]],
    batches: text.TrainingBatches,
    probe: list[dict],
    steps: int,
    console: Console,
) -> tuple[vs.TrainState, list[float], dict[int, float]]:
    """Run all steps. Returns the state, the loss of each step and the held-out loss of some, in bits per byte.

    The losses along the way are measured on `probe`, some batches of the held-out text.
    """
    losses, held_out = [], {}
    every = max(steps // CURVE_POINTS, 1)
    with TrainingProgress(console, steps, batches.rows * batches.length) as progress:
        for i in range(steps):
            state, metrics = step(state, batches.batch(i))
            losses.append(float(metrics.loss) / math.log(2))
            progress.advance(losses[-1])
            if (i + 1) % every == 0:
                held_out[i + 1] = evaluate(partial(measure, state.model), probe)
    return state, losses, held_out


def main() -> None:
    began = time.perf_counter()
    arguments, console = parse_arguments(), Console()
    # Without an accelerator, JAX then has 8 devices on the CPU; with one, this changes nothing.
    jax.config.update("jax_num_cpu_devices", CPU_DEVICES)
    mesh = Mesh(np.array(jax.devices()), ("fsdp",))
    # Rows go to the devices in equal numbers.
    shape = -(-arguments.batch // mesh.size) * mesh.size, arguments.length

    corpus = text.read_corpus(arguments.data)
    console.print(
        f"text: {len(corpus.train):,} bytes of {len(corpus.train_files)} files to train on, "
        f"{len(corpus.held_out):,} of {len(corpus.held_out_files)} held out"
    )
    baselines = {
        name: ngrams.fit(corpus.train, corpus.held_out, order).bits_per_byte(corpus.held_out)
        for name, order in (("byte bigram", 2), ("byte trigram", 3))
    }

    config = model_config(arguments.layers, arguments.width)
    model = vs.fully_shard(lambda: LanguageModel(config, rngs=nnx.Rngs(arguments.seed)), mesh)
    optimizer = adamw(arguments.steps, arguments.lr)
    state = vs.train_state(model, optimizer)
    step = vs.train_step(loss_fn, optimizer, max_norm=CLIP_NORM)
    measure = vs.apply(held_out_loss, mean=True)
    logits = vs.apply(lambda model, tokens: model(tokens), replicate_batch=True)
    description = vs.describe(model)
    console.print(f"model: {description.parameters:,} parameters, {config}", soft_wrap=True)
    console.print(str(description), markup=False, highlight=False, soft_wrap=True)

    batches = text.TrainingBatches(corpus.train, *shape, seed=arguments.seed)
    held_out = list(text.held_out_batches(corpus.held_out, *shape))
    probe = held_out[:: -(-len(held_out) // CURVE_BATCHES)]
    state, losses, curve = train(state, step, measure, batches, probe, arguments.steps, console)

    console.print("held-out text ...")
    loss = evaluate(partial(measure, state.model), held_out)
    sample = generate(partial(logits, state.model), PROMPT, SAMPLE_BYTES, (1, arguments.length))[0]
    console.rule("sample")
    console.print(printable(sample), markup=False, highlight=False, soft_wrap=True)
    console.rule()
    console.print(result_table({**baselines, "this model": loss}))
    arguments.out.mkdir(parents=True, exist_ok=True)
    save_loss_curve(arguments.out / "loss.png", losses, curve, baselines)
    console.print(f"{arguments.out / 'loss.png'} written; {time.perf_counter() - began:.0f} s in all")


if __name__ == "__main__":
    main()
