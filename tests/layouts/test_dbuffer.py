"""DBuffer: filled and read shard by shard, and one array to every JAX transformation."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tests.layouts import drawn
from vescale_layouts import DBuffer, Layout
from vescale_planner import GroupPlan, Rows, TensorSpec, plan_group

pytestmark = pytest.mark.unchecked_annotations

SPECS = [TensorSpec("w", (7, 5), Rows(2)), TensorSpec("b", (3,)), TensorSpec("s", ())]


@pytest.fixture(scope="module")
def layout(meshes: dict[int, Mesh]) -> Layout:
    return Layout(plan_group(SPECS, 3, 4), meshes[3], "fsdp")


@pytest.fixture
def buffer(layout: Layout) -> DBuffer:
    return DBuffer.from_tensors(layout, drawn.tensors(layout.plan), np.float32)


@settings(max_examples=100)
@given(plan=drawn.plans(), dtype=st.sampled_from(drawn.DTYPES))
def test_read_gives_back_what_was_packed(plan: GroupPlan, dtype: np.dtype, meshes: dict[int, Mesh]) -> None:
    tensors = drawn.tensors(plan, dtype)
    buffer = DBuffer.from_tensors(Layout(plan, meshes[plan.num_shards], "fsdp"), tensors, dtype)
    assert buffer.data.dtype == dtype
    found = dict(buffer.read())
    assert list(found) == list(plan.slots)
    for name, tensor in tensors.items():
        assert found[name].dtype == dtype
        assert found[name].shape == tensor.shape
        np.testing.assert_array_equal(found[name], tensor)


@settings(max_examples=40)
@given(plan=drawn.plans(), stack=st.sampled_from([(1,), (3,), (2, 2)]))
def test_stacks_are_laid_out_layer_by_layer(plan: GroupPlan, stack: tuple[int, ...], meshes: dict[int, Mesh]) -> None:
    layout = Layout(plan, meshes[plan.num_shards], "fsdp", stack)
    layers = [drawn.tensors(plan, seed=i) for i in range(math.prod(stack))]
    tensors = {
        name: np.stack([layer[name] for layer in layers]).reshape(*stack, *slot.shape)
        for name, slot in plan.slots.items()
    }
    buffer = DBuffer.from_tensors(layout, tensors, np.float32)
    assert buffer.data.shape == layout.buffer_shape == (*stack, plan.buffer_size)
    assert {shard.data.shape for shard in buffer.data.addressable_shards} == {layout.local_shape}
    flat = np.asarray(buffer.data).reshape(len(layers), plan.buffer_size)
    for row, layer in zip(flat, layers, strict=True):
        np.testing.assert_array_equal(row, DBuffer.from_tensors(layout.layer, layer, np.float32).data)
    for found in (dict(buffer.read()), buffer.tensors()):
        for name, tensor in tensors.items():
            np.testing.assert_array_equal(found[name], tensor, err_msg=name)


@settings(max_examples=30)
@given(plan=drawn.plans())
def test_padding_is_zero(plan: GroupPlan, meshes: dict[int, Mesh]) -> None:
    ones = {name: np.ones(slot.shape, np.int32) for name, slot in plan.slots.items()}
    data = DBuffer.from_tensors(Layout(plan, meshes[plan.num_shards], "fsdp"), ones, np.int32).data
    assert int(np.asarray(data).sum()) == plan.tensor_size


def test_from_tensors_takes_jax_arrays_and_casts(layout: Layout) -> None:
    tensors = {name: jnp.ones(slot.shape, jnp.int32) for name, slot in layout.plan.slots.items()}
    buffer = DBuffer.from_tensors(layout, tensors, jnp.bfloat16)
    assert buffer.data.dtype == jnp.bfloat16
    assert float(dict(buffer.read())["s"]) == 1.0


def test_tensors_are_those_that_were_packed(buffer: DBuffer, layout: Layout) -> None:
    for name, tensor in drawn.tensors(layout.plan).items():
        np.testing.assert_array_equal(buffer.tensors()[name], tensor)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.int8])
def test_zeros_lie_in_shards(layout: Layout, dtype: np.dtype) -> None:
    data = DBuffer.zeros(layout, dtype).data
    assert data.sharding == layout.sharding
    assert data.dtype == dtype
    assert not np.asarray(data).any()


def test_an_abstract_buffer_has_shape_dtype_and_sharding(layout: Layout) -> None:
    data = DBuffer.abstract(layout, jnp.bfloat16).data
    assert (data.shape, data.dtype, data.sharding) == ((layout.buffer_size,), jnp.bfloat16, layout.sharding)


def test_every_device_holds_its_shard_only(buffer: DBuffer, layout: Layout) -> None:
    assert buffer.data.sharding == layout.sharding
    assert {shard.data.shape for shard in buffer.data.addressable_shards} == {(layout.shard_size,)}


def test_the_buffer_is_one_leaf_with_a_name(buffer: DBuffer) -> None:
    ((path, leaf),), _ = jax.tree_util.tree_flatten_with_path(buffer)
    assert jax.tree_util.keystr(path) == ".data"
    assert leaf is buffer.data


def test_tree_map_keeps_the_layout(buffer: DBuffer) -> None:
    doubled = jax.tree.map(lambda x: 2 * x, buffer)
    assert doubled.layout is buffer.layout
    np.testing.assert_array_equal(doubled.data, 2 * buffer.data)


def test_tree_map_may_put_anything_in_it(buffer: DBuffer) -> None:
    assert jax.tree.map(lambda x: x.shape, buffer).data == buffer.data.shape
    assert jax.tree.map(lambda x: None, buffer).data is None


def test_jit_takes_and_returns_it(buffer: DBuffer, layout: Layout) -> None:
    result = jax.jit(lambda b: jax.tree.map(lambda x: x + 1, b))(buffer)
    assert result.layout == layout
    assert result.data.sharding == layout.sharding
    np.testing.assert_array_equal(result.data, buffer.data + 1)


def test_an_equal_layout_is_no_reason_to_compile_again(layout: Layout, meshes: dict[int, Mesh]) -> None:
    traced: list[int] = []

    @jax.jit
    def double(b: DBuffer) -> DBuffer:
        traced.append(1)
        return jax.tree.map(lambda x: 2 * x, b)

    double(DBuffer.zeros(layout, jnp.float32))
    double(DBuffer.zeros(Layout(plan_group(SPECS, 3, 4), meshes[3], "fsdp"), jnp.float32))
    assert len(traced) == 1


def test_donation_deletes_the_old_array(buffer: DBuffer) -> None:
    jax.jit(lambda b: jax.tree.map(lambda x: x + 1, b), donate_argnums=0)(buffer)
    assert buffer.data.is_deleted()


def test_eval_shape_keeps_it_a_buffer(buffer: DBuffer, layout: Layout) -> None:
    shape = jax.eval_shape(lambda b: b, buffer)
    assert isinstance(shape, DBuffer)
    assert shape.data.shape == (layout.buffer_size,)


def test_grad_gives_a_buffer(buffer: DBuffer) -> None:
    grad = jax.grad(lambda b: jnp.sum(b.tensors()["w"] ** 2))(buffer)
    assert isinstance(grad, DBuffer)
    np.testing.assert_array_equal(grad.tensors()["w"], 2 * buffer.tensors()["w"])
    np.testing.assert_array_equal(grad.tensors()["b"], 0)


@pytest.mark.dtype_promotion("standard")
def test_optax_state_has_buffers_of_the_same_layout(buffer: DBuffer, layout: Layout) -> None:
    state = optax.adam(1e-3).init({"group": buffer})
    for moment in (state[0].mu, state[0].nu):
        assert moment["group"].layout == layout
        assert moment["group"].data.shape == buffer.data.shape


def test_a_mesh_with_replicas_is_read_once(meshes: dict[int, Mesh]) -> None:
    both = Mesh(meshes[8].devices.flat[:6].reshape(2, 3), ("data", "fsdp"))
    layout = Layout(plan_group(SPECS, 3, 4), both, "fsdp")
    tensors = drawn.tensors(layout.plan)
    found = dict(DBuffer.from_tensors(layout, tensors, np.float32).read())
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(found[name], tensor)


def test_a_buffer_that_lies_whole_on_every_device_can_be_read(buffer: DBuffer, layout: Layout) -> None:
    whole = jax.device_put(buffer, NamedSharding(layout.mesh, PartitionSpec()))
    np.testing.assert_array_equal(dict(whole.read())["w"], dict(buffer.read())["w"])


def test_all_faults_are_named_at_once(layout: Layout) -> None:
    with pytest.raises(ValueError) as raised:
        DBuffer.from_tensors(layout, {"w": np.ones((5, 7)), "s": np.ones(())}, np.float32)
    assert str(raised.value) == (
        "DBuffer.from_tensors: 2 faults\n"
        "  w: got shape (5, 7); want shape (7, 5); pass the tensors that were planned\n"
        "  b: got no tensor; want shape (3,); pass the tensors that were planned"
    )


def test_it_prints_dtype_and_layout(buffer: DBuffer, layout: Layout) -> None:
    assert repr(buffer) == f"DBuffer(float32, {layout!r})"
    assert repr(DBuffer(None, layout)) == f"DBuffer(NoneType, {layout!r})"
