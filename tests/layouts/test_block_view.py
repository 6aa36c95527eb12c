"""Block views: every block of every tensor once, whole, in its place, for any blocks, storage and number of shards."""

import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tests.planner import strategies
from tests.vescale_jax import counting
from vescale_layouts import BlockArrays, BlockView, DBuffer, Layout, block_index, choose_blocks
from vescale_layouts._block_index import refines
from vescale_layouts._storage import store
from vescale_planner import (
    Cuts,
    Elements,
    GroupPlan,
    Rows,
    Slab,
    Slot,
    TensorSpec,
    Tile,
    WholeTensor,
    plan_group,
    plan_unit,
)

# beartype draws random numbers, which hypothesis forbids while it draws.
pytestmark = pytest.mark.unchecked_annotations

# The reference cuts whole tensors, by the words of the blocks' docstrings.


def as_matrices(tensor, block):
    """The tensor as (matrices, rows, cols), and the height and width of its blocks."""
    shape = tensor.shape
    if isinstance(block, Tile):
        rows = shape[-2] if len(shape) > 1 else 1
        return tensor.reshape(-1, rows, shape[-1] if shape else 1), block.rows, block.cols
    if isinstance(block, Rows):
        flat = tensor.reshape(1, -1, shape[-1] if shape else 1)
        return flat, block.count, flat.shape[2]
    if isinstance(block, Slab) and block.dims:
        flat = tensor.reshape(1, math.prod(shape[: block.dims]), -1)
        return flat, block.count, flat.shape[2]
    return tensor.reshape(1, 1, -1), 1, block.count if isinstance(block, Elements) else tensor.size


def whole_blocks(tensor, block):
    """(matrices, blocks down, blocks across, rows, cols), edge blocks filled with zeros."""
    flat, height, width = as_matrices(tensor, block)
    height, width = min(height, flat.shape[1]), min(width, flat.shape[2])
    down, across = -(-flat.shape[1] // height), -(-flat.shape[2] // width)
    out = np.zeros((len(flat), down, across, height, width), flat.dtype)
    for m, d, a in itertools.product(range(len(flat)), range(down), range(across)):
        part = flat[m, d * height : (d + 1) * height, a * width : (a + 1) * width]
        out[m, d, a, : part.shape[0], : part.shape[1]] = part
    return out


def fill(plan):
    """Tensors that number their elements from 1, and the whole buffer with zeros for padding."""
    tensors, start = {}, 1
    buffer = np.zeros(plan.buffer_size, np.int64)
    for name, slot in plan.slots.items():
        tensors[name] = np.arange(start, start + slot.spec.size).reshape(slot.shape)
        if slot.spec.size:
            buffer[slot.offset : slot.stop] = store(slot, tensors[name])
        start += slot.spec.size
    return tensors, buffer


def check_tables(plan, blocks=None):
    """Gathers the blocks of all shards by the tables alone, and compares them with those of the whole tensors."""
    tensors, buffer = fill(plan)
    chosen = choose_blocks(plan, blocks)
    index = block_index(plan, chosen)
    shards = np.pad(buffer.reshape(plan.num_shards, -1), ((0, 0), (0, 1)))
    gathered = [
        np.concatenate([shards[k][index.positions(i, k)] for k in range(plan.num_shards)])
        for i in range(len(index.batches))
    ]
    assert [batch.count * plan.num_shards for batch in index.batches] == [len(batch) for batch in gathered]
    for name, block in chosen:
        i, where = index.order(name)
        np.testing.assert_array_equal(gathered[i][where], whole_blocks(tensors[name], block))
    there = np.concatenate([batch[batch > 0] for batch in gathered]) if gathered else np.zeros(0)
    assert (
        sorted(there) == sorted(np.concatenate([tensors[n].ravel() for n, _ in chosen])) if chosen else not there.size
    )
    return index


@settings(max_examples=80)
@given(strategies.groups(5), st.one_of(st.integers(1, 9), st.integers(10, 300)), st.integers(1, 4), st.booleans())
def test_own_blocks_are_found_in_the_tables(group, num_shards, alignment, free):
    plans = plan_unit(group, num_shards, alignment, storage="free") if free else [plan_group(group, num_shards)]
    for plan in plans:
        check_tables(plan)


@pytest.mark.parametrize("storage", ["row_major", "transposed", "tiled"])
@settings(max_examples=40)
@given(
    st.lists(st.integers(1, 9), min_size=2, max_size=3).map(tuple),
    st.builds(Tile, st.integers(1, 5), st.integers(1, 5)),
    st.integers(1, 12),
)
def test_all_storage_orders(storage, shape, tile, num_shards):
    # The planner would choose the storage; here it is forced, in the one slot of a plan made by hand.
    spec = TensorSpec("w", shape, tile)
    cuts = Slot(spec, 0, 0, storage).cuts
    shard, start = next(
        (shard, start)
        for shard in itertools.count(1)
        if (start := cuts.first_start(3, shard)) is not None and start + cuts.size <= num_shards * shard
    )
    plan = GroupPlan(num_shards, 1, shard, (Slot(spec, start, cuts.size, storage),))
    plan.check()
    check_tables(plan)


FINER = {
    "tiles in rows": (TensorSpec("w", (70, 48), Rows(16)), Tile(8, 16)),
    "tiles in tiles": (TensorSpec("w", (3, 40, 48), Tile(16, 16)), Tile(8, 5)),
    "runs in runs": (TensorSpec("w", (1001,), Elements(64)), Elements(16)),
    "runs in rows": (TensorSpec("w", (33, 24), Rows(2)), Elements(12)),
    "runs in experts": (TensorSpec("w", (7, 6, 10), Slab(1)), Elements(15)),
    "tiles in experts": (TensorSpec("w", (7, 6, 10), Slab(1)), Tile(4, 4)),
    "elements in tiles": (TensorSpec("w", (20, 9), Tile(3, 4)), Elements(1)),
    "anything in a whole tensor": (TensorSpec("w", (20, 9), WholeTensor()), Tile(3, 4)),
}


@pytest.mark.parametrize("name", FINER)
@pytest.mark.parametrize("num_shards", [1, 3, 16])
def test_view_blocks_may_be_finer(name, num_shards):
    spec, block = FINER[name]
    others = [TensorSpec("a", (5,)), TensorSpec("z", (3, 3), WholeTensor())]
    index = check_tables(plan_group([others[0], spec, others[1]], num_shards), {"w": block})
    assert [batch.names for batch in index.batches] == [("w",)]


cuts = st.one_of(
    st.builds(Cuts.uniform, st.just(210), st.integers(1, 250)),
    st.builds(
        Cuts.periodic, st.just(210), st.integers(1, 40), st.sampled_from([3, 5, 6, 7, 10, 14, 21, 30, 35, 42, 70])
    ),
)


@settings(max_examples=300)
@given(cuts, cuts)
def test_blocks_fit_when_every_cut_is_one(coarse, fine):
    assert refines(coarse, fine) == all(fine.allows(x) for x in range(1, 210) if coarse.allows(x))


def test_blocks_that_may_be_cut_are_all_named():
    plan = plan_group([TensorSpec("a", (9, 300)), TensorSpec("b", (64, 32), Tile(32, 32)), TensorSpec("c", (8,))], 1)
    with pytest.raises(ValueError) as caught:
        choose_blocks(plan, {"a": Elements(256), "b": Tile(24, 32), "c": WholeTensor(), "d": Rows(1)})
    assert str(caught.value) == (
        "BlockView: 4 faults\n"
        "  d: got a block for a tensor without a slot; want one of ['a', 'b', 'c']; drop it\n"
        "  a: got blocks elements:256 of a parameter planned with elements:1, row_major storage; want a parameter "
        "whose shards never cut elements:256; pass blocks=Elements(count=256) for it to fully_shard (or to "
        "TensorSpec)\n"
        "  b: got blocks tile:24,32 of a parameter planned with tile:32,32, row_major storage; want a parameter whose "
        "shards never cut tile:24,32; pass blocks=Tile(rows=24, cols=32) for it to fully_shard (or to TensorSpec)\n"
        "  c: got blocks whole of a parameter planned with elements:1, row_major storage; want a parameter whose "
        "shards never cut whole; pass blocks=WholeTensor() for it to fully_shard (or to TensorSpec)"
    )


def test_other_tiles_of_tiled_storage_are_refused():
    specs = [TensorSpec("up", (2, 35, 22), Tile(8, 8)), TensorSpec("down", (22, 35), Tile(8, 8))]
    plan = plan_group(specs, 8, storage="free")
    assert {slot.storage for slot in plan.slots.values()} == {"tiled"}
    with pytest.raises(ValueError) as caught:
        choose_blocks(plan, {"up": Tile(4, 4)})
    assert str(caught.value) == (
        "BlockView: 1 fault\n"
        "  up: got blocks tile:4,4 of a parameter planned with tile:8,8, tiled storage; want tile:8,8, the tile it is "
        "stored by; take Tile(rows=8, cols=8), or plan with storage='row_major'"
    )


def test_tables_stay_small_whatever_the_row_lengths():
    def table_size(plan):
        return block_index(plan, choose_blocks(plan, None)).table_size

    odd = [TensorSpec(f"w{i}", shape, Tile(32, 32)) for i, shape in enumerate([(1031, 1033), (4096, 2880)] * 3)]
    for num_shards in (2, 64):
        plan = plan_group(odd, num_shards)
        assert table_size(plan) < min(200, plan.shard_size / 16)
    # A shard's tables have only what the shard holds.
    many = [TensorSpec(f"w{i}", (64, 96), Tile(32, 32)) for i in range(300)]
    plan = plan_group(many, 300, order="default")
    assert table_size(plan) < 64 < plan.shard_size / 16


def test_positions_may_pass_two_to_the_31():
    # 2**32 elements in one tensor: sums run over, and come out right.
    plan = plan_group([TensorSpec("w", (64, 8192, 8192), Tile(4096, 4096))], 128)
    index = block_index(plan, choose_blocks(plan, None))
    (batch,) = index.batches
    assert (batch.count, plan.shard_size) == (2, 2**25)
    assert index.order("w")[1].reshape(-1).tolist() == list(range(256))
    at = index.positions(0, 127)
    np.testing.assert_array_equal(at[0, :2, :2], [[0, 1], [8192, 8193]])
    np.testing.assert_array_equal(at[1, -1, -2:], [2**25 - 2, 2**25 - 1])


# On devices.

# Blocks of two shapes, so that little has to be compiled.
GROUP = [
    TensorSpec("tiles", (2, 19, 14), Tile(8, 8)),
    TensorSpec("turned", (14, 19), Tile(8, 8)),
    TensorSpec("rows", (7, 16), Rows(1)),
    TensorSpec("runs", (50,), Elements(16)),
    TensorSpec("whole", (2, 8), WholeTensor()),
    TensorSpec("nothing", (0, 4), Tile(2, 2)),
    TensorSpec("experts", (3, 4, 4), Slab(1)),
]


def plan_for(n):
    return plan_group(GROUP, n, 4, storage="free")


def center(local, shard, chunk):
    """Each block less its largest element; beside it these elements, and how many elements there are."""
    blocks = local.split(shard)
    scales = [x.max((1, 2)) for x in blocks]
    sizes = [jnp.where(mask, 1, 0).sum((1, 2)) for mask in local.masks()]
    if chunk is None:
        return local.join([x - scale[:, None, None] for x, scale in zip(blocks, scales, strict=True)]), scales, sizes
    (shard,), scales = local.update(lambda x, has: ((x[0] - has[:, None, None],), has), (shard,), scales, chunk=chunk)
    return shard, scales, sizes


@pytest.mark.parametrize(("n", "chunk"), [(1, None), (2, 100), (3, None), (5, 1), (8, None), ((2, 4), None)])
def test_devices_see_their_own_blocks(n, chunk, meshes):
    # (2, 4): cut over the second axis, the same on the first.
    mesh = Mesh(np.array(jax.devices()).reshape(n), ("replica", "fsdp")) if isinstance(n, tuple) else meshes[n]
    layout = Layout(plan_for(mesh.shape["fsdp"]), mesh, "fsdp")
    view = BlockView.of(layout)
    tensors, _ = fill(layout.plan)
    buffer = DBuffer.from_tensors(layout, tensors, np.int32)
    compiled = jax.jit(lambda x: view.map(functools.partial(center, chunk=chunk), x)).lower(buffer.data).compile()
    assert counting.collectives(compiled) == {}
    new, scales, sizes = compiled(buffer.data)

    scales, sizes = BlockArrays(scales, view).tensors(), BlockArrays(sizes, view).tensors()
    for name, block in view.blocks:
        blocks = whole_blocks(tensors[name], block)
        np.testing.assert_array_equal(scales[name], blocks.max((3, 4)))
        np.testing.assert_array_equal(sizes[name], (blocks > 0).sum((3, 4)))
        flat, height, width = as_matrices(tensors[name], block)
        spread = blocks.max((3, 4)).repeat(height, 1).repeat(width, 2)[:, : flat.shape[1], : flat.shape[2]]
        tensors[name] = (flat - spread).reshape(tensors[name].shape)
    found = dict(DBuffer(new, layout).read())
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(found[name], tensor)
    for start, stop in layout.plan.gaps:
        assert not np.any(new[start:stop])


def test_the_devices_test_has_tiled_storage_and_several_batches():
    plan = plan_for(8)
    assert {slot.storage for slot in plan.slots.values()} == {"row_major", "tiled"}
    assert len(block_index(plan, choose_blocks(plan, None)).batches) == 2


def test_what_blocks_have_moves_between_meshes_and_groupings(meshes):
    rng = np.random.default_rng(0)
    eight = BlockView.of(Layout(plan_for(8), meshes[8], "fsdp"))
    scales = {name: rng.normal(size=eight.index.order(name)[1].shape).astype(np.float32) for name, _ in eight.blocks}
    on_eight = BlockArrays.from_tensors(eight, scales, np.float32)
    assert all(x.sharding == NamedSharding(meshes[8], PartitionSpec("fsdp")) for x in on_eight.data)
    alone = BlockView.of(Layout(plan_group(GROUP[:1], 3), meshes[3], "fsdp"))
    on_three = BlockArrays.from_tensors(alone, on_eight.tensors(), np.float32)
    np.testing.assert_array_equal(on_three.tensors()["tiles"], scales["tiles"])


def test_a_group_of_nothing(meshes):
    layout = Layout(plan_group([TensorSpec("nothing", (0,))], 2), meshes[2], "fsdp")
    view = BlockView.of(layout)
    assert view.batches == ()
    assert view.map(lambda local, x: local.join(local.split(x), x), DBuffer.zeros(layout, np.float32).data).shape == (
        0,
    )


@pytest.mark.parametrize(("n", "chunk", "stack"), [(2, 100, ()), (3, 2**20, ()), (5, 150, (2,)), (3, 30, (2, 3))])
def test_updates_in_place_go_through_chunks_and_layers(n, chunk, stack, meshes):
    layout = Layout(plan_for(n), meshes[n], "fsdp", stack)
    view = BlockView.of(layout)
    rng = np.random.default_rng(0)
    written, read = (
        DBuffer.from_tensors(
            layout, {k: rng.integers(1, 99, (*stack, *s.shape)) for k, s in layout.plan.slots.items()}, np.int32
        )
        for _ in range(2)
    )
    counts = BlockArrays.zeros(view, np.int32)

    def step(weight, blocks, count):
        x, y = blocks
        # What is kept must change once for each block, however chunks overlap.
        return (x + weight * y.max((1, 2), keepdims=True),), count + (y > 0).sum((1, 2), dtype=np.int32)

    update = jax.jit(
        lambda x, y, kept, w: view.update(step, (x,), kept, read=(y,), replicated=w, chunk=chunk), donate_argnums=(0, 2)
    )
    new, kept = written.data.copy(), counts.data
    compiled = update.lower(new, read.data, kept, np.int32(3)).compile()
    assert counting.collectives(compiled) == {}
    for _ in range(2):
        (new,), kept = compiled(new, read.data, tuple(kept), np.int32(3))
    found, sizes = dict(DBuffer(new, layout).read()), BlockArrays(kept, view).tensors()
    before, others = dict(written.read()), dict(read.read())
    for name, block in view.blocks:
        for layer in np.ndindex(*stack):
            blocks = whole_blocks(others[name][layer], block)
            flat, height, width = as_matrices(before[name][layer], block)
            spread = blocks.max((3, 4)).repeat(height, 1).repeat(width, 2)[:, : flat.shape[1], : flat.shape[2]]
            np.testing.assert_array_equal(found[name][layer], (flat + 6 * spread).reshape(before[name][layer].shape))
            np.testing.assert_array_equal(sizes[name][layer], 2 * (blocks > 0).sum((3, 4)))
