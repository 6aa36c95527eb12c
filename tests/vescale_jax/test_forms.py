"""Forms: what is a parameter, what it is called, and that the model comes back as it was."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from flax.core import freeze
from jax.sharding import Mesh

import vescale_jax as vs
from tests.vescale_jax import models


@pytest.fixture(scope="module")
def three(meshes: dict[int, Mesh]) -> Mesh:
    return meshes[3]


def paths(model: vs.Sharded) -> list[str]:
    return sorted(path for path, _ in model.tensors())


class Odd(nnx.Module):
    """Everything that may hang on a module."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.kernel = nnx.Param(jax.random.normal(rngs.params(), (3, 2)))
        self.value = nnx.Param(jnp.ones(2, jnp.uint8))
        self.flag = nnx.Param(jnp.array([True, False]))
        self.statistic = nnx.BatchStat(jnp.zeros(3))
        self.count = nnx.Variable(jnp.array(7))
        self.raw = jnp.arange(5.0) / 3
        self.numpy = np.arange(4.0, dtype=np.float32)
        self.name = "odd"
        self.function = jnp.tanh
        self.nothing = None
        self.dropout = nnx.Dropout(0.5, rngs=rngs)


def test_nnx_parameters_are_called_by_their_attributes(three: Mesh) -> None:
    assert paths(vs.fully_shard(lambda: Odd(nnx.Rngs(0)), three)) == ["flag", "kernel", "value"]


@pytest.mark.parametrize("built", [True, False])
def test_an_nnx_module_comes_back_as_it_was(built: bool, three: Mesh) -> None:
    odd = Odd(nnx.Rngs(0))
    again = vs.unshard(vs.fully_shard((lambda: Odd(nnx.Rngs(0))) if built else odd, three))
    assert isinstance(again, Odd)
    assert (again.name, again.function, again.nothing) == ("odd", jnp.tanh, None)
    for name in ("raw", "numpy"):
        np.testing.assert_allclose(getattr(again, name), getattr(odd, name), 1e-6)
    for name in ("value", "flag", "statistic", "count"):
        assert type(getattr(again, name)) is type(getattr(odd, name))
        np.testing.assert_array_equal(getattr(again, name)[...], getattr(odd, name)[...])
        assert getattr(again, name)[...].dtype == getattr(odd, name)[...].dtype


def test_only_nnx_parameters_are_sharded(three: Mesh) -> None:
    model = vs.fully_shard(lambda: Odd(nnx.Rngs(0)), three)
    rest = dict(zip(model.structure.form.rest_paths, model.rest, strict=True))
    assert {"count", "statistic", "dropout/rngs/count", "dropout/rngs/key"} <= set(rest)
    assert all(leaf.is_fully_replicated for leaf in rest.values())


def test_a_shared_nnx_layer_is_stored_once_and_stays_shared(three: Mesh) -> None:
    class Twice(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.first = nnx.Linear(2, 2, rngs=rngs)
            self.layers = nnx.List([self.first, nnx.Linear(2, 2, rngs=rngs), self.first])

    model = vs.fully_shard(lambda: Twice(nnx.Rngs(0)), three)
    assert paths(model) == ["first/bias", "first/kernel", "layers/1/bias", "layers/1/kernel"]
    again = vs.unshard(model)
    assert again.layers[0] is again.first is again.layers[2]


def test_subclasses_of_param_are_parameters(three: Mesh) -> None:
    class Adapter(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.lora = nnx.LoRA(3, 2, 4, rngs=rngs)

    assert paths(vs.fully_shard(lambda: Adapter(nnx.Rngs(0)), three)) == ["lora/lora_a", "lora/lora_b"]


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("built", [True, False])
def test_linen_variables_come_back_as_they_were(built: bool, frozen: bool, three: Mesh) -> None:
    variables = models.linen_variables()
    given = freeze(variables) if frozen else variables
    again = vs.unshard(vs.fully_shard(models.LinenNet(), three, params=(lambda: given) if built else given))
    jax.tree.map(
        np.testing.assert_array_equal, again["params"], freeze(variables)["params"] if frozen else variables["params"]
    )


def test_boxed_linen_parameters_are_unboxed(three: Mesh) -> None:
    init = linen.with_partitioning(linen.initializers.ones, ("model", None))
    module = linen.Dense(2, kernel_init=init)
    model = vs.fully_shard(module, three, params=lambda: module.init(jax.random.key(0), jnp.ones((1, 3))))
    np.testing.assert_array_equal(vs.unshard(model)["params"]["kernel"], np.ones((3, 2)))


def test_other_linen_collections_are_left_whole(three: Mesh) -> None:
    module = linen.BatchNorm(use_running_average=False)
    model = vs.fully_shard(module, three, params=module.init(jax.random.key(0), jnp.ones((2, 3))))
    assert paths(model) == ["bias", "scale"]
    assert model.structure.form.rest_paths == ("batch_stats/mean", "batch_stats/var")
    assert sorted(vs.unshard(model)) == ["batch_stats", "params"]


def test_a_pytree_of_any_kind_comes_back_as_it_was(three: Mesh) -> None:
    tree = {"a": (jnp.ones(3), [jnp.zeros((2, 0)), None]), "b": np.float32(2), "c": {"n": np.arange(3)}}
    again = vs.unshard(vs.fully_shard(tree, three))
    assert jax.tree.structure(again) == jax.tree.structure(tree)
    jax.tree.map(np.testing.assert_array_equal, again, tree)


def test_random_keys_in_a_pytree_are_no_parameters(three: Mesh) -> None:
    model = vs.fully_shard({"w": jnp.ones(3), "key": jax.random.key(0)}, three)
    assert paths(model) == ["w"]
    assert model.structure.form.rest_paths == ("key",)
    assert jax.random.key_data(vs.unshard(model)["key"]).tolist() == [0, 0]


@pytest.mark.parametrize("value", [jnp.ones(3), jnp.ones(())])
def test_a_bare_array_is_a_pytree_too(value: jax.Array, three: Mesh) -> None:
    np.testing.assert_array_equal(vs.unshard(vs.fully_shard(value, three)), value)


def test_two_parameters_of_one_name_are_refused(three: Mesh) -> None:
    tree = {"a/b": jnp.ones(2), "a": {"b": jnp.zeros(3)}}
    with pytest.raises(ValueError, match=r"^fully_shard: 1 fault\n  a/b: got "):
        vs.fully_shard(tree, three)


def test_sharding_leaves_the_users_model_alone(three: Mesh) -> None:
    net: Any = models.net()
    before = jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(net)))
    vs.fully_shard(net, three)
    jax.tree.map(np.testing.assert_array_equal, nnx.to_pure_dict(nnx.state(net)), before)
