"""The preflight: what it says of a step against the live step, the cost model, messages, the command."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import Mesh

import vescale_jax as vs
from vescale_jax import __main__ as command_line
from vescale_jax._compiler_options import compiler_options
from vescale_jax.preflight import CHIPS, Rates, Workload, chip, devices, preflight
from vescale_jax.preflight._chip import target_config
from vescale_jax.preflight._collective import Collective
from vescale_jax.preflight._memory import stored_bytes

pytestmark = pytest.mark.unchecked_annotations

WIDTH = 37


@pytest.fixture(autouse=True, scope="module")
def devices_are_there() -> None:
    """Starts JAX with the devices of all tests: the command would choose their number otherwise."""
    jax.devices()


def build() -> dict[str, Any]:
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = ((11, WIDTH), (WIDTH, 53), (53, WIDTH))
    layers = [{"a": jax.random.normal(k, shapes[1]), "b": jax.random.normal(k, shapes[2])} for k in keys[1:]]
    return {"embedding": jax.random.normal(keys[0], shapes[0]), "layers": layers, "scale": jnp.float32(1)}


def loss_fn(params: Any, batch: Any) -> jax.Array:
    x = params["embedding"][batch["tokens"]]
    for layer in params["layers"]:
        x = x + jnp.tanh(x @ layer["a"]) @ layer["b"]
    return jnp.mean(x * params["scale"])


def live_bytes(tree: Any) -> int:
    """What the first device really holds."""
    first = jax.devices()[0]
    return sum(
        shard.data.nbytes
        for leaf in jax.tree.leaves(tree)
        for shard in leaf.addressable_shards
        if shard.device == first
    )


@pytest.mark.parametrize("n", [3, 8])
def test_predicted_bytes_are_those_of_live_arrays(meshes: dict[int, Mesh], n: int) -> None:
    mesh, tx = meshes[n], optax.adamw(1e-3)
    step = vs.train_step(loss_fn, tx)
    tokens = np.zeros((2 * n, 5), np.int32)
    abstract = vs.train_state(vs.fully_shard(build, mesh, abstract=True), tx)
    report, _ = preflight(Workload(step, abstract, {"tokens": tokens}), Rates(chip("cpu"), n))

    state = vs.train_state(vs.fully_shard(build, mesh), tx)
    _, grads = vs.value_and_grad(loss_fn)(state.model, {"tokens": tokens})
    stored = report.memory.stored
    assert stored is not None
    predicted = (stored.parameters, stored.optimizer_state, stored.gradients)
    live = (live_bytes(state.model.params), live_bytes(state.opt_state), live_bytes(grads))
    np.testing.assert_allclose(predicted, live, rtol=0.02)
    # All that a step is given: the state, and this device's rows.
    np.testing.assert_allclose(report.memory.argument_bytes, live_bytes(state) + tokens.nbytes // n, rtol=0.02)
    assert report.memory.total_bytes >= report.memory.argument_bytes
    assert report.tokens == tokens.size
    exact = sum(x.size for x in jax.tree.leaves(jax.eval_shape(build)))
    assert report.parameters == exact
    # Parameters, both moments: what the buffers have beyond the tensors, as far as it divides evenly.
    assert stored.padding == pytest.approx(3 * (stored.parameters - 4 * exact / n), abs=3 * 4 * 5)


def test_padding_of_state_is_counted_once_a_moment(meshes: dict[int, Mesh]) -> None:
    model = vs.fully_shard(build, meshes[8], abstract=True)
    plain, adam = (stored_bytes(vs.train_state(model, tx)) for tx in (optax.sgd(0.1), optax.adamw(0.1)))
    assert adam.padding == pytest.approx(3 * plain.padding, rel=0.01)
    assert adam.parameters == plain.parameters


def test_counts_and_json(meshes: dict[int, Mesh]) -> None:
    tx = optax.adamw(1e-3)
    model = vs.fully_shard(build, meshes[8], abstract=True)
    batch = {"tokens": jax.ShapeDtypeStruct((16, 5), jnp.int32)}
    workload = Workload(vs.train_step(loss_fn, tx), vs.train_state(model, tx), batch, flops_per_token=10.0)
    report, text = preflight(workload, Rates(chip("cpu"), 8))
    record = json.loads(json.dumps(report.as_json()))
    assert {
        "argument_bytes", "temp_bytes", "weight_copy_bytes", "merged_gemm_bytes", "gradient_copy_bytes",
        "hidden_fraction", "collectives", "compile_seconds", "host_memory_bytes", "hlo_bytes",
    } <= set(record)  # fmt: skip
    described = vs.describe(model)
    counts: dict[str, int] = {}
    for one in record["collectives"]:
        counts[one["kind"]] = counts.get(one["kind"], 0) + one["count"]
    # The unit of the embedding is gathered again only if the backward pass needs it.
    assert described.all_gathers - 1 <= counts["all-gather"] <= described.all_gathers
    assert counts["reduce-scatter"] == described.reduce_scatters
    assert counts["all-reduce"] == 1
    assert record["hlo_bytes"] == len(text)
    assert record["hidden_fraction_with_ends"] == {"forward": 0, "backward": 0}  # CPU devices: nothing is asynchronous.
    # 6 FLOPs a parameter and the given ones, over what all devices could do meanwhile.
    work = (6 * report.parameters + 10) * 80
    assert record["mfu"] == pytest.approx(work / (record["step_seconds"] * 8 * chip("cpu").flops_bf16))


sizes = st.integers(1, 10**10)


@given(sizes, st.integers(1, 8), st.integers(1, 64), st.sampled_from(["all-gather", "reduce-scatter", "all-reduce"]))
def test_time_of_a_collective(nbytes: int, a_node: int, nodes: int, kind: str) -> None:
    rates = Rates(chip("h100"), 8)
    group = tuple(node * 8 + device for node in range(nodes) for device in range(a_node))
    seconds = rates.collective_seconds(Collective("c", kind, "f32", nbytes, group, True, "main", 1))
    n, links, network = len(group), rates.chip.link_bandwidth, rates.chip.network_bandwidth
    if n == 1:
        assert seconds == 0
        return
    rounds = 2 if kind == "all-reduce" else 1
    inside = nbytes * (n - 1) / n / links if a_node > 1 else 0
    across = nbytes * (nodes - 1) / nodes / (a_node * network)
    assert seconds == pytest.approx(rates.latency_seconds + rounds * max(inside, across))


@pytest.mark.parametrize("name", [name for name, one in CHIPS.items() if one.platform == "gpu"])
def test_targets_have_what_the_compiler_reads(name: str) -> None:
    text = target_config(chip(name, memory_bandwidth=1e12))
    assert "memory_bandwidth: 1000000000000\n" in text
    assert text.count("{") == text.count("}")
    assert f"device_memory_size: {CHIPS[name].memory_bytes}\n" in text


@pytest.mark.parametrize("platform", ["gpu", "tpu", "cpu", "cuda"])
def test_the_compiler_knows_the_options(platform: str) -> None:
    options = compiler_options(platform)
    # XLA refuses names that it does not know, whatever it compiles for.
    compiled = jax.jit(lambda x: x + 1).lower(jnp.ones(3)).compile(compiler_options=options)
    assert compiled(jnp.ones(3))[0] == 2
    options["changed"] = True
    assert "changed" not in compiler_options(platform)


def test_messages() -> None:
    with pytest.raises(ValueError) as unknown:
        compiler_options("h100")
    assert str(unknown.value) == (
        "compiler_options: platform: got 'h100'; want one of gpu, tpu, cpu; pass jax.default_backend()"
    )
    with pytest.raises(ValueError) as no_chip:
        chip("h10")
    assert str(no_chip.value) == (
        "chip: got 'h10'; want one of h100, h200, a100, b200, v5e, v5p, v6e, cpu; did you mean h100?"
    )
    with pytest.raises(ValueError) as negative:
        chip("h100", link_bandwidth=-1.0)
    assert str(negative.value) == (
        "chip: link_bandwidth: got -1.0; want a positive number; leave it out for the chip's own"
    )
    with pytest.raises(TypeError) as no_step:
        Workload(lambda: None, None, None)
    assert str(no_step.value) == (
        "Workload: step: got function; want something with lower(state, batch); pass what vs.train_step returned, or a "
        "jitted function"
    )


def test_without_the_compiler_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ImportError) as missing:
        devices(chip("h100"), "1x1x8")
    if jax.__version_info__ < (0, 11):
        assert "want JAX 0.11 or newer, which needs Python 3.12" in str(missing.value)
    else:
        assert str(missing.value) == (
            "--chip h100: got no CUDA plugin of JAX; want one, to compile for GPUs; install the extra: pip install "
            "'vescale_jax[cuda-aot]'"
        )
    with pytest.raises(ImportError, match="want the TPU compiler; install it: pip install libtpu"):
        devices(chip("v5e"), "2x4")


SMALL = (
    "--set layers=1 --set width=32 --set heads=2 --set kv_heads=1 --set mlp_width=48 --set vocabulary=64 --set length=8"
)
MODULE = "examples.preflight_model:llama"
MODELS = "tests.vescale_jax.preflight_models"


def test_the_command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture, text = tmp_path / "step.png", tmp_path / "step.hlo"
    words = f"preflight --module {MODULE} --chip cpu --topology 2x4 {SMALL} --plot {picture} --hlo {text}".split()
    assert command_line.main(words) == 0
    printed = capsys.readouterr().out
    assert f"{MODULE}: 8 x cpu, topology 2x4" in printed
    for row in ("parameters", "optimizer state", "gathered buffers", "all-gather", "weights copied before a product"):
        assert row in printed
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert text.read_text().startswith("HloModule")


def test_the_command_as_json_with_other_rates(capsys: pytest.CaptureFixture[str]) -> None:
    words = f"preflight --module {MODELS}:as_tuple --chip cpu --topology 4 --set width=16 --json".split()
    records = []
    for more in ([], ["--link-bandwidth", "1e3", "--option", "xla_cpu_enable_concurrency_optimized_scheduler=true"]):
        assert command_line.main([*words, *more]) == 0
        records.append(json.loads(capsys.readouterr().out))
    assert records[0]["devices"] == 4
    assert records[0]["argument_bytes"] == records[1]["argument_bytes"]
    # A shard, a row and the step count; the compiler rounds each up.
    assert records[0]["argument_bytes"] == pytest.approx(4 * 16 * 16 // 4 + 4 * 16 + 4, abs=16)
    assert records[1]["step_seconds"] > 10 * records[0]["step_seconds"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (f"--module {MODULE} --chip h10 --topology 8", "chip: got 'h10'; want one of h100"),
        (f"--module {MODULE} --chip cpu --topology 8y", "--topology: got '8y'; want numbers with an x between"),
        (f"--module {MODULE} --chip cpu --topology 99", "--topology: got '99' for 8 CPU devices; want no more"),
        (f"--module {MODULE} --chip cpu --topology 8 --mesh a=3", "--mesh: got 'a=3'; want sizes whose product is 8"),
        (f"--module {MODULE} --chip cpu --topology 8 --set x", "--set: got 'x'; want NAME=VALUE"),
        (f"--module {MODULE} --chip cpu --topology 8 --set x=1", "want a function of a mesh that takes ['x']"),
        ("--module examples.preflight_model:no --chip cpu --topology 8", "want a function that exists"),
        ("--module nothing --chip cpu --topology 8", "want package.file:function"),
        (
            f"--module {MODELS}:nothing --chip cpu --topology 8",
            "got NoneType; want a Workload, or (step, abstract state",
        ),
        (f"--module {MODULE} --chip cpu --topology 8 --plot a.gif", "--plot: got a.gif; want a .png or .svg file"),
        (f"--module {MODULE} --chip cpu --topology 8 --hlo no/a.txt", "--hlo: got no/a.txt; want a file in a folder"),
        (f"--module {MODULE} --chip cpu --topology 8 --mesh a=2,a=4", "--mesh: got a twice; want it once"),
        (f"--module {MODULE} --chip cpu --topology 8 --option no=1", "got the compiler option 'no'; want one that XLA"),
        ("--module math:pi --chip cpu --topology 8", "got 'math:pi', a float; want a function of a mesh"),
        (f"--module {MODULE} --chip cpu --topology 8 --product-efficiency 2", "Rates: product_efficiency: got 2.0"),
    ],
)
def test_mistakes(capsys: pytest.CaptureFixture[str], words: str, message: str) -> None:
    assert command_line.main(["preflight", *words.split()]) == 2
    assert message in capsys.readouterr().err


needs_cuda = pytest.mark.skipif(
    jax.__version_info__ < (0, 11) or not __import__("importlib.util").util.find_spec("jax_cuda13_plugin"),
    reason="compiling for GPUs needs Python 3.12 and the extra cuda-aot",
)


@needs_cuda
def test_a_step_compiled_for_gpus_reads_weights_in_place() -> None:
    from tests.vescale_jax.data import record

    kind = chip("h100")
    mesh = Mesh(np.array(devices(kind, "1x1x8")), ("fsdp",))
    report, _ = preflight(record.workload(mesh), Rates(kind, 8))
    assert report.num_devices == 8
    assert report.gradient_copy_bytes == 0
    counts = {(one.kind, one.is_async) for one in report.collectives}
    assert ("all-gather", True) in counts
    assert ("reduce-scatter", True) in counts
    worse, _ = preflight(record.workload(mesh), Rates(kind, 8), {"xla_gpu_enable_triton_gemm": True})
    assert worse.weight_copy_bytes > report.weight_copy_bytes
