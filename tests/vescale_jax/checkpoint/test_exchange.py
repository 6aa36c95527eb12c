"""Exchange: single tensors as safetensors and as an orbax tree, under other names, in other forms."""

import json
import struct
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import Mesh

import vescale_jax as vs
from tests.vescale_jax.checkpoint import states
from vescale_jax.checkpoint import Take, export_orbax, export_safetensors, import_orbax, import_safetensors
from vescale_planner import Elements, Tile

POLICY = vs.MixedPrecisionPolicy(reduce_dtype=jnp.float32)
BLOCKS = {"w": Tile(32, 32), "*": Elements(1)}


def tree() -> dict[str, Any]:
    """Every kind of dtype, a scalar, something empty and typed keys."""
    rng = np.random.default_rng(0)
    return {
        "bf16": jnp.asarray(rng.normal(size=(7, 11)), jnp.bfloat16),
        "e": jnp.zeros((0, 3)),
        "f8": jnp.asarray(rng.normal(size=13), jnp.float8_e4m3fn),
        "flags": jnp.array([True, False, True]),
        "i32": jnp.arange(5),
        "key": jax.random.split(jax.random.key(7), 3),
        "layers": [{"k": jnp.full((3, 2), i, jnp.float32)} for i in range(3)],
        "s": jnp.float32(3),
        "u8": jnp.arange(9, dtype=jnp.uint8),
        "w": jnp.asarray(rng.normal(size=(70, 96)), jnp.float32),
    }


def shard(mesh: Mesh, model: Any = tree, **how: Any) -> vs.Sharded:
    return vs.fully_shard(model, mesh, policy=POLICY, **how)


@pytest.fixture(scope="module")
def model(meshes: dict[int, Mesh]) -> vs.Sharded:
    return shard(meshes[5], blocks=BLOCKS, storage="free")


@pytest.fixture(scope="module")
def file(model: vs.Sharded, tmp_path_factory: Any) -> Path:
    return export_safetensors(model, tmp_path_factory.mktemp("file") / "a.safetensors")


def read_safetensors(path: Path) -> dict[str, tuple[str, list[int], bytes]]:
    """The format, as its description has it."""
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    assert header.pop("__metadata__")["format"] == "flax"
    body = data[8 + length :]
    return {n: (x["dtype"], x["shape"], body[slice(*x["data_offsets"])]) for n, x in header.items()}


def test_safetensors_are_as_the_format_says(file: Path) -> None:
    found, wanted = read_safetensors(file), dict(tree())
    keys, layers = wanted.pop("key"), wanted.pop("layers")
    wanted |= {f"layers/{i}/k": layer["k"] for i, layer in enumerate(layers)}
    wanted["rest/key"] = jax.random.key_data(keys)
    assert found.keys() == wanted.keys()
    codes = {"bfloat16": "BF16", "float8_e4m3fn": "F8_E4M3", "bool": "BOOL", "int32": "I32", "float32": "F32"}
    codes |= {"uint8": "U8", "uint32": "U32"}
    for name, x in wanted.items():
        assert found[name] == (codes[x.dtype.name], list(x.shape), np.asarray(x).tobytes()), name


def test_safetensors_there_and_back(model: vs.Sharded, file: Path, meshes: dict[int, Mesh], tmp_path: Path) -> None:
    for n, how in ((3, {}), (8, {"blocks": BLOCKS, "storage": "free"})):
        states.assert_same(import_safetensors(file, shard(meshes[n], abstract=True, **how)), model)
    # From a checkpoint, without the devices that wrote it.
    vs.checkpoint.save(tmp_path / "a", model)
    again = export_safetensors(tmp_path / "a", tmp_path / "b.safetensors", metadata={"by": "me"})
    assert read_safetensors(again) == read_safetensors(file)


def test_safetensors_are_read_by_others(file: Path, tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors")
    with safetensors.safe_open(file, "numpy") as theirs:
        found = read_safetensors(file)
        assert set(theirs.keys()) == set(found)
        for name, (dtype, shape, data) in found.items():
            if dtype not in ("BF16", "F8_E4M3"):  # NumPy alone has neither.
                assert (list(theirs.get_tensor(name).shape), theirs.get_tensor(name).tobytes()) == (shape, data)


def test_orbax_there_and_back(model: vs.Sharded, meshes: dict[int, Mesh], tmp_path: Path) -> None:
    vs.checkpoint.save(tmp_path / "a", model)
    export_orbax(tmp_path / "a", tmp_path / "tree")
    # As anyone reads it.
    how = {name: ocp.RestoreArgs(restore_type=np.ndarray) for name in ("bf16", "f8", "flags", "s", "w")}
    item = dict.fromkeys(how, 0)
    found = ocp.PyTreeCheckpointer().restore(tmp_path / "tree", item=item, restore_args=how, partial_restore=True)
    for name in ("bf16", "f8", "flags", "s", "w"):
        np.testing.assert_array_equal(np.asarray(found[name]), np.asarray(tree()[name]))
    states.assert_same(import_orbax(tmp_path / "tree", shard(meshes[3], abstract=True)), model)
    assert {path.name for path in tmp_path.iterdir()} == {"a", "tree"}
    # As anyone writes it, lists included.
    others = {k: v for k, v in tree().items() if k not in ("key", "e")}  # orbax takes neither
    ocp.PyTreeCheckpointer().save(tmp_path / "theirs", others)
    target = shard(meshes[2], lambda: others, abstract=True)
    for name, x in import_orbax(tmp_path / "theirs", target).tensors():
        wanted = dict(shard(meshes[1], others).tensors())[name]
        assert x.tobytes() == wanted.tobytes(), name
    with pytest.raises(ValueError, match="got a folder that orbax cannot read"):
        import_orbax(tmp_path / "nothing", target)


def test_names_layers_and_orientations(file: Path, meshes: dict[int, Mesh]) -> None:
    """A list of layers into a stack and a stack into a list, a matrix the other way round, another dtype."""
    rest = ("[befisu]*", "rest/*")
    stack = {"blocks": {"kernel": jnp.zeros((3, 2, 3))}, "w": jnp.zeros((96, 70)), "half": jnp.zeros((7, 11))}
    names: dict[str, Any] = {
        "blocks/kernel": [Take(f"layers/{i}/k", permute=(1, 0)) for i in range(3)],
        "w": Take("w", permute=(1, 0)),
        "half": "bf16",
    }
    target = shard(meshes[3], stack, abstract=True)
    with pytest.raises(ValueError, match="half: got bfloat16 in bf16; want float32; pass cast=True"):
        import_safetensors(file, target, names=names, ignore=rest)
    found = dict(import_safetensors(file, target, names=names, ignore=rest, cast=True).tensors())
    wanted = tree()
    np.testing.assert_array_equal(found["w"], wanted["w"].T)
    np.testing.assert_array_equal(found["half"], np.asarray(wanted["bf16"], np.float32))
    np.testing.assert_array_equal(found["blocks/kernel"], [np.full((2, 3), i) for i in range(3)])
    other = export_safetensors(
        shard(meshes[2], stack), file.with_name("b.safetensors"), names=lambda path: f"model.{path}"
    )
    apart = shard(meshes[5], {"layers": [{"k": jnp.ones((2, 3))} for _ in range(3)]}, abstract=True)
    table = {f"layers/{i}/k": Take("model.blocks/kernel", index=i) for i in range(3)}
    for _, x in import_safetensors(other, apart, names=table, ignore=("model.[hw]*",)).tensors():
        np.testing.assert_array_equal(x, np.zeros((2, 3)))


def test_what_does_not_fit_is_named_all_at_once(file: Path, meshes: dict[int, Mesh], tmp_path: Path) -> None:
    wanted = {
        "w": jnp.zeros((70, 95)),
        "i32": jnp.zeros(5),
        "x": jnp.zeros(3),
        "s": jnp.zeros(3),
        "t": jnp.zeros((3, 2)),
    }
    target = shard(meshes[2], wanted, abstract=True)
    with pytest.raises(ValueError) as caught:
        import_safetensors(file, target, names={"s": "missing", "t": Take("w", index=70)}, ignore=("layers/*",))
    text = str(caught.value)
    assert "w: got shape (70, 96); want (70, 95)" in text
    assert "i32: got int32 in i32; want float32; convert the file" in text
    assert "x: got no tensor x in the file" in text
    assert "s: got no tensor missing in the file" in text
    assert "t: got layer 70 of w of (70, 96); want a layer that is there" in text
    assert "bf16: got a tensor that the model has no place for" in text
    for damage, match in ((b"", "without a header"), (b"\xff" * 20, "without a header")):
        (tmp_path / "a.safetensors").write_bytes(damage)
        with pytest.raises(vs.checkpoint.DamagedError, match=match):
            import_safetensors(tmp_path, target)
    (tmp_path / "a.safetensors").write_bytes(file.read_bytes()[:-1])
    with pytest.raises(vs.checkpoint.DamagedError, match="as its header says"):
        import_safetensors(tmp_path, target)
    with pytest.raises(ValueError, match="in two files"):
        import_safetensors([file, file], target)
    with pytest.raises(ValueError, match="got no such file"):
        import_safetensors(tmp_path / "no", target)
    with pytest.raises(ValueError, match="got a path that exists"):
        export_safetensors(shard(meshes[2], wanted), file)
    with pytest.raises(ValueError, match="got the name 'n' a second time"):
        export_safetensors(shard(meshes[2], wanted), tmp_path / "c.safetensors", names=lambda path: "n")
    with pytest.raises(ValueError, match=r"w: got dtype int4; want one of"):
        export_safetensors(shard(meshes[2], {"w": jnp.zeros(3, jnp.int4)}), tmp_path / "c.safetensors")
