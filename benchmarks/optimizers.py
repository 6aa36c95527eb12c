"""Optimizer steps on flat shards: time and collective bytes, beside optax on per-tensor shardings and beside AdamW.

    python benchmarks/optimizers.py [--json] [--width 256] [--layers 8] [--rounds 9] [--only muon,ratios,table_2]

All on 8 virtual CPU devices, in float32: the parameters of a transformer of a given width and number of layers, and one
optimizer step on them, compiled alone and donated.

- `muon`: ours against `optax.contrib.muon` with one `NamedSharding` a parameter, cut over the first dim that the
  devices divide, where the partitioner puts in the collectives. Same rules, same arithmetic; the results are
  compared.
- `ratios`: each of `vs.optimizers`, over `optax.adamw` on the same model; blocks as each wants them.
- `table_2`: after the paper's Table 2 (arXiv 2602.22437), 8-bit Adam in full; without the planner (tensors simply one
  after the other, so that shards cut blocks: gradients and parameters go to a plan that keeps blocks whole and updates
  come back, by `redistribute`); and without the block view (blocks taken out of global tensors, the partitioner left to
  it). Times over that of the full one.

Steps alternate in one process; ratios are medians over rounds of paired ratios. Absolute times mean nothing on a shared
machine. Collective bytes are what leaves a device in a step, over all devices, read from the compiled program; a
ring's bytes are taken for all-reduce, all-gather and reduce-scatter.
"""

import argparse
import json
import os
import re
import statistics
import time
from functools import partial
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import vescale_jax as vs
from vescale_jax.optimizers import Code
from vescale_layouts import DBuffer, Layout, pack, redistribute
from vescale_planner import Elements, GroupPlan, Slot, TensorSpec, Tile

DEVICES = 8
MUON = {"learning_rate": 1e-2, "beta": 0.95, "weight_decay": 0.1, "consistent_rms": 0.2}


def parameters(width: int, layers: int) -> dict[str, Any]:
    """A transformer's matrices and norms; the vocabulary is small, since its tables are AdamW's."""
    rng, hidden = np.random.default_rng(0), width * 11 // 4

    def normal(*shape: int) -> np.ndarray:
        return (rng.normal(size=shape) / np.sqrt(shape[0])).astype(np.float32)

    layer = {"query": (width, width), "key": (width, width), "value": (width, width), "out": (width, width)}
    layer |= {"gate": (width, hidden), "up": (width, hidden), "down": (hidden, width), "norm": (width,)}
    return {
        "embed": {"embedding": normal(512, width)},
        "layers": [{name: {"kernel": normal(*shape)} for name, shape in layer.items()} for _ in range(layers)],
        "head": {"kernel": normal(width, 512)},
    }


# What travels.

_SIZES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4, "s64": 8, "f64": 8}
_COLLECTIVES = "all-gather|reduce-scatter|all-reduce|all-to-all|collective-permute"


def wire_bytes(compiled: Any) -> tuple[int, dict[str, int]]:
    """Bytes that leave the devices in one run of a program, all together, and how often each collective runs."""
    text = re.sub(r"/\*.*?\*/", "", compiled.as_text())
    bodies = dict(re.findall(r"^(?:ENTRY )?%?([\w.-]+) [^\n]*\{\n(.*?)^\}", text, re.MULTILINE | re.DOTALL))
    entry = re.search(r"^ENTRY %?([\w.-]+)", text, re.MULTILINE)
    assert entry is not None
    total, counts = 0, {}

    def walk(name: str, times: int) -> None:
        nonlocal total
        for line in bodies[name].splitlines():
            found = re.search(rf"= (.*?) ({_COLLECTIVES})(?:-start)?\(", line)
            if found:
                kind, size = found[2], _bytes_of(found[1])
                counts[kind] = counts.get(kind, 0) + times
                total += times * _wire(kind, size, line)
            trips = re.search(r'known_trip_count":\{"n":"(\d+)"', line)
            for inner in re.findall(r"(?:body|calls|to_apply|true_computation|false_computation)=%?([\w.-]+)", line):
                walk(inner, times * (int(trips[1]) if trips else 1))

    walk(entry[1], 1)
    return total, counts


def _bytes_of(result: str) -> int:
    return sum(
        _SIZES[dtype] * int(np.prod([int(d) for d in dims.split(",") if d], dtype=np.int64))
        for dtype, dims in re.findall(r"(\w+)\[([\d,]*)\]", result)
        if dtype in _SIZES
    )


def _wire(kind: str, size: int, line: str) -> int:
    """Bytes over all devices of one collective whose result on one device has so many bytes."""
    if kind == "collective-permute":
        pairs = re.search(r"source_target_pairs=\{(.*?)\}\}", line)
        return size * (pairs[1].count("{") if pairs else DEVICES)
    times = {"all-reduce": 2, "reduce-scatter": DEVICES}.get(kind, 1)
    return times * size * (DEVICES - 1)


# The contestants: each is (state, jitted step), where step(state) gives the next state.


def ours(tx: Any, tree: Any, mesh: Mesh, **how: Any) -> tuple[Any, Any]:
    """One step of an optimizer on flat shards; gradients are made of the parameters."""
    model = vs.fully_shard(tree, mesh, **how)
    state = vs.train_state(model, tx)
    return (state.model.params, state.opt_state), _jitted(tx, (state.model.params, state.opt_state))


def theirs(tx: Any, tree: Any, mesh: Mesh) -> tuple[Any, Any]:
    """The same with a sharding a tensor."""

    def sharding(x: Any) -> NamedSharding:
        for dim, size in enumerate(np.shape(x)):
            if size % DEVICES == 0:
                return NamedSharding(mesh, PartitionSpec(*[None] * dim, "fsdp"))
        return NamedSharding(mesh, PartitionSpec())

    params = jax.tree.map(lambda x: jax.device_put(x, sharding(x)), tree)
    opt_state = jax.jit(tx.init, out_shardings=jax.tree.map(sharding, jax.eval_shape(tx.init, params)))(params)
    return (params, opt_state), _jitted(tx, (params, opt_state))


def gradient(x: jax.Array) -> jax.Array:
    """Something with the parameters' places that is no multiple of them."""
    return jnp.sin(3 * x) + 0.1 * x


def _step(tx: Any, state: Any) -> Any:
    params, opt_state = state
    updates, opt_state = tx.update(jax.tree.map(gradient, params), opt_state, params)
    return optax.apply_updates(params, updates), opt_state


def _jitted(tx: Any, state: Any) -> Any:
    shardings = jax.tree.map(lambda x: x.sharding, state)
    return jax.jit(partial(_step, tx), donate_argnums=0, out_shardings=shardings).lower(state).compile()


def paired(runs: dict[str, tuple[Any, Any]], rounds: int, beside: str) -> tuple[dict[str, float], dict[str, Any]]:
    """Times of some steps over that of one of them, medians over rounds; and the states after the last one."""
    states = {name: state for name, (state, _) in runs.items()}
    ratios: dict[str, list[float]] = {name: [] for name in runs}
    for i in range(rounds + 1):
        taken = {}
        for name in list(runs)[:: 1 if i % 2 else -1]:
            start = time.perf_counter()
            states[name] = jax.block_until_ready(runs[name][1](states[name]))
            taken[name] = time.perf_counter() - start
        for name in runs if i else ():
            ratios[name].append(taken[name] / taken[beside])
    return {name: round(statistics.median(found), 3) for name, found in ratios.items()}, states


def dimension_numbers(tree: Any) -> Any:
    """What optax's Muon takes: the matrices of the layers."""
    dims = optax.contrib.MuonDimensionNumbers()
    return {
        "embed": {"embedding": None},
        "layers": [jax.tree.map(lambda x: dims if np.ndim(x) == 2 else None, layer) for layer in tree["layers"]],
        "head": {"kernel": None},
    }


def muon(tree: Any, mesh: Mesh, rounds: int) -> dict[str, Any]:
    """Ours against optax's."""
    ours_tx = vs.optimizers.muon(**MUON)
    theirs_tx = optax.contrib.muon(**MUON, muon_weight_dimension_numbers=dimension_numbers(tree))
    runs = {"ours": ours(ours_tx, tree, mesh), "optax": theirs(theirs_tx, tree, mesh)}
    size = 4 * sum(x.size for layer in tree["layers"] for x in jax.tree.leaves(layer) if x.ndim == 2)
    ratios, states = paired(runs, rounds, "optax")
    model = vs.fully_shard(tree, mesh, abstract=True)
    found = {
        f"{unit}/{name}": x
        for unit, groups in states["ours"][0].items()
        for b in groups.values()
        for name, x in b.read()
    }
    for i, layer in enumerate(states["optax"][0]["layers"]):
        np.testing.assert_allclose(found[f"layers/{i}/up/kernel"], layer["up"]["kernel"], atol=2e-3)
    (sent, calls), (their_sent, their_calls) = (wire_bytes(run[1]) for run in runs.values())
    return {
        "time_over_optax": ratios["ours"],
        "bytes_over_optax": round(sent / their_sent, 4),
        "bytes_over_matrices": [round(sent / size, 3), round(their_sent / size, 3)],
        "collectives": [calls, their_calls],
        "work": str(vs.optimizers.muon_work(jax.eval_shape(ours_tx.init, model.params))).splitlines(),
    }


def ratios(tree: Any, mesh: Mesh, rounds: int, names: str) -> dict[str, Any]:
    """The optimizers with some names, over AdamW."""
    elements, tiles = Elements(256), Tile(32, 32)
    wanted: dict[str, tuple[Any, Any]] = {
        "adamw": (optax.adamw(1e-3), elements),
        "adamw_8bit": (vs.optimizers.adamw_8bit(1e-3), elements),
        "muon": (vs.optimizers.muon(**MUON), elements),
        "shampoo": (vs.optimizers.shampoo(1e-3, block_size=32), tiles),
        "soap": (vs.optimizers.soap(1e-3, block_size=32), tiles),
    }
    runs = {
        name: ours(tx, tree, mesh, blocks=blocks) for name, (tx, blocks) in wanted.items() if name in names.split(",")
    }
    found, _ = paired(runs, rounds, "adamw")
    return {
        name: {"time_over_adamw": found[name], "collective_bytes": wire_bytes(run[1])[0]} for name, run in runs.items()
    }


# Table 2.


def naive_plan(plan: GroupPlan) -> GroupPlan:
    """The same tensors one after the other, cut wherever the shards end."""
    slots, offset = [], 0
    for slot in plan.ordered_slots:
        slots.append(Slot(TensorSpec(slot.name, slot.shape), offset, slot.spec.size))
        offset += slot.spec.size
    size = -(-offset // plan.num_shards // 8) * 8
    return GroupPlan(plan.num_shards, 8, size, tuple(slots))


def without_planner(tx: Any, tree: Any, mesh: Mesh) -> tuple[Any, Any]:
    """8-bit Adam on shards that cut blocks: everything is moved to whole blocks, and the updates back."""
    planned = vs.fully_shard(tree, mesh, blocks=Elements(256))
    whole = jax.tree.map(lambda b: b.layout, planned.params, is_leaf=_is_buffer)
    naive = jax.tree.map(lambda x: Layout(naive_plan(x.plan), mesh, "fsdp"), whole, is_leaf=_is_layout)

    def move(tree: Any, layouts: Any) -> Any:
        return jax.tree.map(redistribute, tree, layouts, is_leaf=_is_buffer)

    def update(grads: Any, state: Any, params: Any) -> Any:
        updates, state = tx.update(move(grads, whole), state, move(params, whole))
        return move(updates, naive), state

    state = move(planned.params, naive), vs.train_state(planned, tx).opt_state
    return state, _jitted(optax.GradientTransformation(tx.init, update), state)


def without_view(tree: Any, mesh: Mesh) -> tuple[Any, Any]:
    """8-bit Adam written over global tensors cut into runs of 256, with the partitioner left to find what travels."""
    planned = vs.fully_shard(tree, mesh, blocks=Elements(256))
    signed, unsigned = Code("dynamic", True), Code("dynamic", False)

    def blocks(x: jax.Array) -> jax.Array:
        return jnp.pad(x.reshape(-1), (0, -x.size % 256)).reshape(-1, 256)

    def moments(buffer: DBuffer) -> Any:
        return {
            name: [(jnp.zeros(blocks(x).shape, jnp.uint8), jnp.zeros((len(blocks(x)), 1))) for _ in range(2)]
            for name, x in buffer.tensors().items()
        }

    def init(params: Any) -> Any:
        return jax.tree.map(moments, params, is_leaf=_is_buffer)

    def one(x: jax.Array, pair: Any) -> tuple[jax.Array, Any]:
        g, (m, r) = blocks(x), (code.decode(*each) for code, each in zip((signed, unsigned), pair, strict=True))
        m, r = 0.9 * m + 0.1 * g, jnp.sqrt(0.999 * r * r + 0.001 * g * g)
        scales = [jnp.abs(z).max(1, keepdims=True) for z in (m, r)]
        update = (-1e-3 * m / (r + 1e-8)).reshape(-1)[: x.size].reshape(x.shape)
        return update, [(signed.encode(m, scales[0]), scales[0]), (unsigned.encode(r, scales[1]), scales[1])]

    def update(grads: Any, state: Any, params: Any) -> Any:
        def group(buffer: DBuffer, moments: Any) -> Any:
            done = {name: one(x, moments[name]) for name, x in buffer.tensors().items()}
            packed = pack(buffer.layout.plan, {name: u for name, (u, _) in done.items()}, jnp.float32)
            return DBuffer(packed, buffer.layout), {name: pair for name, (_, pair) in done.items()}

        leaves, treedef = jax.tree.flatten(grads, is_leaf=_is_buffer)
        new = [group(b, m) for b, m in zip(leaves, treedef.flatten_up_to(state), strict=True)]
        return tuple(treedef.unflatten(list(part)) for part in zip(*new, strict=True))

    # Blocks lie evenly over the devices where they divide.
    rows = NamedSharding(mesh, PartitionSpec("fsdp"))
    whole = NamedSharding(mesh, PartitionSpec())
    shapes = jax.eval_shape(init, planned.params)
    shardings = jax.tree.map(lambda x: whole if x.shape[0] % DEVICES else rows, shapes)
    state = planned.params, jax.jit(init, out_shardings=shardings)(planned.params)
    return state, _jitted(optax.GradientTransformation(init, update), state)


def table_2(tree: Any, mesh: Mesh, rounds: int) -> dict[str, Any]:
    """8-bit Adam in full and without its parts."""
    tx = vs.optimizers.adamw_8bit(1e-3, weight_decay=0.0)
    runs = {
        "full": ours(tx, tree, mesh, blocks=Elements(256)),
        "without the planner": without_planner(tx, tree, mesh),
        "without the block view": without_view(tree, mesh),
    }
    found, _ = paired(runs, rounds, "full")
    return {
        name: {"time_over_full": found[name], "collective_bytes": wire_bytes(run[1])[0]} for name, run in runs.items()
    }


def _is_buffer(node: Any) -> bool:
    return isinstance(node, DBuffer)


def _is_layout(node: Any) -> bool:
    return isinstance(node, Layout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("width", 256), ("layers", 8), ("rounds", 9)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--only", default="muon,ratios,table_2", help="parts, with commas between")
    every = "adamw,adamw_8bit,muon,shampoo,soap"
    parser.add_argument("--optimizers", default=every, help="of the ratios, adamw among them")
    parser.add_argument("--json", action="store_true", help="print one line of JSON and nothing else")
    args = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", DEVICES)
    mesh = Mesh(np.array(jax.devices()[:DEVICES]), ("fsdp",))
    tree = parameters(args.width, args.layers)
    parts = {"muon": muon, "ratios": partial(ratios, names=args.optimizers), "table_2": table_2}
    result: dict[str, Any] = {name: parts[name](tree, mesh, args.rounds) for name in args.only.split(",")}
    result["jax"] = jax.__version__
    if args.json:
        print(json.dumps(result))
        return
    for name, part in result.items():
        print(name if isinstance(part, dict) else f"{name} {part}")
        for key, value in part.items() if isinstance(part, dict) else ():
            print(f"  {key:24} {value}")


if __name__ == "__main__":
    main()
