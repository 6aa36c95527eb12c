"""Steps that are not finite: skipped on all devices alike, counted, reported, and as if they had never been."""

import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import Mesh

import vescale_jax as vs
from vescale_planner import Elements

ROWS = 24


class Net(nnx.Module):
    """A layer with everything that a step changes beside parameters: statistics, and counters of random keys."""

    def __init__(self) -> None:
        rngs = nnx.Rngs(params=0, dropout=1)
        self.up = nnx.Linear(3, 20, rngs=rngs)
        self.norm = nnx.BatchNorm(20, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.dropout(self.norm(self.up(x))).sum(-1)


def loss_fn(net: Net, batch: dict[str, jax.Array]) -> jax.Array:
    return jnp.mean((net(batch["x"]) - batch["y"]) ** 2)


def batches(count: int) -> list[dict[str, np.ndarray]]:
    random = np.random.default_rng(0)
    shapes = {"x": (ROWS, 3), "y": (ROWS,)}
    return [{name: random.normal(size=s).astype(np.float32) for name, s in shapes.items()} for _ in range(count)]


def spoilt(batch: dict[str, np.ndarray], row: int, value: float) -> dict[str, np.ndarray]:
    """The batch with one target that spoils loss and gradient of its device."""
    y = batch["y"].copy()
    y[row] = value
    return {**batch, "y": y}


OPTIMIZERS = {
    "adamw": (lambda: optax.adamw(1e-2), Elements(1)),
    "adamw_8bit": (lambda: vs.optimizers.adamw_8bit(1e-2, min_size=16, block_size=16), Elements(16)),
}


def raw(tree: Any) -> list[np.ndarray]:
    """The bits of all leaves."""

    def bits(leaf: jax.Array) -> np.ndarray:
        return np.asarray(jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf)

    return [bits(leaf) for leaf in jax.tree.leaves(tree)]


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("devices", [1, 3, 8])
def test_a_step_that_is_not_finite_changes_nothing(meshes: dict[int, Mesh], name: str, devices: int) -> None:
    make, blocks = OPTIMIZERS[name]
    tx = make()
    step = vs.train_step(loss_fn, tx, max_norm=1.0)
    state = vs.train_state(vs.fully_shard(Net, meshes[devices], blocks=blocks), tx)
    first, second = batches(2)
    state, metrics = step(state, first)
    assert not bool(metrics.skipped)
    # The square of the last one overflows.
    for skipped, (row, value) in enumerate([(0, np.nan), (ROWS - 1, np.inf), (ROWS // 2, 3e38)], start=1):
        before = raw(dataclasses.replace(state, skipped=None))
        state, metrics = step(state, spoilt(second, row, value))
        assert bool(metrics.skipped)
        assert not np.isfinite([metrics.loss, metrics.grad_norm]).all()
        for old, new in zip(before, raw(dataclasses.replace(state, skipped=None)), strict=True):
            np.testing.assert_array_equal(old, new)
        copies = [int(shard.data) for shard in state.skipped.addressable_shards]
        assert (int(state.step), copies) == (1, [skipped] * devices)

    twin = vs.train_state(vs.fully_shard(Net, meshes[devices], blocks=blocks), tx)
    for batch in (first, second):
        twin, _ = step(twin, batch)
    state, metrics = step(state, second)
    assert not bool(metrics.skipped)
    for ours, theirs in zip(*(raw((s.model, s.opt_state, s.step)) for s in (state, twin)), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_without_it_one_such_step_spoils_all_parameters(meshes: dict[int, Mesh]) -> None:
    tx = optax.adamw(1e-2)
    step = vs.train_step(loss_fn, tx, skip_nonfinite=False)
    state, metrics = step(vs.train_state(vs.fully_shard(Net, meshes[3]), tx), spoilt(batches(1)[0], 0, np.nan))
    assert not bool(metrics.skipped)
    assert (int(state.step), int(state.skipped)) == (1, 0)
    for path, tensor in state.model.tensors():
        assert np.isnan(tensor).any(), path


def test_it_costs_no_collective_and_next_to_no_memory(meshes: dict[int, Mesh]) -> None:
    def net() -> nnx.Module:
        rngs = nnx.Rngs(0)
        return nnx.List([nnx.Linear(128, 128, rngs=rngs) for _ in range(4)])

    def loss_fn(layers: Any, x: jax.Array) -> jax.Array:
        for layer in layers:
            x = jnp.tanh(layer(x))
        return jnp.mean(x**2)

    tx = optax.adamw(1e-2)
    state = vs.train_state(vs.fully_shard(net, meshes[8], abstract=True), tx)
    batch = jax.ShapeDtypeStruct((8, 128), jnp.float32)
    counts, temporary, aliased = [], [], []
    for skip in (True, False):
        compiled = vs.train_step(loss_fn, tx, max_norm=1.0, skip_nonfinite=skip).lower(state, batch).compile()
        counts.append(
            sorted(re.findall(r" (all-\w+|reduce-scatter|collective-permute)(?:-start)?\(", compiled.as_text()))
        )
        memory = compiled.memory_analysis()
        temporary.append(memory.temp_size_in_bytes)
        aliased.append(memory.alias_size_in_bytes)
    assert counts[0] == counts[1]
    assert counts[0].count("all-reduce") == 1
    assert aliased[0] == aliased[1]
    # The two new moments of a device, at most, beside the old ones; a GPU program computes both in one kernel.
    assert temporary[0] - temporary[1] < 2.1 * 4 * 128 * 129 * 4 / 8
