"""The mapping between plans: any tensor, out of any storage order into any other, by any cuts."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh

import vescale_jax as vs
from vescale_jax.checkpoint import _store
from vescale_jax.checkpoint._gather import Pages, gather
from vescale_jax.checkpoint._plans import plan_of, plan_record
from vescale_jax.checkpoint._ranges import elements_at, positions_of
from vescale_layouts import store
from vescale_planner import Elements, Rows, Slab, Slot, TensorSpec, Tile, WholeTensor, plan_group

pytestmark = pytest.mark.unchecked_annotations

SHAPES = st.lists(st.integers(1, 9), max_size=3).map(tuple)
TILES = st.builds(Tile, st.integers(1, 6), st.integers(1, 6))
BLOCKS = st.one_of(
    TILES, st.builds(Elements, st.integers(1, 7)), st.builds(Rows, st.integers(1, 3)), st.just(WholeTensor())
)


@given(st.data())
@settings(max_examples=300)
def test_positions_are_those_of_the_layout(data: Any) -> None:
    shape, tile = data.draw(SHAPES), data.draw(TILES)
    orders = ["row_major", "transposed", "tiled"] if len(shape) > 1 else ["row_major"]
    spec, storage = TensorSpec("x", shape, tile), data.draw(st.sampled_from(orders))
    slot = Slot(spec, 0, spec.size, storage)
    if slot.tile_order is not None:
        slot = Slot(spec, 0, slot.tile_order.size, storage)
    # What lies at each position; 0 for room that belongs to no element.
    run = store(slot, np.arange(1, spec.size + 1).reshape(shape))
    np.testing.assert_array_equal(elements_at(slot, np.arange(slot.size)), run - 1)
    np.testing.assert_array_equal(run[positions_of(slot, np.arange(spec.size))], np.arange(1, spec.size + 1))


@given(
    st.lists(st.tuples(SHAPES, BLOCKS), min_size=1, max_size=5),
    st.integers(1, 9),
    st.sampled_from(["free", "row_major"]),
)
@settings(max_examples=100)
def test_a_plan_comes_back_from_its_record(tensors: Any, shards: int, storage: Any) -> None:
    specs = [TensorSpec(f"t{i}", shape, block) for i, (shape, block) in enumerate(tensors)]
    plan = plan_group(specs, shards, 4, storage=storage)
    assert plan_of(plan_record(plan)) == plan


def test_every_kind_of_block_has_a_record() -> None:
    blocks = [Elements(3), Rows(2), Tile(2, 3), Slab(1, 2), WholeTensor()]
    plan = plan_group([TensorSpec(f"{i}", (4, 6), block) for i, block in enumerate(blocks)], 2, 1)
    assert plan_of(plan_record(plan)) == plan


@given(st.integers(1, 4), st.integers(1, 50), st.integers(1, 60), st.data())
@settings(max_examples=100)
def test_gather_reads_only_pages_with_something_in_them(shards: int, items: int, page: int, data: Any) -> None:
    held = np.arange(shards * items) + 1
    at = np.array(data.draw(st.lists(st.integers(-1, shards * items - 1), max_size=30)), np.int64)
    read: list[int] = []

    def reader(runs: list[tuple[int, int, np.ndarray]]) -> None:
        for shard, first, out in runs:
            assert first + len(out) <= items
            read.extend(range(shard * items + first, shard * items + first + len(out)))
            out[:] = held[shard * items + first : shard * items + first + len(out)]

    out = np.full(len(at), -7)
    pages = Pages(shards, items, page)
    gather(pages, lambda i, j: at[i:j], reader, out)
    np.testing.assert_array_equal(out, np.where(at < 0, -7, held[np.maximum(at, 0)]))
    wanted = {(k // items, k % items // page) for k in at if k >= 0}
    assert {(k // items, k % items // page) for k in read} == wanted
    assert len(read) == len(set(read))


HOW = st.fixed_dictionaries(
    {
        "n": st.sampled_from([1, 2, 3, 5, 8]),
        "blocks": st.fixed_dictionaries({"*": BLOCKS}),
        "storage": st.sampled_from(["free", "row_major"]),
        "units": st.sampled_from([None, ("x0",), ("x1", "x2")]),
    }
)


@given(st.lists(SHAPES, min_size=3, max_size=4), HOW, HOW)
@settings(max_examples=30)
def test_any_plan_restores_into_any_other(
    tmp_path_factory: Any, shapes: list[tuple[int, ...]], written: dict[str, Any], wanted: dict[str, Any]
) -> None:
    rng = np.random.default_rng(0)
    tensors = {f"x{i}": rng.normal(size=shape).astype(np.float32) for i, shape in enumerate(shapes)}
    path = tmp_path_factory.mktemp("plans") / "a"
    vs.checkpoint.save(path, shard(tensors, **written))
    found = vs.checkpoint.restore(path, shard(tensors, abstract=True, **wanted)).state
    for name, x in found.tensors():
        np.testing.assert_array_equal(x, tensors[name], err_msg=name)


def shard(tensors: dict[str, np.ndarray], n: int, **how: Any) -> vs.Sharded:
    return vs.fully_shard(tensors, Mesh(np.array(jax.devices()[:n]), ("fsdp",)), **how)


@pytest.mark.parametrize(("before", "after"), [("free", "row_major"), ("row_major", "free")])
def test_many_chunks(before: Any, after: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors of many chunks, whose chunks do not divide the shards."""
    monkeypatch.setattr(_store, "_CHUNK_BYTES", 500)
    tensors = {"a": np.arange(70 * 130, dtype=np.float32).reshape(70, 130), "b": np.arange(777, dtype=np.float32)}
    blocks = {"a": Tile(32, 32), "*": Elements(1)}
    vs.checkpoint.save(tmp_path / "a", shard(tensors, 8, blocks=blocks, storage=before))
    for n in (1, 3, 5):
        model = shard(tensors, n, blocks=blocks, storage=after, abstract=True)
        for name, x in vs.checkpoint.restore(tmp_path / "a", model).state.tensors():
            np.testing.assert_array_equal(x, tensors[name], err_msg=name)
