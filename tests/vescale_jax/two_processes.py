"""A job for `test_hosts.py`: trains small models on the rows of this process, and writes what came of it to OUT.

`trained` is called by the test as well, on one process.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

import vescale_jax as vs
from tests.vescale_jax import models
from vescale_planner import Elements


def own(model: vs.Sharded, batch: Any) -> Any:
    """The rows of this process."""
    return jax.tree.map(lambda x: x[vs.own_rows(model, len(x))], batch)


def trained(mesh: Mesh) -> Iterator[tuple[str, np.ndarray]]:
    """Losses, gradient norms, parameters and evaluations of two models, by name."""
    optimizers = {"net": optax.adamw(1e-2), "tree": vs.optimizers.adamw_8bit(1e-2, min_size=16, block_size=16)}
    for name, build, loss_fn in [
        ("net", models.net, models.mean_loss),  # a function: computed shard by shard
        ("tree", models.tree(), models.tree_loss),  # arrays: cut shard by shard
    ]:
        model = vs.fully_shard(build, mesh, blocks=Elements(16))
        yield f"{name}/description", np.array(str(vs.describe(model)).splitlines())
        step = vs.train_step(loss_fn, optimizers[name], max_norm=1.0)
        state = vs.train_state(model, optimizers[name])
        for i, batch in enumerate(models.batches(3)):
            state, metrics = step(state, own(model, batch))
            yield f"{name}/metrics/{i}", np.array([metrics.loss, metrics.grad_norm])
        if name == "tree":
            whole = jax.tree.map(jnp.asarray, models.batches(1)[0])
            yield f"{name}/mean", np.asarray(vs.apply(loss_fn, mean=True)(state.model, own(model, whole)))
            yield f"{name}/whole", np.asarray(vs.apply(loss_fn, mean=True, replicate_batch=True)(state.model, whole))
        for path, tensor in state.model.tensors():
            yield f"{name}/{path}", tensor
        for path, leaf in jax.tree.leaves_with_path(vs.unshard(state.model)):
            yield f"{name}/unsharded{jax.tree_util.keystr(path)}", np.asarray(leaf)


def main() -> None:
    hosts = vs.join_hosts()
    found: dict[str, Any] = dict(trained(Mesh(np.array(jax.devices()), ("fsdp",))))
    np.savez(Path(os.environ["OUT"]) / f"{hosts.process}.npz", **found)


if __name__ == "__main__":
    main()
