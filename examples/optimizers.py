"""The optimizers that the example can train with.

In: a name, the number of steps, a learning rate. Out: an optax transformation, and the blocks that `vs.fully_shard`
has to keep whole for it.

All share one schedule, one weight decay and the moments' decays, so that they differ in their method alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import optax

import vescale_jax as vs
from vescale_planner import Block, Elements, Rows

WARMUP_SHARE = 0.05
WEIGHT_DECAY = 0.1
# A short memory of squared gradients, since a short run's gradients change fast.
DECAYS = {"b1": 0.9, "b2": 0.95}
TILE = 64

LEARNING_RATES = {"adamw": 4e-3, "adamw_8bit": 4e-3, "muon": 8e-3, "shampoo": 4e-3, "soap": 4e-3}
"""At their highest, by name. AdamW's for all but Muon; nothing was searched for."""


@dataclass(frozen=True, slots=True)
class Choice:
    """An optimizer and what it needs.

    Attributes:
        optimizer: an optax transformation for `vs.train_state` and `vs.train_step`.
        blocks: for `vs.fully_shard`: what no shard may cut.
    """

    optimizer: optax.GradientTransformation
    blocks: Any


def schedule(steps: int, learning_rate: float) -> optax.Schedule:
    """A learning rate that rises for a while and then falls to zero in a line."""
    warmup = max(round(steps * WARMUP_SHARE), 1)
    rise = optax.linear_schedule(0.0, learning_rate, warmup)
    return optax.join_schedules([rise, optax.linear_schedule(learning_rate, 0.0, max(steps - warmup, 1))], [warmup])


def choose(name: str, steps: int, learning_rate: float | None = None) -> Choice:
    """The optimizer of a name, for so many steps, at its own learning rate or a given one."""
    rate = schedule(steps, LEARNING_RATES[name] if learning_rate is None else learning_rate)

    def bands(path: str, leaf: jax.ShapeDtypeStruct) -> Block:
        # Tiles of a matrix stay whole where rows are kept together in bands as high as they are.
        return Rows(TILE) if len(leaf.shape) == 2 else Elements(1)

    match name:
        case "adamw":
            return Choice(optax.adamw(rate, **DECAYS, weight_decay=WEIGHT_DECAY), Elements(1))
        case "adamw_8bit":
            return Choice(vs.optimizers.adamw_8bit(rate, **DECAYS, weight_decay=WEIGHT_DECAY), Elements(256))
        case "muon":
            adam = {f"adam_{key}": value for key, value in DECAYS.items()}
            muon = vs.optimizers.muon(
                rate,
                weight_decay=WEIGHT_DECAY,
                adam_learning_rate=schedule(steps, LEARNING_RATES["adamw"]),
                adam_weight_decay=WEIGHT_DECAY,
                **adam,
            )
            return Choice(muon, Elements(1))
        case "shampoo":
            return Choice(vs.optimizers.shampoo(rate, **DECAYS, weight_decay=WEIGHT_DECAY, block_size=TILE), bands)
        case "soap":
            return Choice(vs.optimizers.soap(rate, **DECAYS, weight_decay=WEIGHT_DECAY, block_size=TILE), bands)
    raise ValueError(f"--optimizer {name}: no such optimizer; choose one of {', '.join(LEARNING_RATES)}")
