"""Train the example's model with every optimizer for equally many steps, and compare the held-out loss.

    python examples/compare_optimizers.py [--steps N] [--optimizers NAME ...] [--seeds N] [--out FOLDER]

Model, data, batches and initial parameters are the same for all; each has its own learning rate (optimizers.py).
In: text (see text.py). Out: a table of held-out losses and of the optimizer's bytes; `optimizers.png` in the folder
`--out`.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import jax
import numpy as np
import optimizers
import text
from evaluation import evaluate, held_out_loss, loss_fn
from flax import nnx
from jax.sharding import Mesh
from language_model import LanguageModel
from report import optimizer_table, save_optimizer_curves
from rich.console import Console
from train_lm import CLIP_NORM, Data, all_devices, model_config, train

import vescale_jax as vs


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of one optimizer.

    Attributes:
        name: of the optimizer.
        losses: held-out bits per byte, of each seed.
        curve: held-out bits per byte of a part of the text, by step, of the last seed.
        bytes: of the optimizer's state for each parameter.
    """

    name: str
    losses: list[float]
    curve: dict[int, float]
    bytes: float

    @property
    def loss(self) -> float:
        return float(np.mean(self.losses))


def state_bytes(state: vs.TrainState) -> int:
    """Bytes of the optimizer's state over all devices, each once."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state.opt_state))


def outcome(name: str, arguments: argparse.Namespace, mesh: Mesh, corpus: text.Corpus, console: Console) -> Outcome:
    """Trains with one optimizer, for every seed."""
    config = model_config(arguments.layers, arguments.width)
    shape = arguments.batch, arguments.length
    chosen = optimizers.choose(name, arguments.steps, arguments.lr)
    step = vs.train_step(loss_fn, chosen.optimizer, max_norm=CLIP_NORM)
    measure = vs.apply(held_out_loss, mean=True)
    losses, curve, nbytes = [], {}, 0.0
    for seed in range(arguments.seeds):
        # A function that makes its own random numbers can be traced.
        build = lambda seed=seed: LanguageModel(config, nnx.Rngs(seed))  # noqa: E731
        state = vs.train_state(vs.fully_shard(build, mesh, blocks=chosen.blocks), chosen.optimizer)
        nbytes = state_bytes(state) / vs.describe(state.model).parameters
        data = Data.of(corpus, state.model, shape, seed)
        state, history = train(state, step, measure, data, arguments.steps, console, vs.Hosts(0, 1))
        losses.append(evaluate(partial(measure, state.model), data.held_out))
        curve = history.held_out
    return Outcome(name, losses, curve, nbytes)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Compare the optimizers on the example's model.")
    parser.add_argument("--data", type=Path, help="text file or folder; the standard library's sources if not given")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for optimizers.png")
    parser.add_argument(
        "--optimizers", nargs="+", choices=optimizers.LEARNING_RATES, default=[*optimizers.LEARNING_RATES]
    )
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--width", type=int, default=180)
    parser.add_argument("--lr", type=float, help="one learning rate for all, instead of each one's own")
    parser.add_argument("--json", action="store_true", help="print the outcomes as JSON as well")
    return parser.parse_args()


def main() -> None:
    arguments, console = parse_arguments(), Console()
    mesh = all_devices(vs.Hosts(0, 1))
    corpus = text.read_corpus(arguments.data)
    outcomes = []
    for name in arguments.optimizers:
        console.rule(name)
        outcomes.append(outcome(name, arguments, mesh, corpus, console))
    console.print(optimizer_table(outcomes))
    if arguments.json:
        print(json.dumps([asdict(found) for found in outcomes]))
    arguments.out.mkdir(parents=True, exist_ok=True)
    save_optimizer_curves(arguments.out / "optimizers.png", outcomes)
    console.print(f"{arguments.out / 'optimizers.png'} written")


if __name__ == "__main__":
    main()
