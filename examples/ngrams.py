"""Smoothed byte n-gram models: the simple models that the language model has to beat.

In: training text and held-out text, 1D uint8. Out: bits per byte of the held-out text.

The probability of byte c after a history of k bytes mixes what was counted with the model that sees one byte less,

    p_k(c | history) = (count(history, c) + m_k * p_{k-1}(c | shorter history)) / (count(history) + m_k),

down to p = 1/256. Dirichlet smoothing: MacKay and Peto, "A hierarchical Dirichlet language model", 1995. The more
often a history was seen, the less the shorter one weighs.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

VOCABULARY = 256
STRENGTHS = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0)


@dataclass(frozen=True, slots=True)
class NGram:
    """An n-gram model with histories of up to n - 1 bytes.

    Attributes:
        counts: for k = 0, ..., n - 1 an array (256**k, 256): how often each byte followed each history of k bytes.
        strengths: for each k the m_k above, in pseudo-counts.
    """

    counts: tuple[np.ndarray, ...]
    strengths: tuple[float, ...]

    @property
    def order(self) -> int:
        return len(self.counts)

    def probability(self, history: np.ndarray, byte: np.ndarray) -> np.ndarray:
        """p(byte | history), shape (M,), of histories (M, n - 1), the latest byte last, and bytes (M,)."""
        probability = np.full(len(byte), 1 / VOCABULARY)
        row = np.zeros(len(byte), np.int64)
        for k, (counts, strength) in enumerate(zip(self.counts, self.strengths, strict=True)):
            if k > 0:
                row = row + history[:, -k].astype(np.int64) * VOCABULARY ** (k - 1)
            total = counts.sum(axis=1)[row]
            probability = (counts[row, byte] + strength * probability) / (total + strength)
        return probability

    def bits_per_byte(self, text: np.ndarray) -> float:
        """Mean of -log2 p over all bytes of `text` but the first, which is only a history."""
        return float(-np.log2(self.probability(histories(text, self.order)[1:], text[1:])).mean())


def histories(text: np.ndarray, order: int) -> np.ndarray:
    """The `order - 1` bytes before each byte, shape (len(text), order - 1); before the text there are zeros."""
    padded = np.concatenate([np.zeros(order - 1, text.dtype), text])
    columns = [padded[k : k + len(text)] for k in range(order - 1)]
    return np.stack(columns, axis=1) if columns else np.zeros((len(text), 0), text.dtype)


def count(text: np.ndarray, order: int) -> tuple[np.ndarray, ...]:
    """How often each byte follows each history, for histories of 0 to order - 1 bytes."""
    counts = []
    for k in range(order):
        code = text.astype(np.int64)
        for place, column in enumerate(histories(text, k + 1).T[::-1], start=1):
            code = code + column.astype(np.int64) * VOCABULARY**place
        counts.append(np.bincount(code, minlength=VOCABULARY ** (k + 1)).reshape(-1, VOCABULARY).astype(np.int32))
    return tuple(counts)


def fit(train: np.ndarray, held_out: np.ndarray, order: int) -> NGram:
    """The n-gram model of the training text, its strengths chosen on the *held-out* text.

    That choice favours the n-gram, which is what a model to be beaten should get. From the shortest history up, each
    strength is the best of STRENGTHS given those before it.
    """
    counts = count(train, order)
    strengths: tuple[float, ...] = ()
    for k in range(order):
        tried = [NGram(counts[: k + 1], (*strengths, strength)) for strength in STRENGTHS]
        strengths = min(tried, key=lambda model: model.bits_per_byte(held_out)).strengths
    return NGram(counts, strengths)
