"""The example's loss, its evaluation, and what the model writes."""

import jax.numpy as jnp
import numpy as np
import pytest


@pytest.fixture(scope="session")
def evaluation(example):
    return example("evaluation")


def test_loss_counts_each_token_by_its_weight(evaluation):
    tokens = np.random.default_rng(0).integers(5, size=(2, 9)).astype(np.int32)
    logits = np.random.default_rng(1).normal(size=(2, 8, 5)).astype(np.float32)
    logp = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    losses = -np.take_along_axis(logp, tokens[:, 1:, None], axis=-1)[..., 0]

    def model(inputs):
        np.testing.assert_array_equal(inputs, tokens[:, :-1])
        return jnp.asarray(logits)

    total, count = evaluation.loss_fn(model, {"tokens": tokens})
    assert count == 16
    np.testing.assert_allclose(total, losses.sum(), rtol=1e-5)
    weights = np.zeros((2, 8), np.float32)
    weights[0, :3] = 1
    total, count = evaluation.loss_fn(model, {"tokens": tokens, "weights": weights})
    assert count == 3
    np.testing.assert_allclose(total, losses[0, :3].sum(), rtol=1e-5)


def test_evaluation_of_uniform_logits_is_eight_bits(evaluation, example):
    text = example("text")

    def uniform(batch):
        total, count = evaluation.loss_fn(lambda tokens: jnp.zeros((*tokens.shape, 256)), batch)
        return {"loss": total / count, "tokens": count}

    batches = text.held_out_batches(np.arange(77, dtype=np.uint8), rows=2, length=10)
    assert evaluation.evaluate(uniform, batches) == pytest.approx(8, rel=1e-6)


@pytest.mark.parametrize("length", [4, 64])
def test_generation_reads_the_last_real_token(evaluation, length):
    # A model that is sure of the next byte: the one after its token, so the sample counts upwards.
    def successor(tokens):
        assert tokens.shape == (2, length)
        return 1e3 * jnp.eye(256)[(tokens + 1) % 256]

    samples = evaluation.generate(successor, b"ab", 10, (2, length))
    assert samples == [b"abcdefghijkl"] * 2


def test_generation_depends_on_the_seed_only(evaluation):
    def uniform(tokens):
        return jnp.zeros((*tokens.shape, 256))

    first, again, other = (evaluation.generate(uniform, b"x", 20, (1, 8), seed=seed) for seed in (0, 0, 1))
    assert first == again
    assert first != other
