"""8-bit AdamW: the same bits on every mesh, under every grouping and in NumPy; small, local, and close to AdamW."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import vescale_jax as vs
from tests.vescale_jax import counting
from vescale_jax._sharded import shardings
from vescale_jax.optimizers import Code, adamw_8bit, precisions
from vescale_layouts import DBuffer, Layout
from vescale_planner import Elements, TensorSpec, Tile, plan_group

# What is sharded: runs and tiles, tiles that leave edges, experts, and two that are too small for codes.
SHAPES = {"a": (70, 100), "b": (5000,), "e": (3, 40, 48), "s": (), "t": (64, 96), "v": (33,)}
BLOCKS = {"[et]": Tile(32, 32), "*": Elements(256)}
CODED = ("a", "b", "e", "t")
SCHEDULE = optax.linear_schedule(1e-2, 1e-3, 4)
B1, B2, EPS, DECAY = 0.9, 0.999, 1e-8, 0.1


def numbers(seed: int, scale: float = 1.0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {name: (scale * rng.normal(size=shape)).astype(np.float32) for name, shape in SHAPES.items()}


def constant(value: float) -> dict[str, np.ndarray]:
    return {name: np.full(shape, value, np.float32) for name, shape in SHAPES.items()}


# Ordinary gradients, then what breaks optimizers: nothing at all, next to nothing, and far too much.
GRADS = [numbers(1), numbers(2, 1e-3), constant(0), constant(1e-30), numbers(3), constant(-1e30), numbers(4, 1e30)]


# The reference: whole tensors in NumPy, straight from the definition.


def nearest(x: np.ndarray, table: np.ndarray, positive: bool) -> np.ndarray:
    """The code of the nearest number of a table, the one nearer to 0 of two; of those above 0 for positive `x`."""
    distance = np.abs(x[:, None].astype(np.float64) - table[None].astype(np.float64))
    if positive:
        distance[np.ix_(x > 0, table == 0)] = np.inf
    tied = distance == distance.min(1, keepdims=True)
    # The linear code for signed numbers has one code to spare, which stands for 0 as well.
    return np.where(tied, np.abs(table)[None] + np.arange(256)[None] / 1e9, np.inf).argmin(1)


def blocks_of(shape: tuple[int, ...], block: Any) -> list[np.ndarray]:
    """The flat indices of every block, in order."""
    index = np.arange(int(np.prod(shape)))
    if isinstance(block, Elements):
        return [index[i : i + block.count] for i in range(0, len(index), block.count)]
    cut = index.reshape(-1, *shape[-2:])
    r, c = block.rows, block.cols
    return [
        m[i : i + r, j : j + c].ravel()
        for m in cut
        for i in range(0, shape[-2], r)
        for j in range(0, shape[-1], c)
    ]  # fmt: skip


@functools.cache
def reference() -> list[dict[str, Any]]:
    """Parameters, codes and scales after every step."""
    signed, unsigned = Code("dynamic", True).table, Code("dynamic", False).table
    params = {name: x.ravel() for name, x in numbers(0).items()}
    mean, rms = ({name: np.zeros_like(x) for name, x in params.items()} for _ in range(2))
    history = []
    for t, grads in enumerate(GRADS):
        # Powers are not rounded alike everywhere: these three numbers come from JAX, as in the optimizer.
        root = jnp.sqrt(1 - B2 ** jnp.float32(t + 1))
        gain, eps = np.asarray(root / (1 - B1 ** jnp.float32(t + 1))), np.asarray(root * EPS)
        rate = np.asarray(SCHEDULE(t), np.float32)
        kept: dict[str, Any] = {}
        for name, p in params.items():
            g, m, r = grads[name].ravel(), mean[name], rms[name]
            m = B1 * m + (1 - B1) * g
            unit = np.maximum(r, np.abs(g))
            safe = np.where(unit == 0, np.float32(1), unit)
            r = unit * np.sqrt(B2 * (r / safe) ** 2 + (1 - B2) * (g / safe) ** 2)
            params[name] = p + -rate * (gain * (m / (r + eps)) + DECAY * p)
            if name in CODED:
                block = Tile(32, 32) if name in "et" else Elements(256)
                for key, x, table in (("m", m, signed), ("r", r, unsigned)):
                    codes, scales = np.zeros(x.size, np.uint8), []
                    for where in blocks_of(SHAPES[name], block):
                        scales.append(np.abs(x[where]).max())
                        ratio = x[where] / (scales[-1] or np.float32(1))
                        codes[where] = nearest(ratio, table, positive=key == "r")
                        x[where] = table[codes[where]] * scales[-1]
                    kept |= {f"{key} codes {name}": codes, f"{key} scales {name}": np.array(scales)}
            mean[name], rms[name] = m, r
            kept |= {f"p {name}": params[name]} | ({} if name in CODED else {f"m {name}": m, f"r {name}": r})
        history.append(kept)
    return history


def read(params: Any, state: Any) -> dict[str, np.ndarray]:
    """The same from buffers: by tensor, wherever it lies."""
    found: dict[str, Any] = {}
    for unit, groups in params.items():
        for group, buffer in groups.items():
            found |= {f"p {name}": x for name, x in buffer.read()}
            for key, moment in zip("mr", state.moments[unit][group], strict=True):
                coded = dict(moment.codes.read()) if moment.codes else {}
                found |= {f"{key} codes {name}": coded[name] for name, _ in moment.scales.view.blocks}
                scales, small = jax.tree.map(np.asarray, (moment.scales, moment.small))
                found |= {f"{key} scales {name}": x for name, x in scales.tensors().items()}
                found |= {f"{key} {name}": x for name, x in small.tensors().items()}
    return {name.replace("/", ""): np.asarray(x).ravel() for name, x in found.items()}


def optimizer(**changes: Any) -> optax.GradientTransformation:
    return adamw_8bit(SCHEDULE, B1, B2, EPS, DECAY, **changes)


def step(tx: Any, params: Any, state: Any, grads: Any) -> Any:
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state


def run(mesh: Mesh, chunk: int = 2**20, **how: Any) -> tuple[Any, list[dict[str, np.ndarray]]]:
    """The compiled step, and what it did to all gradients one after the other."""
    how = {"blocks": BLOCKS, **how}
    tx = optimizer(chunk=chunk)
    state = vs.train_state(vs.fully_shard(numbers(0), mesh, **how), tx)
    params, opt_state = state.model.params, state.opt_state
    grads = [vs.fully_shard(g, mesh, **how).params for g in GRADS]
    compiled = jax.jit(functools.partial(step, tx)).lower(params, opt_state, grads[0]).compile()
    history = []
    for g in grads:
        params, opt_state = compiled(params, opt_state, g)
        history.append(read(params, opt_state))
    return compiled, history


CASES: dict[str, dict[str, Any]] = {
    "1": {"n": 1},
    "2, in chunks": {"n": 2, "chunk": 3000},
    "3, three units": {"n": 3, "units": ("a", "[et]")},
    "8, free storage": {"n": 8, "storage": "free"},
}


@pytest.mark.parametrize("case", CASES)
def test_bits_are_those_of_numpy_on_every_mesh(case: str, meshes: dict[int, Mesh]) -> None:
    how = dict(CASES[case])
    n = how.pop("n")
    compiled, history = run(meshes[n], **how)
    assert counting.collectives(compiled) == {}
    if "chunk" in how:  # Four bytes an element for the updates, and what one chunk needs.
        assert compiled.memory_analysis().temp_size_in_bytes < 10 * sum(map(np.size, numbers(0).values())) // n
    for found, wanted in zip(history, reference(), strict=True):
        assert found.keys() == wanted.keys()
        for name, x in wanted.items():
            assert found[name].dtype == x.dtype
            np.testing.assert_array_equal(found[name], x, err_msg=name)
            assert np.all(np.isfinite(x)), name


# Codes.


@pytest.mark.parametrize("name", ["dynamic", "linear"])
@pytest.mark.parametrize("signed", [True, False])
def test_codes_stand_for_the_nearest_number(name: Any, signed: bool) -> None:
    code = Code(name, signed)
    table = code.table
    assert (len(np.unique(table)), table[0], table.max()) == (255 if (name, signed) == ("linear", True) else 256, 0, 1)
    middles = (np.sort(table)[1:] + np.sort(table)[:-1]) / 2
    rng = np.random.default_rng(0)
    x = np.concatenate([table, middles, rng.normal(size=3000) * 10.0 ** rng.uniform(-9, 0, 3000), [0, 1e-30]])
    x = x.astype(np.float32) if signed else np.abs(x).astype(np.float32)
    scale = np.abs(x).max()
    codes = np.asarray(jax.jit(code.encode)(x, scale))
    np.testing.assert_array_equal(codes, nearest(x / scale, table, positive=not signed))
    np.testing.assert_array_equal(code.decode(jnp.asarray(codes), jnp.asarray(scale)), table[codes] * scale)
    assert codes.dtype == np.uint8
    if not signed:
        assert np.all((codes > 0) == (x > 0))


def test_the_dynamic_code_is_that_of_the_paper() -> None:
    # Seven decades with 1, 2, ..., 64 fractions; the highest is 1, the lowest magnitude 0.55e-6.
    table = Code("dynamic", True).table
    assert [int(np.sum((table > 10.0**-d) & (table < 10.0 ** (1 - d)))) for d in range(1, 8)] == [
        64,
        32,
        16,
        8,
        4,
        2,
        1,
    ]
    assert np.sort(table[table > 0])[0] == np.float32(0.55e-6)
    assert np.sort(table)[0] == np.float32(-(1 - 0.9 / 64 / 2))


# Bytes, and which parameter is kept how.


def test_state_is_small_and_lies_with_the_parameters(meshes: dict[int, Mesh]) -> None:
    made = {f"w{i}": jax.ShapeDtypeStruct((512, 1376), jnp.float32) for i in range(4)}
    for blocks in (Elements(256), Tile(32, 32)):
        model = vs.fully_shard(made, meshes[8], blocks=blocks, abstract=True)
        state = vs.train_state(model, optimizer()).opt_state
        size = sum(x.size for x in made.values())
        assert sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state.moments)) <= 2.1 * size
        buffer, (mean, rms) = model.params["root"]["float32"], state.moments["root"]["float32"]
        for moment in (mean, rms):
            assert (moment.codes.data.dtype, moment.codes.data.shape) == (jnp.uint8, buffer.data.shape)
            assert moment.codes.layout == buffer.layout
            assert all(x.sharding.spec == PartitionSpec("fsdp") for x in jax.tree.leaves(moment))
        assert state.count.sharding.spec == PartitionSpec()


def test_precisions_follow_from_the_global_shape_alone(meshes: dict[int, Mesh]) -> None:
    rows = {
        n: precisions(jax.eval_shape(optax.chain(optax.clip(1.0), optimizer()).init, model.params))
        for n in (1, 2, 8)
        for model in [vs.fully_shard(numbers(0), meshes[n], blocks=BLOCKS, abstract=True)]
    }
    assert {row.name: (row.dtype, row.block) for row in rows[1]} == {
        "a": ("uint8", "elements:256"),
        "b": ("uint8", "elements:256"),
        "e": ("uint8", "tile:32,32"),
        "t": ("uint8", "tile:32,32"),
        "s": ("float32", ""),
        "v": ("float32", ""),
    }
    assert set(rows[1]) == set(rows[2]) == set(rows[8])
    by_name = {row.name: str(row) for row in rows[8]}
    assert by_name["a"] == "root a: 7,000 elements, uint8, elements:256, 2.032 bytes an element"
    assert by_name["v"] == "root v: 33 elements, float32, below min_size, 8.000 bytes an element"


# Through the training step.


def perceptron() -> dict[str, Any]:
    keys = jax.random.split(jax.random.key(0))
    return {"up": jax.random.normal(keys[0], (16, 48)) / 4, "down": jax.random.normal(keys[1], (48, 8)) / 7}


def regression(params: Any, x: jax.Array) -> jax.Array:
    return jnp.mean((jnp.tanh(x @ params["up"]) @ params["down"] - jnp.sin(3 * x[:, :8])) ** 2)


def losses(mesh: Mesh, tx: Any, steps: int = 20) -> list[float]:
    state = vs.train_state(vs.fully_shard(perceptron(), mesh, blocks=Elements(16)), tx)
    train = vs.train_step(regression, tx)
    x = np.random.default_rng(0).normal(size=(120, 16)).astype(np.float32)
    found = []
    for _ in range(steps):
        state, metrics = train(state, x)
        found.append(float(metrics.loss))
    return found


def test_training_is_close_to_adamw_and_the_same_on_all_meshes(meshes: dict[int, Mesh]) -> None:
    wide = losses(meshes[8], optax.adamw(0.01, weight_decay=0.1))
    tx = adamw_8bit(0.01, weight_decay=0.1, block_size=16, min_size=0)
    eight, three = losses(meshes[8], tx), losses(meshes[3], tx)
    assert wide[-1] < 0.8 * wide[0]
    np.testing.assert_allclose(eight, wide, rtol=0.01)
    np.testing.assert_allclose(eight, three, rtol=1e-3)


def layers(seed: int) -> dict[str, np.ndarray]:
    """Parameters of three layers, coded and not."""
    rng = np.random.default_rng(seed)
    shapes = {"t": (3, 64, 96), "v": (3, 33), "w": (3, 70, 64)}
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def test_a_stack_of_layers_is_updated_layer_by_layer(meshes: dict[int, Mesh]) -> None:
    tx = optimizer(chunk=1000)
    update = jax.jit(functools.partial(step, tx))

    def run(mesh: Mesh, of: Any, **how: Any) -> dict[str, np.ndarray]:
        blocks = {"*t": Tile(32, 32), "*": Elements(256)}
        one, *more = (vs.fully_shard(of(seed), mesh, blocks=blocks, **how) for seed in (0, 1, 2))
        params, state = one.params, vs.train_state(one, tx).opt_state
        for grads in more:
            params, state = update(params, state, grads.params)
        return read(params, state)

    one, three = (run(meshes[n], lambda seed: {"layers": layers(seed)}, stacks=("layers",)) for n in (1, 3))
    for layer in range(3):
        alone = run(meshes[1], lambda seed, layer=layer: {name: x[layer] for name, x in layers(seed).items()})
        assert one.keys() == three.keys() == alone.keys()
        for name, x in alone.items():
            np.testing.assert_array_equal(one[name].reshape(3, -1)[layer], x, err_msg=name)
            np.testing.assert_array_equal(three[name].reshape(3, -1)[layer], x, err_msg=name)


def test_a_donated_stack_is_written_in_place(meshes: dict[int, Mesh]) -> None:
    plan = plan_group([TensorSpec("w", (512, 1024), Elements(256))], 2)
    layout = Layout(plan, meshes[2], "fsdp", (8,))
    params = {"u": {"g": DBuffer.abstract(layout, jnp.float32)}}
    tx = optimizer(chunk=2**14)
    shapes = jax.eval_shape(tx.init, params)
    targets = shardings(shapes, NamedSharding(meshes[2], PartitionSpec()))
    state = jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, targets)
    laid = jax.tree.map(lambda x: x.sharding, params)
    update = jax.jit(tx.update, donate_argnums=(0, 1), out_shardings=(laid, targets))
    memory = update.lower(params, state, params).compile().memory_analysis()
    elements = int(np.prod(layout.local_shape))
    assert memory.alias_size_in_bytes > 6 * elements
    # Nothing but what a chunk needs: it is 7 bytes an element by `BlockView.map`.
    assert memory.temp_size_in_bytes < 2 * elements


def test_a_donated_state_is_written_in_place(meshes: dict[int, Mesh]) -> None:
    tx = adamw_8bit(0.01, block_size=8, code="linear", min_size=0)
    # More rows than devices, and fewer: a device may hold nothing of a parameter.
    model = vs.fully_shard({"table": jnp.ones((17, 8)), "few": jnp.ones((3, 8))}, meshes[8], blocks=Elements(8))
    state = vs.train_state(model, tx)
    moments = state.opt_state.moments["root"]["float32"]
    assert {x.data.shape for x in (moments.mean.codes, moments.rms.codes)} == {
        (model.params["root"]["float32"].data.size,)
    }
    train = vs.train_step(lambda p, x: jnp.mean((x @ p["table"]) ** 2) + jnp.sum(p["few"] ** 2), tx)
    compiled = train.lower(state, jnp.ones((8, 17))).compile()
    held = [x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(state)]
    assert compiled.memory_analysis().alias_size_in_bytes == sum(held)
    before = [(x.dtype, x.shape, x.sharding) for x in jax.tree.leaves(state)]
    new, _ = train(state, np.ones((8, 17), np.float32))
    assert [(x.dtype, x.shape, x.sharding) for x in jax.tree.leaves(new)] == before


# Mistakes.


def test_blocks_that_shards_may_cut_are_named_with_the_cure(meshes: dict[int, Mesh]) -> None:
    for n in (1, 8):
        model = vs.fully_shard(numbers(0), meshes[n], units=("a",), abstract=True, blocks={"e": Tile(32, 32)})
        with pytest.raises(ValueError) as caught:
            vs.train_state(model, optimizer())
        cut = (
            "got blocks elements:256 of a parameter planned with elements:1, row_major storage; want a parameter whose "
            "shards never cut elements:256; pass blocks=Elements(count=256) for it to fully_shard (or to TensorSpec)"
        )
        assert str(caught.value) == (f"adamw_8bit(block_size=256): 3 faults\n  a: {cut}\n  b: {cut}\n  t: {cut}")


@pytest.mark.unchecked_annotations
def test_wrong_arguments_are_named() -> None:
    with pytest.raises(ValueError) as caught:
        adamw_8bit(1e-3, b1=1.0, b2=-0.1, eps=-1.0, block_size=0, code="cubic", min_size=-1, chunk=0)  # type: ignore[arg-type]
    assert str(caught.value).startswith(
        "adamw_8bit: 7 faults\n  b1: got 1.0; want at least 0 and below 1; pass a decay"
    )
    tx = adamw_8bit(1e-3)
    with pytest.raises(TypeError) as wrong:
        tx.init({"w": jnp.ones(3)})
    assert str(wrong.value) == (
        "adamw_8bit: w: got ArrayImpl; want a buffer of a sharded model; shard the model with fully_shard and pass "
        "model.params"
    )
    with pytest.raises(ValueError, match="adamw_8bit: got no params"):
        tx.update({}, tx.init({}))
