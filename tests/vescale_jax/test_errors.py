"""Bad input: the message names what is at fault, what was given, what is wanted and what to change. Whole texts."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen
from jax.sharding import Mesh

import vescale_jax as vs
from vescale_planner import Rows, Slab

# beartype would catch a wrong type before the library's own check does.
pytestmark = pytest.mark.unchecked_annotations

NAMES = "want patterns that match names such as a, layers/0/b, layers/0/w, ...; mend or drop it"


def tree() -> dict[str, Any]:
    layers = [{"w": jnp.ones((5, 5)), "b": jnp.ones(5)} for _ in range(2)]
    return {"a": jnp.ones((3, 5)), "layers": layers, "s": jnp.ones(())}


@pytest.fixture(scope="module")
def three(meshes: dict[int, Mesh]) -> Mesh:
    return meshes[3]


@pytest.fixture(scope="module")
def model(three: Mesh) -> vs.Sharded:
    return vs.fully_shard(tree(), three)


def message(error: type[Exception], call: Callable[[], Any]) -> str:
    with pytest.raises(error) as raised:
        call()
    return str(raised.value)


FULLY_SHARD: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "an unknown axis": (
        {"axis": "tp"},
        ValueError,
        "fully_shard: axis: got 'tp'; want one of the mesh's axes ['fsdp']; pass axis=...",
    ),
    "patterns that match nothing": (
        {"units": ("blocks/*", "layers/*"), "blocks": {"b/*": Rows(1)}, "trainable": {"lora*": True}},
        ValueError,
        "fully_shard: 3 faults\n"
        f"  blocks: got pattern 'b/*', which matches nothing; {NAMES}\n"
        f"  trainable: got pattern 'lora*', which matches nothing; {NAMES}\n"
        f"  units: got pattern 'blocks/*', which matches nothing; {NAMES}",
    ),
    "a reshard pattern that matches no unit": (
        {"reshard_after_forward": {"layer/*": True}},
        ValueError,
        "fully_shard: 1 fault\n"
        "  reshard_after_forward: got pattern 'layer/*', which matches nothing; want patterns that match names such as "
        "root, layers/0, layers/1; mend or drop it",
    ),
    "a predicate that matches nothing": (
        {"units": lambda path: None},
        ValueError,
        "fully_shard: 1 fault\n"
        "  units: got a function that returns None for every parameter; want a unit name for at least one parameter; "
        "compare it with paths such as a, layers/0/b, layers/0/w",
    ),
    "one pattern instead of a sequence": (
        {"units": "layers/*"},
        ValueError,
        "fully_shard: 1 fault\n  units: got the string 'layers/*'; want a sequence of patterns; pass ('layers/*',)",
    ),
    "units above the cap": (
        {"units": ("layers/*",), "max_unit_bytes": 63},
        ValueError,
        "fully_shard: 3 faults\n"
        "  unit root: got 64 bytes in 2 parameters, the largest a with 60 bytes; want at most max_unit_bytes=63; "
        "cut the unit by a finer rule, or raise max_unit_bytes\n"
        "  unit layers/0: got 120 bytes in 2 parameters, the largest layers/0/w with 100 bytes; want at most "
        "max_unit_bytes=63; cut the unit by a finer rule, or raise max_unit_bytes\n"
        "  unit layers/1: got 120 bytes in 2 parameters, the largest layers/1/w with 100 bytes; want at most "
        "max_unit_bytes=63; cut the unit by a finer rule, or raise max_unit_bytes",
    ),
    "blocks that do not fit": (
        {"blocks": {"a": Slab(3), "layers/*/b": Slab(2)}},
        ValueError,
        "fully_shard: 3 faults\n"
        "  a: got Slab(3) on shape (3, 5); want at most 2 dims; use Slab(2) or another block\n"
        "  layers/0/b: got Slab(2) on shape (5,); want at most 1 dims; use Slab(1) or another block\n"
        "  layers/1/b: got Slab(2) on shape (5,); want at most 1 dims; use Slab(1) or another block",
    ),
    "no block": (
        {"blocks": {"a": 4}},
        ValueError,
        "fully_shard: 1 fault\n"
        "  a: got block 4; want Elements, Rows, Tile, Slab or WholeTensor; pass an instance of one of them",
    ),
    "neither True nor False": (
        {"trainable": {"a": "yes"}, "reshard_after_forward": 2, "units": ("layers",)},
        ValueError,
        "fully_shard: 3 faults\n"
        "  trainable of a: got 'yes'; want True or False; mend the rule\n"
        "  reshard_after_forward of root: got 2; want True or False; mend the rule\n"
        "  reshard_after_forward of layers: got 2; want True or False; mend the rule",
    ),
    "faults of every kind": (
        {"blocks": {"x": Rows(1), "a": Slab(3)}, "trainable": {"s": 3}, "units": ("q/*",)},
        ValueError,
        "fully_shard: 4 faults\n"
        f"  blocks: got pattern 'x', which matches nothing; {NAMES}\n"
        f"  units: got pattern 'q/*', which matches nothing; {NAMES}\n"
        "  trainable of s: got 3; want True or False; mend the rule\n"
        "  a: got Slab(3) on shape (3, 5); want at most 2 dims; use Slab(2) or another block",
    ),
    "no policy": (
        {"policy": "bfloat16"},
        TypeError,
        "fully_shard: policy: got 'bfloat16'; want a vs.MixedPrecisionPolicy; make one",
    ),
    "params beside a pytree": (
        {"params": {}},
        TypeError,
        "fully_shard: params: got params beside a dict; want variables, or a function that returns them, with a linen "
        "module and only with one; pass params=lambda: module.init(key, x)",
    ),
}


@pytest.mark.parametrize("name", FULLY_SHARD)
def test_fully_shard_refuses(name: str, three: Mesh) -> None:
    options, error, text = FULLY_SHARD[name]
    assert message(error, lambda: vs.fully_shard(tree(), three, **options)) == text


def test_a_mesh_of_two_unnamed_axes_needs_the_axis(mesh: Callable[..., Mesh]) -> None:
    both = Mesh(mesh(4).devices.reshape(2, 2), ("data", "model"))
    assert message(ValueError, lambda: vs.fully_shard(tree(), both)) == (
        "fully_shard: axis: got none for a mesh with the axes ['data', 'model']; want one of them; pass axis=..."
    )


def test_something_else_than_a_mesh() -> None:
    assert message(TypeError, lambda: vs.fully_shard(tree(), 8)) == (
        "fully_shard: mesh: got int; want a jax.sharding.Mesh; use jax.make_mesh"
    )


def test_leaves_that_are_no_arrays(three: Mesh) -> None:
    assert message(TypeError, lambda: vs.fully_shard({"a": 1.0, "b": [2, jnp.ones(3), "x"]}, three)) == (
        "fully_shard: 3 faults\n"
        "  a: got a leaf of type float; want an array; wrap it in jnp.asarray, or keep it out of the tree\n"
        "  b/0: got a leaf of type int; want an array; wrap it in jnp.asarray, or keep it out of the tree\n"
        "  b/2: got a leaf of type str; want an array; wrap it in jnp.asarray, or keep it out of the tree"
    )


def test_a_linen_module_without_variables(three: Mesh) -> None:
    assert message(TypeError, lambda: vs.fully_shard(linen.Dense(3), three)) == (
        "fully_shard: params: got no params; want variables, or a function that returns them, with a linen module and "
        "only with one; pass params=lambda: module.init(key, x)"
    )


@pytest.mark.parametrize("built", [False, True])
def test_parameters_instead_of_variables(built: bool, three: Mesh) -> None:
    inner = {"kernel": jnp.ones((2, 3)), "bias": jnp.ones(3)}
    given = (lambda: inner) if built else inner
    assert message(ValueError, lambda: vs.fully_shard(linen.Dense(3), three, params=given)) == (
        "fully_shard: params: got ['kernel', 'bias']; want the variables of the linen module, a mapping with the "
        "collection 'params'; pass what module.init returns, or {'params': params}"
    )


def test_nothing_is_made_before_the_arguments_are_checked(three: Mesh) -> None:
    made: list[int] = []

    def build() -> dict[str, Any]:
        jax.debug.callback(lambda: made.append(1))
        return tree()

    message(ValueError, lambda: vs.fully_shard(build, three, units=("q",)))
    jax.effects_barrier()
    assert made == []


# From here on: mistakes that must be an error of the library, in its words, and not one from deep inside or none.


@pytest.mark.parametrize("given", [None, lambda: None], ids=["None", "a function that returns nothing"])
def test_no_model_is_refused(given: Any, three: Mesh) -> None:
    # The return was forgotten; a model without parameters would train nothing in silence.
    assert message(TypeError, lambda: vs.fully_shard(given, three)).startswith("fully_shard: model: got None; want ")


def test_complex_parameters_are_refused(three: Mesh) -> None:
    # They are not integers, yet would be frozen without a word.
    text = message((TypeError, ValueError), lambda: vs.fully_shard({"a": jnp.ones(4, jnp.complex64)}, three))
    assert text.startswith("fully_shard: 1 fault\n  a: got complex64; want ")


@pytest.mark.parametrize("cap", [0, -5, "1GB"])
def test_a_cap_that_is_no_positive_integer_is_refused(cap: Any, three: Mesh) -> None:
    text = message((TypeError, ValueError), lambda: vs.fully_shard(tree(), three, max_unit_bytes=cap))
    assert text.startswith("fully_shard: ")
    assert f"max_unit_bytes: got {cap!r}; want " in text


@pytest.mark.parametrize("rule", [3, (3,), lambda path: 3], ids=["a number", "numbers", "a function to numbers"])
def test_units_of_another_type_are_refused(rule: Any, three: Mesh) -> None:
    text = message((TypeError, ValueError), lambda: vs.fully_shard(tree(), three, units=rule))
    assert text.startswith("fully_shard: ")
    assert "units: got " in text


def test_rngs_that_are_no_mapping_are_refused(three: Mesh) -> None:
    module = linen.Dense(3)
    params = module.init(jax.random.key(0), jnp.ones((1, 2)))
    text = message(TypeError, lambda: vs.fully_shard(module, three, params=params, rngs=jax.random.key(0)))
    assert text.startswith("fully_shard: rngs: got ")


def test_rngs_that_are_no_keys_are_refused(three: Mesh) -> None:
    module = linen.Dense(3)
    params = module.init(jax.random.key(0), jnp.ones((1, 2)))
    text = message(TypeError, lambda: vs.fully_shard(module, three, params=params, rngs={"dropout": 0}))
    assert text.startswith("fully_shard: ")
    assert "rngs/dropout: got " in text


def test_shapes_without_values_are_refused_unless_abstract(three: Mesh) -> None:
    shapes = jax.eval_shape(tree)
    text = message((TypeError, ValueError), lambda: vs.fully_shard(shapes, three))
    assert text.startswith("fully_shard: ")
    assert "a: got " in text
    assert "abstract=True" in text


def test_params_that_are_python_numbers_are_refused(three: Mesh) -> None:
    from flax import nnx

    class Scale(nnx.Module):
        def __init__(self) -> None:
            self.scale = nnx.Param(1.5)

    text = message(TypeError, lambda: vs.fully_shard(Scale(), three))
    assert text.startswith("fully_shard: 1 fault\n  scale: got a leaf of type float; want an array")


# The batch.


def batch(rows: int = 6) -> dict[str, Any]:
    return {"x": np.ones((rows, 5), np.float32)}


def mean(params: Any, batch: Any) -> jax.Array:
    return jnp.mean(batch["x"] @ params["layers"][0]["w"]) * params["s"]


def step(model: vs.Sharded, loss_fn: Callable[..., Any] = mean, given: Any = None, **options: Any) -> Any:
    tx = optax.sgd(0.1)
    state = vs.train_state(model, tx)
    return vs.train_step(loss_fn, tx, donate=False, **options)(state, batch() if given is None else given)


ROWS = (
    "want a multiple of 3, the devices of axis 'fsdp'; fill up with rows that count nothing (vs.Mean), or pass "
    "replicate_batch=True"
)


@pytest.mark.parametrize("what", ["train_step", "value_and_grad", "apply"])
def test_rows_that_do_not_divide(what: str, model: vs.Sharded) -> None:
    given = {"x": np.ones((7, 5)), "y": np.ones(4), "z": np.ones(6), "scalar": 1.0}
    call = {
        "train_step": lambda: step(model, given=given),
        "value_and_grad": lambda: vs.value_and_grad(mean)(model, given),
        "apply": lambda: vs.apply(mean)(model, given),
    }[what]
    assert message(ValueError, call) == (
        f"{what}: 2 faults\n  batch/x: got 7 rows, shape (7, 5); {ROWS}\n  batch/y: got 4 rows, shape (4,); {ROWS}"
    )


def test_leaves_of_a_batch_that_are_no_arrays(model: vs.Sharded) -> None:
    assert message(TypeError, lambda: step(model, given={"x": "text", "y": [object()]})) == (
        "train_step: 2 faults\n"
        "  batch/x: got a leaf of type str; want an array; convert it or leave it out\n"
        "  batch/y/0: got a leaf of type object; want an array; convert it or leave it out"
    )


def test_arrays_of_a_batch_that_hold_no_numbers(model: vs.Sharded) -> None:
    given = {"x": np.array(["a"] * 6), "y": np.array([None] * 6), "z": np.zeros(6, "datetime64[s]")}
    assert message(TypeError, lambda: step(model, given=given)) == (
        "train_step: 3 faults\n"
        "  batch/x: got an array of dtype <U1; want one of numbers; convert it or leave it out\n"
        "  batch/y: got an array of dtype object; want one of numbers; convert it or leave it out\n"
        "  batch/z: got an array of dtype datetime64[s]; want one of numbers; convert it or leave it out"
    )


# The loss function.

LOSSES: dict[str, tuple[Callable[..., Any], str]] = {
    "one loss a row": (
        lambda params, batch: batch["x"].sum(1),
        "loss_fn: got a loss of shape (2,) and dtype float32 with a count of shape (); want scalars; sum or average "
        "over this device's rows",
    ),
    "nothing": (
        lambda params, batch: None,
        "loss_fn: got NoneType; want a scalar or vs.Mean(total, count); return (loss, aux) only with has_aux=True",
    ),
    "aux without has_aux": (
        lambda params, batch: (mean(params, batch), {}),
        "loss_fn: got tuple; want a scalar or vs.Mean(total, count); return (loss, aux) only with has_aux=True",
    ),
    "an integer": (
        lambda params, batch: jnp.int32(1),
        "loss_fn: got a loss of shape () and dtype int32 with a count of shape (); want scalars; sum or average over "
        "this device's rows",
    ),
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_that_is_none(name: str, model: vs.Sharded) -> None:
    loss_fn, text = LOSSES[name]
    assert message(TypeError, lambda: step(model, loss_fn)) == text


def test_aux_of_dtypes_that_cannot_be_reduced(model: vs.Sharded) -> None:
    def loss_fn(params: Any, batch: Any) -> Any:
        return mean(params, batch), {"ok": batch["x"].sum() > 0, "key": jax.random.key(0)}

    assert message(TypeError, lambda: step(model, loss_fn, has_aux=True)) == (
        "loss_fn: got aux of dtype bool, key<fry>; want vs.Mean, floats (averaged over the devices) or integers "
        "(summed over them); convert it"
    )


def test_has_aux_without_aux(model: vs.Sharded) -> None:
    text = message(TypeError, lambda: step(model, mean, has_aux=True))
    assert text.startswith("loss_fn: got ")
    assert text.endswith("; want (loss, aux), since has_aux=True; return two values")


def test_aux_that_is_no_array_is_named(model: vs.Sharded) -> None:
    text = message(TypeError, lambda: step(model, lambda p, b: (mean(p, b), {"name": "x"}), has_aux=True))
    assert text.startswith("loss_fn: got aux")


# Wrong arguments of the other functions.


@pytest.mark.parametrize("norm", [0, -1.0, float("nan")])
def test_a_norm_that_is_not_positive(norm: float) -> None:
    assert message(ValueError, lambda: vs.train_step(mean, optax.sgd(0.1), max_norm=norm)) == (
        f"train_step: max_norm: got {norm}; want a positive number; pass None for no clipping"
    )


def test_a_loss_and_an_accumulation_of_another_type() -> None:
    text = (
        "value_and_grad: 2 faults\n"
        "  loss_fn: got None; want a function of the model and a batch; pass the function itself, such as lambda "
        "model, batch: ...\n"
        "  accumulation: got 4; want a vs.Accumulation, or None; pass vs.Accumulation(microbatches=4) for four pieces"
    )
    anything: Any = None
    assert message(TypeError, lambda: vs.train_step(anything, optax.sgd(0.1), accumulation=4)) == text
    assert message(TypeError, lambda: vs.value_and_grad(anything, accumulation=4)) == text


def test_a_model_whose_memory_a_step_has_taken(three: Mesh) -> None:
    model = vs.fully_shard(tree(), three)
    jax.tree.leaves(model.params)[0].delete()
    assert message(RuntimeError, lambda: vs.train_state(model, optax.sgd(0.1))).startswith("train_state: got a state")


def test_a_model_that_is_not_sharded() -> None:
    want = "want what fully_shard returned; shard it"
    assert message(TypeError, lambda: vs.value_and_grad(mean)(tree(), batch())) == (
        f"value_and_grad: got a model of type dict; {want}"
    )
    assert message(TypeError, lambda: vs.apply(mean)(tree(), batch())) == f"apply: got a model of type dict; {want}"


@pytest.mark.parametrize("what", ["train_state", "unshard", "describe"])
def test_a_model_that_is_not_sharded_elsewhere(what: str) -> None:
    arguments = {"train_state": (optax.sgd(0.1),)}.get(what, ())
    text = message(TypeError, lambda: getattr(vs, what)(tree(), *arguments))
    assert text == f"{what}: got a model of type dict; want what fully_shard returned; shard it"


def test_a_state_that_is_none(model: vs.Sharded) -> None:
    assert message(TypeError, lambda: vs.train_step(mean, optax.sgd(0.1))(model, batch())) == (
        "train_step: got Sharded; want a TrainState; make one with vs.train_state"
    )


def test_an_abstract_model_cannot_be_unsharded(three: Mesh) -> None:
    abstract = vs.fully_shard(tree(), three, abstract=True)
    assert message((TypeError, ValueError), lambda: vs.unshard(abstract)).startswith("unshard: got ")


def test_an_optimizer_that_is_none(model: vs.Sharded) -> None:
    assert message(TypeError, lambda: vs.train_state(model, "adam")).startswith("train_state: tx: got ")
    assert message(TypeError, lambda: vs.train_step(mean, "adam")).startswith("train_step: tx: got ")
