"""per_parameter: masks, labels and ratios on the logical parameters, equal to one device, without a gather."""

import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from flax import linen, nnx

import vescale_jax as vs
from tests.vescale_jax import counting, models, twin
from vescale_jax.optimizers import Columns, by_path, describe, per_parameter, scale_by_path
from vescale_layouts import DBuffer
from vescale_planner import Rows, Tile


def matrices(params):
    return jax.tree.map(lambda x: x.ndim > 1, params)


def ranks(params):
    return jax.tree.map(lambda x: ("scalars", "vectors", "matrices")[x.ndim], params)


LABELLED = {"scalars": optax.sgd(1e-2), "vectors": optax.adam(1e-2), "matrices": optax.adamw(2e-2)}

# One for each kind of thing that differs between parameters, with a rule that needs the path.
KINDS = {
    "mask by rank": optax.adamw(1e-2, weight_decay=0.5, mask=matrices),
    "mask by path": optax.adamw(1e-2, weight_decay=0.5, mask=by_path({"layers/*/w": True, "*": False})),
    "labels": optax.multi_transform(LABELLED, ranks),
    "rates by path": optax.chain(optax.adam(1e-2), scale_by_path({"layers/0/*": 0.5, "embed": 0.1})),
    "one number a parameter": optax.chain(optax.clip_by_global_norm(0.5), optax.lamb(1e-2)),
    "several steps": optax.MultiSteps(optax.lars(1e-2), 2),
}


@pytest.mark.parametrize("kind", KINDS)
def test_training_is_that_of_one_device(kind, meshes):
    model = vs.fully_shard(models.tree(), meshes[5])
    ours = twin.sharded(model, models.tree_loss, per_parameter(KINDS[kind], model), twin.BATCHES)
    twin.assert_same(ours, twin.tree_twin(KINDS[kind], 3))


def update_of(tx, model):
    """The compiled update, and its arguments."""
    tx = per_parameter(tx, model)
    state = jax.jit(tx.init)(model.params)
    return jax.jit(tx.update, donate_argnums=(0, 1)), (jax.tree.map(jnp.cos, model.params), state, model.params)


def plain_update(tx, params):
    return jax.jit(tx.update)(jax.tree.map(jnp.cos, params), tx.init(params), params)[0]


def assert_equal(model, updates, plain):
    """Updates of a sharded model are those of a tree of parameters, by path."""
    found = dict(dataclasses.replace(model, params=updates).tensors())
    wanted = {jax.tree_util.keystr(path, simple=True, separator="/"): x for path, x in jax.tree.leaves_with_path(plain)}
    assert sorted(found) == sorted(wanted)
    for path, value in wanted.items():
        np.testing.assert_allclose(found[path], value, rtol=1e-5, atol=1e-6, err_msg=path)


ADAFACTOR = optax.adafactor(0.1, min_dim_size_to_factor=2)


def tensors(*shapes):
    return {f"t{i}": jax.random.normal(jax.random.key(i), shape) for i, shape in enumerate(shapes)}


@pytest.mark.parametrize(
    ("options", "params"),
    [
        ({"blocks": Rows(2)}, tensors((4, 6), (6, 6), (2, 3, 4), (5,), (), (1, 7))),
        ({"blocks": Tile(4, 4), "storage": "free"}, tensors((8, 8), (4, 12))),
        ({"stacks": ("layers",)}, {"layers": tensors((3, 4, 5), (3, 5), (3, 6, 6)), "head": tensors((5, 5), (7,))}),
    ],
    ids=["rows", "transposed", "stack"],
)
@pytest.mark.parametrize("name", ["adafactor", "lamb", "mask"])
def test_any_layout_is_updated_alike(name, options, params, meshes):
    tx = {"adafactor": ADAFACTOR, "lamb": optax.lamb(0.1), "mask": optax.adamw(0.1, weight_decay=1.0, mask=matrices)}[
        name
    ]
    if "storage" in options:
        options = {**options, "blocks": {"t0": Tile(8, 4), "t1": Tile(4, 4)}}
    model = vs.fully_shard(params, meshes[3], **options)
    update, arguments = update_of(tx, model)
    if name == "adafactor" and any(slot.storage == "tiled" for slot in all_slots(model)):
        pytest.fail("the planner chose tiles: the test should have transposed storage")
    updates, state = update(*arguments)
    assert_equal(model, updates, plain_update(tx, params))
    for wanted, found in zip(jax.tree.leaves(arguments[1]), jax.tree.leaves(state), strict=True):
        assert (wanted.shape, wanted.dtype) == (found.shape, found.dtype)


def all_slots(model):
    buffers = jax.tree.leaves(model.params, is_leaf=lambda node: isinstance(node, DBuffer))
    return [slot for buffer in buffers for slot in buffer.layout.plan.ordered_slots]


def test_nothing_is_gathered_and_sums_travel_together(meshes):
    model = vs.fully_shard(models.tree(), meshes[8])
    for tx, reductions in ((KINDS["mask by rank"], 0), (KINDS["labels"], 0), (optax.novograd(0.1), 1), (ADAFACTOR, 2)):
        update, arguments = update_of(tx, model)
        counts = counting.collectives(update.lower(*arguments).compile())
        assert counts == ({"all-reduce": reductions} if reductions else {})


@pytest.mark.parametrize("kind", ["mask by rank", "labels", "one number a parameter"])
def test_the_program_does_not_grow_with_the_parameters(kind, meshes):
    def operations(count):
        model = vs.fully_shard(tensors(*[(4, 4), (4,)] * count), meshes[2], abstract=True)
        tx = per_parameter(KINDS[kind], model)
        state = jax.eval_shape(tx.init, model.params)
        text = str(jax.make_jaxpr(tx.update)(model.params, state, model.params))
        # Runs of a shard are told apart one by one, and single norms are added up.
        return len(
            [line for line in text.splitlines() if re.search(r":f32\[\d+\] = (mul|div|add|sqrt|integer_pow)", line)]
        )

    assert operations(12) == operations(3)


def test_labels_share_buffers(meshes):
    model = vs.fully_shard(models.tree(), meshes[3])
    labels = {name: optax.adamw(rate) for name, rate in (("scalars", 0.1), ("vectors", 0.2), ("matrices", 0.3))}
    _, (_, state, params) = update_of(optax.multi_transform(labels, ranks), model)
    held = sum(x.size for x in jax.tree.leaves(state) if x.ndim)
    assert held == 2 * sum(x.size for x in jax.tree.leaves(params))


@pytest.mark.parametrize(
    "params", [tensors((16, 16), (3,), ()), {"layers": tensors((2, 16, 16), (2, 7))}], ids=["plain", "stack"]
)
def test_little_state_takes_no_buffer(params, meshes):
    # Nothing but the vectors has a second moment of its own shape.
    stacks = ("layers",) if "layers" in params else ()
    model = vs.fully_shard(params, meshes[3], stacks=stacks)
    update, arguments = update_of(optax.adafactor(0.1, min_dim_size_to_factor=16), model)
    held = sum(x.size for x in jax.tree.leaves(arguments[1]))
    assert held < 0.4 * sum(x.size for x in jax.tree.leaves(params))
    updates, _ = update(*arguments)
    assert_equal(model, updates, plain_update(optax.adafactor(0.1, min_dim_size_to_factor=16), params))


def test_the_table_says_which_parameters_are_treated_alike(meshes):
    # Over the buffers of three units.
    model = vs.fully_shard(models.tree(), meshes[3], units=("layers/*",), abstract=True)

    def reasons(tx):
        return {row.path: row.reason for row in describe(tx, model)}

    paths = ("embed", "scale", "three", "layers/0/b", "layers/0/w", "layers/1/b", "layers/1/w")
    for kind, ways in {
        "mask by rank": (1, 2, 2, 2, 1, 2, 1),
        "mask by path": (1, 1, 1, 1, 2, 1, 2),
        # By their numbers alone.
        "rates by path": (1, 3, 3, 2, 2, 3, 3),
    }.items():
        wanted = [f"way {way} of {max(ways)}" for way in ways]
        assert reasons(per_parameter(KINDS[kind], model)) == dict(zip(paths, wanted, strict=True))
    # What has the label of plain SGD has no state to tell it by.
    tx = per_parameter(KINDS["labels"], model)
    one, two, three = "label matrices, way 1 of 3", "label vectors, way 2 of 3", "way 3 of 3"
    assert reasons(tx) == dict(zip(paths, (one, three, two, two, one, two, one), strict=True))
    assert set(reasons(jax.eval_shape(tx.init, model.params)).values()) == {"as the buffer"}
    assert set(reasons(optax.chain(optax.identity(), tx)).values()) == {"as the buffer"}


def test_padding_stays_zero(meshes):
    # What is divided by its own norm is not a number where there is nothing.
    unit = optax.GradientTransformation(
        lambda params: optax.EmptyState(),
        lambda g, state, params: (jax.tree.map(lambda x: x / jnp.linalg.norm(x.reshape(-1)) + 1, g), state),
    )
    model = vs.fully_shard(tensors((5,), (3, 1)), meshes[5])
    update, arguments = update_of(unit, model)
    (updates,) = jax.tree.leaves(update(*arguments)[0])
    (layout,) = {node.layout for node in jax.tree.leaves(model.params, is_leaf=lambda x: isinstance(x, DBuffer))}
    assert layout.plan.gaps
    for start, stop in layout.plan.gaps:
        np.testing.assert_array_equal(updates[start:stop], 0)


def test_the_state_keeps_the_structure_of_optax(meshes):
    model = vs.fully_shard(models.tree(), meshes[3])
    tx = per_parameter(optax.inject_hyperparams(optax.adamw, static_args="mask")(0.1, mask=matrices), model)
    state = vs.train_state(model, tx)
    adam = state.opt_state.inner_state[0]
    assert jax.tree.structure(adam.mu) == jax.tree.structure(model.params)
    state.opt_state.hyperparams["learning_rate"] = jnp.zeros(())
    after, _ = vs.train_step(models.tree_loss, tx, donate=False)(state, twin.BATCHES[0])
    jax.tree.map(np.testing.assert_array_equal, after.model.params, model.params)


def test_small_state_is_read_by_path(meshes):
    params = tensors((4, 6), (5, 5), (7,))
    found = []
    for n in (1, 3):
        model = vs.fully_shard(params, meshes[n])
        update, arguments = update_of(ADAFACTOR, model)
        _, state = update(*arguments)
        columns = [
            x for x in jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, Columns)) if isinstance(x, Columns)
        ]
        found.append([column.tensors() for column in columns])
        rows = columns[0].tensors()[0]
        assert {path: x.shape for path, x in rows.items()} == {"t0": (4,), "t1": (5,), "t2": (1,)}
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5), *found)


def test_arguments_beside_the_gradients_are_passed_on(meshes):
    model = vs.fully_shard(models.tree(), meshes[3])
    tx = optax.chain(optax.sgd(0.1), optax.contrib.reduce_on_plateau(patience=0, factor=0.5, cooldown=0))
    wrapped = per_parameter(tx, model)
    state = wrapped.init(model.params)
    theirs = tx.init(models.tree())
    for value in (1.0, 2.0, 3.0):
        updates, state = jax.jit(wrapped.update)(model.params, state, model.params, value=jnp.float32(value))
        plain, theirs = tx.update(models.tree(), theirs, models.tree(), value=jnp.float32(value))
    assert_equal(model, updates, plain)


def test_meshes_with_explicit_axes(meshes):
    model = vs.fully_shard(models.tree(), jax.make_mesh((8,), ("fsdp",)))
    tx = per_parameter(optax.contrib.prodigy(1.0), model)
    ours = twin.sharded(model, models.tree_loss, tx, twin.BATCHES)
    twin.assert_same(ours, twin.tree_twin(optax.contrib.prodigy(1.0), 3))


def test_the_tree_is_the_users_own_without_what_is_frozen(meshes):
    seen = []

    def mask(params):
        seen.append(jax.tree.map(lambda x: x.shape, params))
        return matrices(params)

    tree = {"layers": [{"w": jnp.ones((2, 3)), "b": jnp.ones(3)}], "head": jnp.ones((3, 3))}
    model = vs.fully_shard(tree, meshes[2], trainable={"head": False, "*": True}, abstract=True)
    vs.train_state(model, per_parameter(optax.adamw(0.1, mask=mask), model))
    assert seen[0] == {"layers": [{"w": (2, 3), "b": (3,)}], "head": None}


def test_modules_are_nested_dicts_by_path(meshes):
    model = vs.fully_shard(models.net, meshes[2], abstract=True)
    paths = []
    rule = by_path(lambda path, x: paths.append((path, x.shape)) or True)
    vs.train_state(model, per_parameter(optax.adamw(0.1, mask=rule), model))
    assert ("layers/0/up/kernel", (models.WIDTH, 7)) in paths
    assert ("temperature", ()) in paths


UNSUPPORTED = {
    "matrix products": (optax.contrib.muon(0.1), "needs it whole"),
    "random numbers": (optax.add_noise(0.1, 0.5, jax.random.key(0)), "takes an array of its shape from elsewhere"),
    "histories": (optax.scale_by_lbfgs(3), r"state of shape \(3, 5, 5\) for a parameter of shape \(5, 5\)"),
    "transposes": (optax.stateless(lambda g, p: jax.tree.map(jnp.transpose, g)), "exchanges its dims"),
    "symmetry": (
        optax.stateless(lambda g, p: jax.tree.map(lambda x: x + x.T, g)),
        "combines its rows with its columns",
    ),
    "sorting": (optax.stateless(lambda g, p: jax.tree.map(jnp.sort, g)), "needs it whole"),
    "strangers": (
        optax.stateless(lambda g, p: {**g, "v": g["w"] + g["v"], "w": g["w"]}),
        "mixes its elements with those of other parameters",
    ),
}


@pytest.mark.parametrize("kind", UNSUPPORTED)
def test_what_is_not_supported_is_refused_before_the_first_step(kind, meshes):
    tx, why = UNSUPPORTED[kind]
    model = vs.fully_shard({"w": jnp.ones((5, 5)), "v": jnp.ones((5, 5))}, meshes[2], abstract=True)
    with pytest.raises(ValueError, match=rf"^per_parameter: \d faults?\n  [wv]: got .*{why}"):
        vs.train_state(model, per_parameter(tx, model))


def test_buffers_of_another_model_are_refused(meshes):
    one, other = (vs.fully_shard({"w": jnp.ones(shape)}, meshes[2]) for shape in ((3, 2), (5, 2)))
    with pytest.raises(ValueError, match=r"^per_parameter: got a dict without the buffer root/float32 of the model"):
        per_parameter(optax.sgd(0.1), one).init(other.params)


def test_a_model_without_parameters_to_train_is_refused(meshes):
    model = vs.fully_shard({"w": jnp.ones(3)}, meshes[2], trainable=False)
    with pytest.raises(ValueError, match=r"^per_parameter: got a model without trainable parameters"):
        per_parameter(optax.sgd(0.1), model)


@pytest.mark.unchecked_annotations
def test_a_model_that_is_not_sharded_is_refused():
    model: Any = {"w": jnp.ones(3)}
    with pytest.raises(TypeError, match=r"^per_parameter: got a model of type dict"):
        per_parameter(optax.sgd(0.1), model)


def test_rules_by_path_need_parameters(meshes):
    model = vs.fully_shard({"w": jnp.ones(3)}, meshes[2])
    with pytest.raises(ValueError, match=r"^by_path: got flat buffers"):
        scale_by_path({"w": 0.5}).update(model.params, optax.EmptyState())
    with pytest.raises(ValueError, match=r"^by_path: 1 fault\n  rule: got pattern 'v', which matches nothing"):
        by_path({"v": 1})({"w": jnp.ones(3)})


def test_rules_by_path_pass_over_what_an_outer_mask_took_out():
    rule = by_path({"w": "a", "v": "b"})
    assert rule({"w": jnp.ones(3), "v": optax.MaskedNode()}) == {"w": "a", "v": optax.MaskedNode()}


@pytest.mark.parametrize("kind", ["nnx", "linen"])
def test_rules_by_path_are_the_same_without_sharding(kind):
    """Flax keeps an array in a box; the box has no part in the path."""
    if kind == "nnx":
        params = nnx.state(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), nnx.Param)
    else:
        params = {name: linen.Partitioned(jnp.ones(3), ("x",)) for name in ("kernel", "bias")}
    seen = {}
    by_path(lambda path, x: seen.setdefault(path, True))(params)
    assert seen == {"bias": True, "kernel": True}
    scaled, _ = scale_by_path({"bias": 2.0}).update(jax.tree.map(jnp.ones_like, params), optax.EmptyState())
    assert sorted(float(x.max()) for x in jax.tree.leaves(scaled)) == [1.0, 2.0]
    tx = optax.masked(optax.set_to_zero(), by_path({"bias": True, "*": False}))
    updates, _ = tx.update(jax.tree.map(jnp.ones_like, params), tx.init(params))
    assert sorted(float(x.max()) for x in jax.tree.leaves(updates)) == [0.0, 1.0]


@pytest.mark.unchecked_annotations
def test_rules_by_path_have_a_value_for_every_parameter():
    with pytest.raises(
        ValueError, match=r"^by_path: 1 fault\n  w: got no value by any pattern; .* add \"\*\" as the last"
    ):
        by_path({"v": True})({"w": jnp.ones(3), "v": jnp.ones(3)})
    with pytest.raises(TypeError, match=r"^scale_by_path: 1 fault\n  w: got '0.5'; want a factor"):
        scale_by_path({"w": "0.5"}).update({"w": jnp.ones(3)}, optax.EmptyState())
