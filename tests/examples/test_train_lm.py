"""The example's training script: its loss, evaluation and generation, and that training lowers the loss."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from rich.console import Console

import vescale_jax as vs


@pytest.fixture(scope="session")
def train_lm(example):
    return example("train_lm")


def test_loss_counts_each_token_by_its_weight(train_lm):
    tokens = np.random.default_rng(0).integers(5, size=(2, 9)).astype(np.int32)
    logits = np.random.default_rng(1).normal(size=(2, 8, 5)).astype(np.float32)
    logp = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    losses = -np.take_along_axis(logp, tokens[:, 1:, None], axis=-1)[..., 0]

    def model(inputs):
        np.testing.assert_array_equal(inputs, tokens[:, :-1])
        return jnp.asarray(logits)

    total, count = train_lm.loss_fn(model, {"tokens": tokens})
    assert count == 16
    np.testing.assert_allclose(total, losses.sum(), rtol=1e-5)
    weights = np.zeros((2, 8), np.float32)
    weights[0, :3] = 1
    total, count = train_lm.loss_fn(model, {"tokens": tokens, "weights": weights})
    assert count == 3
    np.testing.assert_allclose(total, losses[0, :3].sum(), rtol=1e-5)


def test_evaluation_of_uniform_logits_is_eight_bits(train_lm, example):
    text = example("text")

    def uniform(batch):
        total, count = train_lm.loss_fn(lambda tokens: jnp.zeros((*tokens.shape, 256)), batch)
        return {"loss": total / count, "tokens": count}

    batches = text.held_out_batches(np.arange(77, dtype=np.uint8), rows=2, length=10)
    assert train_lm.evaluate(uniform, batches) == pytest.approx(8, rel=1e-6)


@pytest.mark.parametrize("length", [4, 64])
def test_generation_reads_the_last_real_token(train_lm, length):
    # A model that is sure of the next byte: the one after its token, so the sample counts upwards.
    def successor(tokens):
        assert tokens.shape == (2, length)
        return 1e3 * jnp.eye(256)[(tokens + 1) % 256]

    samples = train_lm.generate(successor, b"ab", 10, (2, length))
    assert samples == [b"abcdefghijkl"] * 2


def test_generation_depends_on_the_seed_only(train_lm):
    def uniform(tokens):
        return jnp.zeros((*tokens.shape, 256))

    first, again, other = (train_lm.generate(uniform, b"x", 20, (1, 8), seed=seed) for seed in (0, 0, 1))
    assert first == again
    assert first != other


def test_training_lowers_the_loss_on_all_devices(train_lm, example, mesh):
    batches = example("text").TrainingBatches(np.frombuffer(b"never odd or even. " * 50, np.uint8), rows=8, length=16)
    # A table from byte to logits takes tokens and returns logits as the language model does, and compiles fast.
    model = vs.fully_shard(lambda: nnx.Embed(256, 256, rngs=nnx.Rngs(0)), mesh(8))
    optimizer = train_lm.adamw(30, 0.3)
    state = vs.train_state(model, optimizer)
    step = vs.train_step(train_lm.loss_fn, optimizer, max_norm=train_lm.CLIP_NORM)
    measure = vs.apply(train_lm.held_out_loss, mean=True)
    probe = [batches.batch(100)]
    state, losses, curve = train_lm.train(state, step, measure, batches, probe, 30, Console(quiet=True))
    assert losses[0] == pytest.approx(8, rel=0.05)
    assert losses[-1] < 0.5 * losses[0]
    assert curve[30 // train_lm.CURVE_POINTS * train_lm.CURVE_POINTS] < 0.5 * losses[0]
    assert int(state.step) == 30


def test_the_model_can_be_asked_for_by_two_sizes(train_lm):
    config = train_lm.model_config(layers=2, width=90)
    assert (config.layers, config.width, config.heads, config.mlp_width) == (2, 90, 3, 250)
    with pytest.raises(ValueError, match=r"--width 100 is no multiple"):
        train_lm.model_config(layers=2, width=100)
