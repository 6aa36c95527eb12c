"""Records a small step as compiled text: python record.py cpu|h100 FILE; test_preflight_program.py has its counts."""

import re
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

import vescale_jax as vs
from vescale_jax.preflight import Rates, Workload, chip, devices, preflight

WIDTH, ROWS = 64, 8


def build():
    return {
        "layers": [{"w": jnp.zeros((WIDTH, WIDTH)), "g": jnp.zeros(WIDTH)} for _ in range(1)],
        "stack": {"w": jnp.zeros((7, WIDTH, WIDTH)), "g": jnp.zeros((7, WIDTH))},
    }


def one(layer, x):
    return x + jnp.tanh((x * layer["g"][None]) @ layer["w"])


def loss_fn(params, rows):
    x = rows
    for layer in params["layers"]:
        x = one(layer, x)
    x, _ = jax.lax.scan(lambda x, layer: (one(layer, x), None), x, params["stack"])
    return x.astype(jnp.float32).mean()


def workload(mesh):
    tx = optax.sgd(0.1)
    policy = vs.MixedPrecisionPolicy(gather_dtype=jnp.bfloat16, reduce_dtype=jnp.bfloat16)
    model = vs.fully_shard(build, mesh, stacks=("stack",), prefetch=1, policy=policy, abstract=True)
    batch = jax.ShapeDtypeStruct((ROWS * mesh.size, WIDTH), jnp.bfloat16)
    return Workload(vs.train_step(loss_fn, tx), vs.train_state(model, tx), batch)


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    kind = chip(sys.argv[1])
    mesh = Mesh(np.array(devices(kind, "1x1x8")), ("fsdp",))
    text = preflight(workload(mesh), Rates(kind, 8))[1]
    # Without the table of source lines, which names files of the machine, and without what no reader looks at.
    kept = [line for line in text.splitlines() if not line[:1].isdigit()]
    for useless in (r' ?(scheduling_name="[^"]*"|stack_frame_id=\d+)', r", sharding=\{[^}]*\}", r", metadata=\{\}"):
        kept = [re.sub(useless, "", line) for line in kept]
    Path(sys.argv[2]).write_text("\n".join(kept) + "\n")
