"""The optimizers of the example: each can be chosen, and lowers the loss of a small model on blocks of its own."""

import jax
import numpy as np
import pytest
from flax import nnx

import vescale_jax as vs


@pytest.fixture(scope="session")
def optimizers(example):
    return example("optimizers")


def test_the_learning_rate_rises_and_falls_to_zero(optimizers):
    rates = [float(optimizers.schedule(100, 0.5)(i)) for i in range(101)]
    assert rates[0] == rates[-1] == 0
    assert rates.index(max(rates)) == 5
    assert max(rates) == 0.5


def test_an_unknown_one_is_refused(optimizers):
    with pytest.raises(ValueError, match=r"no such optimizer; choose one of adamw, adamw_8bit, muon, shampoo, soap"):
        optimizers.choose("adam", 3, 0.1)


@pytest.mark.parametrize("name", ["adamw", "adamw_8bit", "muon", "shampoo", "soap"])
def test_each_trains_on_the_blocks_that_it_asks_for(optimizers, mesh, name):
    def build():
        return nnx.List([nnx.Linear(70, 66, use_bias=False, rngs=nnx.Rngs(0))])

    def loss_fn(layers, x):
        return ((layers[0](x) - x[:, :66]) ** 2).mean()

    chosen = optimizers.choose(name, 40, 0.01)
    state = vs.train_state(vs.fully_shard(build, mesh(2), blocks=chosen.blocks), chosen.optimizer)
    step = vs.train_step(loss_fn, chosen.optimizer)
    x = np.asarray(jax.random.normal(jax.random.key(1), (80, 70)))
    losses = []
    for _ in range(10):
        state, metrics = step(state, x)
        losses.append(float(metrics.loss))
    assert losses[-1] < 0.9 * losses[0]
    assert int(state.skipped) == 0
