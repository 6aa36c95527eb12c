"""Text as bytes: where it is read, how it is split, and the batches that are cut from it.

In: a file, a folder, or nothing, which means the sources of Python's own standard library.
Out: a `Corpus` of two streams of bytes (training and held-out), `TrainingBatches` of one of them, and the
`held_out_batches` of the other.

The split is by file and depends on nothing but each file's relative path, so it is the same on every machine and
does not move when files are added. Every file is followed by one NUL byte, and a stream starts with one: the model
learns where files begin and end, and every byte of every file has something before it to be predicted from.

Shapes: B rows in a batch, T predicted tokens in a row. A token is a byte. A row holds T + 1 of them, since each
token is predicted from those before it and the first one only from the row before.
"""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

VOCABULARY = 256
BOUNDARY = 0  # stands between files; files that hold it themselves are not text and are skipped
HELD_OUT_SHARE = 1 / 20

# Installed packages are not the standard library; the test suite is left out by some distributions, as are the
# folders below them in others. Encodings and pydoc's topics are tables that a program wrote.
SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data"}
SKIPPED_PREFIX = "_sysconfigdata"  # how this very interpreter was built


@dataclass(frozen=True, slots=True)
class Corpus:
    """Two streams of bytes, each 1D uint8, and the relative paths of the files they come from."""

    train: np.ndarray
    held_out: np.ndarray
    train_files: tuple[str, ...]
    held_out_files: tuple[str, ...]


def standard_library() -> dict[str, Path]:
    """The standard library's own Python files, by relative path."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = {path.relative_to(root).as_posix(): path for path in root.rglob("*.py") if path.is_file()}
    return {
        name: path
        for name, path in files.items()
        if not SKIPPED_FOLDERS.intersection(name.split("/")) and not path.name.startswith(SKIPPED_PREFIX)
    }


def files_of(data: Path | None) -> dict[str, Path]:
    """Relative path -> file, of the folder `data`, of the one file `data`, or of the standard library (None)."""
    if data is None:
        return standard_library()
    if data.is_file():
        return {data.name: data}
    if not data.is_dir():
        raise ValueError(f"--data {data}: no such file or folder; give a text file or a folder of them")
    files = {path.relative_to(data).as_posix(): path for path in data.rglob("*") if path.is_file()}
    return {name: path for name, path in files.items() if not any(part.startswith(".") for part in name.split("/"))}


def rank(name: str) -> float:
    """A number in [0, 1) that depends on the relative path alone."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8]) / 2**64


def split(names: list[str]) -> tuple[list[str], list[str]]:
    """Training and held-out names, each sorted. Of two or more files at least one is on each side."""
    ranked = sorted(names, key=lambda name: (rank(name), name))
    held_out = sum(rank(name) < HELD_OUT_SHARE for name in ranked)
    if len(ranked) > 1:
        held_out = min(max(held_out, 1), len(ranked) - 1)
    return sorted(ranked[held_out:]), sorted(ranked[:held_out])


def stream(texts: list[bytes]) -> np.ndarray:
    """The texts joined, a boundary before, between and after them: 1D uint8."""
    edge = bytes([BOUNDARY])
    return np.frombuffer(edge + b"".join(text + edge for text in texts), np.uint8)


def read_corpus(data: Path | None = None) -> Corpus:
    """Read and split the text.

    A single file cannot be split by file: its last part is held out.

    Raises:
        ValueError: if there is no such path, or no text in it.
    """
    contents = {name: path.read_bytes().replace(b"\r\n", b"\n") for name, path in files_of(data).items()}
    texts = {name: text for name, text in contents.items() if text and BOUNDARY not in text}
    if not texts:
        where = data if data is not None else sysconfig.get_paths()["stdlib"]
        raise ValueError(
            f"no text in {where}: {len(contents)} files, all empty or with NUL bytes; give others by --data"
        )
    if len(texts) == 1:
        ((name, text),) = texts.items()
        cut = len(text) - int(len(text) * HELD_OUT_SHARE)
        return Corpus(stream([text[:cut]]), stream([text[cut:]]), (name,), (name,))
    train, held_out = split(list(texts))
    return Corpus(
        stream([texts[name] for name in train]),
        stream([texts[name] for name in held_out]),
        tuple(train),
        tuple(held_out),
    )


class TrainingBatches:
    """Random batches of one stream, each a function of the seed and the step alone.

    An epoch cuts the stream into rows at a random offset and puts them in a random order, so within an epoch no row
    comes twice, and from one epoch to the next the cuts differ. A resumed run asks for the step it needs: there is
    no state to save.
    """

    def __init__(self, tokens: np.ndarray, rows: int, length: int, seed: int = 0):
        # One row fewer than fit, so that every offset below `length` leaves room for the last row.
        self.rows_per_epoch = (len(tokens) - 1) // length - 1
        if self.rows_per_epoch < 1:
            raise ValueError(
                f"training text has {len(tokens)} bytes, rows of {length} need at least {2 * length + 1}; "
                "give more text by --data or a smaller --length"
            )
        self.tokens, self.rows, self.length, self.seed = tokens, rows, length, seed

    def starts(self, epoch: int) -> np.ndarray:
        """Where the rows of one epoch start, in the order they are used: 1D int64."""
        random = np.random.default_rng((self.seed, epoch))
        return random.integers(self.length) + self.length * random.permutation(self.rows_per_epoch)

    def batch(self, step: int, rows: np.ndarray | None = None) -> dict[str, np.ndarray]:
        """{"tokens": (B, T + 1) int32} of step 0, 1, ...; or only some of its rows, by number."""
        chosen = np.arange(self.rows) if rows is None else rows
        epochs, places = np.divmod(step * self.rows + chosen, self.rows_per_epoch)
        first = np.empty(len(chosen), np.int64)
        for epoch in np.unique(epochs):
            first[epochs == epoch] = self.starts(int(epoch))[places[epochs == epoch]]
        return {"tokens": self.tokens[first[:, None] + np.arange(self.length + 1)].astype(np.int32)}


def held_out_batches(
    tokens: np.ndarray, rows: int, length: int, chosen: np.ndarray | None = None
) -> Iterator[dict[str, np.ndarray]]:
    """Batches {"tokens": (B, T + 1) int32, "weights": (B, T) float32} in which every byte but the first counts once.

    The last batch is filled up with tokens of weight zero, so all batches have one shape. With `chosen`, only the rows
    of these numbers are taken from every batch.
    """
    predicted = len(tokens) - 1
    batches = -(-predicted // (rows * length))
    count = batches * rows
    padded = np.zeros(count * length + 1, np.int32)
    padded[: len(tokens)] = tokens
    cuts = np.arange(count)[:, None] * length + np.arange(length + 1)
    weights = (np.arange(count * length) < predicted).astype(np.float32).reshape(count, length)
    for batch in np.split(np.arange(count), batches):
        if chosen is not None:
            batch = batch[chosen]
        yield {"tokens": padded[cuts[batch]], "weights": weights[batch]}
