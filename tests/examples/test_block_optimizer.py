"""The example of an optimizer on blocks: its scales are means over blocks, and devices make no difference."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import vescale_jax as vs
from vescale_planner import Tile


@pytest.fixture(scope="session")
def block_optimizer(example):
    return example("block_optimizer")


def test_every_block_has_its_own_scale(block_optimizer, meshes):
    optimizer = block_optimizer.block_descent(1.0, decay=0.0)
    grad = np.random.default_rng(0).normal(size=(19, 12)).astype(np.float32)
    grads = vs.fully_shard({"w": grad}, meshes[3], blocks=Tile(8, 8)).params
    updates, state = jax.jit(optimizer.update)(grads, optimizer.init(grads))
    (scales,) = state["root"]["float32"].tensors().values()
    (update,) = [x for _, x in updates["root"]["float32"].read()]
    for down in range(3):
        for across in range(2):
            at = np.s_[8 * down : 8 * down + 8, 8 * across : 8 * across + 8]
            np.testing.assert_allclose(scales[0, down, across], np.abs(grad[at]).mean(), rtol=1e-6)
            np.testing.assert_allclose(update[at], -grad[at] / np.abs(grad[at]).mean(), rtol=1e-5)


def test_devices_make_no_difference(block_optimizer):
    (losses, parameters), (alone, others) = (block_optimizer.train(n, steps=8) for n in (8, 1))
    assert losses[-1] < losses[0]
    np.testing.assert_allclose(losses, alone, rtol=1e-4)
    for name, parameter in parameters.items():
        np.testing.assert_allclose(jnp.asarray(parameter), others[name], atol=1e-4)
