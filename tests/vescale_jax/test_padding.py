"""Blocks that do not fit equal shards are reported, with what would help; storage can be chosen instead."""

import warnings

import jax
import jax.numpy as jnp
import pytest

import vescale_jax as vs
from vescale_planner import Rows, Tile


def shapes(*sizes):
    return {f"w{i}": jax.ShapeDtypeStruct(size, jnp.float32) for i, size in enumerate(sizes)}


def test_a_unit_that_pads_badly_is_reported_with_cures(mesh):
    with pytest.warns(
        UserWarning, match=r"unit root: [\d.]+% padding, [\d,]+ bytes a gather, .*What would help: "
    ) as seen:
        vs.fully_shard(shapes((3000, 700), (900, 1100), (640, 2500)), mesh(8), blocks=Rows(128), abstract=True)
    assert "HSDP" in str(seen[0].message) or "group of their own" in str(seen[0].message)


def test_small_paddings_are_not_worth_a_word(mesh):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        vs.fully_shard(shapes((30, 7), (9, 11), ()), mesh(8), blocks=Rows(4), abstract=True)


def test_free_storage_saves_padding_and_changes_no_value(mesh):
    tree = {"a": jnp.arange(66.0 * 40).reshape(66, 40), "b": jnp.arange(40.0 * 66).reshape(40, 66)}
    ratios = {}
    for storage in ("row_major", "free"):
        model = vs.fully_shard(tree, mesh(8), blocks=Tile(16, 16), storage=storage)
        ratios[storage] = vs.describe(model).padding_ratio
        whole = vs.unshard(model)
        assert all((whole[name] == value).all() for name, value in tree.items())
    assert ratios["free"] < ratios["row_major"]


@pytest.mark.unchecked_annotations
def test_an_unknown_storage_is_refused(mesh):
    with pytest.raises(ValueError) as raised:
        vs.fully_shard({"w": jnp.ones(3)}, mesh(2), storage="tiled")
    assert str(raised.value) == (
        "fully_shard: 1 fault\n  storage: got 'tiled'; want 'row_major' or 'free'; pass one of these"
    )
