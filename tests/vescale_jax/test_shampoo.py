"""Shampoo: the papers' formulas in float64, the same bits on every mesh, no collective, and finite on any gradient."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import vescale_jax as vs
from tests.vescale_jax import block_steps as steps
from tests.vescale_jax import counting
from vescale_jax._sharded import shardings
from vescale_jax.optimizers import adamw_8bit, describe, precisions, shampoo
from vescale_layouts import DBuffer, Layout
from vescale_planner import Elements, Rows, TensorSpec, Tile, plan_group

RATE, DECAY, EPS, RIDGE, EVERY = 1e-2, 0.1, 1e-8, 1e-3, 2


@dataclasses.dataclass(frozen=True)
class Rule:
    """What differs between the cases; see `shampoo`."""

    grafting: Any = "adam"
    b1: float = 0.9
    b2: float = 0.999
    momentum: float = 0.0
    root: int = 4
    roots: Any = "newton"
    n: int = 3
    extreme: bool = False

    @property
    def given(self) -> list[dict[str, np.ndarray]]:
        """The gradients."""
        return steps.EXTREME if self.extreme else steps.ORDINARY


# Of the meshes that are compared; it has every kind of state.
COMPARED = Rule("adagrad", extreme=True)
RULES = {
    "sgd, momentum": Rule("sgd", momentum=0.9, n=8, extreme=True),
    "adam, jacobi": Rule(roots="jacobi", root=2, n=5),
    # No decay, no momentum, no grafting: Shampoo as it was (Gupta et al., algorithm 1).
    "none, sums": Rule("none", b1=0.0, b2=1.0, n=2),
    "none, means": Rule("none", root=8, momentum=0.5),
}


def optimizer(rule: Rule = Rule(), **changes: Any) -> optax.GradientTransformation:
    given = {
        "momentum": rule.momentum,
        "grafting": rule.grafting,
        "block_size": steps.TILE,
        "precondition_frequency": EVERY,
        "root": rule.root,
        "roots": rule.roots,
        "matrix_epsilon": RIDGE,
        "min_size": steps.MIN_SIZE,
    }
    return shampoo(RATE, rule.b1, rule.b2, EPS, DECAY, **{**given, **changes})


# The reference: whole tensors in float64, straight from the formulas.


def reference(rule: Rule) -> list[dict[str, np.ndarray]]:
    """Updates after each gradient."""
    params = {name: x.astype(np.float64) for name, x in steps.numbers(0).items()}
    state: dict[str, Any] = {name: (np.zeros_like(x), np.zeros_like(x)) for name, x in params.items()}
    kept: dict[Any, Any] = {}
    history = []
    for t, grads in enumerate(rule.given, 1):
        updates = {}
        weight = 1 - rule.b2**t if rule.b2 < 1 else 1.0
        new = 1 - rule.b2 if rule.b2 < 1 else 1.0
        for name, p in params.items():
            g = grads[name].astype(np.float64)
            mean, squares = state[name]
            mean = rule.b1 * mean + (1 - rule.b1) * g
            sums = name in steps.TILED and rule.grafting == "adagrad"
            squares = squares + g**2 if sums else rule.b2 * squares + new * g**2
            state[name] = mean, squares
            unbiased = mean / (1 - rule.b1**t)
            direction = unbiased / (np.sqrt(squares if sums else squares / weight) + EPS)
            if name in steps.TILED:
                direction = unbiased if rule.grafting in ("sgd", "none") else direction
                for tile in steps.tiles(g):
                    at = (name, *map(str, tile))
                    direction[tile] = step(rule, kept, at, t, g[tile], unbiased[tile], direction[tile], weight)
            updates[name] = -RATE * (direction + DECAY * p)
        history.append(updates)
    return history


def step(rule: Rule, kept: Any, at: Any, t: int, g: Any, mean: Any, graft: Any, weight: float) -> np.ndarray:
    """The direction of one tile."""
    new = 1 - rule.b2 if rule.b2 < 1 else 1.0
    left, right, roots, velocity = kept.get(at, (0.0, 0.0, None, 0.0))
    left, right = rule.b2 * left + new * g @ g.T, rule.b2 * right + new * g.T @ g
    if (t - 1) % EVERY == 0:
        roots = inverse_root(left / weight, rule.root), inverse_root(right / weight, rule.root)
    direction = roots[0] @ mean @ roots[1]
    if rule.grafting != "none":
        length = np.linalg.norm(direction)
        direction = direction * (np.linalg.norm(graft) / length) if length else direction
    velocity = rule.momentum * velocity + direction
    kept[at] = left, right, roots, velocity
    return velocity


def inverse_root(x: np.ndarray, root: int) -> np.ndarray:
    values, vectors = np.linalg.eigh(x)
    if values[-1] <= 0:
        return np.zeros_like(x)
    return (vectors * (np.maximum(values, 0) + RIDGE * values[-1]) ** (-1 / root)) @ vectors.T


@pytest.mark.parametrize("name", RULES)
def test_updates_are_those_of_the_papers(name: str, meshes: dict[int, Mesh]) -> None:
    rule = RULES[name]
    compiled, history = steps.run(optimizer(rule), meshes[rule.n], rule.given)
    assert counting.collectives(compiled) == {}
    steps.close(history, reference(rule), 3e-4)
    for found in history:
        assert all(np.all(np.isfinite(x)) for x in found.values())


@functools.cache
def history_of(case: str, mesh: Mesh) -> tuple[Any, list[dict[str, Any]]]:
    """The update by `COMPARED` in one of `steps.CASES`, and what it did."""
    how = dict(steps.CASES[case])
    del how["n"]
    compiled, history = steps.run(optimizer(COMPARED, chunk=how.pop("chunk", 2**20)), mesh, steps.EXTREME, **how)
    assert counting.collectives(compiled) == {}
    return compiled, history


@pytest.mark.parametrize("case", steps.CASES)
def test_bits_are_the_same_on_every_mesh(case: str, meshes: dict[int, Mesh]) -> None:
    _, history = history_of(case, meshes[steps.CASES[case]["n"]])
    assert "statistics/left a" in history[0]
    if case == "1":
        steps.close(history, reference(COMPARED), 3e-4)
    steps.same(history, history_of("1", meshes[1])[1])


def test_a_state_goes_on_on_another_mesh(meshes: dict[int, Mesh]) -> None:
    tx, (_, wanted) = optimizer(COMPARED), history_of("1", meshes[1])
    (first, _), (then, _) = history_of("5", meshes[5]), history_of("2, in chunks", meshes[2])
    model, other = (steps.model_of(steps.numbers(0), meshes[n]) for n in (5, 2))
    state = vs.train_state(model, tx).opt_state
    for g in steps.EXTREME[:4]:
        _, state = first(steps.model_of(g, meshes[5]).params, state, model.params)
    state = steps.moved(state, vs.train_state(other, tx).opt_state)
    for step, g in enumerate(steps.EXTREME[4:6], 4):
        updates, state = then(steps.model_of(g, meshes[2]).params, state, other.params)
        for name, x in steps.tensors(updates):
            np.testing.assert_array_equal(x, wanted[step][f"update {name}"])


def test_a_stack_of_layers_is_updated_layer_by_layer(meshes: dict[int, Mesh]) -> None:
    alone, _ = history_of("2, in chunks", meshes[2])
    layout = steps.model_of(steps.numbers(0), meshes[2]).params["root"]["float32"].layout
    tx = optimizer(COMPARED, chunk=steps.CASES["2, in chunks"]["chunk"])

    def run(layout: Layout, of: Any, update: Any = None) -> tuple[Any, list[Any]]:
        """The update, and updates and states of buffers made by `of` from the seeds of two layers."""

        def buffers(*seeds: int) -> Any:
            return {"root": {"float32": DBuffer.from_tensors(layout, of(*seeds), jnp.float32)}}

        params = buffers(0, 1)
        shapes = jax.eval_shape(tx.init, params)
        laid = shardings(shapes, NamedSharding(meshes[2], PartitionSpec()))
        state = jax.tree.map(lambda x, at: jax.device_put(jnp.zeros(x.shape, x.dtype), at), shapes, laid)
        update = update or jax.jit(tx.update).lower(params, state, params).compile()
        found = []
        for seeds in ((2, 3), (4, 5)):
            updates, state = update(buffers(*seeds), state, params)
            found.append(dict(steps.tensors(updates)) | dict(steps.named(state)))
        return update, found

    def both(*seeds: int) -> dict[str, np.ndarray]:
        one, two = map(steps.numbers, seeds)
        return {name: np.stack([one[name], two[name]]) for name in one}

    compiled, stack = run(Layout(layout.plan, layout.mesh, layout.axis, (2,)), both)
    assert counting.collectives(compiled) == {}
    for layer in (0, 1):
        _, wanted = run(layout, lambda *seeds, layer=layer: steps.numbers(seeds[layer]), alone)
        for x, y in zip(stack, wanted, strict=True):
            for name, value in y.items():
                np.testing.assert_array_equal(x[name][layer], value, err_msg=name)


# Bytes, and which parameter is treated how.


def test_the_table_says_what_each_parameter_has(meshes: dict[int, Mesh]) -> None:
    tx = optimizer(Rule("sgd", momentum=0.9))
    tables = {n: describe(tx, steps.model_of(steps.numbers(0), meshes[n], abstract=True)) for n in (1, 2, 8)}
    assert {row.path: (row.rule, row.reason, row.blocks) for row in tables[1]} == {
        "a": ("shampoo", "matrix", "tile:16,16, 12 of them"),
        "e": ("shampoo", "matrix", "tile:16,16, 18 of them"),
        "t": ("shampoo", "matrix", "tile:16,16, 6 of them"),
        "m": ("adamw", "below min_size", ""),
        "r": ("adamw", "one row or one column", ""),
        "s": ("adamw", "scalar", ""),
        "v": ("adamw", "vector", ""),
    }
    # Mean and velocity; roots and statistics of both sides with their sizes.
    assert tables[1]["a"].state_bytes == 8 * 38 * 52 + 12 * (8 + 8 * 2 * 16 * 16)
    assert tables[1]["v"].state_bytes == 12 * 33
    assert tables[1].rows == tables[2].rows == tables[8].rows
    assert [row.path for row in tables[8]] == sorted(steps.SHAPES)
    assert tables[8].device_bytes < tables[2].device_bytes < tables[1].device_bytes
    model = steps.model_of(steps.numbers(0), meshes[2])
    state = vs.train_state(model, optax.chain(optax.clip(1.0), tx)).opt_state
    assert describe(state, model) == tables[2]
    held = sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(state))
    assert tables[2].device_bytes == held
    assert "│ a         │ 38x52   │ shampoo │ matrix" in str(tables[2])
    with pytest.raises(KeyError, match="got 'b'"):
        tables[1]["b"]


def test_other_optimizers_are_element_wise(meshes: dict[int, Mesh]) -> None:
    model = steps.model_of(steps.numbers(0), meshes[2], units=("a",), trainable={"v": False, "*": True})
    table = describe(optax.adamw(1e-3), model)
    assert {row.rule for row in table} == {"element-wise"}
    assert {row.path: row.state_bytes for row in table} == {
        name: 8 * int(np.prod(shape)) for name, shape in steps.SHAPES.items() if name != "v"
    }


def test_the_table_of_8_bit_adam_is_that_of_its_precisions(meshes: dict[int, Mesh]) -> None:
    model = vs.fully_shard(steps.numbers(0), meshes[2], blocks=Elements(256), abstract=True)
    tx = adamw_8bit(1e-3, min_size=steps.MIN_SIZE)
    table, wanted = describe(tx, model), precisions(jax.eval_shape(tx.init, model.params))
    assert {row.path: (row.blocks, row.state_bytes) for row in table} == {
        row.name: (row.block, row.state_bytes) for row in wanted
    }
    assert (table["a"].rule, table["v"].rule) == ("adamw_8bit", "adamw")


# Through the training step.


def perceptron() -> dict[str, Any]:
    keys = jax.random.split(jax.random.key(0))
    return {"up": jax.random.normal(keys[0], (16, 48)) / 4, "down": jax.random.normal(keys[1], (48, 8)) / 7}


def regression(params: Any, x: jax.Array) -> jax.Array:
    return jnp.mean((jnp.tanh(x @ params["up"]) @ params["down"] - jnp.sin(3 * x[:, :8])) ** 2)


def losses(mesh: Mesh, tx: Any) -> list[float]:
    state = vs.train_state(vs.fully_shard(perceptron(), mesh, blocks=Rows(8)), tx)
    train = vs.train_step(regression, tx)
    x = np.random.default_rng(0).normal(size=(120, 16)).astype(np.float32)
    laid = [(x.dtype, x.shape, x.sharding) for x in jax.tree.leaves(state)]
    found = []
    for _ in range(30):
        state, metrics = train(state, x)
        found.append(float(metrics.loss))
    assert [(x.dtype, x.shape, x.sharding) for x in jax.tree.leaves(state)] == laid
    return found


def test_training_beats_adamw_on_explicit_axes_too(meshes: dict[int, Mesh]) -> None:
    adamw = losses(meshes[8], optax.adamw(0.01))
    tx = shampoo(optax.constant_schedule(0.01), block_size=8, min_size=0)
    explicit = jax.make_mesh((3,), ("fsdp",), devices=jax.devices()[:3], axis_types=(AxisType.Explicit,))
    assert losses(explicit, tx)[-1] < 0.95 * adamw[-1]


def test_a_donated_state_is_written_in_place(meshes: dict[int, Mesh]) -> None:
    plan = plan_group([TensorSpec("w", (512, 1024), Tile(32, 32))], 2)
    layout = Layout(plan, meshes[2], "fsdp", (8,))
    params = {"u": {"g": DBuffer.abstract(layout, jnp.float32)}}
    tx = shampoo(1e-3, block_size=32, chunk=2**14)
    shapes = jax.eval_shape(tx.init, params)
    targets = shardings(shapes, NamedSharding(meshes[2], PartitionSpec()))
    state = jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, targets)
    laid = jax.tree.map(lambda x: x.sharding, params)
    update = jax.jit(tx.update, donate_argnums=(0, 1), out_shardings=(laid, targets))
    memory = update.lower(params, state, params).compile().memory_analysis()
    size = 4 * int(np.prod(layout.local_shape))
    held = sum(
        int(np.prod(s.shard_shape(x.shape))) * 4 for x, s in zip(*map(jax.tree.leaves, (shapes, targets)), strict=True)
    )
    assert memory.alias_size_in_bytes == held + size
    # Directions, and what a chunk needs.
    assert memory.temp_size_in_bytes < 3 * size


# Mistakes.


def test_tiles_that_shards_may_cut_are_named_with_the_cure(meshes: dict[int, Mesh]) -> None:
    for n in (1, 8):
        blocks = {"e": Tile(16, 16), "t": Rows(16), "*": Elements(1)}
        model = vs.fully_shard(steps.numbers(0), meshes[n], abstract=True, blocks=blocks)
        with pytest.raises(ValueError) as caught:
            vs.train_state(model, optimizer())
        assert str(caught.value) == (
            "shampoo(block_size=16): 1 fault\n  a: got blocks tile:16,16 of a parameter planned with "
            "elements:1, row_major storage; want a parameter whose shards never cut tile:16,16; pass "
            "blocks=Tile(rows=16, cols=16) for it to fully_shard (or to TensorSpec)"
        )


@pytest.mark.unchecked_annotations
def test_wrong_arguments_are_named() -> None:
    wrong: Any = {
        "b1": 1.0, "b2": 1.1, "eps": 0, "momentum": 1, "grafting": "lamb", "block_size": 1, "min_size": -1, "chunk": 0,
        "precondition_frequency": 0, "root": 3, "roots": "qr", "matrix_epsilon": 0,
    }  # fmt: skip
    with pytest.raises(ValueError) as caught:
        shampoo(1e-3, **wrong)
    lines = str(caught.value).split("\n  ")
    assert lines[:2] == ["shampoo: 12 faults", "b1: got 1.0; want at least 0 and below 1; pass 0.9"]
    assert {line.split(":")[0] for line in lines[1:]} == set(wrong)
    with pytest.raises(ValueError, match=r"at least 1e-7 for 'newton'"):
        shampoo(1e-3, roots="newton", matrix_epsilon=1e-9)
    tx = shampoo(1e-3)
    with pytest.raises(TypeError, match="shampoo: w: got ArrayImpl; want a buffer of a sharded model"):
        tx.init({"w": jnp.ones(3)})
    with pytest.raises(ValueError, match="shampoo: got no params"):
        tx.update({}, tx.init({}))
