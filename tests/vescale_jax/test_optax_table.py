"""Optimizers of optax run as docs/optimizers.md says, and equal to themselves without sharding."""

import functools
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest

import vescale_jax as vs

DOCUMENT = Path(__file__).parents[2] / "docs" / "optimizers.md"
AS_IT_IS, WRAPPED, REFUSED = "as it is", "`per_parameter`", "refused"


def matrices(params):
    return jax.tree.map(lambda x: x.ndim > 1, params)


def labels(params):
    return jax.tree.map(lambda x: "ab"[x.ndim > 1], params)


def parameters():
    keys = iter(jax.random.split(jax.random.key(0), 4))
    return {name: 0.5 * jax.random.normal(next(keys), SHAPES[name]) for name in SHAPES}


SHAPES = {"b": (3,), "s": (), "v": (4, 6), "w": (4, 6)}
STEPS = 3

ALIASES = """
adabelief adadelta adagrad adam adamax adamaxw adamw adan amsgrad fromage lamb lars lion nadam nadamw novograd
optimistic_adam_v2 optimistic_gradient_descent radam rmsprop rprop sgd sign_sgd signum yogi
"""
CONTRIB = """
acprop ademamix adopt dadapt_adamw dog dowg galore madgrad muon prodigy schedule_free_adamw schedule_free_sgd
simplified_ademamix
"""
OPTIMIZERS = {
    **{name: getattr(optax, name)(0.1) for name in ALIASES.split()},
    "adafactor": optax.adafactor(0.1, min_dim_size_to_factor=4),
    "lbfgs": optax.scale_by_lbfgs(3),
    "noisy_sgd": optax.noisy_sgd(0.1, key=jax.random.key(0)),
    "sm3": optax.masked(optax.sm3(0.1), lambda params: jax.tree.map(lambda x: x.ndim > 0, params)),
    **{f"contrib.{name}": getattr(optax.contrib, name)(0.1) for name in CONTRIB.split()},
    "contrib.cocob": optax.contrib.cocob(),
    "adamw(mask=...)": optax.adamw(0.1, weight_decay=0.5, mask=matrices),
    "masked": optax.chain(optax.sgd(0.1), optax.masked(optax.scale(0.5), matrices)),
    "multi_transform": optax.multi_transform({"a": optax.adam(0.1), "b": optax.sgd(0.1, momentum=0.9)}, labels),
    "inject_hyperparams": optax.inject_hyperparams(optax.adamw)(learning_rate=0.1),
    "apply_if_finite": optax.apply_if_finite(optax.adam(0.1), 3),
    "MultiSteps": optax.MultiSteps(optax.adam(0.1), 2),
    "ema": optax.chain(optax.ema(0.9), optax.sgd(0.1)),
    "clip": optax.chain(optax.clip(0.1), optax.sgd(0.1)),
    "clip_by_global_norm": optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(0.1)),
    "clip_by_block_rms": optax.chain(optax.clip_by_block_rms(0.1), optax.sgd(0.1)),
    "adaptive_grad_clip": optax.chain(optax.adaptive_grad_clip(0.1), optax.sgd(0.1)),
    "centralize": optax.chain(optax.centralize(), optax.sgd(0.1)),
    "add_noise": optax.chain(optax.add_noise(0.1, 0.5, jax.random.key(0)), optax.sgd(0.1)),
    "scale_by_schedule": optax.chain(optax.scale_by_schedule(lambda count: 0.5**count), optax.sgd(0.1)),
}


@functools.cache
def documented():
    """The table of the document: how each optimizer runs, by name."""
    section = DOCUMENT.read_text().partition("## Any optax optimizer, by parameter")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (`[^|]+`) \| ([^|]+) \|", section, re.MULTILINE)
    return {name: how.strip() for names, how in rows for name in re.findall(r"`([^`]+)`", names)}


@pytest.fixture(scope="module")
def sharded(mesh):
    return {n: vs.fully_shard(parameters(), mesh(n)) for n in (1, 3, 8)}


def gradients():
    return [
        {
            name: np.asarray(jax.random.normal(jax.random.key(10 * i + k), shape))
            for k, (name, shape) in enumerate(SHAPES.items())
        }
        for i in range(STEPS)
    ]


@functools.partial(jax.jit, static_argnums=0, compiler_options={"xla_backend_optimization_level": 0})
def trained(tx, params, grads):
    def step(carry, grads):
        params, state = carry
        updates, state = tx.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), None

    return jax.lax.scan(step, (params, tx.init(params)), grads)[0][0]


def stacked(trees):
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_run_as_documented(name, sharded):
    tx, how = OPTIMIZERS[name], documented()[name]
    if how == REFUSED:
        with pytest.raises(ValueError, match=r"^per_parameter: \d+ fault"):
            vs.train_state(sharded[3], vs.optimizers.per_parameter(tx, sharded[3]))
    if how != AS_IT_IS:
        with pytest.raises(ValueError, match=r"^train_state: \d+ fault"):
            vs.train_state(sharded[3], tx)
    if how == REFUSED:
        return
    grads = gradients()
    theirs = trained(tx, parameters(), stacked(grads))
    # What runs as it is does so on any mesh, as other tests show.
    for n in (3,) if how == AS_IT_IS else (1, 3, 8):
        model = sharded[n]
        ours = tx if how == AS_IT_IS else vs.optimizers.per_parameter(tx, model)
        buffers = stacked([vs.fully_shard(g, model.structure.mesh).params for g in grads])
        found = dict(model.__class__(trained(ours, model.params, buffers), {}, (), model.structure).tensors())
        for path, value in theirs.items():
            np.testing.assert_allclose(found[path], value, rtol=2e-5, atol=2e-6, err_msg=path)


def test_the_table_is_complete():
    assert sorted(documented()) == sorted(OPTIMIZERS)
