"""What the example saves beside the state, and how a run goes on from it.

In: the folder of `--checkpoint`, the arguments of the run, its history so far. Out: checkpoints every so many steps; on
resuming, the state and the history of the newest complete one. Where the data continue needs no file: the batches that
a state has seen are its updates and its skipped steps.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

import vescale_jax as vs

SETTINGS = ("seed", "batch", "length", "steps", "optimizer", "lr", "layers", "width", "stack")
"""Arguments that decide the course of a run; a resumed run has to have the same."""


@dataclass
class History:
    """What the loss curve is drawn from, in bits per byte.

    Attributes:
        losses: of each step.
        held_out: after some steps, by their number.
    """

    losses: list[float] = field(default_factory=list)
    held_out: dict[int, float] = field(default_factory=dict)


class Checkpoints:
    """The checkpoints of one run; none without a folder."""

    def __init__(self, folder: Path | None, every: int, arguments: argparse.Namespace):
        self.checkpointer = None if folder is None else vs.checkpoint.Checkpointer(folder)
        self.every = every
        self.settings = {name: getattr(arguments, name) for name in SETTINGS}

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, *error: Any) -> None:
        if self.checkpointer is not None:
            self.checkpointer.__exit__(*error)

    def start(self, state: vs.TrainState, resume: bool) -> tuple[vs.TrainState, History]:
        """The state and the history to go on from: those of the newest checkpoint, or the given one and none."""
        if self.checkpointer is None:
            return state, History()
        found = self.checkpointer.restore(state) if resume else None
        if found is None:
            if self.checkpointer.steps:
                raise ValueError(
                    f"--checkpoint {self.checkpointer.folder}: holds another run; add --resume to go on with it"
                )
            return state, History()
        saved = found.extra["settings"]
        if differ := [name for name in SETTINGS if saved[name] != self.settings[name]]:
            given = ", ".join(f"--{name} {saved[name]}" for name in differ)
            raise ValueError(f"--resume: {found.path} was made with {given}; give the same, or another --checkpoint")
        curve = found.extra["held_out"]
        held_out = dict(zip(curve["steps"].tolist(), curve["losses"].tolist(), strict=True))
        return found.state, History(found.extra["losses"].tolist(), held_out)

    def save(self, state: vs.TrainState, history: History, step: int, last: bool) -> None:
        """Saves every so many steps and after the last one, while training goes on."""
        if self.checkpointer is None or (step % self.every and not last):
            return
        curve = {"steps": np.array([*history.held_out], np.int64), "losses": np.array([*history.held_out.values()])}
        extra = {"settings": self.settings, "losses": np.array(history.losses), "held_out": curve}
        self.checkpointer.save(state, extra)
