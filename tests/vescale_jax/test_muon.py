"""Muon: the numbers of optax and of NumPy on every mesh, for lists and stacks; what travels, and what it needs."""

import dataclasses
import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import vescale_jax as vs
from benchmarks.optimizers import wire_bytes
from tests.vescale_jax import counting
from vescale_jax._sharded import shardings
from vescale_jax.optimizers import Matrix, describe, muon, muon_work, newton_schulz
from vescale_layouts import DBuffer, Layout
from vescale_planner import TensorSpec, Tile, plan_group

LAYERS = 8
SHAPES = {
    "attn/query/kernel": (8, 2, 4),
    "attn/query/bias": (2, 4),
    "attn/out/kernel": (2, 4, 8),
    "qkv/kernel": (8, 24),
    "moe/experts": (3, 8, 5),
    "up/kernel": (8, 20),
    "norm": (8,),
    "none": (0, 4),
}
OTHERS = {"embed/embedding": (17, 8), "proj/kernel": (7, 5), "temperature": (), "conv/kernel": (3, 3, 2, 4)}
RULES = {"*qkv/kernel": Matrix(split_cols=6), "proj/*": "muon"}
RATE, BETA, DECAY, RMS = 0.02, 0.95, 0.1, 0.2
COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def numbers(seed: int, scale: float = 1.0, layers: int = LAYERS) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    shapes = OTHERS | {f"layers/{i}/{name}": shape for i in range(layers) for name, shape in SHAPES.items()}
    return {name: (scale * rng.normal(size=shape)).astype(np.float32) for name, shape in shapes.items()}


def nested(flat: dict[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for path, x in flat.items():
        *outer, last = path.split("/")
        functools.reduce(lambda node, key: node.setdefault(key, {}), outer, tree)[last] = x
    return tree


# What Muon is, in float64 and on whole matrices.


def matrices_of(path: str, x: np.ndarray) -> list[np.ndarray] | None:
    """The matrices of a parameter, (m, n) each, as views that are written to; None for AdamW."""
    if path.endswith(("bias", "norm", "temperature", "embedding", "none")):
        return None
    if "query" in path:
        return [x.reshape(8, 8)]
    if "out" in path:
        return [x.reshape(8, 8)]
    if "qkv" in path:
        return [x[:, 4 * i : 4 * i + 4] for i in range(6)]
    if "experts" in path:
        return [*x]
    return [x.reshape(18, 4)] if "conv" in path else [x]


def orthogonal(x: np.ndarray) -> np.ndarray:
    a, b, c = COEFFICIENTS
    y = x / (np.linalg.norm(x) + 1e-8)
    for _ in range(5):
        gram = y @ y.T
        y = a * y + (b * gram + c * gram @ gram) @ y
    return y


@functools.cache
def reference(steps: int = 3) -> dict[str, np.ndarray]:
    """The parameters after some steps, in float64."""
    params = {name: x.astype(np.float64) for name, x in numbers(0).items()}
    moments = {name: [np.zeros_like(x), np.zeros_like(x)] for name, x in params.items()}
    for t in range(1, steps + 1):
        for name, g in numbers(t).items():
            m, v = moments[name]
            if matrices_of(name, params[name]) is None:
                m[...] = 0.9 * m + 0.1 * g
                v[...] = 0.999 * v + 0.001 * g.astype(np.float64) ** 2
                root = np.sqrt(v / (1 - 0.999**t))
                params[name] -= RATE * (m / (1 - 0.9**t) / (root + 1e-8) + 0.05 * params[name])
                continue
            m[...] = BETA * m + (1 - BETA) * g
            u = BETA * m / (1 - BETA ** (t + 1)) + (1 - BETA) * g / (1 - BETA**t)
            for part, new in zip(matrices_of(name, u) or [], matrices_of(name, params[name]) or [], strict=True):
                new -= RATE * (RMS * np.sqrt(max(part.shape)) * orthogonal(part) + DECAY * new)
    return params


def optimizer(**changes: Any) -> optax.GradientTransformation:
    given = {"weight_decay": DECAY, "adam_weight_decay": 0.05, "rules": RULES, **changes}
    return muon(RATE, BETA, **given)


def step(tx: Any, grads: Any, state: Any, params: Any) -> Any:
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state


def after(tx: Any, params: Any, grads: list[Any]) -> Any:
    state = jax.jit(tx.init)(params)
    # Compiling takes most of the time here.
    jitted = jax.jit(functools.partial(step, tx), compiler_options={"xla_backend_optimization_level": 0})
    for g in grads:
        params, state = jitted(g, state, params)
    return params, state


def list_model(mesh: Mesh, seed: int, layers: int = 3, **how: Any) -> Any:
    return vs.fully_shard(nested(numbers(seed, layers=layers)), mesh, **how)


def stack_params(mesh: Mesh, seed: int, dims: tuple[int, ...] = (8,)) -> Any:
    """The layers as a stack in one buffer, beside the other parameters."""
    n, tensors = mesh.shape["fsdp"], numbers(seed)
    specs = [TensorSpec(name, shape) for name, shape in SHAPES.items()]
    layout = Layout(plan_group(specs, n, 4), mesh, "fsdp", dims)
    stacked = {
        name: np.stack([tensors[f"layers/{i}/{name}"] for i in range(LAYERS)]).reshape(*dims, *shape)
        for name, shape in SHAPES.items()
    }
    rest = Layout(plan_group([TensorSpec(name, shape) for name, shape in OTHERS.items()], n, 4), mesh, "fsdp")
    return {
        "layers": {"float32": DBuffer.from_tensors(layout, stacked, np.float32)},
        "root": {"float32": DBuffer.from_tensors(rest, tensors, np.float32)},
    }


# On 2 devices a stack of 2 and one that is loose, on 3 a stack, on 8 nothing but loose matrices.
LISTS: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "1": (1, {}, {"layers": 2}),
    "2": (2, {}, {}),
    "2, one unit": (2, {"units": ("*",)}, {}),
    "3, tiles anyhow": (3, {"blocks": Tile(4, 4), "storage": "free"}, {"chunk": 40}),
    "8, tiles": (8, {"blocks": {"*kernel": Tile(4, 4)}, "storage": "free"}, {"layers": 2}),
}


@pytest.mark.parametrize("case", LISTS)
def test_a_list_of_layers_is_as_in_numpy(case: str, meshes: dict[int, Mesh]) -> None:
    n, how, changes = LISTS[case]
    changes = dict(changes)
    models = [list_model(meshes[n], seed, changes.get("layers", 3), **how) for seed in range(4)]
    changes.pop("layers", None)
    tx = optimizer(**changes)
    params, _ = after(tx, models[0].params, [model.params for model in models[1:]])
    for path, x in dataclasses.replace(models[0], params=params).tensors():
        np.testing.assert_allclose(x, reference()[path], rtol=1e-5, atol=3e-6, err_msg=path)


STACKS: dict[str, tuple[int, tuple[int, ...], dict[str, Any]]] = {
    "1, two dims": (1, (2, 4), {}),
    "2, in turns": (2, (8,), {"turn_layers": 2}),
    "3, one absent": (3, (8,), {}),
    "5, some loose": (5, (8,), {}),
    "8": (8, (8,), {}),
}


@pytest.mark.parametrize("case", STACKS)
def test_a_stack_of_layers_is_as_in_numpy(case: str, meshes: dict[int, Mesh]) -> None:
    n, dims, changes = STACKS[case]
    params, *grads = [stack_params(meshes[n], seed, dims) for seed in range(4)]
    params, _ = after(optimizer(**changes), params, grads)
    for name, x in params["layers"]["float32"].read():
        for i, layer in enumerate(x.reshape(LAYERS, *SHAPES[name])):
            wanted = reference()[f"layers/{i}/{name}"]
            np.testing.assert_allclose(layer, wanted, rtol=1e-5, atol=3e-6, err_msg=name)
    for name, x in params["root"]["float32"].read():
        np.testing.assert_allclose(x, reference()[name], rtol=1e-5, atol=3e-6, err_msg=name)


@pytest.mark.parametrize("consistent_rms", [None, 0.2])
@pytest.mark.parametrize("nesterov", [False, True])
def test_it_is_the_muon_of_optax(nesterov: bool, consistent_rms: float | None, meshes: dict[int, Mesh]) -> None:
    dims, same = optax.contrib.MuonDimensionNumbers, {"nesterov": nesterov, "consistent_rms": consistent_rms}
    known = {"query": dims(0, (1, 2)), "out": dims((0, 1), 2), "experts": dims(1, 2), "conv": dims((0, 1, 2), 3)}
    names = [path for path, x in numbers(0, layers=1).items() if matrices_of(path, x) is not None and "qkv" not in path]
    flat = {path: numbers(0)[path] for path in names}
    specs = {path: next((d for word, d in known.items() if word in path), dims()) for path in flat}
    theirs = optax.contrib.muon(RATE, beta=BETA, weight_decay=DECAY, muon_weight_dimension_numbers=specs, **same)
    wanted, state = dict(flat), theirs.init(flat)
    grads = [{path: numbers(seed)[path] for path in flat} for seed in (1, 2)]
    for g in grads:
        updates, state = jax.jit(theirs.update)(g, state, wanted)
        wanted = optax.apply_updates(wanted, updates)
    model, *grads = [vs.fully_shard(nested(tree), meshes[2]) for tree in (flat, *grads)]
    params, _ = after(optimizer(rules=None, **same), model.params, [g.params for g in grads])
    for path, x in dataclasses.replace(model, params=params).tensors():
        np.testing.assert_allclose(x, wanted[path], rtol=1e-5, atol=2e-6, err_msg=path)


def test_zero_tiny_and_huge_gradients_stay_finite(meshes: dict[int, Mesh]) -> None:
    model = list_model(meshes[3], 0, layers=1)
    grads = [jax.tree.map(lambda x, v=value: x * 0 + v, model.params) for value in (0.0, 1e-30, 1e30, -1e38, 0.0)]
    tx = optimizer(exchange_dtype=jnp.bfloat16)
    params, state = after(tx, model.params, grads)
    for x in jax.tree.leaves((params, state)):
        assert np.all(np.isfinite(x))


def test_newton_schulz_knows_no_scale() -> None:
    x = np.random.default_rng(0).normal(size=(3, 6, 9)).astype(np.float32)
    found = newton_schulz(jnp.asarray(x), [COEFFICIENTS] * 5, 1e-8)
    for wanted, y in zip(map(orthogonal, x.astype(np.float64)), found, strict=True):
        np.testing.assert_allclose(y, wanted, atol=1e-5)
    values = np.linalg.svd(found, compute_uv=False)
    assert np.all((values > 0.5) & (values < 1.3))
    for scale in (1e-30, 1e30):
        np.testing.assert_allclose(newton_schulz(jnp.asarray(x * scale), [COEFFICIENTS] * 5, 0.0), found, atol=1e-5)
    tall = newton_schulz(jnp.asarray(x.swapaxes(1, 2)), [COEFFICIENTS] * 5, 1e-8)
    np.testing.assert_allclose(tall.swapaxes(1, 2), found, atol=1e-5)


MATRICES = {
    "heads of a query": (Matrix((0,), (2,)), (8, 2, 4), [(2, 8, 4)]),
    "query": (Matrix((0,), (1, 2)), (8, 2, 4), [(1, 8, 8)]),
    "output": (Matrix((0, 1), (-1,)), (2, 4, 8), [(1, 8, 8)]),
    "fewer keys": (Matrix(split_cols=(8, 4, 4)), (5, 16), [(1, 5, 8), (1, 5, 4), (1, 5, 4)]),
    "heads of rows": (Matrix(split_rows=2), (3, 8, 5), [(6, 4, 5)]),
    "both": (Matrix((1,), (0,), split_rows=(1, 2), split_cols=2), (4, 3, 7), [(14, 1, 2), (14, 2, 2)]),
}


@pytest.mark.parametrize("name", MATRICES)
def test_a_parameter_is_taken_apart_and_put_together(name: str) -> None:
    matrix, shape, shapes = MATRICES[name]
    x = jnp.arange(np.prod(shape)).reshape(shape)
    parts = matrix.split(x)
    assert [part.shape for part in parts] == shapes == matrix.shapes(shape)
    np.testing.assert_array_equal(matrix.join(parts, shape), x)
    if name == "heads of a query":
        np.testing.assert_array_equal(parts[0][1], x[:, 1])
    if name == "fewer keys":
        np.testing.assert_array_equal(parts[1][0], x[:, 8:12])
    if name == "heads of rows":
        np.testing.assert_array_equal(parts[0][3], x[1, 4:])


# What travels.

WIDE = {"q": (32, 32), "k": (32, 32), "up": (32, 64), "down": (64, 32), "norm": (32,)}


def abstract(tx: Any, mesh: Mesh, layers: int, as_stack: bool) -> tuple[Any, Any]:
    """Parameters and state without values."""
    plan = plan_group([TensorSpec(name, shape) for name, shape in WIDE.items()], mesh.shape["fsdp"], 4)
    units = {"layers": (layers,)} if as_stack else {f"layers/{i}": () for i in range(layers)}
    params = {
        unit: {"float32": DBuffer.abstract(Layout(plan, mesh, "fsdp", dims), jnp.float32)}
        for unit, dims in units.items()
    }
    state = jax.eval_shape(tx.init, params)
    targets = shardings(state, NamedSharding(mesh, PartitionSpec()))
    return params, jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), state, targets)


def lowered(tx: Any, mesh: Mesh, layers: int, as_stack: bool = True) -> tuple[Any, Any]:
    params, state = abstract(tx, mesh, layers, as_stack)
    return jax.jit(tx.update, donate_argnums=(0, 1)).lower(params, state, params), muon_work(state)


@pytest.mark.parametrize("as_stack", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_stack_takes_two_exchanges(dtype: Any, as_stack: bool, meshes: dict[int, Mesh]) -> None:
    for layers in (16,) if as_stack else (8,):
        program, work = lowered(optimizer(rules=None, exchange_dtype=dtype), meshes[8], layers, as_stack)
        wire = {"float32": "f32", "bfloat16": "bf16"}[dtype]
        # In the program that XLA is given; the compiler for CPUs widens every bfloat16 collective to float32.
        assert (
            re.findall(r'"stablehlo.all_to_all"\(.*\) <.*> : \(tensor<(?:\d+x)*(\w+)>\)', program.as_text())
            == [wire] * 2
        )
        compiled = program.compile()
        assert counting.collectives(compiled) == {"all-to-all": 2}
        # None in the body of a loop: all of them stand in the entry computation.
        entry = compiled.as_text().split("\nENTRY ")[1]
        assert len(re.findall(r" all-to-all(?:-start)?\(", entry)) == 2
        assert work.wire_elements <= 2 * work.matrix_elements
        assert str(work).startswith(f"stack of {layers} layers, 4 parameters each, {layers // 8} on a device: 2 all")


@pytest.mark.parametrize("layers", [1, 3, 6, 9, 12, 15])
@pytest.mark.parametrize("n", [2, 3, 8])
def test_no_more_travels_than_twice_the_matrices(n: int, layers: int, meshes: dict[int, Mesh]) -> None:
    _, state = abstract(optimizer(rules=None), meshes[n], layers, as_stack=False)
    work = muon_work(state)
    assert work.matrix_elements == layers * sum(int(np.prod(shape)) for shape in WIDE.values() if len(shape) > 1)
    assert work.wire_elements <= 2 * work.matrix_elements
    largest = max(min(shape) ** 2 * max(shape) for shape in WIDE.values() if len(shape) > 1)
    assert max(work.costs) <= 1.15 * sum(work.costs) / n + largest


def test_the_account_of_what_travels_is_that_of_the_program(meshes: dict[int, Mesh]) -> None:
    program, work = lowered(optimizer(rules=None), meshes[8], 9)
    compiled = program.compile()
    assert wire_bytes(compiled)[0] == 4 * work.wire_elements
    assert set(counting.collectives(compiled)) == {"all-to-all", "collective-permute"}


def test_temporary_memory_does_not_grow_with_the_layers(meshes: dict[int, Mesh]) -> None:
    def temp(layers: int, **changes: Any) -> int:
        program, _ = lowered(optimizer(rules=None, **changes), meshes[8], layers)
        return program.compile().memory_analysis().temp_size_in_bytes

    assert temp(64, turn_layers=1) <= 1.02 * temp(32, turn_layers=1)
    # In one exchange, what grows is what is sent and received.
    shards = 4 * 32 * sum(int(np.prod(shape)) for shape in WIDE.values()) // 8
    assert temp(64) - temp(32) <= 2.1 * shards


# Which parameter takes what.


def test_rulings_follow_from_path_and_shape_alone(meshes: dict[int, Mesh]) -> None:
    tables = [describe(optimizer(), list_model(meshes[n], 0, abstract=True)) for n in (1, 3, 8)]
    rows = {row.path: row for row in tables[0]}
    for table in tables[1:]:
        assert list(table) == list(tables[0])
    assert {path: (row.rule, row.reason) for path, row in rows.items()} == {
        **{
            f"layers/{i}/{name}": found
            for i in range(3)
            for name, found in {
                "attn/query/kernel": ("muon", "attention, (in, heads, out)"),
                "attn/query/bias": ("adamw", "a bias"),
                "attn/out/kernel": ("muon", "attention, (heads, in, out)"),
                "qkv/kernel": ("muon", "asked for"),
                "moe/experts": ("muon", "matrices in the last two dims"),
                "up/kernel": ("muon", "a matrix"),
                "norm": ("adamw", "a vector"),
                "none": ("adamw", "no element"),
            }.items()
        },
        "embed/embedding": ("adamw", "an embedding"),
        "proj/kernel": ("muon", "asked for"),
        "temperature": ("adamw", "a scalar"),
        "conv/kernel": ("muon", "a convolution"),
    }
    assert rows["layers/0/qkv/kernel"].blocks == "6 x (8, 4)"
    assert (rows["layers/0/qkv/kernel"].state_bytes, rows["layers/0/norm"].state_bytes) == (4 * 8 * 24, 8 * 8)
    stacked = jax.eval_shape(optimizer().init, stack_params(meshes[2], 0))
    assert {row.path: row.blocks for row in stacked.rules(lambda unit, group, name: name)}[
        "moe/experts"
    ] == "24 x (8, 5)"


def test_state_holds_adam_only_where_it_is_used(meshes: dict[int, Mesh]) -> None:
    state = vs.train_state(list_model(meshes[8], 0, layers=1), optimizer()).opt_state
    layer, root = state.moments["layers/0"]["float32"], state.moments["root"]["float32"]
    assert layer.momentum.data.shape == layer.layout.buffer_shape
    held = sum(x.size for x in jax.tree.leaves(layer.mean))
    assert 16 <= held < layer.layout.buffer_size / 2
    assert isinstance(root.mean, DBuffer)
    for x in jax.tree.leaves(state.moments):
        assert x.sharding.spec == PartitionSpec("fsdp")


def regression(params: Any, x: jax.Array) -> jax.Array:
    return jnp.mean((jnp.tanh(x @ params["up"]) @ params["down"] - jnp.sin(3 * x[:, :8])) ** 2)


def test_training_steps_are_the_same_on_all_meshes(meshes: dict[int, Mesh]) -> None:
    def losses(mesh: Mesh, **changes: Any) -> list[float]:
        tx = muon(0.05, weight_decay=0.01, rules=lambda path, shape: None, **changes)
        keys = jax.random.split(jax.random.key(0))
        tree = {"up": jax.random.normal(keys[0], (16, 48)) / 4, "down": jax.random.normal(keys[1], (48, 8)) / 7}
        state = vs.train_state(vs.fully_shard(tree, mesh), tx)
        train = vs.train_step(regression, tx)
        x = np.random.default_rng(0).normal(size=(120, 16)).astype(np.float32)
        found = []
        for _ in range(8):
            state, metrics = train(state, x)
            found.append(float(metrics.loss))
        return found

    eight = losses(meshes[8])
    assert eight[-1] < 0.8 * eight[0]
    explicit = jax.make_mesh((3,), ("fsdp",), devices=jax.devices()[:3])
    np.testing.assert_allclose(eight, losses(meshes[3]), rtol=1e-4)
    np.testing.assert_allclose(
        eight, losses(explicit, exchange_dtype=jnp.bfloat16, compute_dtype=jnp.bfloat16), rtol=0.05
    )


# Mistakes.


def test_wrong_rules_are_named(meshes: dict[int, Mesh]) -> None:
    model = vs.fully_shard({"a": jnp.ones((4, 6)), "b": jnp.ones(3), "c": jnp.ones((2, 3))}, meshes[2])
    rules = {"a": Matrix(split_cols=4), "b": "muon", "c": Matrix((0,), (-2,)), "d": "adamw"}
    with pytest.raises(ValueError) as caught:
        vs.train_state(model, muon(0.1, rules=rules))
    assert str(caught.value) == (
        "muon: 4 faults\n"
        "  rules: got pattern 'd', which matches nothing; want patterns that match names such as a, b, c; mend or drop "
        "it\n  a: got split_cols=4; want parts of 6, what shape (4, 6) has there; pass a divisor, or widths that add "
        "up to it\n"
        "  b: got 'muon' for shape (3,); want a parameter of two dims or more; pass 'adamw', or no rule\n"
        "  c: got Matrix(rows=(0,), cols=(-2,), split_rows=1, split_cols=1); want every dim once; pass other dims"
    )


@pytest.mark.unchecked_annotations
def test_wrong_arguments_are_named() -> None:
    with pytest.raises(ValueError, match=r"muon: 6 faults\n  beta: got 1\.0; want at least 0 and below 1"):
        muon(0.1, 1.0, adam_b1=-1.0, adam_b2=2.0, eps=-1.0, chunk=0, turn_layers=0)
    with pytest.raises(
        ValueError, match=r"muon: 2 faults\n  momentum_dtype: got 'bf16'.*\n  exchange_dtype: got 'int8'"
    ):
        muon(0.1, momentum_dtype="bf16", exchange_dtype="int8")
    with pytest.raises(TypeError, match=r"  beta: got a JAX array; .*lambda learning_rate: muon\(learning_rate\)"):
        optax.inject_hyperparams(muon)(learning_rate=0.1).init({})
    with pytest.raises(ValueError, match="muon: ns_coeffs"):
        muon(0.1, ns_coeffs=(1.0, 2.0))
    tx = muon(0.1)
    with pytest.raises(TypeError, match="muon: w: got ArrayImpl; want a buffer of a sharded model"):
        tx.init({"w": jnp.ones(3)})
    with pytest.raises(ValueError, match="muon: got no params"):
        tx.update({}, tx.init({}))
