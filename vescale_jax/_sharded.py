"""Sharded: a model whose parameters are shards of flat buffers.

It is a pytree. Its leaves are the buffers, one a group, and the leaves of the rest; the recipe that makes a model of
them again is static. So it goes through `jax.jit`, donation and checkpoints as it is, and a thousand parameters cost a
dispatch no more than their groups do.
"""

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from vescale_layouts import BlockArrays, DBuffer

from ._form import Form
from ._groups import Unit, each_group
from ._policy import MixedPrecisionPolicy

Buffers = dict[str, dict[str, DBuffer]]
"""Buffers by unit and group name."""


@dataclass(frozen=True, eq=False)
class Structure:
    """What of a sharded model is static.

    Attributes:

    - `form`: how a model is made of parameters and rest.
    - `units`: the units with their groups and layouts.
    - `mesh`, `axis`: over which devices the buffers are cut.
    - `policy`: the dtypes.
    """

    form: Form
    units: tuple[Unit, ...]
    mesh: Mesh
    axis: str
    policy: MixedPrecisionPolicy

    @functools.cached_property
    def _hash(self) -> int:
        return hash((self.units, self.mesh, self.axis, self.policy))

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        # Compared at every dispatch of a jitted step, nearly always with itself.
        if self is other:
            return True
        if not isinstance(other, Structure):
            return NotImplemented
        mine = (self._hash, self.axis, self.policy, self.mesh, self.units, self.form)
        return mine == (other._hash, other.axis, other.policy, other.mesh, other.units, other.form)

    @property
    def num_shards(self) -> int:
        """N, the devices of the axis."""
        return self.mesh.shape[self.axis]

    @property
    def replicated(self) -> NamedSharding:
        """The sharding of everything that every device holds whole."""
        return NamedSharding(self.mesh, PartitionSpec())

    def __repr__(self) -> str:
        return f"Structure({len(self.units)} units over {self.num_shards} devices of axis {self.axis!r})"


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["params", "frozen", "rest"], meta_fields=["structure"]
)
@dataclass(frozen=True)
class Sharded:
    """A model that lies in flat buffers, cut evenly over the devices of one mesh axis.

    Made by `fully_shard`; taken by `value_and_grad`, `train_step`, `apply`, `unshard` and `describe`.

    Attributes:

    - `params`: the trainable buffers by unit and group: what an optimizer is given.
    - `frozen`: the buffers without gradients, likewise.
    - `rest`: leaves that are no parameters, whole on every device.
    - `structure`: static: units, layouts, mesh, dtypes, and how to put the model together.
    """

    params: Buffers
    frozen: Buffers
    rest: tuple[Any, ...]
    structure: Structure

    def tensors(self) -> Iterator[tuple[str, np.ndarray]]:
        """The logical parameters on the host, one buffer at a time, by path."""
        for unit, group in each_group(self.structure.units):
            buffers = self.params if group.trainable else self.frozen
            for name, tensor in buffers[unit.name][group.name].read():
                yield group.prefix + name, tensor


def is_buffer(node: Any) -> bool:
    """Whether a node of a tree is a group's buffer."""
    return isinstance(node, DBuffer)


def check_sharded(model: Any, what: str) -> Structure:
    """The structure of a sharded model.

    Raises: `TypeError` if it is none.
    """
    if not isinstance(model, Sharded):
        raise TypeError(f"{what}: got a model of type {type(model).__name__}; want what fully_shard returned; shard it")
    return model.structure


def check_alive(tree: Any, what: str) -> None:
    """Raises `RuntimeError` if a step has taken the memory of some arrays."""
    for leaf in jax.tree.leaves(tree):
        if isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer) and leaf.is_deleted():
            raise RuntimeError(
                f"{what}: got a state that was donated to an earlier step; want the state which that step returned, or "
                "its model; write state, metrics = step(state, batch), or pass donate=False to train_step"
            )


def copied(leaf: Any, device: Any = None) -> jax.Array:
    """A copy of an array or of random keys, on a device or with a sharding; it shares no memory with the original."""
    if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        data = jnp.asarray(np.array(jax.random.key_data(leaf)), device=device)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(leaf))
    return jnp.asarray(np.array(leaf), device=device)


def is_abstract(tree: Any) -> bool:
    """Whether a tree holds shapes without values."""
    return any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(tree))


def unshard(model: Sharded) -> Any:
    """The model in the form the user gave it, with whole parameters on the host's default device.

    Arguments:

    - `model`: what `fully_shard` returned, trained or not.

    Returns: an `nnx.Module`, the variables of a linen module (unboxed), or the pytree, in the stored dtypes.

    Raises: `TypeError` for what is no sharded model, `ValueError` for an abstract one.
    """
    structure = check_sharded(model, "unshard")
    if is_abstract(model):
        raise ValueError("unshard: got an abstract model; want one with values; call fully_shard without abstract=True")
    check_alive(model, "unshard")
    params = {path: jnp.asarray(tensor) for path, tensor in model.tensors()}
    rest = tuple(copied(leaf) for leaf in model.rest)
    return structure.form.whole(params, rest)


def shardings(tree: Any, replicated: NamedSharding) -> Any:
    """The sharding of every leaf of a training state.

    Arguments:

    - `tree`: any pytree with `DBuffer`s in it, such as an optimizer's state; leaves need shapes only.
    - `replicated`: for leaves that are neither in a buffer nor beside the blocks of a view.

    Returns: the same tree with shardings for leaves. A buffer whose array is no longer of the buffer's size (the
    placeholders of factored optimizers) is replicated.
    """

    def one(node: Any) -> Any:
        if isinstance(node, BlockArrays):
            return node.shardings(replicated)
        if not isinstance(node, DBuffer):
            return replicated
        even = getattr(node.data, "shape", None) == node.layout.buffer_shape
        return DBuffer(node.layout.sharding if even else replicated, node.layout)

    return jax.tree.map(one, tree, is_leaf=lambda node: isinstance(node, DBuffer | BlockArrays))
