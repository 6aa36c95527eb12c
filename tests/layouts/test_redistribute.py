"""redistribute: exact between random plans and placements, by one collective where that is no waste."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tests.layouts import drawn
from tests.planner import strategies
from tests.vescale_jax import counting
from vescale_layouts import (
    DBuffer,
    Exchange,
    Layout,
    Partial,
    Replicated,
    choose_owners,
    exchange_of,
    plan_owners,
    redistribute,
    runs_between,
)
from vescale_planner import Elements, GroupPlan, Rows, TensorSpec, Tile, plan_group

# Every kind of place: empty and scalar, shards without elements, matrices, batches of them.
SHAPES = {"w": (24, 40), "b": (7,), "s": (), "none": (0, 4), "m": (3, 8, 16), "n": (40, 24)}


def specs(block: Any = None, order: str = "w b s none m n") -> list[TensorSpec]:
    return [TensorSpec(name, SHAPES[name], block or Elements(1)) for name in order.split()]


@st.composite
def pairs(draw: st.DrawFn) -> tuple[GroupPlan, GroupPlan]:
    """Two plans of the same tensors: other blocks, orders, alignments, storage orders, or owners."""
    group, n = draw(strategies.groups()), draw(st.sampled_from(drawn.MESH_SIZES))
    other = st.one_of(st.builds(Tile, strategies.small, strategies.small), st.builds(Elements, strategies.small))

    def plan() -> GroupPlan:
        tensors = draw(st.permutations(group))
        if draw(st.booleans()):
            tensors = [TensorSpec(spec.name, spec.shape, draw(other)) for spec in tensors]
        if draw(st.booleans()):
            return plan_owners(tensors, n, draw(st.integers(1, 4)))
        return plan_group(tensors, n, draw(st.integers(1, 4)), storage=draw(st.sampled_from(["row_major", "free"])))

    return plan(), plan()


def moved(exchange: Exchange, shards: np.ndarray) -> np.ndarray:
    """What the devices hold afterwards, (N, Y), by NumPy: the tables read as they are documented."""
    runs, c = exchange.runs, exchange.unit
    n = runs.num_shards

    def take(x: np.ndarray, table: np.ndarray, size: int) -> np.ndarray:
        out = np.zeros((size, c), x.dtype)
        for (start, origin, step), end in zip(table, np.append(table[1:, 0], size), strict=False):
            for i in range(start, end):
                at = origin + (i - start) * step
                out[i] = x[at] if at < len(x) else 0
        return out

    if not runs.source_size or not runs.target_size:
        return np.zeros((n, runs.target_size), shards.dtype)
    units = shards.reshape(n, -1, c)
    sent = [take(units[k], exchange.send[k], exchange.send_size) for k in range(n)]
    received = [np.zeros((exchange.received_size, c), shards.dtype) for _ in range(n)]
    if exchange.transport == "ragged_all_to_all":
        first, landing = (np.cumsum(exchange.parts, d) - exchange.parts for d in (1, 0))
        for i, j in np.ndindex(n, n):
            size = exchange.parts[i, j]
            received[j][landing[i, j] : landing[i, j] + size] = sent[i][first[i, j] : first[i, j] + size]
    elif exchange.transport == "all_to_all":
        for j in range(n):
            received[j] = np.concatenate([np.split(sent[i], n)[j] for i in range(n)])
    for each in exchange.rounds:
        assert all(len(set(side)) == len(each.pairs) for side in zip(*each.pairs, strict=True))
        for i, j in each.pairs:
            received[j][each.offset : each.offset + each.size] = sent[i][each.offset : each.offset + each.size]
    base = [] if exchange.transport == "none" else received
    held = [np.concatenate([base[k], units[k]]) if base else units[k] for k in range(n)]
    return np.stack([take(held[k], exchange.place[k], runs.target_size // c).ravel() for k in range(n)])


def buffer_of(plan: GroupPlan, tensors: dict[str, np.ndarray]) -> np.ndarray:
    """The whole buffer, element by element."""
    out = np.zeros(plan.buffer_size, np.float32)
    for name, slot in plan.slots.items():
        for index in np.ndindex(slot.shape):
            out[slot.offset + slot.position(index)] = tensors[name][index]
    return out


@pytest.mark.unchecked_annotations
@settings(max_examples=150)
@given(pairs(), st.sampled_from([("cpu", 0.0), ("cpu", 2.0), ("gpu", 0.0), ("gpu", 1e9)]))
def test_tables_move_every_element_exactly(plans: tuple[GroupPlan, GroupPlan], how: tuple[str, float]) -> None:
    source, target = plans
    tensors = {name: x + 1 for name, x in drawn.tensors(source).items()}
    runs = runs_between(source, target)
    exchange = exchange_of(runs, how[0], slack=how[1])
    before = buffer_of(source, tensors).reshape(source.num_shards, -1)
    found = moved(exchange, before)
    np.testing.assert_array_equal(found.ravel(), buffer_of(target, tensors))
    # Nothing travels that stays, and exact ways carry what has to travel and next to no more.
    travels = runs.table[runs.table[:, 0] != runs.table[:, 3]][:, 5].sum()
    assert exchange.wire_elements >= travels
    if exchange.transport in ("none", "ragged_all_to_all"):
        assert exchange.wire_elements == travels
    if how == ("cpu", 2.0) and exchange.transport == "all_to_all":
        assert exchange.wire_elements <= 2 * travels


KINDS = {
    "other order": (specs(), specs(order="n m none s b w")),
    "other blocks": (specs(Elements(1)), specs(Rows(3))),
    "other storage": (specs(Tile(4, 4)), specs(Elements(8))),
    "owners": (specs(), None),
}


@pytest.mark.parametrize("n", drawn.MESH_SIZES)
@pytest.mark.parametrize("kind", KINDS)
def test_layouts_are_moved_on_devices(kind: str, n: int, meshes: dict[int, Mesh]) -> None:
    before, after = KINDS[kind]
    plan = plan_group(before, n, 4, storage="free" if kind == "other storage" else "row_major")
    other = plan_owners(before, n, cost=lambda spec: spec.size**1.5) if after is None else plan_group(after, n, 2)
    source, target = (Layout(p, meshes[n], "fsdp") for p in (plan, other))
    tensors = drawn.tensors(plan)
    buffer = DBuffer.from_tensors(source, tensors, np.float32)
    found = redistribute(buffer, target)
    np.testing.assert_array_equal(found.data, DBuffer.from_tensors(target, tensors, np.float32).data)
    assert found.data.sharding == target.sharding
    back = jax.jit(lambda b: redistribute(b, source))(found)
    np.testing.assert_array_equal(back.data, buffer.data)


@pytest.mark.parametrize("n", [1, 3, 8])
def test_whole_and_partial_buffers_are_moved(n: int, meshes: dict[int, Mesh]) -> None:
    source = Layout(plan_group(specs(), n, 4), meshes[n], "fsdp")
    target = Layout(plan_group(specs(Rows(2), "n m none s b w"), n, 2), meshes[n], "fsdp")
    tensors = drawn.tensors(source.plan)
    buffer, wanted = (DBuffer.from_tensors(x, tensors, np.float32) for x in (source, target))

    whole = redistribute(buffer, Replicated(target))
    assert whole.data.sharding.is_fully_replicated
    np.testing.assert_array_equal(whole.data, wanted.data)
    np.testing.assert_array_equal(redistribute(whole, target, source=Replicated(target)).data, wanted.data)

    summands = np.stack([np.asarray(buffer.data) * (k + 1) for k in range(n)])
    data = jax.device_put(summands, NamedSharding(meshes[n], PartitionSpec("fsdp")))
    times = n * (n + 1) / 2
    for goal, collective in ((target, "reduce-scatter"), (Replicated(target), "all-reduce")):
        move = jax.jit(lambda x, goal=goal: redistribute(DBuffer(x, source), goal, source=Partial(source)).data)
        np.testing.assert_array_equal(move(data), np.asarray(wanted.data) * times)
        assert counting.collectives(move.lower(data).compile()) == ({collective: 1} if n > 1 else {})


def test_a_balanced_move_is_one_all_to_all(meshes: dict[int, Mesh]) -> None:
    n, tensors = 8, [TensorSpec(f"t{i}", (8, 16)) for i in range(64)]
    # Each device holds eight tensors before, and an eighth of each of them goes to each owner.
    source = Layout(plan_group(tensors, n), meshes[n], "fsdp")
    target = Layout(plan_group([tensors[i % 8 * 8 + i // 8] for i in range(64)], n), meshes[n], "fsdp")
    move = jax.jit(lambda b: redistribute(b, target))
    text = move.lower(DBuffer.abstract(source, jnp.float32)).compile()
    assert counting.collectives(text) == {"all-to-all": 1}


def test_stacks_are_moved_layer_by_layer(meshes: dict[int, Mesh]) -> None:
    source = Layout(plan_group(specs(), 3, 4), meshes[3], "fsdp", (2,))
    target = Layout(plan_owners(specs(), 3), meshes[3], "fsdp", (2,))
    tensors = {name: np.stack([x, 3 * x]) for name, x in drawn.tensors(source.plan).items()}
    found = redistribute(DBuffer.from_tensors(source, tensors, np.float32), target)
    np.testing.assert_array_equal(found.data, DBuffer.from_tensors(target, tensors, np.float32).data)
    whole = redistribute(found, Replicated(source))
    np.testing.assert_array_equal(whole.data, DBuffer.from_tensors(source, tensors, np.float32).data)


def test_tables_have_a_row_a_run(meshes: dict[int, Mesh]) -> None:
    tensors = [TensorSpec(f"t{i}", (512, 96)) for i in range(12)]
    exchange = exchange_of(runs_between(plan_group(tensors, 8), plan_group(tensors[::-1], 8, 256)))
    assert max(exchange.send.shape[1], exchange.place.shape[1]) <= 16
    assert exchange.send.dtype == exchange.place.dtype == np.int32


@given(st.lists(st.integers(0, 99), max_size=30), st.integers(1, 9))
def test_owners_have_equal_work(costs: list[int], n: int) -> None:
    owners = choose_owners(costs, costs, n)
    loads = [sum(c for c, o in zip(costs, owners, strict=True) if o == k) for k in range(n)]
    assert max(loads) <= max([4 / 3 * max(sum(costs) / n, 0) + max(costs, default=0) / 3, max(costs, default=0)])
    plan = plan_owners([TensorSpec(f"t{i}", (c,)) for i, c in enumerate(costs)], n, 4)
    plan.check()
    assert plan.shard_size < max(loads) + 4


def test_what_cannot_be_moved_is_named(meshes: dict[int, Mesh]) -> None:
    source = Layout(plan_group(specs(), 3), meshes[3], "fsdp")
    buffer = DBuffer.zeros(source, jnp.float32)
    other = plan_group([TensorSpec("w", (40, 24)), *specs(order="b s none m"), TensorSpec("x", (2,))], 3)
    with pytest.raises(ValueError) as raised:
        redistribute(buffer, Layout(other, meshes[3], "fsdp"))
    assert str(raised.value) == (
        "redistribute: 3 faults\n"
        "  w: got shape (40, 24) in the target; want shape (24, 40); plan the same tensors\n"
        "  n: got no such tensor in the target; want shape (40, 24); plan the same tensors\n"
        "  x: got no such tensor in the source; want one; plan the same tensors"
    )
    with pytest.raises(ValueError, match="redistribute: got a target with mesh"):
        redistribute(buffer, Layout(plan_group(specs(), 2), meshes[2], "fsdp"))
    with pytest.raises(ValueError, match="redistribute: got a target with stack"):
        redistribute(buffer, Layout(source.plan, meshes[3], "fsdp", (2,)))
