"""gather and reduce_scatter: what NumPy says, each the other's transpose, in the dtypes that were asked for."""

import functools
import re
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from tests.layouts import drawn
from vescale_layouts import DBuffer, Layout, gather, reduce_scatter
from vescale_planner import Rows, TensorSpec, WholeTensor, plan_group

SPECS = [
    TensorSpec("w", (7, 5), Rows(2)),
    TensorSpec("b", (3,)),
    TensorSpec("s", ()),
    TensorSpec("none", (0, 4)),
    TensorSpec("m", (2, 3), WholeTensor()),
]


def layout_of(mesh: Mesh, specs: list[TensorSpec] = SPECS) -> Layout:
    return Layout(plan_group(specs, mesh.shape["fsdp"], 4), mesh, "fsdp")


def on_devices(layout: Layout, fn: Callable[..., object], out: PartitionSpec) -> Callable[..., object]:
    """`fn` of the local shard, jitted."""
    specs = PartitionSpec(layout.axis)
    return jax.jit(jax.shard_map(fn, mesh=layout.mesh, in_specs=specs, out_specs=out, check_vma=False))


def stacked(tensors: dict[str, jax.Array]) -> dict[str, jax.Array]:
    return {name: tensor[None] for name, tensor in tensors.items()}


@pytest.mark.parametrize("n", drawn.MESH_SIZES)
def test_gather_gives_every_device_the_tensors(n: int, meshes: dict[int, Mesh]) -> None:
    layout = layout_of(meshes[n])
    tensors = drawn.tensors(layout.plan)
    data = DBuffer.from_tensors(layout, tensors, np.float32).data
    found = on_devices(layout, lambda s: stacked(gather(layout, s)), layout.spec)(data)
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(found[name], np.stack([tensor] * n), err_msg=name)


@pytest.mark.parametrize("n", drawn.MESH_SIZES)
def test_reduce_scatter_leaves_the_sum_over_devices(n: int, meshes: dict[int, Mesh]) -> None:
    layout = layout_of(meshes[n])
    tensors = drawn.tensors(layout.plan)

    def local(shard: jax.Array) -> jax.Array:
        del shard
        weight = 1 + jax.lax.axis_index("fsdp").astype(jnp.float32)
        return reduce_scatter(layout, {name: weight * tensor for name, tensor in tensors.items()})

    data = on_devices(layout, local, layout.spec)(DBuffer.zeros(layout, jnp.float32).data)
    assert data.shape == (layout.buffer_size,)
    for name, tensor in DBuffer(data, layout).read():
        np.testing.assert_array_equal(tensor, tensors[name] * (n * (n + 1) / 2), err_msg=name)
    for start, stop in layout.plan.gaps:
        np.testing.assert_array_equal(data[start:stop], 0)


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("n", [1, 3, 8])
def test_the_gradient_of_gather_is_the_summed_shard(n: int, again: bool, meshes: dict[int, Mesh]) -> None:
    layout = layout_of(meshes[n])
    weights = drawn.tensors(layout.plan, seed=1)

    def local(shard: jax.Array) -> jax.Array:
        def loss(shard: jax.Array) -> jax.Array:
            tensors = gather(layout, shard, again=again)
            mine = 1 + jax.lax.axis_index("fsdp").astype(jnp.float32)
            return mine * functools.reduce(jnp.add, [jnp.sum(tensors[name] * w) for name, w in weights.items()])

        return jax.grad(loss)(shard)

    data = on_devices(layout, local, layout.spec)(DBuffer.zeros(layout, jnp.float32).data)
    for name, tensor in DBuffer(data, layout).read():
        np.testing.assert_array_equal(tensor, weights[name] * (n * (n + 1) / 2), err_msg=name)


def test_gathering_again_gives_the_same_and_is_not_merged_with_the_first(meshes: dict[int, Mesh]) -> None:
    layout = layout_of(meshes[3])
    data = DBuffer.from_tensors(layout, drawn.tensors(layout.plan), np.float32).data

    def twice(again: bool) -> Callable[..., object]:
        return on_devices(layout, lambda s: (gather(layout, s), gather(layout, s, again=again)), PartitionSpec())

    first, second = twice(True)(data)
    jax.tree.map(np.testing.assert_array_equal, first, second)
    counts = [len(re.findall(r" all-gather\(", twice(a).lower(data).compile().as_text())) for a in (False, True)]
    assert counts == [1, 2]


@pytest.mark.dtype_promotion("standard")
@pytest.mark.parametrize("dtype", ["int32", "int8", "uint8", "bool"])
def test_arrays_without_gradient_are_gathered_as_they_are(dtype: str, meshes: dict[int, Mesh]) -> None:
    layout = layout_of(meshes[5])
    tensors = drawn.tensors(layout.plan, np.dtype(dtype))
    data = DBuffer.from_tensors(layout, tensors, dtype).data
    found = on_devices(layout, lambda s: gather(layout, s), PartitionSpec())(data)
    for name, tensor in tensors.items():
        assert found[name].dtype == dtype
        np.testing.assert_array_equal(found[name], tensor)


def test_integers_are_gathered_under_strict_dtype_promotion(meshes: dict[int, Mesh]) -> None:
    layout = layout_of(meshes[2])
    data = DBuffer.zeros(layout, jnp.int32).data
    assert on_devices(layout, lambda s: gather(layout, s), PartitionSpec())(data)["w"].dtype == jnp.int32


def test_the_cast_stays_before_the_gather(meshes: dict[int, Mesh]) -> None:
    layout = layout_of(meshes[3])
    data = DBuffer.zeros(layout, jnp.float32).data

    def local(shard: jax.Array) -> dict[str, jax.Array]:
        # Computing in float32 afterwards is what tempts XLA to gather in float32.
        tensors = gather(layout, shard, gather_dtype=jnp.bfloat16)
        return {name: 2 * tensor.astype(jnp.float32) for name, tensor in tensors.items()}

    # In the program that XLA is given; the compiler for CPUs widens every bfloat16 collective to float32.
    text = on_devices(layout, local, PartitionSpec()).lower(data).as_text()
    ((operand, wire),) = re.findall(r'"stablehlo.all_gather"\((%\w+)\).* : \(tensor<\d+x(\w+)>\)', text)
    assert wire == "bf16"
    # XLA may move a convert over a gather, but not over a barrier.
    assert f"{operand} = stablehlo.optimization_barrier" in text


def test_the_sum_is_in_the_reduce_dtype(meshes: dict[int, Mesh]) -> None:
    layout = layout_of(meshes[8])
    tensors = drawn.tensors(layout.plan)

    def total(reduce_dtype: str) -> np.ndarray:
        def local(shard: jax.Array) -> jax.Array:
            # 256 + 7 ones: bfloat16 has 8 bits and loses each of the ones.
            mine = jnp.where(jax.lax.axis_index("fsdp") == 0, 256.0, 1.0).astype(shard.dtype)
            grads = {name: jnp.full(t.shape, mine) for name, t in tensors.items()}
            return reduce_scatter(layout, grads, reduce_dtype=reduce_dtype)

        data = on_devices(layout, local, layout.spec)(DBuffer.zeros(layout, jnp.float32).data)
        return dict(DBuffer(data, layout).read())["w"]

    np.testing.assert_array_equal(total("float32"), 263)
    assert (total("bfloat16") != 263).all()


def test_the_gradient_of_bfloat16_tensors_is_summed_in_float32_by_default(meshes: dict[int, Mesh]) -> None:
    layout = layout_of(meshes[8])

    def local(shard: jax.Array) -> jax.Array:
        mine = jnp.where(jax.lax.axis_index("fsdp") == 0, 256.0, 1.0).astype(jnp.bfloat16)
        return jax.grad(lambda s: jnp.sum(gather(layout, s, gather_dtype=jnp.bfloat16)["w"] * mine).astype(s.dtype))(
            shard
        )

    data = on_devices(layout, local, layout.spec)(DBuffer.zeros(layout, jnp.float32).data)
    assert data.dtype == jnp.float32
    np.testing.assert_array_equal(dict(DBuffer(data, layout).read())["w"], 263)


def test_a_group_without_elements_is_gathered_and_reduced(meshes: dict[int, Mesh]) -> None:
    layout = layout_of(meshes[3], [TensorSpec("none", (0, 4))])

    def local(shard: jax.Array) -> tuple[jax.Array, jax.Array]:
        tensors = gather(layout, shard)
        return tensors["none"], reduce_scatter(layout, tensors)

    data = DBuffer.zeros(layout, jnp.float32).data
    tensor, shard = on_devices(layout, local, PartitionSpec())(data)
    assert tensor.shape == (0, 4)
    assert shard.shape == (0,)


def test_reduce_scatter_names_all_faults(meshes: dict[int, Mesh]) -> None:
    layout = layout_of(meshes[2], SPECS[:2])
    with pytest.raises(ValueError) as raised:
        reduce_scatter(layout, {"w": jnp.ones((5, 7))})
    assert str(raised.value) == (
        "pack: 2 faults\n"
        "  w: got shape (5, 7); want shape (7, 5); plan the group anew or mend the tensor\n"
        "  b: got no tensor; want one of shape (3,); pass all tensors of the plan"
    )
