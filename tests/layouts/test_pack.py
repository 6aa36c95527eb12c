"""pack and unpack: every element exactly once, zeros in the padding, and the shapes as they were."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings

from tests.layouts import drawn
from vescale_layouts import pack, unpack
from vescale_planner import GroupPlan, Rows, TensorSpec, plan_group

pytestmark = pytest.mark.unchecked_annotations

PLAN = plan_group([TensorSpec("w", (3, 5), Rows(1)), TensorSpec("s", ()), TensorSpec("none", (2, 0))], 4, alignment=4)


# Shapes differ from example to example, so each is compiled anew: few examples.
@settings(max_examples=20)
@given(plan=drawn.plans(largest=3))
def test_unpack_undoes_pack(plan: GroupPlan) -> None:
    tensors = drawn.tensors(plan)
    buffer = pack(plan, {name: jnp.asarray(t) for name, t in tensors.items()}, jnp.float32)
    assert buffer.shape == (plan.buffer_size,)
    # Every element once: what lies outside of the slots is zero.
    assert float(buffer.sum()) == sum(float(t.sum()) for t in tensors.values())
    found = unpack(plan, buffer)
    assert list(found) == list(plan.slots)
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(found[name], tensor)
        assert found[name].shape == tensor.shape


def test_padding_is_zero() -> None:
    ones = {name: jnp.ones(slot.shape) for name, slot in PLAN.slots.items()}
    buffer = np.asarray(pack(PLAN, ones, jnp.float32))
    for start, stop in PLAN.gaps:
        np.testing.assert_array_equal(buffer[start:stop], 0)
    assert buffer.sum() == PLAN.tensor_size


def test_every_tensor_is_cast() -> None:
    tensors = {"w": jnp.ones((3, 5), jnp.float16), "s": jnp.ones((), jnp.int32), "none": jnp.ones((2, 0))}
    assert pack(PLAN, tensors, jnp.bfloat16).dtype == jnp.bfloat16


def test_a_group_without_elements_is_an_empty_buffer() -> None:
    plan = plan_group([TensorSpec("none", (0, 3))], 5)
    buffer = pack(plan, {"none": jnp.ones((0, 3))}, jnp.float32)
    assert buffer.shape == (0,)
    assert unpack(plan, buffer)["none"].shape == (0, 3)


def test_a_group_without_tensors_is_an_empty_buffer() -> None:
    plan = plan_group([], 3)
    assert pack(plan, {}, jnp.float32).shape == (0,)
    assert unpack(plan, jnp.zeros(0)) == {}


def test_packing_is_one_concatenate_and_unpacking_slices() -> None:
    tensors = {name: jnp.ones(slot.shape) for name, slot in PLAN.slots.items()}
    packing = str(jax.make_jaxpr(lambda t: pack(PLAN, t, jnp.float32))(tensors))
    assert packing.count(" concatenate[") == 1
    unpacking = str(jax.make_jaxpr(lambda b: unpack(PLAN, b))(jnp.zeros(PLAN.buffer_size)))
    assert unpacking.count(" slice[") == len(PLAN.slots)
    assert "gather" not in unpacking
    assert "concatenate" not in unpacking


def test_all_faults_are_named_at_once() -> None:
    with pytest.raises(ValueError) as raised:
        pack(PLAN, {"w": jnp.ones((5, 3)), "none": jnp.ones((2, 0)), "x": jnp.ones(1)}, jnp.float32)
    assert str(raised.value) == (
        "pack: 3 faults\n"
        "  w: got shape (5, 3); want shape (3, 5); plan the group anew or mend the tensor\n"
        "  s: got no tensor; want one of shape (); pass all tensors of the plan\n"
        f"  x: got a tensor without a slot; want one of {list(PLAN.slots)}; leave it out or plan the group anew"
    )
