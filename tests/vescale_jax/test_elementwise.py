"""Optimizers that do the same to buffers as to parameters pass; all others are refused before the first step."""

import jax
import jax.numpy as jnp
import optax
import optax.contrib
import pytest

import vescale_jax as vs
from examples.block_optimizer import block_descent
from tests.vescale_jax import models


def matrices(params):
    return jax.tree.map(lambda x: x.ndim > 1, params)


ALIKE = {
    "adamw": optax.adamw(0.1),
    "sgd": optax.sgd(0.1, momentum=0.9, nesterov=True),
    "lion": optax.lion(0.1),
    "adagrad": optax.adagrad(0.1),
    "rmsprop": optax.rmsprop(0.1),
    "adabelief": optax.adabelief(0.1),
    "schedule": optax.adam(optax.cosine_decay_schedule(1.0, 10)),
    "global norm": optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(0.1)),
    "values": optax.chain(optax.clip(1.0), optax.adam(0.1)),
    "schedule free": optax.contrib.schedule_free_adamw(0.1),
    "hyperparameters": optax.inject_hyperparams(optax.adamw)(learning_rate=0.1),
    "if finite": optax.apply_if_finite(optax.adam(0.1), 3),
    "several steps": optax.MultiSteps(optax.adam(0.1), 2),
    "ema": optax.chain(optax.ema(0.9), optax.sgd(0.1)),
    "muon in a chain": optax.chain(
        optax.clip_by_global_norm(1.0), vs.optimizers.muon(0.1), optax.add_decayed_weights(0.1)
    ),
    "muon in several steps": optax.MultiSteps(vs.optimizers.muon(0.1), 2),
    "mask of all": optax.adamw(0.1, mask=lambda params: jax.tree.map(lambda _: True, params)),
}

BESIDE_OURS = {
    "adaptive clipping before muon": optax.chain(optax.adaptive_grad_clip(0.1), vs.optimizers.muon(0.1)),
    "trust ratios after muon": optax.chain(vs.optimizers.muon(0.1), optax.scale_by_trust_ratio()),
    **{
        f"decay mask after {make.__name__}": optax.chain(make(0.1), optax.add_decayed_weights(0.1, mask=matrices))
        for make in (
            vs.optimizers.muon,
            vs.optimizers.adamw_8bit,
            vs.optimizers.shampoo,
            vs.optimizers.soap,
            block_descent,
        )
    },
}

OTHERWISE = {
    **BESIDE_OURS,
    "lamb": optax.lamb(0.1),
    "lars": optax.lars(0.1),
    "adafactor": optax.adafactor(0.1),
    "novograd": optax.novograd(0.1),
    "muon": optax.contrib.muon(0.1),
    "adaptive clipping": optax.chain(optax.adaptive_grad_clip(0.1), optax.sgd(0.1)),
    "norm of one": optax.chain(optax.clip_by_block_rms(1.0), optax.sgd(0.1)),
    "centralized": optax.chain(optax.centralize(), optax.sgd(0.1)),
    "decay mask": optax.adamw(0.1, mask=matrices),
    "mask of a scale": optax.chain(optax.adam(0.1), optax.masked(optax.scale(0.1), matrices)),
    "labels": optax.multi_transform(
        {"a": optax.adam(0.1), "b": optax.sgd(0.1)},
        lambda params: jax.tree.map(lambda x: "a" if x.ndim > 1 else "b", params),
    ),
}


@pytest.fixture(scope="module")
def model(mesh):
    return vs.fully_shard(models.net, mesh(3), abstract=True)


@pytest.mark.parametrize("name", ALIKE)
def test_what_treats_all_elements_alike_passes(name, model):
    vs.train_state(model, ALIKE[name])


@pytest.mark.parametrize("name", OTHERWISE)
def test_what_would_treat_buffers_otherwise_is_refused(name, model):
    with pytest.raises(ValueError, match=r"^train_state: \d+ faults?\n  .*got an optimizer "):
        vs.train_state(model, OTHERWISE[name])


def test_the_message_names_the_parameters(mesh):
    model = vs.fully_shard({"layers": [{"w": jnp.ones((3, 2)), "b": jnp.ones(2)}]}, mesh(3))
    with pytest.raises(ValueError) as raised:
        vs.train_state(model, OTHERWISE["decay mask"])
    assert str(raised.value) == (
        "train_state: 1 fault\n"
        "  layers/0/w: got an optimizer that treats it differently from its buffer (such as a mask by rank or by "
        "name); want one that treats all parameters of a buffer alike, element by element; run it on the parameters: "
        "tx = vs.optimizers.per_parameter(tx, model)"
    )


def test_one_parameter_may_be_reduced_over(mesh):
    # There is nothing else in its buffer, and padding adds nothing to a norm.
    vs.train_state(vs.fully_shard({"w": jnp.ones((3, 2))}, mesh(3)), OTHERWISE["lamb"])


@pytest.mark.parametrize("name", BESIDE_OURS)
def test_what_stands_beside_ours_is_to_be_wrapped_alone(name, model):
    with pytest.raises(ValueError, match=r"chain\(\.\.\., vs\.optimizers\.per_parameter\(it, model\), \.\.\.\)"):
        vs.train_state(model, BESIDE_OURS[name])


def test_what_is_by_parameter_does_not_hide_a_mask_beside_it(model):
    by_parameter = vs.optimizers.per_parameter(optax.lamb(0.1), model)
    vs.train_state(model, optax.chain(by_parameter, optax.scale(0.5)))
    with pytest.raises(ValueError, match="treats it differently from its buffer"):
        vs.train_state(model, optax.chain(by_parameter, optax.add_decayed_weights(0.1, mask=matrices)))


def test_stepping_aside_leaves_nothing_in_the_caches_of_jit(model):
    """The check traces the user's own jitted functions, too."""
    ours = vs.optimizers.muon(0.1)
    jitted = optax.GradientTransformation(jax.jit(ours.init), jax.jit(ours.update))
    plain, kept = (vs.train_state(model, tx).opt_state for tx in (ours, jitted))
    assert jax.tree.structure(plain) == jax.tree.structure(kept)
    assert jax.tree.leaves(kept)
