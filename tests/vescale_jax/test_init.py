"""Initialisation: the same bits on every mesh, the plain model's values, one program for identical layers."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, Mesh

import vescale_jax as vs
from tests.vescale_jax import models
from vescale_jax import _init


def values(model: vs.Sharded) -> dict[str, np.ndarray]:
    return dict(model.tensors())


def assert_equal_bits(ours: dict[str, np.ndarray], theirs: dict[str, np.ndarray]) -> None:
    assert ours.keys() == theirs.keys()
    for path, value in theirs.items():
        assert ours[path].dtype == value.dtype
        assert ours[path].tobytes() == value.tobytes(), path


@pytest.fixture(scope="module")
def on_one(meshes: dict[int, Mesh]) -> dict[str, np.ndarray]:
    return values(vs.fully_shard(models.net, meshes[1]))


@pytest.mark.parametrize("n", [2, 3, 5, 8])
def test_values_have_the_same_bits_on_every_mesh(
    n: int, meshes: dict[int, Mesh], on_one: dict[str, np.ndarray]
) -> None:
    assert_equal_bits(values(vs.fully_shard(models.net, meshes[n])), on_one)


def test_values_do_not_depend_on_the_units(meshes: dict[int, Mesh], on_one: dict[str, np.ndarray]) -> None:
    model = vs.fully_shard(models.net, meshes[3], units=lambda path: path.rsplit("/", 1)[-1])
    for path, value in values(model).items():
        np.testing.assert_allclose(value, on_one[path], 1e-6)


def test_values_are_those_of_the_plain_model(on_one: dict[str, np.ndarray]) -> None:
    plain = nnx.to_flat_state(nnx.state(models.net(), nnx.Param))
    assert len(plain) == len(on_one)
    for path, leaf in plain:
        np.testing.assert_allclose(on_one["/".join(map(str, path))], leaf[...], 1e-6)


@pytest.mark.parametrize("impl", ["rbg", "unsafe_rbg"])
def test_other_random_number_generators_give_the_same_bits_too(impl: str, meshes: dict[int, Mesh]) -> None:
    def build() -> dict[str, jax.Array]:
        first, second = jax.random.split(jax.random.key(0, impl=impl))
        return {"w": jax.random.normal(first, (13, 7)), "v": jax.random.uniform(second, (3,))}

    found = {n: values(vs.fully_shard(build, meshes[n])) for n in (1, 3, 8)}
    assert_equal_bits(found[3], found[1])
    assert_equal_bits(found[8], found[1])
    np.testing.assert_allclose(found[1]["w"], build()["w"], 1e-6)


def test_linen_values_have_the_same_bits_on_every_mesh(meshes: dict[int, Mesh]) -> None:
    found = [values(vs.fully_shard(models.LinenNet(), meshes[n], params=models.linen_variables)) for n in (1, 5)]
    assert_equal_bits(found[1], found[0])
    plain = models.linen_variables()["params"]
    np.testing.assert_allclose(found[0]["layers_1/Dense_0/kernel"], plain["layers_1"]["Dense_0"]["kernel"], 1e-6)


def test_stacked_layers_are_initialised(meshes: dict[int, Mesh]) -> None:
    def build() -> nnx.Module:
        make = nnx.split_rngs(splits=3)(nnx.vmap(lambda rngs: models.Block(5, 7, rngs)))
        return make(nnx.Rngs(0))

    found = values(vs.fully_shard(build, meshes[5]))
    np.testing.assert_allclose(found["up/kernel"], build().up.kernel[...], 1e-6)


CONSTANTS: dict[str, Callable[[], Any]] = {
    "a scalar from Python": lambda: jnp.array(1.5),
    "a scalar in a dtype": lambda: jnp.bfloat16(1.5),
    "an integer": lambda: jnp.array(3),
    "ones": lambda: jnp.ones((3, 2)),
    "a NumPy array": lambda: np.arange(7, dtype=np.float32),
    "an empty array": lambda: jnp.zeros((0, 3)),
    "a large constant": lambda: jnp.asarray(np.arange(100, dtype=np.float32)),
}


@pytest.mark.parametrize("name", CONSTANTS)
def test_parameters_that_are_constants(name: str, meshes: dict[int, Mesh]) -> None:
    make = CONSTANTS[name]
    found = values(vs.fully_shard(lambda: {"w": make()}, meshes[3]))["w"]
    want = np.asarray(make())
    assert found.dtype == want.dtype
    np.testing.assert_array_equal(found, want)


def test_a_scalar_parameter_of_a_module(meshes: dict[int, Mesh]) -> None:
    class Scale(nnx.Module):
        def __init__(self) -> None:
            self.scale = nnx.Param(jnp.array(2.0))

    assert values(vs.fully_shard(Scale, meshes[3]))["scale"] == 2.0


def test_constants_of_the_rest(meshes: dict[int, Mesh]) -> None:
    class Counter(nnx.Module):
        def __init__(self) -> None:
            self.weight = nnx.Param(jnp.ones(3))
            self.count = nnx.Variable(jnp.array(7))
            self.table = jnp.arange(4.0)

    model = vs.fully_shard(Counter, meshes[3])
    assert {str(np.asarray(leaf)) for leaf in model.rest} == {"7", "[0. 1. 2. 3.]"}
    assert all(leaf.sharding == model.structure.replicated for leaf in model.rest)


def test_one_value_may_be_two_parameters(meshes: dict[int, Mesh]) -> None:
    def build() -> dict[str, jax.Array]:
        shared = jax.random.normal(jax.random.key(0), (7, 11))
        return {"a": shared, "b": shared, "c": 2 * shared}

    found = values(vs.fully_shard(build, meshes[3], units=lambda path: path))
    np.testing.assert_array_equal(found["a"], found["b"])
    np.testing.assert_array_equal(found["c"], 2 * found["a"])


def test_stored_values_have_the_policys_dtype(meshes: dict[int, Mesh]) -> None:
    policy = vs.MixedPrecisionPolicy(param_dtype=jnp.bfloat16)
    found = values(vs.fully_shard(models.tree, meshes[3], policy=policy))
    for path, value in {"embed": models.tree()["embed"], "scale": models.tree()["scale"]}.items():
        assert found[path].dtype == jnp.bfloat16
        np.testing.assert_array_equal(found[path], np.asarray(value.astype(jnp.bfloat16)))


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, Any, Any]]:
    """The programs that initialisation makes: group, slice of the computation, jitted function."""
    made: list[tuple[Any, Any, Any]] = []
    original = _init._program

    def record(group: Any, piece: Any) -> Any:
        made.append((group, piece, original(group, piece)))
        return made[-1][2]

    monkeypatch.setattr(_init, "_program", record)
    return made


def test_identical_layers_are_compiled_once(programs: list[Any], meshes: dict[int, Mesh]) -> None:
    model = vs.fully_shard(lambda: models.Net(nnx.Rngs(0), layers=6), meshes[3])
    assert len(model.structure.units) == 7
    assert len(programs) == 2
    kernels = [value for path, value in model.tensors() if path.endswith("up/kernel")]
    assert len({kernel.tobytes() for kernel in kernels}) == 6


def test_layers_that_differ_are_not_taken_for_each_other(programs: list[Any], meshes: dict[int, Mesh]) -> None:
    def build() -> dict[str, Any]:
        keys = jax.random.split(jax.random.key(0), 2)
        draw = (jax.random.normal, jax.random.uniform)
        return {"layers": [{"w": fn(key, (15, 9))} for fn, key in zip(draw, keys, strict=True)]}

    found = values(vs.fully_shard(build, meshes[3]))
    assert len(programs) == 2
    assert found["layers/0/w"].min() < 0 <= found["layers/1/w"].min()


def test_layers_that_differ_in_a_large_constant_are_not_taken_for_each_other(meshes: dict[int, Mesh]) -> None:
    tables = [np.arange(100, dtype=np.float32), np.arange(100, dtype=np.float32)[::-1].copy()]

    def build() -> dict[str, Any]:
        return {"layers": [{"w": jnp.asarray(table) * 2} for table in tables]}

    found = values(vs.fully_shard(build, meshes[3]))
    for i, table in enumerate(tables):
        np.testing.assert_array_equal(found[f"layers/{i}/w"], 2 * table)


def test_layers_that_differ_in_an_inner_constant_are_not_taken_for_each_other(meshes: dict[int, Mesh]) -> None:
    # Constants inside of a jitted function; printed, large arrays look alike in the middle.
    tables = [np.zeros(5000, np.float32), np.zeros(5000, np.float32)]
    tables[1][2500] = 1

    def build() -> dict[str, Any]:
        return {"layers": [{"w": jax.jit(lambda table=table: jnp.asarray(table) * 2)()} for table in tables]}

    found = values(vs.fully_shard(build, meshes[3]))
    assert [found[f"layers/{i}/w"].sum() for i in range(2)] == [0, 2]


def test_no_more_than_one_unit_is_whole_at_a_time(programs: list[Any], meshes: dict[int, Mesh]) -> None:
    def build() -> dict[str, Any]:
        keys = jax.random.split(jax.random.key(0), 8)
        return {"layers": [{"w": jax.random.normal(key, (64, 64))} for key in keys]}

    vs.fully_shard(build, meshes[8])
    ((group, piece, program),) = programs
    memory = program.lower(*piece.values).compile().memory_analysis()
    layer = group.layout.buffer_size * 4
    assert memory.temp_size_in_bytes <= 5 * layer
    assert memory.output_size_in_bytes <= layer // 8 + 64


def test_abstract_models_hold_no_arrays(programs: list[Any], meshes: dict[int, Mesh]) -> None:
    model = vs.fully_shard(models.net, meshes[3], abstract=True)
    assert programs == []
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(model))
    concrete = vs.fully_shard(models.net, meshes[3])
    assert jax.tree.structure(model) == jax.tree.structure(concrete)
    for ours, theirs in zip(jax.tree.leaves(model), jax.tree.leaves(concrete), strict=True):
        assert (ours.shape, ours.dtype, ours.sharding) == (theirs.shape, theirs.dtype, theirs.sharding)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_a_mesh_that_is_set_does_not_matter(kind: AxisType, on_one: dict[str, np.ndarray]) -> None:
    mesh = jax.make_mesh((4,), ("fsdp",), axis_types=(kind,))
    with jax.set_mesh(mesh):
        model = vs.fully_shard(models.net, mesh)
    assert_equal_bits(values(model), on_one)


def test_initialisation_inside_the_users_set_mesh_of_another_mesh(meshes: dict[int, Mesh], on_one: Any) -> None:
    # The mesh that is passed counts, not the one that happens to be set.
    with jax.set_mesh(jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)):
        model = vs.fully_shard(models.net, meshes[3])
    assert_equal_bits(values(model), on_one)
