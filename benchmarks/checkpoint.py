"""Checkpoints of this library beside orbax's on the same arrays, memory while restoring, and the pause of a save.

    python benchmarks/checkpoint.py [--json] [--layers 8] [--width 2048] [--rounds 9] [--folder /tmp] [--only PART]

A bare tree of square matrices, sharded over 8 virtual CPU devices, with AdamW's moments: by default 403 MB. All on one
machine and in one process; folders are under `--folder`, whose disk is part of what is measured.

- `throughput`: `save` and `restore` of this library and of `orbax.checkpoint.PyTreeCheckpointer`, with orbax's own
  settings, given exactly the same arrays (the flat buffers). Both force their files to the disk. They alternate, and
  ratios are medians of paired ratios, orbax's seconds over ours: above 1, ours is faster.
- `memory`: in a process of its own, a checkpoint of 8 devices is restored on 5, once with all tensors row-major and
  once out of tiles into row-major. On CPU devices the restored state lies in host memory itself; what the peak of the
  resident memory has beyond that is given in units of the largest unit.
- `pause`: seconds that `Checkpointer.save` takes until training may go on, over those of `save(wait=True)`; medians of
  alternating saves.
"""

import argparse
import dataclasses
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import numpy as np
import optax
from jax.sharding import Mesh

import vescale_jax as vs
from vescale_planner import Tile

DEVICES = 8


def mesh(devices: int) -> Mesh:
    return Mesh(np.array(jax.devices()[:devices]), ("fsdp",))


def make_state(args: Any, devices: int, *, abstract: bool = False, **how: Any) -> vs.TrainState:
    """The sharded state; with values, these are not zero."""

    def build() -> Any:
        keys = jax.random.split(jax.random.key(0), args.layers)
        return {"layers": [{"w": jax.random.normal(key, (args.width, args.width))} for key in keys]}

    state = vs.train_state(vs.fully_shard(build, mesh(devices), abstract=abstract, **how), optax.adamw(1e-3))
    if abstract:
        return state
    noise = jax.jit(lambda tree: jax.tree.map(lambda x: x + 0.5 if x.ndim else x, tree), donate_argnums=0)
    return dataclasses.replace(state, opt_state=noise(state.opt_state))


def seconds(run: Callable[[], Any]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def throughput(args: Any, folder: Path) -> dict[str, Any]:
    import orbax.checkpoint as ocp

    state = make_state(args, DEVICES)
    target = make_state(args, DEVICES, abstract=True)
    arrays = {f"{i:04d}": leaf for i, leaf in enumerate(jax.tree.leaves(state))}
    size = sum(leaf.nbytes for leaf in arrays.values())
    theirs = ocp.PyTreeCheckpointer()
    how = jax.tree.map(lambda x: ocp.ArrayRestoreArgs(sharding=x.sharding), arrays)

    def save_theirs() -> None:
        theirs.save(folder / "theirs", arrays)

    def restore_theirs() -> None:
        jax.block_until_ready(theirs.restore(folder / "theirs", restore_args=how))

    def restore_ours() -> None:
        jax.block_until_ready(vs.checkpoint.restore(folder / "ours", target).state)

    runs = {
        "save": (lambda: vs.checkpoint.save(folder / "ours", state), save_theirs),
        "restore": (restore_ours, restore_theirs),
    }
    taken: dict[str, list[tuple[float, float]]] = {"save": [], "restore": []}
    for i in range(args.rounds + 1):
        for name, pair in runs.items():
            if name == "save":
                for path in (folder / "ours", folder / "theirs"):
                    shutil.rmtree(path, ignore_errors=True)
                os.sync()
            both = [0.0, 0.0]
            for j in (0, 1) if i % 2 else (1, 0):
                both[j] = seconds(pair[j])
            if i:  # The first round warms up.
                taken[name].append((both[0], both[1]))
    found: dict[str, Any] = {"megabytes": round(size / 1e6)}
    for name, pairs in taken.items():
        ratios = [theirs / ours for ours, theirs in pairs]
        found[f"{name}_throughput_ratio"] = round(statistics.median(ratios), 2)
        found[f"{name}_ratio_quartiles"] = [round(q, 2) for q in statistics.quantiles(ratios, n=4)[::2]]
        for who, times in zip(("ours", "orbax"), zip(*pairs, strict=True), strict=True):
            found[f"{name}_gigabytes_a_second_{who}"] = round(size / 1e9 / statistics.median(times), 2)
    return found


def memory(args: Any, folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, blocks in (("row_major", None), ("reordered", Tile(48, 48))):
        how = {} if blocks is None else {"blocks": {"*": blocks}, "storage": "free"}
        vs.checkpoint.save(folder / name, make_state(args, DEVICES, **how))
        command = [sys.executable, __file__, "--peak", str(folder / name)]
        command += ["--layers", str(args.layers), "--width", str(args.width)]
        out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        found[f"extra_memory_in_units_{name}"] = json.loads(out)
    return found


def peak(args: Any) -> float:
    """Resident memory at its highest while restoring on 5 devices, beyond the restored state; in largest units."""
    small = argparse.Namespace(layers=1, width=64)
    with tempfile.TemporaryDirectory() as warm:
        vs.checkpoint.save(Path(warm) / "a", make_state(small, 5))
        vs.checkpoint.restore(Path(warm) / "a", make_state(small, 5, abstract=True))
    target = make_state(args, 5, abstract=True)
    Path("/proc/self/clear_refs").write_text("5")  # Forgets the highest mark.
    before = status("VmRSS")
    state = vs.checkpoint.restore(args.peak, target).state
    state = jax.block_until_ready(state)
    held = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    return round((status("VmHWM") - before - held) / (4 * args.width**2), 2)


def status(name: str) -> int:
    """Bytes of one line of the kernel's account of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def pause(args: Any, folder: Path) -> dict[str, Any]:
    state = make_state(args, DEVICES)
    times: dict[bool, list[float]] = {True: [], False: []}
    with vs.checkpoint.Checkpointer(folder / "run", keep=1) as checkpointer:
        for i in range(args.rounds + 1):
            for wait in (False, True):
                taken = seconds(lambda wait=wait: checkpointer.save(state, wait=wait))
                checkpointer.wait()
                if i:
                    times[wait].append(taken)
    asynchronous, synchronous = statistics.median(times[False]), statistics.median(times[True])
    return {
        "pause_ratio": round(asynchronous / synchronous, 3),
        "pause_seconds": round(asynchronous, 4),
        "synchronous_seconds": round(synchronous, 4),
    }


PARTS: dict[str, Callable[[Any, Path], dict[str, Any]]] = {
    "throughput": throughput,
    "memory": memory,
    "pause": pause,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("layers", 8), ("width", 2048), ("rounds", 9)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument(
        "--folder", type=Path, help="where checkpoints are written; the system's temporary one if not given"
    )
    parser.add_argument("--only", choices=PARTS, help="one part")
    parser.add_argument("--json", action="store_true", help="print one line of JSON and nothing else")
    parser.add_argument("--peak", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", DEVICES)
    if args.peak:
        print(peak(args))
        return
    result: dict[str, Any] = {}
    for name, part in PARTS.items():
        if args.only in (None, name):
            with tempfile.TemporaryDirectory(dir=args.folder) as folder:
                result |= part(args, Path(folder))
    result["jax"] = jax.__version__
    if args.json:
        print(json.dumps(result))
        return
    for key, value in result.items():
        print(f"{key:40} {value}")


if __name__ == "__main__":
    main()
