"""The loss of the example, how it is measured on held-out text, and samples of what the model writes.

In: a model, batches {"tokens": (B, T + 1) int32, "weights": (B, T) float32, if not 1}. Out: losses in nats for
training, in bits per byte for people; text as bytes.

Shapes: B rows in a batch, T predicted tokens in a row, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import vescale_jax as vs


def loss_fn(model: Callable[[jax.Array], jax.Array], batch: dict[str, jax.Array]) -> vs.Mean:
    """Mean of the token losses in nats, as its sum and the number of tokens; each counts by its weight, if given."""
    inputs, targets = batch["tokens"][:, :-1], batch["tokens"][:, 1:]
    logits = model(inputs).astype(jnp.float32)  # (B, T, V)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)  # (B, T)
    weights = batch.get("weights")
    if weights is None:
        weights = jnp.ones_like(losses)
    return vs.Mean((losses * weights).sum(), weights.sum())


def held_out_loss(model: Callable[[jax.Array], jax.Array], batch: dict[str, jax.Array]) -> dict[str, Any]:
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
