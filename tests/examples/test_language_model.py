"""The example's model: shapes, what it may see, and its rotary attention."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx


@pytest.fixture(scope="session")
def language_model(example):
    return example("language_model")


@pytest.fixture(scope="module")
def logits(language_model):
    """Logits of a small model with random parameters, compiled: tokens (2, 10) -> (2, 10, 19)."""
    config = language_model.ModelConfig(vocabulary=19, layers=1, width=12, heads=2, mlp_width=21)

    def initialise_and_apply(tokens):  # one compilation for both, which is faster than op by op
        return language_model.LanguageModel(config, rngs=nnx.Rngs(0))(tokens)

    return jax.jit(initialise_and_apply)


def test_a_later_token_changes_no_earlier_logits(logits):
    tokens = np.random.default_rng(0).integers(19, size=(2, 10)).astype(np.int32)
    changed = tokens.copy()
    changed[0, 6] = (tokens[0, 6] + 1) % 19
    before, after = np.asarray(logits(tokens)), np.asarray(logits(changed))
    assert before.shape == (2, 10, 19)
    assert before.dtype == np.float32
    np.testing.assert_array_equal(before[0, :6], after[0, :6])
    np.testing.assert_array_equal(before[1], after[1])
    assert (np.abs(before[0, 6:] - after[0, 6:]).max(axis=-1) > 0).all()


def test_products_of_rotated_vectors_depend_on_the_distance_only(language_model):
    rng = np.random.default_rng(1)
    pair = np.tile(rng.normal(size=(2, 1, 1, 30)), (1, 12, 1, 1)).astype(np.float32)  # a query, a key, everywhere
    query, key = np.asarray(jax.jit(language_model.rotate)(pair)[:, :, 0])
    scores = query @ key.T
    for distance in range(-11, 12):
        diagonal = np.diagonal(scores, distance)
        np.testing.assert_allclose(diagonal, diagonal[0], rtol=1e-4, atol=1e-4)
    assert abs(scores[0, 0] - scores[0, 1]) > 1e-2


def test_rotation_keeps_length_and_dtype(language_model):
    x = np.random.default_rng(2).normal(size=(2, 5, 3, 6)).astype(np.float32)
    rotated = np.asarray(jax.jit(language_model.rotate)(x))
    np.testing.assert_allclose(np.linalg.norm(rotated, axis=-1), np.linalg.norm(x, axis=-1), rtol=1e-5)
    np.testing.assert_array_equal(rotated[:, 0], x[:, 0])
    assert jax.eval_shape(language_model.rotate, jax.ShapeDtypeStruct(x.shape, jnp.bfloat16)).dtype == jnp.bfloat16


def test_layers_are_a_list_and_widths_do_not_divide_by_eight(language_model):
    config = language_model.ModelConfig()
    assert not any(size % 8 == 0 for size in (config.width, config.width // config.heads, config.mlp_width))
    abstract = nnx.eval_shape(lambda: language_model.LanguageModel(config, rngs=nnx.Rngs(0)))
    assert isinstance(abstract.layers, nnx.List)
    assert len(abstract.layers) == config.layers
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(nnx.state(abstract, nnx.Param)))


def test_an_odd_head_width_is_refused(language_model):
    with pytest.raises(ValueError, match=r"width 180 does not give 4 heads of an even width.* multiple of 8"):
        language_model.ModelConfig(heads=4)


def test_stacked_layers_are_the_layers_one_after_the_other(language_model):
    sizes = {"vocabulary": 19, "layers": 2, "width": 12, "heads": 2, "mlp_width": 21}
    stacked = language_model.LanguageModel(language_model.ModelConfig(**sizes, stack=True), rngs=nnx.Rngs(0))
    listed = language_model.LanguageModel(language_model.ModelConfig(**sizes), rngs=nnx.Rngs(1))
    for name in ("embedding", "norm", "head"):
        nnx.update(getattr(listed, name), nnx.state(getattr(stacked, name)))
    layers = nnx.state(stacked.layers)
    assert {leaf.shape[0] for leaf in jax.tree.leaves(layers)} == {2}
    kernels = jax.tree.leaves(layers.attention.query.kernel)[0]
    assert np.abs(kernels[0] - kernels[1]).max() > 1e-3  # each layer has random numbers of its own
    for i, layer in enumerate(listed.layers):
        nnx.update(layer, jax.tree.map(lambda leaf, i=i: leaf[i], layers))
    tokens = np.random.default_rng(0).integers(19, size=(2, 10)).astype(np.int32)
    logits = nnx.jit(lambda model, tokens: model(tokens))
    np.testing.assert_allclose(logits(stacked, tokens), logits(listed, tokens), rtol=1e-5, atol=1e-5)
