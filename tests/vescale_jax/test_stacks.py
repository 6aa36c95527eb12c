"""Stacks of layers: trained on every mesh as on one device, with and without look-ahead."""

import functools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import Mesh

import vescale_jax as vs
from tests.vescale_jax import counting, models, twin
from tests.vescale_jax import stack_models as stacks
from vescale_layouts import DBuffer
from vescale_planner import Elements

LAYERS = ("layers",)
Train = Callable[..., twin.Run]


@pytest.fixture(scope="session")
def train(meshes: dict[int, Mesh]) -> Train:
    """Trains the bare network two steps over some devices."""

    @functools.cache
    def one(n: int, prefetch: int, reshard: bool = True) -> twin.Run:
        options: Any = {"stacks": LAYERS, "prefetch": prefetch, "reshard_after_forward": reshard}
        model = vs.fully_shard(stacks.tree, meshes[n], **options)
        return twin.sharded(model, stacks.tree_loss, twin.ADAMW, twin.BATCHES[:2])

    return one


@functools.cache
def tree_twin() -> twin.Run:
    return twin.plain(stacks.tree(), stacks.tree_loss, twin.ADAMW, twin.BATCHES[:2])


def same_bits(left: twin.Run, right: twin.Run) -> None:
    np.testing.assert_array_equal(left.losses, right.losses)
    for path, value in left.params.items():
        np.testing.assert_array_equal(value, right.params[path], err_msg=path)
    for one, other in zip(left.rest, right.rest, strict=True):
        np.testing.assert_array_equal(_data(one), _data(other))


def _data(leaf: Any) -> Any:
    return jax.random.key_data(leaf) if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf


@pytest.mark.parametrize(("n", "prefetch"), [(1, 0), (1, 1), (2, 1), (3, 0), (8, 1)])
def test_training_is_that_of_one_device(n: int, prefetch: int, train: Train) -> None:
    twin.assert_same(train(n, prefetch), tree_twin())


@pytest.mark.parametrize("n", [1, 3])
def test_looking_ahead_changes_no_bit(n: int, train: Train) -> None:
    same_bits(train(n, 0), train(n, 1))


def test_keeping_layers_changes_no_bit(train: Train) -> None:
    same_bits(train(3, 0), train(3, 0, reshard=False))


@pytest.mark.parametrize("remat", [False, True])
def test_nnx_stacks_with_dropout(remat: bool, meshes: dict[int, Mesh]) -> None:
    def make() -> Any:
        return stacks.dropout_net(remat)

    # Every device folds its number into the keys, the only one too.
    folded = make()
    keys = nnx.state(folded, nnx.RngKey)
    nnx.update(folded, jax.tree.map(jax.vmap(lambda key: jax.random.fold_in(key, 0)), keys))
    theirs = twin.plain(folded, models.mean_loss, twin.ADAMW, twin.BATCHES[:2])
    one = vs.fully_shard(make, meshes[1], stacks=LAYERS, prefetch=1)
    twin.assert_same(twin.sharded(one, models.mean_loss, twin.ADAMW, twin.BATCHES[:2]), theirs)
    runs = [
        twin.sharded(
            vs.fully_shard(make, meshes[3], stacks=LAYERS, prefetch=prefetch),
            models.mean_loss,
            twin.ADAMW,
            twin.BATCHES[:2],
        )
        for prefetch in (0, 1)
    ]
    same_bits(*runs)
    # The counters of the streams are those of one device on any mesh.
    for mine, want in zip(runs[0].rest, theirs.rest, strict=True):
        if mine.dtype == jnp.uint32:
            np.testing.assert_array_equal(mine, want)


def test_nnx_stacks_with_batch_statistics_and_counters(meshes: dict[int, Mesh]) -> None:
    theirs = twin.plain(stacks.norm_net(), models.mean_loss, twin.ADAMW, twin.BATCHES[:2])
    one = vs.fully_shard(stacks.norm_net, meshes[1], stacks=LAYERS, prefetch=1)
    ours = twin.sharded(one, models.mean_loss, twin.ADAMW, twin.BATCHES[:2])
    twin.assert_same(ours, theirs, rtol=2e-4, atol=1e-5)
    for mine, want in zip(ours.rest, theirs.rest, strict=True):
        np.testing.assert_allclose(mine, want, rtol=1e-4, atol=1e-5)
    many = vs.fully_shard(stacks.norm_net, meshes[2], stacks=LAYERS, prefetch=0)
    state, _ = vs.train_step(models.mean_loss, twin.ADAMW)(vs.train_state(many, twin.ADAMW), twin.BATCHES[0])
    whole = vs.unshard(state.model)
    np.testing.assert_array_equal(whole.layers.calls[...], np.ones(stacks.LAYERS))
    assert whole.layers.norm.mean[...].shape == (stacks.LAYERS, stacks.WIDTH)
    assert np.abs(whole.layers.norm.mean[...]).max() > 0


@pytest.mark.parametrize("remat", [False, True])
def test_linen_stacks(remat: bool, meshes: dict[int, Mesh]) -> None:
    net, variables = stacks.LinenStackNet(remat=remat), stacks.linen_variables()
    theirs = twin.plain(net, stacks.linen_loss, twin.ADAMW, twin.BATCHES[:2], variables=variables)
    model = vs.fully_shard(net, meshes[8], params=stacks.linen_variables, stacks=LAYERS, prefetch=1)
    twin.assert_same(twin.sharded(model, stacks.linen_loss, twin.ADAMW, twin.BATCHES[:2]), theirs)


def test_linen_stacks_drop_the_same_with_look_ahead(meshes: dict[int, Mesh]) -> None:
    runs = []
    for prefetch in (0, 1):
        model = vs.fully_shard(
            stacks.LinenStackNet(),
            meshes[2],
            params=stacks.linen_variables,
            stacks=LAYERS,
            prefetch=prefetch,
            rngs={"dropout": jax.random.key(5)},
        )
        runs.append(twin.sharded(model, stacks.linen_loss, twin.ADAMW, twin.BATCHES[:2]))
    # Equal masks. Of XLA's own making, the last bit may be another where a turn stands outside of the loop.
    twin.assert_same(*runs, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("n", [1, 3, 8])
@pytest.mark.parametrize("born", [True, False])
def test_values_are_those_of_one_device(n: int, born: bool, meshes: dict[int, Mesh]) -> None:
    tree = {**stacks.tree(), "layers": stacks.stack(empty=jnp.zeros((stacks.LAYERS, 0, 3)), s=jnp.arange(4.0))}

    def build() -> Any:
        return {**stacks.tree(), "layers": stacks.stack(empty=jnp.zeros((stacks.LAYERS, 0, 3)), s=jnp.arange(4.0))}

    model = vs.fully_shard(build if born else tree, meshes[n], stacks=LAYERS)
    jax.tree.map(np.testing.assert_array_equal, vs.unshard(model), tree)


def test_nnx_stacks_are_born_as_on_one_device(meshes: dict[int, Mesh]) -> None:
    wanted = dict(vs.fully_shard(stacks.plain_net(), meshes[1], stacks=LAYERS).tensors())
    alone, many = (dict(vs.fully_shard(stacks.plain_net, meshes[n], stacks=LAYERS).tensors()) for n in (1, 3))
    for path, value in wanted.items():
        np.testing.assert_array_equal(alone[path], many[path], err_msg=path)
        # Computed one operation at a time, the last bit may be another.
        np.testing.assert_allclose(alone[path], value, rtol=1e-6, err_msg=path)


def test_apply_runs_layer_by_layer(meshes: dict[int, Mesh]) -> None:
    model = vs.fully_shard(stacks.tree, meshes[8], stacks=LAYERS, prefetch=1)
    found = vs.apply(lambda p, batch: stacks.tree_logits(p, batch["x"]))(model, twin.BATCHES[0])
    np.testing.assert_allclose(
        found, stacks.tree_logits(stacks.tree(), jnp.asarray(twin.BATCHES[0]["x"])), rtol=1e-4, atol=1e-5
    )


def lowered(mesh: Mesh, layers: int, prefetch: int) -> Any:
    tx = optax.adamw(1e-2)
    model = vs.fully_shard(lambda: stacks.tree(layers), mesh, stacks=LAYERS, prefetch=prefetch, abstract=True)
    return model, vs.train_step(stacks.tree_loss, tx).lower(vs.train_state(model, tx), twin.BATCHES[0])


def executed(text: str) -> dict[str, int]:
    """How often each collective runs, with the trips of the loops around it."""
    bodies = dict(re.findall(r"^(?:ENTRY )?%?([\w.-]+) \(.*?\{\n(.*?)^\}", text, re.MULTILINE | re.DOTALL))
    found: dict[str, int] = {}

    def visit(body: str, times: int) -> None:
        for line in body.splitlines():
            collective = re.search(rf" ({'|'.join(counting.COLLECTIVES)})(?:-start)?\(", line)
            if collective:
                found[collective[1]] = found.get(collective[1], 0) + times
            if " while(" in line:
                inner = re.search(r"body=%?([\w.-]+)", line)
                trips = re.search(r'"known_trip_count":\{"n":"(\d+)"\}', line)
                assert inner
                assert trips
                visit(bodies[inner[1]], times * int(trips[1]))
            elif " call(" in line and (called := re.search(r"to_apply=%?([\w.-]+)", line)):
                visit(bodies[called[1]], times)

    entry = re.search(r"^ENTRY %?([\w.-]+) ", text, re.MULTILINE)
    assert entry
    visit(bodies[entry[1]], 1)
    return found


@pytest.mark.parametrize(("layers", "prefetch"), [(7, 0), (7, 1), (2, 1)])
def test_collectives_are_those_that_describe_counts(layers: int, prefetch: int, meshes: dict[int, Mesh]) -> None:
    model, program = lowered(meshes[2], layers, prefetch)
    described, ran = vs.describe(model), executed(program.compile().as_text())
    assert described.all_gathers == 2 * layers + 2
    assert described.reduce_scatters == layers + 1
    assert ran["all-gather"] == described.all_gathers
    assert ran["reduce-scatter"] == described.reduce_scatters
    assert ran["all-reduce"] == 1


@pytest.mark.parametrize("prefetch", [0, 1])
def test_the_program_is_as_long_for_many_layers_as_for_few(prefetch: int, meshes: dict[int, Mesh]) -> None:
    few, many = (len(lowered(meshes[2], layers, prefetch)[1].as_text()) for layers in (8, 32))
    assert many < 1.02 * few


@pytest.mark.parametrize("prefetch", [0, 1])
def test_memory_grows_by_activations_alone(prefetch: int, meshes: dict[int, Mesh]) -> None:
    width, rows, tx = 64, 2, optax.sgd(0.1)

    def temporary(layers: int) -> int:
        def build() -> Any:
            return {"layers": {"w": jnp.ones((layers, width, width))}}

        def loss(p: Any, x: jax.Array) -> jax.Array:
            return jax.lax.scan(lambda x, one: (jnp.tanh(x @ one["w"]), None), x, p["layers"])[0].mean()

        model = vs.fully_shard(build, meshes[2], stacks=LAYERS, prefetch=prefetch, abstract=True)
        step = vs.train_step(loss, tx).lower(vs.train_state(model, tx), jnp.ones((2 * rows, width)))
        return step.compile().memory_analysis().temp_size_in_bytes

    few, many = temporary(8), temporary(32)
    shards = 24 * width * width * 4 // 2  # Gradients are shards, and as many as parameters.
    activations = 24 * rows * width * 4 * 4
    assert many - few <= shards + activations


def test_a_step_may_take_the_memory_of_the_old_state(meshes: dict[int, Mesh]) -> None:
    state = vs.train_state(vs.fully_shard(stacks.tree, meshes[2], stacks=LAYERS, prefetch=1), twin.ADAMW)
    new, _ = vs.train_step(stacks.tree_loss, twin.ADAMW)(state, twin.BATCHES[0])
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state.model.params))
    for buffer in jax.tree.leaves(new.model.params, is_leaf=lambda x: isinstance(x, DBuffer)):
        assert buffer.data.sharding == buffer.layout.sharding


def test_8_bit_adam_is_the_same_on_every_mesh(meshes: dict[int, Mesh]) -> None:
    tx, runs = vs.optimizers.adamw_8bit(1e-2), []

    @jax.jit
    def step(params: Any, state: Any, grads: Any) -> Any:
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    for n in (1, 2, 3, 8):
        model, grads = (
            vs.fully_shard(lambda f=f: jax.tree.map(f, stacks.tree()), meshes[n], stacks=LAYERS, blocks=Elements(8))
            for f in (lambda x: x, jnp.sin)
        )
        params, state = step(model.params, vs.train_state(model, tx).opt_state, grads.params)
        params, state = step(params, state, grads.params)
        runs.append(dict(vs.Sharded(params, model.frozen, model.rest, model.structure).tensors()))
    for run in runs[1:]:
        for path, value in run.items():
            np.testing.assert_array_equal(value, runs[0][path], err_msg=path)


W, B = jnp.ones((4, 3, 3)), jnp.ones((4, 3))
FAULTS: dict[str, tuple[Any, dict[str, Any], list[str]]] = {
    "nothing": ({"layers": {"w": W}}, {"stacks": ("layer",)}, ["stacks: got pattern 'layer', which matches nothing"]),
    "a string": (
        {"layers": {"w": W}},
        {"stacks": "layers"},
        [r"stacks: got the string 'layers'", r"pass \('layers',\)"],
    ),
    "no layers": (
        {"layers": {"w": W, "b": B, "short": jnp.ones((3, 3)), "scalar": jnp.ones(())}},
        {"stacks": LAYERS},
        [r"layers/short: got shape \(3, 3\); want layers on dim 0, 4 as", r"layers/scalar: got shape \(\);"],
    ),
    "a list": (
        {"layers": [{"w": jnp.ones((3, 5)), "b": jnp.ones(5)} for _ in range(2)]},
        {"stacks": LAYERS},
        [r"layers/1/w: got shape \(3, 5\); .*; a list of equal layers goes into rolled=\('layers',\)"],
    ),
    "no list": (
        {"layers": {"w": W}},
        {"rolled": LAYERS},
        [r"rolled: got pattern 'layers', which matches no list of layers such as layers/0/", r"stacks=\('layers',\)"],
    ),
    "zero layers": ({"layers": {"w": jnp.ones((0, 3))}}, {"stacks": LAYERS}, [r"layers/w: got shape \(0, 3\);"]),
    "far ahead": ({"layers": {"w": W}}, {"stacks": LAYERS, "prefetch": 2}, ["prefetch: got 2; want 0, 1 or None"]),
    "a unit in a stack": (
        {"layers": {"w": W}, "embed": B},
        {"stacks": LAYERS, "units": ("layers", "embed")},
        ["units: got pattern 'layers', which matches nothing"],
    ),
    "a unit's name": (
        {"layers": {"w": W}, "embed": B},
        {"stacks": LAYERS, "units": lambda path: "layers"},
        ["unit layers: got the name of a stack, for parameters outside of it: embed;"],
    ),
    "root": ({"root": {"w": W}, "embed": B}, {"stacks": ("root",)}, ["unit root: got the name of a stack"]),
    "complex": ({"layers": {"w": W * 1j}}, {"stacks": LAYERS}, ["layers/w: got complex64"]),
}


@pytest.mark.parametrize("name", FAULTS)
def test_faults_say_what_to_change(name: str, meshes: dict[int, Mesh]) -> None:
    params, options, said = FAULTS[name]
    with pytest.raises(ValueError, match=r"fully_shard: [12] fault") as raised:
        vs.fully_shard(params, meshes[2], **options)
    for text in said:
        assert re.search(text, str(raised.value)), str(raised.value)


def test_the_deepest_of_overlapping_patterns_counts(meshes: dict[int, Mesh]) -> None:
    params = {"net": {"layers": {"w": W, "b": B}, "other": B}, "embed": B}
    model = vs.fully_shard(params, meshes[2], stacks=("net", "net/layers"), abstract=True)
    units = {
        unit.name: (unit.stack, [path for group in unit.groups for path in group.paths])
        for unit in model.structure.units
    }
    assert units == {
        "root": ((), ["embed"]),
        "net": ((4,), ["net/other"]),
        "net/layers": ((4,), ["net/layers/b", "net/layers/w"]),
    }
