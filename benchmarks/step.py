"""The training step through this library and through per-tensor NamedSharding FSDP, side by side.

    python benchmarks/step.py [--json] [--form list|stack|rolled] [--width 256] [--layers 4] [--length 128]
                              [--rows 32] [--rounds 15] [--prefetch 0] [--keep]

Both train the example's language model with AdamW on 8 virtual CPU devices, in float32, since CPU devices emulate
bfloat16. Its layers are a list, or a stack under `nnx.scan`; `rolled` is a list that the library runs as a stack,
against the list. The baseline is what the Flax guide and MaxText do: each parameter is cut over the first of its dims
that the devices divide, the batch over rows, and the partitioner puts in the collectives, one a tensor; a tensor that
nothing divides is replicated. Sizes are chosen so that all matrices divide, in favour of the baseline. `XLA_FLAGS` in
the environment count for both.

Steps alternate, ours and theirs, in one process; ratios are medians over rounds of the paired ratios, ours over theirs.
Absolute times mean nothing on a shared machine, and CPU seconds are disturbed less than seconds. Prints
`step_time_ratio`, `cpu_time_ratio`, `temp_bytes_ratio` and `compile_time_ratio`, and `all_gathers` and `reduces` as
[ours, theirs].
"""

import argparse
import json
import os
import re
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from language_model import LanguageModel, ModelConfig

import vescale_jax as vs

DEVICES = 8


def loss_of(model: LanguageModel, batch: dict[str, jax.Array]) -> jax.Array:
    """Mean cross-entropy of the next token, over tokens (rows, length + 1)."""
    logits = model(batch["tokens"][:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["tokens"][:, 1:]).mean()


def ours(build: Callable[[], LanguageModel], mesh: Mesh, tx: Any, options: dict[str, Any]) -> tuple[Any, Any]:
    """The sharded state and the step, as a user of the library writes them."""
    model = vs.fully_shard(build, mesh, **options)
    return vs.train_state(model, tx), vs.train_step(loss_of, tx)


def theirs(build: Callable[[], LanguageModel], mesh: Mesh, tx: Any, stacked: bool, layers: int) -> tuple[Any, Any]:
    """The state with one sharding a tensor, and the jitted step."""
    replicated, rows = NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, PartitionSpec("fsdp"))

    def sharding(x: Any) -> NamedSharding:
        for dim, size in enumerate(x.shape):
            # Not over the layers of a stack, which would gather all of it for each layer.
            if size % DEVICES == 0 and not (stacked and dim == 0 and size == layers and x.ndim > 1):
                return NamedSharding(mesh, PartitionSpec(*[None] * dim, "fsdp"))
        return replicated

    graphdef, abstract = nnx.split(nnx.eval_shape(build))
    params = jax.jit(lambda: nnx.split(build())[1], out_shardings=jax.tree.map(sharding, abstract))()
    opt_shardings = jax.tree.map(sharding, jax.eval_shape(tx.init, params))
    state = (params, jax.jit(tx.init, out_shardings=opt_shardings)(params))

    def step(state: Any, batch: Any) -> tuple[Any, jax.Array]:
        params, opt_state = state
        batch = jax.lax.with_sharding_constraint(batch, rows)
        loss, grads = jax.value_and_grad(lambda p: loss_of(nnx.merge(graphdef, p), batch))(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), loss

    shardings = jax.tree.map(lambda x: x.sharding, state)
    return state, jax.jit(step, donate_argnums=0, out_shardings=(shardings, replicated))


def collectives(text: str) -> dict[str, int]:
    """How often each collective stands in a compiled program."""
    names = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute")
    return {name: len(re.findall(rf" {name}(?:-start)?\(", text)) for name in names}


def compile_step(step: Any, state: Any, batch: Any) -> tuple[Any, float]:
    """The compiled step and the seconds that took."""
    start = time.perf_counter()
    compiled = step.lower(state, batch).compile()
    return compiled, time.perf_counter() - start


def paired_ratios(runs: list[Callable[[], None]], rounds: int) -> list[tuple[float, float]]:
    """Runs two functions in turn, in changing order; first over second for each round, in seconds and CPU seconds."""
    ratios = []
    for i in range(rounds):
        taken = [(0.0, 0.0), (0.0, 0.0)]
        for j in (0, 1) if i % 2 == 0 else (1, 0):
            start, cpu = time.perf_counter(), time.process_time()
            runs[j]()
            taken[j] = time.perf_counter() - start, time.process_time() - cpu
        ratios.append((taken[0][0] / taken[1][0], taken[0][1] / taken[1][1]))
    return ratios


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("width", 256), ("layers", 4), ("length", 128), ("rows", 32), ("rounds", 15), ("steps", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--form", choices=("list", "stack", "rolled"), default="list")
    parser.add_argument("--prefetch", type=int, help="layers of a stack gathered ahead; by default 0 on CPU devices")
    parser.add_argument("--keep", action="store_true", help="reshard_after_forward=False")
    parser.add_argument("--json", action="store_true", help="print one line of JSON and nothing else")
    args = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", DEVICES)

    mesh = Mesh(np.array(jax.devices()[:DEVICES]), ("fsdp",))
    config = ModelConfig(
        vocabulary=256,
        layers=args.layers,
        width=args.width,
        heads=args.width // 32,
        mlp_width=args.width * 11 // 4,
        stack=args.form == "stack",
    )
    rng = np.random.default_rng(0)
    batch = {"tokens": jnp.asarray(rng.integers(0, 256, (args.rows, args.length + 1)), jnp.int32)}
    batch = jax.device_put(batch, NamedSharding(mesh, PartitionSpec("fsdp")))
    tx = optax.adamw(1e-3)

    states, programs, texts, temps, compile_seconds, losses = [], [], [], [], [], [[], []]
    stacked = args.form == "stack"
    options: dict[str, Any] = {"reshard_after_forward": not args.keep, "prefetch": args.prefetch}
    options |= {"stack": {"stacks": ("layers",)}, "rolled": {"rolled": ("layers",)}}.get(args.form, {})
    for make in (lambda *a: ours(*a, options), lambda *a: theirs(*a, stacked, args.layers)):
        state, step = make(lambda: LanguageModel(config, nnx.Rngs(0)), mesh, tx)
        compiled, seconds = compile_step(step, state, batch)
        states.append(state)
        programs.append(compiled)
        texts.append(compiled.as_text())
        temps.append(compiled.memory_analysis().temp_size_in_bytes)
        compile_seconds.append(seconds)

    def run(i: int) -> None:
        for _ in range(args.steps):
            states[i], out = programs[i](states[i], batch)
            losses[i].append(out.loss if i == 0 else out)
        jax.block_until_ready((states[i], losses[i][-1]))

    run(0), run(1)
    ratios, cpu_ratios = zip(*paired_ratios([lambda: run(0), lambda: run(1)], args.rounds), strict=True)
    np.testing.assert_allclose(losses[0], losses[1], rtol=2e-3)
    counts = [collectives(text) for text in texts]
    result = {
        "step_time_ratio": round(statistics.median(ratios), 3),
        "step_time_quartiles": [round(q, 3) for q in statistics.quantiles(ratios, n=4)[::2]],
        "cpu_time_ratio": round(statistics.median(cpu_ratios), 3),
        "temp_bytes_ratio": round(temps[0] / temps[1], 3),
        "compile_time_ratio": round(compile_seconds[0] / compile_seconds[1], 3),
        "all_gathers": [c["all-gather"] for c in counts],
        "reduces": [c["reduce-scatter"] + c["all-reduce"] for c in counts],
        "jax": jax.__version__,
    }
    if args.json:
        print(json.dumps(result))
        return
    for key, value in result.items():
        print(f"{key:20} {value}")


if __name__ == "__main__":
    main()
