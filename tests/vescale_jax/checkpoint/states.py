"""States for the tests of checkpoints, and their contents by logical name, wherever they lie."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

import vescale_jax as vs
from vescale_jax.checkpoint._dtypes import without_keys
from vescale_jax.checkpoint._entries import Blocks, Parts, Tensors, entries
from vescale_layouts import DBuffer
from vescale_planner import Elements, Tile

# Runs, tiles that leave edges, a batch of matrices, and tensors that are smaller than any mesh.
SHAPES = {"a": (70, 100), "b": (5000,), "e": (3, 40, 48), "s": (), "t": (64, 96), "v": (33,)}
BLOCKS = {"[aet]": Tile(32, 32), "*": Elements(256)}


def numbers(seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in SHAPES.items()}


def contents(state: Any) -> dict[str, np.ndarray]:
    """Everything in a state by field and parameter; padding and absent blocks are left out."""
    found: dict[str, np.ndarray] = {}
    for entry in entries(state, "test"):
        if isinstance(entry, Tensors):
            read = dict(DBuffer(entry.array, entry.layout).read())
            found |= {f"{entry.field}/{entry.prefix}{name}": read[name] for name in entry.names}
        elif isinstance(entry, Blocks):
            whole, stack = np.asarray(entry.array), len(entry.layout.stack)
            for name in entry.names:
                where = entry.view.index.order(name)[1]
                found[f"{entry.field}/{entry.prefix}{name}"] = whole[*[slice(None)] * stack, where]
        elif isinstance(entry, Parts):
            end, whole = 0, np.asarray(entry.array)
            for path, shape in entry.members:
                size = int(np.prod(shape))
                found[f"{entry.field}/{path}"] = whole[end : end + size].reshape(shape)
                end += size
        else:
            found[entry.path] = np.asarray(without_keys(entry.array))
    return found


def assert_same(found: Any, wanted: Any) -> None:
    """Every bit of two states is the same."""
    a, b = (x if isinstance(x, dict) else contents(x) for x in (found, wanted))
    assert a.keys() == b.keys()
    for name in b:
        assert (a[name].dtype, a[name].shape) == (b[name].dtype, b[name].shape), name
        assert a[name].tobytes() == b[name].tobytes(), name


def filled(state: Any, seed: int = 0) -> Any:
    """The same state with random bits in every array; what belongs to nothing stays zero."""
    rng = np.random.default_rng(seed)

    def one(leaf: Any) -> Any:
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return leaf
        old = np.asarray(leaf)
        drawn = rng.integers(1, 100, old.shape)
        return jax.device_put(drawn.astype(old.dtype), leaf.sharding)

    return jax.tree.map(one, state)


def make(mesh: Mesh, model: Any = None, tx: Any = None, *, abstract: bool = False, **how: Any) -> vs.TrainState:
    """A training state over the tree of `numbers`, or of a model; `tx` may be a function of the sharded model."""
    model = vs.fully_shard(numbers(0) if model is None else model, mesh, abstract=abstract, **how)
    tx = optax.adamw(1e-2) if tx is None else tx
    return vs.train_state(model, tx if isinstance(tx, optax.GradientTransformation) else tx(model))
