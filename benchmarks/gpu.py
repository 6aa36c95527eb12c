"""What one accelerator says: the step against plain JAX, copies after autotuning, block quantisation, Newton-Schulz.

    python benchmarks/gpu.py [--json] [--width 2048] [--layers 8] [--length 2048] [--rows 4] [--rounds 15]

One command, under three minutes, no downloads; needs nothing but the library. It runs on whatever device JAX finds
first, so that `--width 64 --layers 2 --length 32 --rows 2` tries it out on a CPU.

- `step_time_ratio`: a training step through the library on one device over the same step in plain `jax.jit`, AdamW in
  float32, computed in bfloat16; steps alternate, medians of paired ratios. On one device nothing is gathered, so this
  is what flat buffers cost: slices for parameters, one concatenate for gradients, and an optimizer that runs on few
  arrays instead of many.
- `copies`: bytes that the compiled step copies without computing anything, ours and theirs. Products are chosen by
  measurement here, which they are not where programs are compiled without the chip.
- `adamw_8bit`: the update of `optimizers.adamw_8bit` over that of AdamW in float32, time, and parameters a second.
- `newton_schulz`: of a batch of square matrices, FLOP/s.
"""

import argparse
import json
import re
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

import vescale_jax as vs
from vescale_jax.optimizers import newton_schulz
from vescale_planner import Elements

VOCABULARY = 8192
QUINTIC = ((3.4445, -4.7750, 2.0315),) * 5
ITEMSIZE = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "f32": 4, "s32": 4, "u32": 4, "f64": 8}


def parameters(args: argparse.Namespace) -> Any:
    """A decoder without attention: gated layers, which is where the weights are."""
    keys = iter(jax.random.split(jax.random.key(0), 3 * args.layers + 2))
    width, inner = args.width, args.width * 7 // 2

    def matrix(rows: int, cols: int) -> jax.Array:
        return jax.random.normal(next(keys), (rows, cols)) / rows**0.5

    layers = [
        {
            "norm": jnp.ones(width),
            "gate": matrix(width, inner),
            "up": matrix(width, inner),
            "down": matrix(inner, width),
        }
        for _ in range(args.layers)
    ]
    return {"embed": matrix(VOCABULARY, width), "layers": layers, "head": matrix(width, VOCABULARY)}


def loss_fn(params: Any, batch: Any) -> jax.Array:
    """Mean cross-entropy of tokens (rows, length + 1), in the dtype of the parameters."""
    x = params["embed"][batch["tokens"][:, :-1]]
    for layer in params["layers"]:
        square = jnp.mean(jnp.square(x.astype(jnp.float32)), -1, keepdims=True)
        h = (x * jax.lax.rsqrt(square + 1e-6)).astype(x.dtype) * layer["norm"]
        x = x + (jax.nn.silu(h @ layer["gate"]) * (h @ layer["up"])) @ layer["down"]
    logits = (x @ params["head"]).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["tokens"][:, 1:]).mean()


def plain_step(tx: Any) -> Any:
    """The same step without the library."""

    def step(state: Any, batch: Any) -> Any:
        params, opt_state = state

        def low(params: Any) -> jax.Array:
            return loss_fn(jax.tree.map(lambda x: x.astype(jnp.bfloat16), params), batch)

        loss, grads = jax.value_and_grad(low)(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), loss

    return jax.jit(step, donate_argnums=0)


def seconds(run: Callable[[], Any]) -> float:
    """Of one call, to the end."""
    start = time.perf_counter()
    jax.block_until_ready(run())
    return time.perf_counter() - start


def paired(first: Callable[[], Any], second: Callable[[], Any], rounds: int) -> list[float]:
    """Ratios of the seconds of two functions, run in turn and in changing order."""
    first(), second()
    ratios = []
    for i in range(rounds):
        if i % 2:
            b, a = seconds(second), seconds(first)
        else:
            a, b = seconds(first), seconds(second)
        ratios.append(a / b)
    return ratios


def copied_bytes(text: str) -> int:
    """Bytes that copies, slices and transposes write as instructions of their own."""
    total = 0
    copy = r"= (\w+)\[([\d,]*)\]\S* (?:copy|transpose|slice)\("
    fused = r"%(?:wrapped_\w*(?:slice|copy|transpose)\w*|loop_slice_fusion\S*) = (\w+)\[([\d,]*)\]"
    body = re.split(r"^ENTRY ", text, flags=re.MULTILINE)[-1]
    for dtype, dims in re.findall(copy, body) + re.findall(fused, body):
        total += ITEMSIZE.get(dtype, 4) * int(np.prod([int(d) for d in dims.split(",") if d]))
    return total


def measure_step(args: argparse.Namespace, mesh: Mesh) -> dict[str, Any]:
    """The step with and without the library."""
    tx = optax.adamw(1e-4)
    tokens = np.random.default_rng(0).integers(0, VOCABULARY, (args.rows, args.length + 1), np.int32)
    batch = {"tokens": jax.device_put(tokens, mesh.devices.flat[0])}
    policy = vs.MixedPrecisionPolicy(gather_dtype=jnp.bfloat16, reduce_dtype=jnp.bfloat16)
    params = parameters(args)
    model = vs.fully_shard(params, mesh, policy=policy, max_unit_bytes=None)
    states = [vs.train_state(model, tx), (params, tx.init(params))]
    steps = [vs.train_step(loss_fn, tx), plain_step(tx)]
    programs = [step.lower(state, batch).compile() for step, state in zip(steps, states, strict=True)]

    def run(i: int) -> Any:
        states[i], out = programs[i](states[i], batch)
        return out

    ratios = paired(lambda: run(0), lambda: run(1), args.rounds)
    temps = [program.memory_analysis().temp_size_in_bytes for program in programs]
    return {
        "step_time_ratio": round(statistics.median(ratios), 4),
        "step_time_quartiles": [round(q, 4) for q in statistics.quantiles(ratios, n=4)[::2]],
        "temp_bytes": temps,
        "copied_bytes": [copied_bytes(program.as_text()) for program in programs],
        "parameters": sum(x.size for x in jax.tree.leaves(params)),
    }


def measure_quantisation(args: argparse.Namespace, mesh: Mesh) -> dict[str, Any]:
    """Updates alone, of the same parameters."""
    size = args.width * args.width * 16
    model = vs.fully_shard({"w": jnp.ones((size // 256, 256))}, mesh, blocks=Elements(256))
    runs = []
    for tx in (vs.optimizers.adamw_8bit(1e-3), optax.adamw(1e-3)):
        state = tx.init(model.params)
        update = jax.jit(lambda grads, state, params, tx=tx: tx.update(grads, state, params))
        runs.append(lambda update=update, state=state: update(model.params, state, model.params))
    ratios = paired(*runs, args.rounds)
    taken = statistics.median(seconds(runs[0]) for _ in range(args.rounds))
    return {"time_ratio": round(statistics.median(ratios), 2), "parameters_per_second": int(size / taken)}


def measure_newton_schulz(args: argparse.Namespace) -> dict[str, Any]:
    """Products of a batch of matrices."""
    n, count = args.width, 8
    x = jax.random.normal(jax.random.key(0), (count, n, n), jnp.bfloat16)
    run = jax.jit(lambda x: newton_schulz(x, QUINTIC, 1e-7, jnp.bfloat16))
    jax.block_until_ready(run(x))
    taken = statistics.median(seconds(lambda: run(x)) for _ in range(args.rounds))
    flops = count * len(QUINTIC) * 3 * 2 * n**3
    return {"tflops_per_second": round(flops / taken / 1e12, 2)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("width", 2048), ("layers", 8), ("length", 2048), ("rows", 4), ("rounds", 15)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--json", action="store_true", help="print one line of JSON and nothing else")
    args = parser.parse_args()
    device = jax.devices()[0]
    mesh = Mesh(np.array([device]), ("fsdp",))
    result = {
        "device": device.device_kind,
        "jax": jax.__version__,
        "step": measure_step(args, mesh),
        "adamw_8bit": measure_quantisation(args, mesh),
        "newton_schulz": measure_newton_schulz(args),
    }
    print(json.dumps(result) if args.json else json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
