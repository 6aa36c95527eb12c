"""Segments: spreads, totals and indices of any plan, device by device, against NumPy on the whole tensors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.layouts import drawn
from vescale_layouts import DBuffer, Layout, LocalSegments, Segments, Terms
from vescale_planner import TensorSpec, plan_group

# beartype draws random numbers, which hypothesis forbids while it draws.
pytestmark = pytest.mark.unchecked_annotations

REDUCERS = {"sum": (np.sum, 0), "max": (np.max, -np.inf), "min": (np.min, np.inf)}


def shards(layout):
    """The segments of every device, outside of any shard_map."""
    return [LocalSegments(layout, *(jnp.asarray(column) for column in runs.T)) for runs in Segments.of(layout).table]


def owners(plan):
    """For every element of the buffer the tensor it belongs to, and its position in the slot; T in padding."""
    owner = np.full(plan.buffer_size, len(plan.slots))
    position = np.zeros(plan.buffer_size, np.int64)
    for i, slot in enumerate(plan.ordered_slots):
        owner[slot.offset : slot.stop] = i
        position[slot.offset : slot.stop] = np.arange(slot.size)
    return owner.reshape(plan.num_shards, -1), position.reshape(plan.num_shards, -1)


@settings(max_examples=12)
@given(drawn.plans(largest=6), st.sampled_from([(), (2,)]))
def test_every_element_gets_the_value_of_its_tensor(meshes, plan, stack):
    layout = Layout(plan, meshes[plan.num_shards], "fsdp", stack)
    owner, _ = owners(plan)
    for k, local in enumerate(shards(layout)):
        found = local.spread(jnp.arange(len(plan.slots), dtype=jnp.int32), len(plan.slots))
        np.testing.assert_array_equal(found, np.broadcast_to(owner[k], layout.local_shape))


@settings(max_examples=8)
@given(drawn.plans(largest=6), st.sampled_from([(), (2,)]), st.sampled_from(list(REDUCERS)), st.integers(0, 99))
def test_totals_are_those_of_whole_tensors(meshes, plan, stack, reducer, seed):
    layout = Layout(plan, meshes[plan.num_shards], "fsdp", stack)
    owner, _ = owners(plan)
    buffer = np.random.default_rng(seed).integers(-99, 99, (*stack, *owner.shape)).astype(np.float32)
    reduce, empty = REDUCERS[reducer]
    for k, local in enumerate(shards(layout)):
        shard = buffer[..., k, :]
        found = local.total(jnp.asarray(shard), reducer)
        mine = [shard[..., owner[k] == i] for i in range(len(plan.slots))]
        np.testing.assert_array_equal(found, [reduce(x) if x.size else empty for x in mine])


@pytest.mark.parametrize("tensors", [1, 40, 400])
def test_long_shards_and_many_runs(mesh, tensors):
    # Runs that span chunks, begin and end within them, and fill them; more runs than are chosen by comparisons.
    rng = np.random.default_rng(tensors)
    sizes = rng.permutation(np.concatenate([rng.integers(1, 9, tensors), [256, 512, 700, 1500]]))
    plan = plan_group([TensorSpec(f"t{i}", (int(size),)) for i, size in enumerate(sizes)], 2, 1)
    layout = Layout(plan, mesh(2), "fsdp")
    owner, _ = owners(plan)
    for k, local in enumerate(shards(layout)):
        shard = rng.integers(-99, 99, plan.shard_size).astype(np.float32)
        want = np.zeros(len(plan.slots) + 1)
        np.add.at(want, owner[k], shard)
        np.testing.assert_array_equal(local.total(jnp.asarray(shard)), want[:-1])
        np.testing.assert_array_equal(
            local.spread(jnp.arange(len(plan.slots)), -1), np.where(owner[k] < len(plan.slots), owner[k], -1)
        )


@settings(max_examples=12)
@given(drawn.plans(largest=4), st.sampled_from([(), (2,)]))
def test_elements_find_their_rows(meshes, plan, stack):
    layout = Layout(plan, meshes[plan.num_shards], "fsdp", stack)
    owner, position = owners(plan)
    terms, start = [], 0
    for slot in plan.ordered_slots:
        rows = slot.shape[0] if slot.shape else 1
        length = max(slot.size // max(rows, 1), 1)
        terms.append(Terms(start, ((length, max(rows, 1), 1),), max(rows, 1)))
        start += max(rows, 1) * (stack or (1,))[0]
    for k, local in enumerate(shards(layout)):
        found = np.asarray(local.index(terms)).reshape((*stack, 1)[0], plan.shard_size)
        for layer, row in enumerate(found):
            for i, term in enumerate(terms):
                inside = owner[k] == i
                ((length, rows, _),) = term.dims
                want = term.start + position[k][inside] // length % rows + layer * term.layer_step
                np.testing.assert_array_equal(row[inside], want)


@pytest.mark.parametrize("stack", [(), (3,)])
def test_the_map_normalises_every_tensor_on_its_devices(meshes, stack):
    plan = plan_group([TensorSpec("a", (7, 3)), TensorSpec("b", (5,)), TensorSpec("c", ())], 3, 4)
    layout = Layout(plan, meshes[3], "fsdp", stack)
    rng = np.random.default_rng(0)
    tensors = {name: rng.normal(size=(*stack, *slot.shape)).astype(np.float32) for name, slot in plan.slots.items()}
    buffer = DBuffer.from_tensors(layout, tensors, jnp.float32)

    def unit(local, shard):
        norms = jnp.sqrt(jax.lax.psum(local.total(shard * shard), layout.axis))
        return shard / local.spread(norms, 1)

    found = DBuffer(jax.jit(lambda x: Segments.of(layout).map(unit, x))(buffer.data), layout)
    for name, tensor in found.read():
        np.testing.assert_allclose(tensor, tensors[name] / np.linalg.norm(tensors[name]), rtol=1e-5)


def test_tensors_beyond_int32_are_refused(mesh):
    plan = plan_group([TensorSpec("huge", (2**31,))], 2, 1)
    with pytest.raises(ValueError, match="want fewer than 2147483648"):
        Segments.of(Layout(plan, mesh(2), "fsdp"))
