"""Restoring: onto any mesh, any grouping, any optimizer of ours, bit for bit; and what cannot be kept is named."""

import ast
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import Mesh

import vescale_jax as vs
from tests.vescale_jax import models
from tests.vescale_jax.checkpoint import states
from vescale_jax.checkpoint import _snapshot
from vescale_jax.checkpoint._match import is_reset, shortest_patterns
from vescale_jax.optimizers import adamw_8bit, muon, per_parameter, shampoo, soap
from vescale_planner import Tile

BLOCKS = states.BLOCKS
OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "adamw": lambda: optax.adamw(1e-2),
    "adamw_8bit": lambda: adamw_8bit(1e-2),
    "muon": lambda: muon(1e-2),
    "shampoo": lambda: shampoo(1e-2, block_size=Tile(32, 32), min_size=4096),
    "soap": lambda: soap(1e-2, block_size=Tile(32, 32), min_size=4096),
    "adafactor": lambda: lambda model: per_parameter(optax.adafactor(1e-2, min_dim_size_to_factor=16), model),
    "labels": lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1e-2, momentum=0.9)),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_on_other_meshes_units_and_storage(name: str, meshes: dict[int, Mesh], tmp_path: Path) -> None:
    """8 devices to 1, 2, 3, 5 and back; one unit to others; row-major to free and back: every bit."""
    tx = OPTIMIZERS[name]()
    state = states.filled(states.make(meshes[8], tx=tx, blocks=BLOCKS))
    wanted = states.contents(state)
    vs.checkpoint.save(tmp_path / "8", state)
    others: dict[str, dict[str, Any]] = {
        "1": {"n": 1},
        "3": {"n": 3},
        "5, free": {"n": 5, "storage": "free"},
        "2, units": {"n": 2, "units": ("a", "[es]")},
    }
    if name == "adafactor":  # Which columns it keeps in vectors depends on the groups.
        del others["2, units"], others["5, free"]
    for case, how in others.items():
        n = how.pop("n")
        there = vs.checkpoint.restore(
            tmp_path / "8", states.make(meshes[n], tx=tx, abstract=True, blocks=BLOCKS, **how)
        )
        found = states.contents(there.state)
        if name != "muon":  # It keeps what AdamW has in a buffer or by blocks, whichever is smaller.
            assert found.keys() == wanted.keys()
        vs.checkpoint.save(tmp_path / case, there.state)
        again = vs.checkpoint.restore(tmp_path / case, states.make(meshes[8], tx=tx, abstract=True, blocks=BLOCKS))
        states.assert_same(again.state, wanted)
        for path, x in found.items():
            if x.shape == wanted[path].shape:
                assert x.tobytes() == wanted[path].tobytes(), path


def test_a_module_with_all_its_state(meshes: dict[int, Mesh], tmp_path: Path) -> None:
    """Parameters, batch statistics, counters and typed keys, step and extra."""

    class Model(nnx.Module):
        def __init__(self) -> None:
            rngs = nnx.Rngs(0, dropout=1)
            self.layers = nnx.List([models.Block(5, 7, rngs) for _ in range(2)])
            self.norm = nnx.BatchNorm(5, rngs=rngs)
            self.dropout = nnx.Dropout(0.5, rngs=rngs)

    key = jax.random.key(3, impl="rbg")
    extra = {"position": 7, "name": "run", "nothing": None, "list": [1.5, (True, float("inf"))], "key": key}
    extra["array"] = jnp.arange(3, dtype=jnp.bfloat16)
    extra["swapped"] = [np.arange(3, dtype=order + "i4") for order in "<>"]
    state = states.filled(states.make(meshes[8], Model))
    vs.checkpoint.save(tmp_path / "a", state, extra)
    for n in (1, 5):
        found = vs.checkpoint.restore(tmp_path / "a", states.make(meshes[n], Model, abstract=True))
        states.assert_same(found.state, state)
        assert found.step == int(state.step)
        assert jax.random.key_impl(found.extra.pop("key")) == "rbg"
        array = found.extra.pop("array")
        assert array.dtype == jnp.bfloat16
        assert array.tolist() == [0, 1, 2]
        assert [array.tolist() for array in found.extra.pop("swapped")] == [[0, 1, 2], [0, 1, 2]]
        assert found.extra == {"position": 7, "name": "run", "nothing": None, "list": [1.5, [True, float("inf")]]}
    # The model alone, out of a training state; keys stay keys.
    model = vs.checkpoint.restore(tmp_path / "a", vs.fully_shard(Model, meshes[3], abstract=True)).state
    states.assert_same(model, {k: v for k, v in states.contents(state).items() if k.startswith("model")})
    vs.unshard(model)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float8_e4m3fn", "int8", "uint32", "bool"])
def test_dtypes(dtype: str, meshes: dict[int, Mesh], tmp_path: Path) -> None:
    bits = np.random.default_rng(0).integers(0, 2 if dtype == "bool" else 100, (7, 11))
    tree = {"w": jnp.asarray(bits).astype(dtype), "f": jnp.ones(3)}
    policy = vs.MixedPrecisionPolicy(reduce_dtype=jnp.float32)
    model = vs.fully_shard(tree, meshes[3], policy=policy)
    vs.checkpoint.save(tmp_path / "a", model)
    found = vs.checkpoint.restore(tmp_path / "a", vs.fully_shard(tree, meshes[2], policy=policy, abstract=True)).state
    states.assert_same(found, model)


def test_a_frozen_parameter_may_be_thawed(meshes: dict[int, Mesh], tmp_path: Path) -> None:
    frozen = states.filled(states.make(meshes[3], trainable={"a": False, "*": True}))
    vs.checkpoint.save(tmp_path / "a", frozen)
    target = states.make(meshes[2])
    with pytest.raises(ValueError, match=r"opt_state/0/mu/a: got nothing in the checkpoint") as caught:
        vs.checkpoint.restore(tmp_path / "a", target)
    assert "reset=('opt_state/0/mu/a', 'opt_state/0/nu/a',)" in str(caught.value)
    found = vs.checkpoint.restore(tmp_path / "a", target, reset=("opt_state/0/?u/a",))
    wanted = states.contents(frozen) | {f"opt_state/0/{m}/a": np.zeros((70, 100), np.float32) for m in ("mu", "nu")}
    states.assert_same(found.state, wanted)


def test_stacks_of_layers(meshes: dict[int, Mesh], tmp_path: Path) -> None:
    class Stacked(nnx.Module):
        def __init__(self) -> None:
            @nnx.split_rngs(splits=3)
            @nnx.vmap(in_axes=(0,), out_axes=0)
            def build(rngs: nnx.Rngs) -> models.Block:
                return models.Block(5, 7, rngs)

            self.layers = build(nnx.Rngs(0))
            self.head = nnx.Linear(5, 3, rngs=nnx.Rngs(1))

        def __call__(self, x: Any) -> Any:
            @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
            def run(x: Any, layer: Any) -> Any:
                return layer(x)

            return self.head(run(x, self.layers))

    state = states.filled(states.make(meshes[8], Stacked))
    vs.checkpoint.save(tmp_path / "a", state)
    for n in (1, 3):
        found = vs.checkpoint.restore(tmp_path / "a", states.make(meshes[n], Stacked, abstract=True))
        states.assert_same(found.state, state)


def test_replicas_are_written_once(mesh: Callable[..., Mesh], tmp_path: Path) -> None:
    twice = Mesh(np.array(jax.devices()[:6]).reshape(2, 3), ("replica", "fsdp"))
    state = states.filled(states.make(mesh(8), tx=adamw_8bit(1e-2), blocks=BLOCKS))
    vs.checkpoint.save(tmp_path / "8", state)
    target = states.make(twice, tx=adamw_8bit(1e-2), blocks=BLOCKS, axis="fsdp", abstract=True)
    found = vs.checkpoint.restore(tmp_path / "8", target).state
    states.assert_same(found, state)
    for leaf in jax.tree.leaves(found):
        for shard in leaf.addressable_shards:
            twin = next(s for s in leaf.addressable_shards if s.index == shard.index)
            assert np.asarray(shard.data).tobytes() == np.asarray(twin.data).tobytes()
    vs.checkpoint.save(tmp_path / "2 x 3", found)
    assert len(list((tmp_path / "2 x 3" / "arrays/0000").glob("c.*"))) == 3
    target = states.make(mesh(5), tx=adamw_8bit(1e-2), blocks=BLOCKS, abstract=True)
    states.assert_same(vs.checkpoint.restore(tmp_path / "2 x 3", target).state, state)


def test_equal_layers_share_files(meshes: dict[int, Mesh], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many of them go into a file: their order is kept."""

    def build() -> models.Net:
        return models.Net(nnx.Rngs(0), layers=5)

    state = states.filled(states.make(meshes[3], build))
    size, files = 4 * 28 * 2, []  # A bit more than two shards of a layer.
    for limit in (2**20, size, 0):
        monkeypatch.setattr(_snapshot, "_PACKED_BYTES", limit)
        path = vs.checkpoint.save(tmp_path / str(limit), state)
        vs.checkpoint.verify(path)
        files.append(len(list(path.glob("arrays/*/c.*"))))
        for n in (3, 5):
            found = vs.checkpoint.restore(path, states.make(meshes[n], build, abstract=True))
            states.assert_same(found.state, state)
    assert files[0] < files[1] < files[2]


def test_resumed_equals_uninterrupted(meshes: dict[int, Mesh], tmp_path: Path) -> None:
    tx = optax.adamw(optax.linear_schedule(1e-2, 1e-3, 6))
    step = vs.train_step(models.weighted_loss, tx, max_norm=1.0)
    batches = models.batches(6)
    state = states.make(meshes[5], models.net, tx)
    for i, batch in enumerate(batches):
        state, _ = step(state, batch)
        if i == 2:
            vs.checkpoint.save(tmp_path / "a", state, {"position": i + 1})
    found = vs.checkpoint.restore(tmp_path / "a", states.make(meshes[5], models.net, tx, abstract=True))
    resumed = found.state
    for batch in batches[found.extra["position"] :]:
        resumed, _ = step(resumed, batch)
    # The padding, too.
    for a, b in zip(jax.tree.leaves(resumed), jax.tree.leaves(state), strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def test_sixteen_devices_and_back(meshes: dict[int, Mesh], tmp_path: Path) -> None:
    state = states.filled(states.make(meshes[8], tx=adamw_8bit(1e-2), blocks=BLOCKS))
    vs.checkpoint.save(tmp_path / "8", state)
    program = Path(__file__).with_name("sixteen.py")
    subprocess.run([sys.executable, str(program), str(tmp_path)], check=True, timeout=120)
    target = states.make(meshes[8], tx=adamw_8bit(1e-2), abstract=True, blocks=BLOCKS)
    states.assert_same(vs.checkpoint.restore(tmp_path / "16", target).state, state)


@pytest.mark.unchecked_annotations
def test_what_does_not_fit_is_named_all_at_once(meshes: dict[int, Mesh], tmp_path: Path) -> None:
    path = tmp_path / "a"
    vs.checkpoint.save(path, states.make(meshes[2], tx=adamw_8bit(1e-2), blocks=BLOCKS))

    def message(**how: Any) -> str:
        kept = {name: how.pop(name) for name in ("reset",) if name in how}
        how = {"tx": adamw_8bit(1e-2), "blocks": BLOCKS, "abstract": True, **how}
        with pytest.raises(ValueError) as caught:
            vs.checkpoint.restore(path, states.make(meshes[3], **how), **kept)
        return str(caught.value)

    text = message(tx=adamw_8bit(1e-2, block_size=128))
    assert "scales/b: got a number for each of (1, 1, 20) blocks elements:256" in text
    assert "make the optimizer with the blocks that were saved" in text
    assert "reset=('opt_state/moments/mean/scales/b', 'opt_state/moments/rms/scales/b',)" in text
    text = message(tx=optax.adamw(1e-2))
    assert "opt_state/0/mu: got nothing in the checkpoint for 6 of its entries" in text
    assert "opt_state/moments/mean/codes: got a checkpoint that has it, and a state that has not" in text
    text = message(model={**states.numbers(0), "v": np.zeros(34, np.float32), "new": np.zeros(2, np.float32)})
    assert "model/v: got shape (33,) in the checkpoint; want (34,)" in text
    assert "model/new: got nothing in the checkpoint" in text
    text = message(model={n: x.astype(np.float16) for n, x in states.numbers(0).items()})
    assert "model: got dtype float32 in the checkpoint for 6 of its entries (" in text
    assert "reset: got the pattern 'opt/*'; want one that matches something" in message(reset=("opt/*",))
    assert "want one with values where nothing is restored" in message(reset=("opt_state/*",))
    with pytest.raises(TypeError, match="want a sequence of patterns"):
        vs.checkpoint.restore(path, states.make(meshes[3], abstract=True), reset="opt_state/*")
    with pytest.raises(TypeError, match="got a model of type dict"):
        vs.checkpoint.restore(path, {})


@given(st.data())
def test_proposed_patterns_match_what_is_wrong_and_nothing_else(data: st.DataObject) -> None:
    part = st.sampled_from(["a", "b", "*", "[x]", "?"])
    paths = st.lists(part, min_size=1, max_size=4).map("/".join)
    every = data.draw(st.sets(paths, max_size=12))
    # A path is an array or a folder of such.
    every = {path for path in every if not any(other.startswith(f"{path}/") for other in every)}
    wrong = {path for path in sorted(every) if data.draw(st.booleans())}
    patterns = shortest_patterns(wrong, every)
    assert {path for path in every if is_reset(path, patterns)} == wrong
    assert len(patterns) <= len(wrong)


def test_what_the_error_proposes_is_taken_and_keeps_what_fits(meshes: dict[int, Mesh], tmp_path: Path) -> None:
    """Parameters of another shape, missing and new ones, an optimizer where there was none, values without a field."""
    tree = {**states.numbers(1), "layers": [{"w": np.ones(5, np.float32)} for _ in range(2)]}
    saved = {"model": vs.fully_shard(tree, meshes[3]), "state": states.filled(states.make(meshes[3], tree))}
    wanted = states.contents(saved["state"].model)
    other = {**states.numbers(0), "layers": {"w": np.ones((2, 5), np.float32)}, "v": np.zeros(34, np.float32)}
    for name, state in saved.items():
        vs.checkpoint.save(tmp_path / name, state)
        target = states.make(meshes[2], other)
        with pytest.raises(ValueError, match="goes into a stack, or back, by export and import") as caught:
            vs.checkpoint.restore(tmp_path / name, target)
        proposed = re.search(r"pass reset=(\(.*?,\)) to", str(caught.value))
        assert proposed is not None
        found = vs.checkpoint.restore(tmp_path / name, target, reset=ast.literal_eval(proposed[1])).state.model
        own = states.contents(target.model)
        kept = states.contents(saved["model"]) if name == "model" else wanted
        for path, x in states.contents(found).items():
            want = own[path] if path in ("model/v", "model/layers/w") else kept[path]
            assert x.tobytes() == want.tobytes(), path


def test_another_optimizer_starts_anew(meshes: dict[int, Mesh], tmp_path: Path) -> None:
    state = states.filled(states.make(meshes[2], tx=adamw_8bit(1e-2), blocks=BLOCKS))
    vs.checkpoint.save(tmp_path / "a", state)
    # Another block size keeps the codes' places, and drops just the scales of what it cannot keep.
    target = states.make(meshes[3], tx=adamw_8bit(1e-2, block_size=128), blocks=BLOCKS)
    found = states.contents(vs.checkpoint.restore(tmp_path / "a", target, reset=("*/scales/b",)).state)
    wanted = states.contents(state)
    for path, x in found.items():
        old = wanted[path] if "scales/b" not in path else np.zeros((1, 1, 40), np.float32)
        assert x.tobytes() == old.tobytes(), path
    target = states.make(meshes[3], tx=optax.adamw(1e-2))
    found = states.contents(vs.checkpoint.restore(tmp_path / "a", target, reset=("opt_state/*",)).state)
    assert {k: v.tobytes() for k, v in found.items() if k.startswith("model")} == {
        k: v.tobytes() for k, v in wanted.items() if k.startswith("model")
    }
    assert not any(x.any() for k, x in found.items() if k.startswith("opt_state"))


@pytest.mark.unchecked_annotations
def test_what_cannot_be_saved(meshes: dict[int, Mesh], tmp_path: Path) -> None:
    state = states.make(meshes[2])
    with pytest.raises(TypeError) as caught:
        vs.checkpoint.save(tmp_path / "a", state, {"a": object(), "b": {1: 2, "$c": 3}, "d": np.array(["x"])})
    assert "extra/a: got a object" in str(caught.value)
    assert "extra/b: got the key 1" in str(caught.value)
    assert "extra/b: got the key '$c'" in str(caught.value)
    assert "extra/d: got an array of <U1" in str(caught.value)
    with pytest.raises(ValueError, match="got an abstract state"):
        vs.checkpoint.save(tmp_path / "a", states.make(meshes[2], abstract=True))
    assert not any(tmp_path.iterdir())
    vs.checkpoint.save(tmp_path / "a", state)
    with pytest.raises(ValueError, match="got a path that exists"):
        vs.checkpoint.save(tmp_path / "a", state)
    jax.tree.leaves(state)[1].delete()
    with pytest.raises(RuntimeError, match="donated"):
        vs.checkpoint.save(tmp_path / "b", state)
