"""Layout: a plan on a mesh, and where every element lies."""

import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from jax.sharding import Mesh, PartitionSpec

from tests.layouts import drawn
from vescale_layouts import DBuffer, Layout
from vescale_planner import GroupPlan, Rows, TensorSpec, Tile, plan_group

pytestmark = pytest.mark.unchecked_annotations

SPECS = [TensorSpec("w", (7, 5), Rows(2)), TensorSpec("b", (3,)), TensorSpec("s", ()), TensorSpec("none", (0, 4))]


def layout_of(mesh: Mesh, specs: list[TensorSpec] = SPECS) -> Layout:
    return Layout(plan_group(specs, mesh.shape["fsdp"], 4), mesh, "fsdp")


@settings(max_examples=60)
@given(plan=drawn.plans())
def test_locate_finds_every_element_in_the_devices_memory(plan: GroupPlan, meshes: dict[int, Mesh]) -> None:
    layout = Layout(plan, meshes[plan.num_shards], "fsdp")
    # Every element of the group has its own number, so a wrong place cannot hold the right value.
    numbers, total = {}, 0
    for name, slot in plan.slots.items():
        size = math.prod(slot.shape)
        numbers[name] = np.arange(total + 1, total + size + 1, dtype=np.int32).reshape(slot.shape)
        total += size
    data = DBuffer.from_tensors(layout, numbers, np.int32).data
    shards = {shard.device: np.asarray(shard.data) for shard in data.addressable_shards}
    shards = [shards[device] for device in layout.mesh.devices.flat]
    for name, tensor in numbers.items():
        for index in np.ndindex(tensor.shape):
            found = layout.locate(name, index)
            assert shards[found.device][found.position] == tensor[index]
            assert found.offset == found.device * layout.shard_size + found.position


@settings(max_examples=40)
@given(plan=drawn.plans())
def test_locate_agrees_with_the_placements(plan: GroupPlan, meshes: dict[int, Mesh]) -> None:
    layout = Layout(plan, meshes[plan.num_shards], "fsdp")
    assert list(layout.placements) == list(plan.slots)
    for name, placement in layout.placements.items():
        for element, index in enumerate(np.ndindex(plan.slots[name].shape)):
            assert layout.locate(name, index).device == placement.owner(element)


def test_tensors_stored_in_another_order_lie_where_locate_says_or_are_refused(meshes: dict[int, Mesh]) -> None:
    # Transposed and tiled slots: a layout that does not know them must not lay their elements in row-major order.
    specs = [TensorSpec("w", (8, 24), Tile(4, 4)), TensorSpec("v", (24, 8), Tile(4, 4))]
    plan = plan_group(specs, 8, storage="free")
    assert any(slot.storage != "row_major" for slot in plan.slots.values())
    tensors = {name: np.arange(192, dtype=np.int32).reshape(slot.shape) for name, slot in plan.slots.items()}
    try:
        layout = Layout(plan, meshes[8], "fsdp")
        flat = np.asarray(DBuffer.from_tensors(layout, tensors, np.int32).data)
    except (NotImplementedError, ValueError):
        return
    for name, tensor in tensors.items():
        assert all(flat[layout.locate(name, i).offset] == tensor[i] for i in np.ndindex(tensor.shape)), name


def test_the_buffer_is_cut_evenly_over_the_axis(meshes: dict[int, Mesh]) -> None:
    layout = layout_of(meshes[3])
    assert layout.spec == PartitionSpec("fsdp")
    assert layout.sharding.shard_shape((layout.buffer_size,)) == (layout.shard_size,)
    assert layout.buffer_size == 3 * layout.shard_size


def test_equal_plans_on_equal_meshes_make_equal_layouts(mesh: Callable[..., Mesh]) -> None:
    first, second = layout_of(mesh(3)), layout_of(mesh(3))
    assert first == second
    assert hash(first) == hash(second)
    assert first != layout_of(mesh(2))
    assert first != layout_of(mesh(3), SPECS[:2])
    assert first != "layout"


def test_a_stack_is_cut_along_its_last_dim_only(meshes: dict[int, Mesh]) -> None:
    layer = layout_of(meshes[3])
    stack = Layout(layer.plan, layer.mesh, "fsdp", (4,))
    assert stack.spec == PartitionSpec(None, "fsdp")
    assert (stack.buffer_shape, stack.local_shape) == ((4, layer.buffer_size), (4, layer.shard_size))
    assert stack.layer == layer != stack
    assert layer.layer is layer
    assert "stack (4,)" in repr(stack)
    assert (
        len({stack, layer, Layout(layer.plan, layer.mesh, "fsdp", (5,)), Layout(layer.plan, layer.mesh, "fsdp")}) == 3
    )


def test_a_mesh_with_more_axes_cuts_over_one(mesh: Callable[..., Mesh]) -> None:
    both = Mesh(mesh(6).devices.reshape(2, 3), ("data", "fsdp"))
    layout = Layout(plan_group(SPECS, 3, 4), both, "fsdp")
    assert layout.sharding.shard_shape((layout.buffer_size,)) == (layout.shard_size,)


def test_it_prints_the_mesh_and_the_plan(meshes: dict[int, Mesh]) -> None:
    layout = layout_of(meshes[2])
    assert repr(layout) == f"Layout(4 tensors, 2 shards of {layout.shard_size} elements over 'fsdp')"
    assert str(layout) == f"axis 'fsdp' of mesh {{'fsdp': 2}}\n{layout.plan}"


def test_an_unknown_axis_is_refused(meshes: dict[int, Mesh]) -> None:
    with pytest.raises(ValueError) as raised:
        Layout(plan_group(SPECS, 2), meshes[2], "model")
    assert str(raised.value) == "Layout: got axis 'model'; want one of the mesh's axes ['fsdp']"


def test_a_plan_for_another_number_of_devices_is_refused(meshes: dict[int, Mesh]) -> None:
    with pytest.raises(ValueError) as raised:
        Layout(plan_group(SPECS, 2), meshes[3], "fsdp")
    assert str(raised.value) == (
        "Layout: got a plan for 2 shards; want 3, the devices of axis 'fsdp'; plan the group for this mesh"
    )


def test_locate_refuses_what_is_not_there(meshes: dict[int, Mesh]) -> None:
    layout = layout_of(meshes[2])
    with pytest.raises(KeyError) as unknown:
        layout.locate("x")
    assert unknown.value.args == (f"Layout: got tensor 'x'; want one of {list(layout.plan.slots)}",)
    for index in [(7, 0), (0, -1), (0,), ()]:
        with pytest.raises(IndexError) as outside:
            layout.locate("w", index)
        assert str(outside.value) == f"Layout: w: got index {index}; want one integer a dim, inside shape (7, 5)"
    with pytest.raises(IndexError):
        layout.locate("none", (0, 0))


def test_a_scalar_is_located_without_an_index(meshes: dict[int, Mesh]) -> None:
    layout = layout_of(meshes[2])
    assert layout.locate("s").offset == layout.plan.slots["s"].offset
