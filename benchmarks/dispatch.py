"""What it costs to call a jitted function with a training state, by the number of parameters.

    python benchmarks/dispatch.py [--json] [--few 16] [--many 1600] [--rounds 200]

The function does nothing with the state, so that the time is that of handing it over: flattening the tree, comparing
its static part with what was compiled, and passing arrays on. Two models have the same units and bytes, and few or many
parameters; `ours` is the median time of the second over the first, `theirs` the same for states of one array a
parameter, and `ratio_at_many` ours over theirs at many parameters. Calls alternate in one process; times mean nothing.
"""

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import vescale_jax as vs

UNITS = 4
ELEMENTS = 2**20
TX = optax.adamw(1e-3)


def params(count: int) -> Any:
    """Four layers of `count` parameters in all."""
    each = count // UNITS
    size = ELEMENTS // count // 8 * 8
    return {"layers": [{f"w{i}": jnp.ones(size) for i in range(each)} for _ in range(UNITS)]}


def ours(count: int, mesh: Mesh) -> Any:
    """The state of a model sharded by this library."""
    return vs.train_state(vs.fully_shard(params(count), mesh), TX)


def theirs(count: int, mesh: Mesh) -> Any:
    """Parameters and optimizer state, one array a parameter, cut over the devices."""
    state = jax.device_put(params(count), NamedSharding(mesh, PartitionSpec("fsdp")))
    return state, TX.init(state)


def call(state: Any) -> Callable[[], Any]:
    """Hands a state to a compiled function."""
    jitted = jax.jit(lambda state, x: x + 1)
    x = jnp.zeros(())
    jax.block_until_ready(jitted(state, x))
    return lambda: jax.block_until_ready(jitted(state, x))


def seconds(run: Callable[[], Any]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("few", 16), ("many", 1600), ("rounds", 200)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--json", action="store_true", help="print one line of JSON and nothing else")
    args = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", 8)
    mesh = Mesh(np.array(jax.devices()[:8]), ("fsdp",))
    runs = {(make.__name__, n): call(make(n, mesh)) for make in (ours, theirs) for n in (args.few, args.many)}
    times: dict[Any, list[float]] = {key: [] for key in runs}
    for _ in range(args.rounds):
        for key, run in runs.items():
            times[key].append(seconds(run))
    median = {key: statistics.median(values) for key, values in times.items()}
    result = {
        "ours": round(median["ours", args.many] / median["ours", args.few], 2),
        "theirs": round(median["theirs", args.many] / median["theirs", args.few], 2),
        "ratio_at_many": round(median["ours", args.many] / median["theirs", args.many], 3),
        "jax": jax.__version__,
    }
    print(json.dumps(result) if args.json else "\n".join(f"{key:14} {value}" for key, value in result.items()))


if __name__ == "__main__":
    main()
