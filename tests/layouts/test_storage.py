"""Storage orders on arrays agree with the planner's positions, on hosts and on devices, and reach every layer above."""

import itertools

import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from vescale_layouts import DBuffer, Layout, RaggedShard, pack, unpack
from vescale_layouts._storage import load, store
from vescale_planner import Elements, Slot, TensorSpec, Tile, plan_group

dims = st.integers(1, 9)
tiles = st.builds(Tile, st.integers(1, 5), st.integers(1, 5))


@settings(max_examples=40)
@given(st.lists(dims, min_size=2, max_size=4).map(tuple), tiles, st.sampled_from(["row_major", "transposed", "tiled"]))
def test_every_element_lies_where_the_plan_says(shape, tile, storage):
    spec = TensorSpec("w", shape, tile)
    order = Slot(spec, 0, 0, storage).tile_order
    slot = Slot(spec, 0, order.size if order else spec.size, storage)
    tensor = np.arange(1, spec.size + 1).reshape(shape)
    run = store(slot, tensor)
    assert run.shape == (slot.size,)
    for index in itertools.product(*map(range, shape)):
        assert run[slot.position(index)] == tensor[index]
    assert np.count_nonzero(run) == spec.size
    np.testing.assert_array_equal(load(slot, run), tensor)
    on_device = store(slot, jnp.asarray(tensor))
    np.testing.assert_array_equal(on_device, run)
    np.testing.assert_array_equal(load(slot, on_device), tensor)


@given(
    st.lists(dims, min_size=1, max_size=3).map(tuple), tiles, st.integers(1, 9), st.sampled_from(["row_major", "free"])
)
def test_placements_agree_with_the_plan(shape, tile, num_shards, storage):
    specs = [TensorSpec("a", shape, tile), TensorSpec("b", (3,), Elements(2)), TensorSpec("c", (2, 5, 3), Tile(2, 2))]
    plan = plan_group(specs, num_shards, storage=storage)
    for name, slot in plan.slots.items():
        placement = RaggedShard.from_slot(slot, num_shards, plan.shard_size)
        for device in range(num_shards):
            held = [piece for piece in plan.pieces(device) if piece.name == name]
            elements = placement.elements(device)
            assert [(piece.start, piece.stop) for piece in held] == [(elements.start, elements.stop)] * bool(elements)
            assert all(placement.owner(element) == device for element in elements)


def test_a_tiled_plan_packs_and_unpacks_on_every_path(meshes):
    # Both dims leave edge tiles, and 8 shards cannot hold whole bands of rows.
    specs = [
        TensorSpec("up", (2, 35, 22), Tile(8, 8)),
        TensorSpec("down", (22, 35), Tile(8, 8)),
        TensorSpec("n", (22,)),
    ]
    plan = plan_group(specs, 8, storage="free")
    assert "tiled" in {slot.storage for slot in plan.slots.values()}
    layout = Layout(plan, meshes[8], "fsdp")
    rng = np.random.default_rng(0)
    tensors = {name: rng.normal(size=slot.shape).astype(np.float32) for name, slot in plan.slots.items()}
    buffer = DBuffer.from_tensors(layout, tensors, np.float32)
    packed = pack(plan, {name: jnp.asarray(tensor) for name, tensor in tensors.items()}, jnp.float32)
    np.testing.assert_array_equal(buffer.data, packed)
    for found in (dict(buffer.read()), unpack(plan, packed)):
        for name, tensor in tensors.items():
            np.testing.assert_array_equal(found[name], tensor)
    where = layout.locate("up", (1, 34, 21))
    assert buffer.data[where.offset] == tensors["up"][1, 34, 21]
    assert divmod(where.offset, plan.shard_size) == (where.device, where.position)
