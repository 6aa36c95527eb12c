"""The example's n-gram models against slow, direct computations."""

import math
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest

TRAIN = b"abracadabra, the cat sat on the mat; the rat ate the oat. " * 3 + b"\x00\xff end"
HELD_OUT = b"the cat ate a rat, abra! \xfe"


@pytest.fixture(scope="session")
def ngrams(example):
    return example("ngrams")


def array(text: bytes) -> np.ndarray:
    return np.frombuffer(text, np.uint8)


@pytest.mark.parametrize("order", [1, 2, 3])
def test_probabilities_sum_to_one(ngrams, order):
    model = ngrams.fit(array(TRAIN), array(HELD_OUT), order)
    every_byte = np.arange(256)
    for history in (b"th", b"\x00\xff", b"qz", b"at"):
        rows = np.tile(array(history)[: order - 1], (256, 1))
        probabilities = model.probability(rows, every_byte)
        assert (probabilities > 0).all()
        assert probabilities.sum() == pytest.approx(1, abs=1e-12)


def test_bigram_equals_a_direct_computation(ngrams):
    model = ngrams.fit(array(TRAIN), array(HELD_OUT), 2)
    weak, strong = model.strengths
    singles, pairs = Counter(TRAIN), Counter(zip(b"\x00" + TRAIN[:-1], TRAIN, strict=True))
    firsts = Counter(b"\x00" + TRAIN[:-1])
    bits = 0.0
    for before, byte in pairwise(HELD_OUT):
        shorter = (singles[byte] + weak / 256) / (len(TRAIN) + weak)
        bits -= math.log2((pairs[before, byte] + strong * shorter) / (firsts[before] + strong))
    assert model.bits_per_byte(array(HELD_OUT)) == pytest.approx(bits / (len(HELD_OUT) - 1), rel=1e-12)


def test_counts_of_trigrams_equal_a_direct_count(ngrams):
    counts = ngrams.count(array(TRAIN), 3)[2]
    padded = b"\x00\x00" + TRAIN
    direct = Counter(padded[place : place + 3] for place in range(len(TRAIN)))
    assert counts.sum() == len(TRAIN)
    assert {
        bytes([*divmod(row, 256), byte]): counts[row, byte] for row, byte in zip(*counts.nonzero(), strict=True)
    } == direct


def test_the_chosen_strengths_are_the_best_tried(ngrams):
    model = ngrams.fit(array(TRAIN), array(HELD_OUT), 2)
    best = model.bits_per_byte(array(HELD_OUT))
    for strength in ngrams.STRENGTHS:
        other = ngrams.NGram(model.counts, (model.strengths[0], strength))
        assert other.bits_per_byte(array(HELD_OUT)) >= best
