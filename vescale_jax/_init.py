"""Initialisation: buffers filled unit by unit, never a whole model on one device, the same values on every mesh.

Comes in: the traced computation that builds the whole model, and the units. Goes out: the sharded buffers.

The computation is traced once. What is tiny in it (random keys, counters) is computed at once; of the rest, each group
takes the equations its own tensors need. Every device computes the group's tensors whole and keeps its own shard: the
program is the same on every mesh, and so are the bits, whatever the random number generator. Memory peaks at one group.
Identical layers differ only in their keys, which are inputs of the program: they are compiled once. A stack of layers
goes parameter by parameter, all layers of one at a time, since they are computed together; a list of layers that is
kept as a stack goes layer by layer.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, DropVar, Jaxpr, JaxprEqn, Literal, Var
from jax.sharding import PartitionSpec

from vescale_layouts import DBuffer, Layout, pack, store

from ._groups import Group
from ._signature import signature

# Elements up to which an intermediate value counts as tiny: keys, counters, scales.
_TINY = 64


@dataclass(frozen=True)
class Recipe:
    """The traced computation of a whole model, cut where values are tiny.

    Attributes:

    - `jaxpr`: the whole of it; its outputs are the model's leaves, parameters first.
    - `known`: values of the tiny variables.
    - `producers`: for every other variable, the index of the equation that makes it.
    """

    jaxpr: Jaxpr
    known: dict[Var, Any]
    producers: dict[Var, int]

    @classmethod
    def from_jaxpr(cls, closed: ClosedJaxpr) -> "Recipe":
        """Computes what is tiny and notes who makes the rest."""
        jaxpr = closed.jaxpr
        known: dict[Var, Any] = dict(zip(jaxpr.constvars, closed.consts, strict=True))
        producers: dict[Var, int] = {}
        for i, eqn in enumerate(jaxpr.eqns):
            tiny = all(math.prod(getattr(v.aval, "shape", ())) <= _TINY for v in eqn.outvars)
            if tiny and all(isinstance(v, Literal) or v in known for v in eqn.invars):
                outputs = [v for v in eqn.outvars if not isinstance(v, DropVar)]
                piece = Slice.of(jaxpr, known, [eqn], outputs)
                known.update(zip(outputs, piece(*piece.values), strict=True))
            else:
                producers.update((v, i) for v in eqn.outvars)
        return cls(jaxpr, known, producers)

    def slice(self, outputs: Sequence[int]) -> "Slice":
        """The part of the computation that some of the outputs need."""
        chosen = [self.jaxpr.outvars[i] for i in outputs]
        needed: set[int] = set()
        wanted = list(chosen)
        while wanted:
            v = wanted.pop()
            if isinstance(v, Var) and v not in self.known and self.producers[v] not in needed:
                needed.add(self.producers[v])
                wanted.extend(self.jaxpr.eqns[self.producers[v]].invars)
        return Slice.of(self.jaxpr, self.known, [self.jaxpr.eqns[i] for i in sorted(needed)], chosen)


@dataclass(frozen=True)
class Slice:
    """Some outputs of a recipe as a function of tiny inputs.

    Attributes:

    - `jaxpr`: the equations needed.
    - `values`: the inputs.
    """

    jaxpr: Jaxpr
    values: list[Any]

    @classmethod
    def of(cls, whole: Jaxpr, known: dict[Var, Any], eqns: list[JaxprEqn], outputs: Sequence[Var | Literal]) -> "Slice":
        """Cuts some equations out of a computation; what is known becomes an input."""
        atoms = [v for eqn in eqns for v in eqn.invars] + list(outputs)
        inputs = list(dict.fromkeys(v for v in atoms if isinstance(v, Var) and v in known))
        jaxpr = whole.replace(constvars=[], invars=inputs, eqns=eqns, outvars=list(outputs))
        return cls(jaxpr, [known[v] for v in inputs])

    def __call__(self, *values: Any) -> list[Any]:
        """Evaluates the outputs."""
        outputs = jax.core.eval_jaxpr(self.jaxpr, (), *values)
        # A constant output is a Python or NumPy scalar.
        return [
            jnp.asarray(value, getattr(v.aval, "dtype", None)) if isinstance(v, Literal) else value
            for value, v in zip(outputs, self.jaxpr.outvars, strict=True)
        ]

    @property
    def signature(self) -> Any:
        """Equal for two slices that compute the same function of their inputs."""
        return signature(self.jaxpr)


def fill(recipe: Recipe, groups: Sequence[Group], index: Mapping[str, int | tuple[int, ...]]) -> list[DBuffer]:
    """Makes the buffers of groups, one after the other.

    Arguments:

    - `recipe`: the computation of the whole model.
    - `groups`: which ones.
    - `index`: of every parameter's output in the recipe, by path; of a stack that the model has as a list, one index a
      layer.

    Returns: one buffer a group.
    """
    compiled: dict[Any, Callable[..., Any]] = {}

    def run(program: Callable[..., Any], group: Group, piece: Slice, slot: str, *arguments: Any) -> jax.Array:
        key = (group.layout, group.dtype, slot, piece.signature)
        if key not in compiled:
            compiled[key] = program()
        # One at a time: the next one's temporaries must not pile up behind this one's.
        return jax.block_until_ready(compiled[key](*arguments, *piece.values))

    buffers: list[DBuffer] = []
    for group in groups:
        outputs: list[Any] = [index[path] for path in group.paths]
        if not group.layout.stack:
            piece = recipe.slice(outputs)
            data = run(functools.partial(_program, group, piece), group, piece, "")
            buffers.append(DBuffer(data, group.layout))
            continue
        data = DBuffer.zeros(group.layout, group.dtype).data
        if all(isinstance(output, tuple) for output in outputs):
            for place, layer in enumerate(zip(*outputs, strict=True)):
                piece = recipe.slice(layer)
                data = run(functools.partial(_layer_program, group, piece), group, piece, "", data, np.int32(place))
        else:
            for slot, output in zip(group.layout.plan.slots, outputs, strict=True):
                piece = recipe.slice([output])
                data = run(functools.partial(_stack_program, group, piece, slot), group, piece, slot, data)
        buffers.append(DBuffer(data, group.layout))
    return buffers


def _program(group: Group, piece: Slice) -> Callable[..., Any]:
    """Makes the buffer of a group."""
    return _jitted(group.layout, functools.partial(_own_shard, group, piece), len(piece.values))


def _layer_program(group: Group, piece: Slice) -> Callable[..., Any]:
    """Writes one layer of a stack into a buffer that is donated."""

    def local(shard: jax.Array, place: jax.Array, *values: Any) -> jax.Array:
        return lax.dynamic_update_index_in_dim(shard, _own_shard(group, piece, *values), place, 0)

    return _jitted(group.layout, local, 1 + len(piece.values), donate=True)


def _own_shard(group: Group, piece: Slice, *values: Any) -> jax.Array:
    """Computes the tensors of a group, or of one layer, and keeps this device's shard `(S,)`."""
    layout = group.layout
    # Behind the barrier lies what depends on the mesh: fused with it, values can differ in the last bit.
    tensors = lax.optimization_barrier(piece(*values))
    buffer = pack(layout.plan, dict(zip(layout.plan.slots, tensors, strict=True)), group.dtype)
    start = lax.axis_index(layout.axis) * layout.shard_size
    return lax.dynamic_slice_in_dim(buffer, start, layout.shard_size)


def _jitted(layout: Layout, local: Callable[..., Any], number: int, *, donate: bool = False) -> Callable[..., Any]:
    """Runs a function on every device, on its shard if that is donated and on so many values that all devices get."""
    whole = (PartitionSpec(),) * number
    mapped = jax.shard_map(
        local,
        mesh=layout.mesh,
        in_specs=(layout.spec, *whole) if donate else whole,
        out_specs=layout.spec,
        axis_names={layout.axis},
        check_vma=False,
    )
    return jax.jit(mapped, out_shardings=layout.sharding, donate_argnums=(0,) if donate else ())


def _stack_program(group: Group, piece: Slice, name: str) -> Callable[..., Any]:
    """Writes one parameter of a stack, all layers of it, into a buffer that is donated."""
    layout, slot = group.layout, group.layout.plan.slots[name]

    def local(shard: jax.Array, *values: Any) -> jax.Array:
        (tensor,) = lax.optimization_barrier(piece(*values))
        flat = jax.vmap(functools.partial(store, slot))(tensor.astype(group.dtype))
        at = jnp.arange(layout.shard_size) + lax.axis_index(layout.axis) * layout.shard_size - slot.offset
        if not slot.size:
            return shard
        return jnp.where((at >= 0) & (at < slot.size), flat.at[:, at].get(mode="clip"), shard)

    return _jitted(layout, local, len(piece.values), donate=True)
