"""Steps of an optimizer that works on tiles: on any mesh, by tensor, to compare with other meshes and with NumPy."""

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

import vescale_jax as vs
from vescale_layouts import BlockArrays, DBuffer
from vescale_planner import Elements, Tile

# What is sharded: a matrix with edges and corners, experts, one without edges; and what is not in tiles: a scalar, a
# vector, one row, and a matrix below `MIN_SIZE`.
SHAPES = {"a": (38, 52), "e": (3, 24, 40), "m": (5, 9), "r": (1, 1200), "s": (), "t": (32, 48), "v": (33,)}
TILED = ("a", "e", "t")
TILE, MIN_SIZE = 16, 1000
BLOCKS = {"[aet]": Tile(TILE, TILE), "*": Elements(1)}

# Meshes, groupings and storage under which everything has to be the same.
CASES: dict[str, dict[str, Any]] = {
    "1": {"n": 1},
    "2, in chunks": {"n": 2, "chunk": 1500},
    "3, two units": {"n": 3, "units": ("a",)},
    "5": {"n": 5},
    "8, free storage": {"n": 8, "storage": "free"},
}


def numbers(seed: int, scale: float = 1.0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {name: (scale * rng.normal(size=shape)).astype(np.float32) for name, shape in SHAPES.items()}


# Ordinary gradients, then what breaks optimizers: nothing at all, next to nothing, and far too much.
ORDINARY = [numbers(1), numbers(2, 1e-3), numbers(3), numbers(4, 5.0)]
EXTREME = [
    *(numbers(5, 0), numbers(6, 1e-30), numbers(7, 1e-30), numbers(1), numbers(8, 0)),
    *(numbers(9, 1e-30), numbers(10, 1e30), numbers(11), numbers(12, 1e-30)),
]


def model_of(values: dict[str, np.ndarray], mesh: Mesh, **how: Any) -> vs.Sharded:
    return vs.fully_shard(values, mesh, **{"blocks": BLOCKS, **how})


def run(tx: Any, mesh: Mesh, grads: Sequence[dict[str, np.ndarray]], **how: Any) -> tuple[Any, list[dict[str, Any]]]:
    """The compiled update, and updates and state by tensor after each gradient."""
    model = model_of(numbers(0), mesh, **how)
    params, state = model.params, vs.train_state(model, tx).opt_state
    given = [model_of(g, mesh, **how).params for g in grads]
    compiled = jax.jit(tx.update).lower(given[0], state, params).compile()
    history = []
    for g in given:
        updates, state = compiled(g, state, params)
        history.append({f"update {name}": x for name, x in tensors(updates)} | dict(named(state)))
    return compiled, history


def tensors(buffers: Any) -> Iterator[tuple[str, np.ndarray]]:
    """The tensors of a tree of buffers, by their last names."""
    for buffer in jax.tree.leaves(buffers, is_leaf=lambda node: isinstance(node, DBuffer)):
        for name, x in buffer.read():
            yield name.rsplit("/", 1)[-1], x


def named(state: Any) -> Iterator[tuple[str, np.ndarray]]:
    """Everything that a state holds for a tensor: `"statistics/left a"`."""
    nodes = jax.tree_util.tree_leaves_with_path(state, is_leaf=lambda node: isinstance(node, DBuffer | BlockArrays))
    for path, node in nodes:
        where = "/".join(part for part in map(_name, path) if part not in ("moments", "a", "root", "float32"))
        if isinstance(node, DBuffer):
            yield from ((f"{where} {name}", x) for name, x in tensors(node))
        elif isinstance(node, BlockArrays):
            host = jax.tree.map(np.asarray, node)
            yield from ((f"{where} {name.rsplit('/', 1)[-1]}", x) for name, x in host.tensors().items())


def _name(key: Any) -> str:
    return str(getattr(key, "name", getattr(key, "key", key)))


def same(found: Sequence[dict[str, Any]], wanted: Sequence[dict[str, Any]]) -> None:
    """Raises unless two histories have the same bits, and finite numbers."""
    for step, (x, y) in enumerate(zip(found, wanted, strict=True)):
        assert x.keys() == y.keys()
        for name, value in y.items():
            np.testing.assert_array_equal(x[name], value, err_msg=f"{name} after step {step}")
            assert np.all(np.isfinite(value)), (name, step)


def close(found: Sequence[dict[str, Any]], wanted: Sequence[dict[str, np.ndarray]], tolerance: float) -> None:
    """Raises unless updates are those of a reference, relative to the largest of a tensor."""
    for step, (x, y) in enumerate(zip(found, wanted, strict=True)):
        for name, value in y.items():
            apart = np.abs(x[f"update {name}"] - value).max()
            assert apart <= tolerance * np.abs(value).max(), (name, step, apart / np.abs(value).max())


def tiles(x: np.ndarray) -> Iterator[tuple[int | slice, ...]]:
    """The index of each tile of a tensor's last two dims."""
    rows, cols = (range(0, dim, TILE) for dim in x.shape[-2:])
    for lead in np.ndindex(*x.shape[:-2]):
        yield from ((*lead, slice(i, i + TILE), slice(j, j + TILE)) for i in rows for j in cols)


def moved(state: Any, like: Any) -> Any:
    """A state for another mesh, tensor by tensor; `like` gives its layouts."""

    def one(old: Any, new: Any) -> Any:
        if isinstance(new, DBuffer):
            return DBuffer.from_tensors(new.layout, dict(old.read()), jnp.float32)
        if isinstance(new, BlockArrays):
            return BlockArrays.from_tensors(new.view, jax.tree.map(np.asarray, old).tensors(), jnp.float32)
        return jax.device_put(np.asarray(old), new.sharding)

    return jax.tree.map(one, state, like, is_leaf=lambda node: isinstance(node, DBuffer | BlockArrays))
