"""describe: its numbers are those of the buffers that exist, and its table shows them."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

import vescale_jax as vs
from tests.vescale_jax import models

POLICY = vs.MixedPrecisionPolicy(gather_dtype=jnp.bfloat16)


def sharded(mesh: Mesh, *, abstract: bool = True) -> vs.Sharded:
    made = {**models.tree(), "ids": jnp.arange(6, dtype=jnp.int32), "key": jax.random.key(0)}
    return vs.fully_shard(made, mesh, policy=POLICY, trainable={"three": False}, abstract=abstract)


@pytest.fixture(scope="module")
def described(meshes: dict[int, Mesh]) -> vs.Description:
    return vs.describe(sharded(meshes[3]))


def test_there_is_a_row_for_every_group(described: vs.Description) -> None:
    assert [(row.unit, row.group, row.tensors, row.elements) for row in described.groups] == [
        ("root", "float32", 2, 66),
        ("root", "float32_frozen", 1, 3),
        ("root", "int32_frozen", 1, 6),
        ("layers/0", "float32", 2, 30),
        ("layers/1", "float32", 2, 30),
    ]


def test_dtypes_are_those_of_the_policy(described: vs.Description) -> None:
    root = {row.group: (row.dtype, row.gather_dtype, row.reduce_dtype) for row in described.groups}
    assert root == {
        "float32": ("float32", "bfloat16", "float32"),
        "float32_frozen": ("float32", "bfloat16", None),
        "int32_frozen": ("int32", "int32", None),
    }


def test_numbers_add_up(described: vs.Description) -> None:
    assert described.parameters == 66 + 3 + 6 + 30 + 30
    for row in described.groups:
        assert row.padding == 3 * row.shard_size - row.elements
        assert row.padding_ratio == row.padding / row.elements
        assert row.shard_bytes == 4 * row.shard_size
        assert row.gathered_bytes == 3 * row.shard_size * (4 if row.group == "int32_frozen" else 2)
    assert described.padding_ratio == sum(row.padding for row in described.groups) / described.parameters
    assert described.largest_gathered_bytes == sum(row.gathered_bytes for row in described.groups[:3])


def test_bytes_are_those_of_the_arrays(meshes: dict[int, Mesh]) -> None:
    model = sharded(meshes[3], abstract=False)
    held = [leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves((model.params, model.frozen))]
    assert vs.describe(model).shard_bytes == sum(held)


def test_a_key_counts_with_its_data(described: vs.Description) -> None:
    assert described.replicated_bytes == 8


def test_an_abstract_model_costs_what_a_concrete_one_does(meshes: dict[int, Mesh], described: vs.Description) -> None:
    assert vs.describe(sharded(meshes[3], abstract=False)) == described


def test_one_device_needs_no_collectives(meshes: dict[int, Mesh]) -> None:
    described = vs.describe(sharded(meshes[1]))
    assert (described.all_gathers, described.reduce_scatters) == (0, 0)


def test_bytes_on_a_device_shrink_with_the_mesh(meshes: dict[int, Mesh]) -> None:
    # Small and odd tensors are sharded too: never more than a device's part and the alignment of each group.
    total = 4 * (66 + 3 + 6 + 30 + 30)
    for n, mesh in meshes.items():
        assert vs.describe(sharded(mesh)).shard_bytes <= math.ceil(total / n) + 5 * 32


def test_a_model_without_parameters_has_no_rows(meshes: dict[int, Mesh]) -> None:
    described = vs.describe(vs.fully_shard({"key": jax.random.key(0)}, meshes[2]))
    assert (described.groups, described.parameters, described.padding_ratio) == ((), 0, 0.0)
    assert described.largest_gathered_bytes == 0
    assert str(described)


def test_the_table_shows_every_unit_and_the_totals(described: vs.Description) -> None:
    table = str(described)
    for word in ("root", "layers/0", "layers/1", "bfloat16 / float32", "bfloat16, frozen", "int32, frozen"):
        assert word in table
    text = " ".join(table.split())
    assert "135 parameters over 3 devices of axis 'fsdp'" in text
    assert f"{described.all_gathers} all-gathers, {described.reduce_scatters} reduce-scatters" in text


def test_the_table_is_plain_text(described: vs.Description) -> None:
    assert "\x1b" not in str(described)
    assert max(len(line) for line in str(described).splitlines()) <= 120
    assert not any(line.endswith(" ") for line in str(described).splitlines())


def test_large_numbers_are_printed_in_units(meshes: dict[int, Mesh]) -> None:
    big = {"w": jax.ShapeDtypeStruct((2**20, 48), np.float32)}
    table = str(vs.describe(vs.fully_shard(big, meshes[3], abstract=True, max_unit_bytes=None)))
    assert "50,331,648" in table
    assert "64.0 MiB" in table
    assert "192.0 MiB" in table
