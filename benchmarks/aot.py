"""The compiled training step for accelerators that are not there: this library beside per-tensor NamedSharding.

    python benchmarks/aot.py [--json] [--model llama-3-8b] [--topology 1x1x8] [--chip h100] [--layers N ...]
                             [--form stack list] [--side ours theirs] [--table]

Compiles, for each side, form and number of layers, the same model in pure JAX (a pytree of parameters, layers under
`jax.lax.scan` or in a list, `jax.checkpoint` around a layer) with the same AdamW in float32, the same bfloat16
gathers and sums, and the same compiler options, and reads both programs with `vescale_jax.preflight`. Per-tensor
sharding is what the Flax guide and MaxText do: each parameter is cut over the first of its dims that the devices
divide, and the partitioner puts in the collectives.

Models: llama-3-8b and llama-3-70b (arXiv 2407.21783, table 3), and gpt-oss-120b (arXiv 2508.10925, table 1: 128
experts, 4 a token, each with room for twice its share of tokens), without rotary positions, biases and sinks. One row
of 4096 tokens a device. Every program is compiled in a process of its own, so that its host memory can be told. A side
that cannot be compiled has an `error` instead of numbers. Needs the extra cuda-aot for `--chip` other than cpu.

`--table` prints the rows for docs/benchmarks.md.
"""

import argparse
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import vescale_jax as vs
from vescale_jax.preflight import Rates, Workload, chip, devices, devices_per_node, preflight

LINK_BANDWIDTH = 450e9
"""Bytes/s from one GPU to the others of its node, one way: NVLink of an H100."""


@dataclass(frozen=True)
class Shape:
    """Sizes of a decoder: `experts` of `mlp_width` each, of which a token meets `chosen`; one expert is a plain MLP."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    head_width: int
    mlp_width: int
    vocabulary: int
    experts: int = 1
    chosen: int = 1

    def layer(self) -> dict[str, tuple[int, ...]]:
        """Shapes of one layer's parameters."""
        d, f, e = self.width, self.mlp_width, self.experts
        shapes = {
            "norm_1": (d,),
            "query": (d, self.heads * self.head_width),
            "key": (d, self.kv_heads * self.head_width),
            "value": (d, self.kv_heads * self.head_width),
            "out": (self.heads * self.head_width, d),
            "norm_2": (d,),
        }
        if e == 1:
            return shapes | {"gate": (d, f), "up": (d, f), "down": (f, d)}
        return shapes | {"router": (d, e), "gate_up": (e, d, 2 * f), "down": (e, f, d)}

    def active(self) -> int:
        """Parameters that one token meets."""
        layer = sum(math.prod(s) // (self.experts if len(s) == 3 else 1) * (self.chosen if len(s) == 3 else 1)
                    for s in self.layer().values())  # fmt: skip
        return self.layers * layer + 2 * self.vocabulary * self.width


MODELS = {
    "llama-3-8b": Shape(32, 4096, 32, 8, 128, 14336, 128256),
    "llama-3-70b": Shape(80, 8192, 64, 8, 128, 28672, 128256),
    "gpt-oss-120b": Shape(36, 2880, 64, 8, 64, 2880, 201088, 128, 4),
    "tiny": Shape(4, 64, 4, 2, 16, 128, 256),
}


def norm(x: jax.Array, gain: jax.Array) -> jax.Array:
    squares = jnp.mean(jnp.square(x.astype(jnp.float32)), -1, keepdims=True)
    return (x * jax.lax.rsqrt(squares + 1e-5)).astype(x.dtype) * gain


def experts(p: dict[str, jax.Array], x: jax.Array, shape: Shape) -> jax.Array:
    """A mixture of experts over tokens (n, D), each expert with room for twice its share; what is above is left out."""
    n, width = x.shape
    room = 2 * n * shape.chosen // shape.experts
    scores, chosen = jax.lax.top_k((x @ p["router"]).astype(jnp.float32), shape.chosen)
    weights = jax.nn.softmax(scores).astype(x.dtype).ravel()
    taken = jax.nn.one_hot(chosen.ravel(), shape.experts, dtype=jnp.int32)  # (n * chosen, experts)
    place = (jnp.cumsum(taken, 0) * taken).sum(-1) - 1  # of each pair within its expert
    slot = jnp.where(place < room, chosen.ravel() * room + place, shape.experts * room)
    rows = jnp.zeros((shape.experts * room, width), x.dtype)
    rows = rows.at[slot].set(jnp.repeat(x, shape.chosen, 0), mode="drop").reshape(shape.experts, room, width)
    gate, up = jnp.split(jnp.einsum("erd,edf->erf", rows, p["gate_up"]), 2, -1)
    made = jnp.einsum("erf,efd->erd", jax.nn.silu(gate) * up, p["down"]).reshape(-1, width)
    made = made.at[slot].get(mode="fill", fill_value=0) * weights[:, None]
    return made.reshape(n, shape.chosen, width).sum(1)


def layer(p: dict[str, jax.Array], x: jax.Array, shape: Shape, locally: Callable[[Any], Any]) -> jax.Array:
    rows, length, width = x.shape
    h = norm(x, p["norm_1"])
    query = (h @ p["query"]).reshape(rows, length, shape.heads, shape.head_width)
    key = (h @ p["key"]).reshape(rows, length, shape.kv_heads, shape.head_width)
    value = (h @ p["value"]).reshape(rows, length, shape.kv_heads, shape.head_width)
    mixed = jax.nn.dot_product_attention(query, key, value, is_causal=True)
    x = x + mixed.reshape(rows, length, -1) @ p["out"]
    h = norm(x, p["norm_2"])
    if shape.experts == 1:
        return x + (jax.nn.silu(h @ p["gate"]) * (h @ p["up"])) @ p["down"]
    return x + locally(lambda p, h: experts(p, h.reshape(-1, width), shape).reshape(h.shape))(p, h)


Same = Callable[[Any], Any]


def loss_of(
    shape: Shape, constrain: Same = lambda x: x, cast: Same = lambda p: p, locally: Same = lambda f: f
) -> Callable[[Any, Any], jax.Array]:
    """The loss; `constrain`, `cast` and `locally` are what per-tensor sharding has to be told."""

    @jax.checkpoint
    def one(p: Any, x: jax.Array) -> jax.Array:
        return constrain(layer(cast(p), x, shape, locally))

    def loss(params: Any, batch: Any) -> jax.Array:
        x = constrain(cast(params["embedding"])[batch["tokens"][:, :-1]])
        if isinstance(params["layers"], dict):
            x, _ = jax.lax.scan(lambda x, p: (one(p, x), None), x, params["layers"])
        else:
            for p in params["layers"]:
                x = one(p, x)
        logits = (norm(x, cast(params["norm"])) @ cast(params["head"])).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["tokens"][:, 1:]).mean()

    return loss


def build(shape: Shape, form: str) -> Any:
    """The parameters, float32, layers stacked or in a list."""
    d, v = shape.width, shape.vocabulary
    if form == "stack":
        layers: Any = {name: jnp.zeros((shape.layers, *s)) for name, s in shape.layer().items()}
    else:
        layers = [{name: jnp.zeros(s) for name, s in shape.layer().items()} for _ in range(shape.layers)]
    return {"embedding": jnp.zeros((v, d)), "layers": layers, "norm": jnp.zeros(d), "head": jnp.zeros((d, v))}


def ours(shape: Shape, form: str, mesh: Mesh, tx: Any, prefetch: int) -> tuple[Any, Any]:
    """Step and abstract state, as a user of the library writes them."""
    model = vs.fully_shard(
        lambda: build(shape, form),
        mesh,
        stacks=("layers",) if form == "stack" else (),
        prefetch=prefetch,
        max_unit_bytes=None if form == "list" else 2**30,
        policy=vs.MixedPrecisionPolicy(gather_dtype=jnp.bfloat16, reduce_dtype=jnp.bfloat16),
        abstract=True,
    )
    return vs.train_step(loss_of(shape), tx), vs.train_state(model, tx)


def theirs(shape: Shape, form: str, mesh: Mesh, tx: Any) -> tuple[Any, Any]:
    """Step and abstract state with one sharding a tensor."""
    replicated, rows = NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, PartitionSpec("fsdp"))
    count = mesh.size

    def sharded(path: Any, x: Any) -> jax.ShapeDtypeStruct:
        stacked = form == "stack" and any(getattr(key, "key", None) == "layers" for key in path)
        spec = PartitionSpec()
        for dim, size in enumerate(x.shape):
            if size % count == 0 and not (stacked and dim == 0):
                spec = PartitionSpec(*[None] * dim, "fsdp")
                break
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))

    params = jax.tree_util.tree_map_with_path(sharded, jax.eval_shape(lambda: build(shape, form)))
    state = params, jax.tree_util.tree_map_with_path(sharded, jax.eval_shape(tx.init, params))
    loss = loss_of(
        shape,
        lambda x: jax.lax.with_sharding_constraint(x, rows),
        lambda p: jax.tree.map(lambda x: x.astype(jnp.bfloat16), p),
        # Otherwise the tokens of all devices would be sorted by expert together.
        lambda f: jax.shard_map(
            f, mesh=mesh, in_specs=(PartitionSpec(), PartitionSpec("fsdp")), out_specs=PartitionSpec("fsdp")
        ),
    )

    def step(state: Any, batch: Any) -> tuple[Any, jax.Array]:
        params, opt_state = state
        batch = jax.lax.with_sharding_constraint(batch, rows)
        value, grads = jax.value_and_grad(loss)(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), value

    shardings = jax.tree.map(lambda x: x.sharding, state)
    return jax.jit(step, donate_argnums=0, out_shardings=(shardings, replicated)), state


def measure(side: str, form: str, layers: int | None, args: argparse.Namespace) -> dict[str, Any]:
    """Compiles one program in this process; its numbers."""
    shape = MODELS[args.model]
    shape = Shape(**{**shape.__dict__, **({"layers": layers} if layers else {})})
    kind = chip(args.chip, link_bandwidth=LINK_BANDWIDTH)
    if kind.platform == "cpu":
        jax.config.update("jax_num_cpu_devices", math.prod(map(int, args.topology.split("x"))))
    mesh = Mesh(np.array(devices(kind, args.topology)), ("fsdp",))
    tx = optax.adamw(3e-4)
    step, state = ours(shape, form, mesh, tx, args.prefetch) if side == "ours" else theirs(shape, form, mesh, tx)
    rows = NamedSharding(mesh, PartitionSpec("fsdp"))
    batch = {"tokens": jax.ShapeDtypeStruct((mesh.size, args.length + 1), jnp.int32, sharding=rows)}
    # Causal attention: two products of (length, length / 2) by the width of the heads, three times that with gradients.
    attention = 6.0 * shape.layers * shape.heads * shape.head_width * args.length
    workload = Workload(step, state, batch, mesh.size * args.length, attention, shape.active())
    options = dict(pair.split("=") for pair in args.option)
    options = {name: {"true": True, "false": False}.get(value, value) for name, value in options.items()}
    report, text = preflight(workload, Rates(kind, devices_per_node(kind, args.topology)), options)
    if args.hlo:
        Path(args.hlo).write_text(text)
    return {"side": side, "form": form, "layers": shape.layers, **report.as_json()}


def apart(side: str, form: str, layers: int | None, arguments: list[str]) -> dict[str, Any]:
    """Compiles one program in a process of its own."""
    own = ["--one", side, form, str(layers or 0)]
    done = subprocess.run([sys.executable, __file__, *arguments, *own], capture_output=True, text=True, check=False)
    if done.returncode:
        lines = [line for line in done.stderr.strip().splitlines() if line.strip()]
        return {"side": side, "form": form, "layers": layers, "error": " ".join(lines[-3:])[:400]}
    return json.loads(done.stdout.strip().splitlines()[-1])


def row(found: dict[str, Any]) -> str:
    """A line of the table."""
    head = f"| {found['form']}, {found['layers']} layers | {found['side']} "
    if "error" in found:
        return head + f"| does not compile: {found['error'][:120]} |"
    hidden = found["hidden_fraction"]
    counts = {"all-gather": 0, "reduce-scatter": 0, "all-reduce": 0}
    for one in found["collectives"]:
        counts[one["kind"]] = counts.get(one["kind"], 0) + one["count"]
    shares = " / ".join("-" if hidden[name] is None else f"{hidden[name]:.2f}" for name in ("forward", "backward"))
    return head + (
        f"| {found['temp_bytes'] / 1e9:.2f} | {found['gathered_bytes'] / 1e9:.2f} "
        f"| {found['weight_copy_bytes'] / 1e9:.2f} | {found['merged_gemm_bytes'] / 1e9:.2f} "
        f"| {found['gradient_copy_bytes'] / 1e9:.2f} | {shares} "
        f"| {counts['all-gather']} / {counts['reduce-scatter']} / {counts['all-reduce']} "
        f"| {1000 * found['step_seconds']:.0f} | {found['mfu']:.2f} "
        f"| {found['lower_seconds']:.0f} + {found['compile_seconds']:.0f} | {found['host_memory_bytes'] / 1e9:.1f} "
        f"| {found['hlo_bytes'] / 1e6:.2f} |"
    )


HEAD = """\
| form | side | temporary GB | gathered GB | weights copied GB | merged GB | gradients copied GB \
| hidden, forward / backward | all-gathers / reduce-scatters / all-reduces | est. step ms | est. MFU \
| trace + compile s | host GB | program MB |
|---|---|---|---|---|---|---|---|---|---|---|---|---|---|"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-3-8b", choices=MODELS)
    parser.add_argument("--chip", default="h100")
    parser.add_argument("--topology", default="1x1x8")
    parser.add_argument("--length", type=int, default=4096, help="tokens of a row")
    parser.add_argument("--layers", type=int, nargs="*", default=[], help="instead of the model's own number")
    parser.add_argument("--form", nargs="*", default=["stack", "list"], choices=["stack", "list"])
    parser.add_argument("--side", nargs="*", default=["ours", "theirs"], choices=["ours", "theirs"])
    parser.add_argument("--prefetch", type=int, default=1, choices=[0, 1], help="of stacks, ours")
    parser.add_argument("--option", action="append", default=[], metavar="NAME=VALUE", help="a compiler option")
    parser.add_argument("--json", action="store_true", help="print one line of JSON and nothing else")
    parser.add_argument("--table", action="store_true", help="print rows of Markdown")
    parser.add_argument("--hlo", help="write the compiled text of the last program")
    parser.add_argument("--one", nargs=3, metavar=("SIDE", "FORM", "LAYERS"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        side, form, layers = args.one
        print(json.dumps(measure(side, form, int(layers), args)))
        return
    programs = [(side, form, n) for form in args.form for n in args.layers or [None] for side in args.side]
    found = [apart(*program, sys.argv[1:]) for program in programs]
    if args.json:
        print(json.dumps({"model": args.model, "chip": args.chip, "topology": args.topology, "programs": found}))
        return
    print(HEAD)
    for one in found:
        print(row(one))


if __name__ == "__main__":
    main()
