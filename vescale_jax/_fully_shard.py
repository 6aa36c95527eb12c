"""fully_shard: from a Flax model to flat buffers.

Comes in: a module or a pytree, or a function that builds one, and a mesh. Goes out: a `Sharded` model. On the way, in
the order of the files: the model is taken apart (`_forms`), its parameters are sorted into units (`_units`) and groups
(`_groups`), every group is planned and bound to the mesh, and the buffers are filled (`_init`, or from given arrays).
All mistakes of the arguments are found before anything is made, and reported together.
"""

import os
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen
from jax.sharding import Mesh

from vescale_layouts import DBuffer
from vescale_planner import Block, Elements, Faults

from ._form import Parts
from ._forms import builder, check_model, split_model
from ._groups import Storage, Treatment, Unit, each_group, gathered_dtype, make_groups, stored_dtype
from ._init import Recipe, fill
from ._policy import MixedPrecisionPolicy
from ._rolled_form import RolledForm, roll
from ._rules import Rule, resolve
from ._sharded import Buffers, Sharded, Structure, copied
from ._units import UnitRule, assign, in_order, stacked


def fully_shard(
    model: Any,
    mesh: Mesh,
    *,
    params: Any = None,
    axis: str | None = None,
    units: UnitRule = None,
    stacks: Sequence[str] = (),
    rolled: Sequence[str] = (),
    prefetch: int | None = None,
    max_unit_bytes: int | None = 2**30,
    blocks: Rule[Block] = Elements(1),
    storage: Storage = "row_major",
    trainable: Rule[bool] = True,
    policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),
    reshard_after_forward: Rule[bool] = True,
    rngs: Mapping[str, jax.Array] | None = None,
    abstract: bool = False,
) -> Sharded:
    """Shards a model's parameters over one axis of a mesh, in blocks that stay whole.

    The model's code is not changed: inside the loss it is the same module with whole parameters. If a function is
    given, it is traced once, and parameters are computed unit by unit and kept in shards; the whole model never
    exists. The values are the same on every mesh.

    Arguments:

    - `model`: an `nnx.Module`; a `linen.Module`; a pytree of arrays for a pure function; or a function without
      arguments that builds a module or a pytree.
    - `mesh`: the devices.
    - `params`: for a linen module, its variables (boxed or not), or a function that returns them, such as
      `lambda: module.init(key, x)`.
    - `axis`: the mesh axis over which parameters are cut. None: the only axis, or else the one called `fsdp`.
    - `units`: which parameters are gathered together. None: every layer of a list of layers, and the rest as `root`.
      Patterns such as `("encoder/layers/*", "embed")`, or a function from path to unit name, choose otherwise.
    - `stacks`: patterns such as `("layers",)` for what the model scans over (`nnx.scan`, linen's `nn.scan`,
      `jax.lax.scan`): parameters below such a path have layers on dim 0. Each layer is gathered by itself, inside the
      scan. Blocks are those of one layer.
    - `rolled`: patterns such as `("layers",)` for lists of equal layers, `layers/0/...`, that are to be kept and run as
      a stack: parameters then are called `layers/...`. The model keeps its list; what it computes with equal layers one
      after the other becomes a loop.
    - `prefetch`: of a stack, how many layers are gathered ahead of the one that computes, 0 or 1. None: 1, but 0 on
      CPU devices, where nothing runs beside the computation.
    - `max_unit_bytes`: cap on the gathered bytes of a unit; without `units`, larger ones are split, and big tables get
      their own. None: no cap. A layer of a stack may be of any size.
    - `blocks`: the piece of each parameter that is never cut, such as `Rows(32)`: one for all, by path pattern, or a
      function of path and `jax.ShapeDtypeStruct`.
    - `storage`: `"free"` lets the planner store parameters with `Tile` blocks transposed or tile by tile, and a unit in
      two buffers, where that saves padding; the model sees no difference.
    - `trainable`: which parameters have gradients and optimizer state, by path. With patterns, the first that matches
      counts, here and elsewhere, and what none matches is trained: `{"head/*": True, "*": False}` trains the head.
    - `policy`: the dtypes.
    - `reshard_after_forward`: whether the backward pass gathers again instead of keeping the whole parameters, by unit
      name. True takes least memory, False one gather less.
    - `rngs`: random keys by stream, for linen modules that draw numbers.
    - `abstract`: whether to return shapes, dtypes and shardings only, and make no array.

    Returns: the sharded model.

    Raises: `ValueError` or `TypeError` that names every parameter, unit or pattern at fault, with what was given, what
    is wanted and what to change.
    """
    axis = _axis(mesh, axis)
    _warn_of_lone_processes(mesh)
    _check_arguments(model, params, policy, max_unit_bytes)
    streams = {} if rngs is None else rngs
    build = builder(model, params, streams)
    traced = _trace(build, mesh) if build else None
    parts, form = (traced[0], traced[1]) if traced else split_model(model, params, streams)
    outputs = list(parts.params)
    parts, form, lists = roll(parts, form, rolled, Faults("fully_shard"))
    if isinstance(stacks, Sequence) and not isinstance(stacks, str):
        stacks = (*stacks, *lists)
    asked = _Asked(units, stacks, prefetch, max_unit_bytes, blocks, storage, trainable, reshard_after_forward)
    planned = _plan_units(parts, asked, mesh, axis, policy)
    structure = Structure(form=form, units=planned, mesh=mesh, axis=axis, policy=policy)
    if abstract:
        return _abstract(structure, parts)
    if not traced:
        _check_values(parts)
    return _build(structure, parts, traced[2], outputs) if traced else _load(structure, parts)


def _axis(mesh: Mesh, axis: str | None) -> str:
    if not isinstance(mesh, Mesh):
        raise TypeError(f"fully_shard: mesh: got {type(mesh).__name__}; want a jax.sharding.Mesh; use jax.make_mesh")
    names = list(mesh.axis_names)
    if axis is None and len(names) > 1 and "fsdp" not in names:
        raise ValueError(
            f"fully_shard: axis: got none for a mesh with the axes {names}; want one of them; pass axis=..."
        )
    if axis is None:
        axis = names[0] if len(names) == 1 else "fsdp"
    if axis not in names:
        raise ValueError(f"fully_shard: axis: got {axis!r}; want one of the mesh's axes {names}; pass axis=...")
    return str(axis)


def _warn_of_lone_processes(mesh: Mesh) -> None:
    """Says so when this process was started as one of several and trains alone."""
    started = os.environ.get("JAX_NUM_PROCESSES", "1")
    alone = len({device.process_index for device in mesh.devices.flat}) == 1
    if alone and jax.process_count() == 1 and started.isdigit() and int(started) > 1:
        warnings.warn(
            f"fully_shard: this is one of {started} processes (JAX_NUM_PROCESSES), and knows nothing of the others: "
            "each trains a model of its own. Call vs.join_hosts() first in the script.",
            stacklevel=3,
        )


def _check_arguments(model: Any, params: Any, policy: Any, max_unit_bytes: Any) -> None:
    if not isinstance(model, linen.Module | type):
        check_model(model)
    if isinstance(model, linen.Module) != (params is not None):
        got = "no params" if params is None else f"params beside a {type(model).__name__}"
        raise TypeError(
            f"fully_shard: params: got {got}; want variables, or a function that returns them, with a linen module and "
            "only with one; pass params=lambda: module.init(key, x)"
        )
    if not isinstance(policy, MixedPrecisionPolicy):
        raise TypeError(f"fully_shard: policy: got {policy!r}; want a vs.MixedPrecisionPolicy; make one")
    if max_unit_bytes is not None and (not isinstance(max_unit_bytes, int) or max_unit_bytes < 1):
        raise ValueError(
            f"fully_shard: max_unit_bytes: got {max_unit_bytes!r}; want a positive number of bytes, or None for no "
            "cap; pass an int such as 2**30"
        )


def _trace(build: Callable[[], Any], mesh: Mesh) -> tuple[Parts, Any, Any]:
    """Traces the function that builds the model: its parts without values, its form, and the computation."""
    kept: list[Any] = []

    def leaves() -> tuple[list[Any], list[Any]]:
        parts, form = build()
        kept.append((list(parts.params), form))
        return list(parts.params.values()), list(parts.rest)

    # A mesh that the user has set would be recorded in the trace, which has to run inside a shard_map.
    with jax.set_mesh(mesh), jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
        closed, (params, rest) = jax.make_jaxpr(leaves, return_shape=True)()
    paths, form = kept[0]
    return Parts(dict(zip(paths, params, strict=True)), tuple(rest)), form, closed


@dataclass(frozen=True, eq=False)
class _Asked:
    """The rules that `fully_shard` was given, as they are."""

    units: Any
    stacks: Any
    prefetch: Any
    max_unit_bytes: int | None
    blocks: Any
    storage: Any
    trainable: Any
    reshard: Any


def _plan_units(parts: Parts, asked: _Asked, mesh: Mesh, axis: str, policy: MixedPrecisionPolicy) -> tuple[Unit, ...]:
    faults = Faults("fully_shard")
    layers, lengths = _layers(parts, asked.stacks, faults)
    leaves = {
        path: jax.ShapeDtypeStruct(leaf.shape[1:] if path in layers else leaf.shape, leaf.dtype)
        for path, leaf in parts.params.items()
    }
    for path, leaf in leaves.items():
        if jnp.issubdtype(leaf.dtype, jnp.complexfloating):
            change = "keep real and imaginary part as two parameters"
            faults.add(path, got=str(leaf.dtype), want="a real dtype", change=change)
    nbytes = {
        path: int(np.prod(leaf.shape)) * gathered_dtype(stored_dtype(leaf, policy), policy).itemsize
        for path, leaf in leaves.items()
    }
    shapes = {path: (leaf,) for path, leaf in leaves.items()}
    block_of = resolve(asked.blocks, shapes, argument="blocks", default=Elements(1), faults=faults)
    trains = resolve(asked.trainable, shapes, argument="trainable", default=True, faults=faults)
    others = {path: size for path, size in nbytes.items() if path not in layers}
    assigned = others or not layers or asked.units
    members = assign(others, asked.units, asked.max_unit_bytes, faults) if assigned else {}
    for name in sorted(members.keys() & lengths.keys()):
        got = f"the name of a stack, for parameters outside of it: {', '.join(members[name][:3])}"
        faults.add(f"unit {name}", got=got, want="another name", change="name the unit otherwise, by units=...")
        faults.raise_if_any()
    for path, unit in layers.items():
        members.setdefault(unit, []).append(path)
    members = in_order(members)
    reshards = resolve(asked.reshard, members, argument="reshard_after_forward", default=True, faults=faults)
    if asked.storage not in get_args(Storage):
        want = " or ".join(map(repr, get_args(Storage)))
        faults.add("storage", got=repr(asked.storage), want=want, change="pass one of these")
        faults.raise_if_any()
    if asked.prefetch not in (None, 0, 1) or isinstance(asked.prefetch, bool):
        faults.add("prefetch", got=repr(asked.prefetch), want="0, 1 or None", change="pass one of these")
    chosen = asked.trainable
    if not faults and isinstance(chosen, Mapping) and all(value is True for value in chosen.values()):
        got = "patterns that freeze nothing, since what no pattern matches is trained"
        faults.add("trainable", got=got, want="at least one False", change='add "*": False as the last pattern')
    for argument, values in (("trainable", trains), ("reshard_after_forward", reshards)):
        for name, value in values.items():
            if not isinstance(value, bool | np.bool_):
                faults.add(f"{argument} of {name}", got=repr(value), want="True or False", change="mend the rule")
    treatment = Treatment(block_of, trains, policy, mesh, axis, asked.storage)
    on_cpu = mesh.devices.flat[0].platform == "cpu"
    prefetch = int(not on_cpu) if asked.prefetch is None else asked.prefetch
    planned = tuple(
        Unit(
            name=name,
            groups=make_groups(name, paths, leaves, treatment, faults, lengths.get(name, ())),
            reshard_after_forward=bool(reshards[name]),
            stack=lengths.get(name, ()),
            prefetch=prefetch if name in lengths else 0,
        )
        for name, paths in members.items()
    )
    faults.raise_if_any()
    return planned


def _layers(parts: Parts, stacks: Any, faults: Faults) -> tuple[dict[str, str], dict[str, tuple[int, ...]]]:
    """The stack of every parameter that is in one, and the layers of each stack."""
    owners: dict[str, str] = {}
    lengths: dict[str, tuple[int, ...]] = {}
    for unit, paths in stacked(list(parts.params), stacks, faults).items():
        shapes = {path: tuple(parts.params[path].shape) for path in paths}
        usual = Counter(shape[0] for shape in shapes.values() if shape).most_common(1)
        length = usual[0][0] if usual else 0
        for path, shape in shapes.items():
            if not shape or shape[0] != length or not length:
                want = (
                    f"layers on dim 0, {length} as in most parameters of stack {unit}" if length else "layers on dim 0"
                )
                change = "leave it out of stacks by a finer pattern, or put the layers on dim 0"
                if all(_is_in_list(other, unit) for other in paths):
                    change = f"a list of equal layers goes into rolled=({unit!r},)"
                faults.add(path, got=f"shape {shape}", want=want, change=change)
        owners.update(dict.fromkeys(paths, unit))
        lengths[unit] = (length,)
    faults.raise_if_any()
    return owners, lengths


def _is_in_list(path: str, name: str) -> bool:
    """Whether a parameter is of a numbered layer below a name."""
    return path.removeprefix(f"{name}/").split("/")[0].isdecimal()


def _buffers(structure: Structure, made: list[DBuffer], trainable: bool) -> Buffers:
    buffers: Buffers = {}
    for (unit, group), buffer in zip(each_group(structure.units), made, strict=True):
        if group.trainable == trainable:
            buffers.setdefault(unit.name, {})[group.name] = buffer
    return buffers


def _sharded(structure: Structure, made: list[DBuffer], rest: tuple[Any, ...]) -> Sharded:
    return Sharded(_buffers(structure, made, True), _buffers(structure, made, False), rest, structure)


def _check_values(parts: Parts) -> None:
    faults = Faults("fully_shard")
    for path, leaf in parts.params.items():
        if isinstance(leaf, jax.ShapeDtypeStruct):
            got = f"a shape without values, {leaf.shape} {leaf.dtype}"
            faults.add(path, got=got, want="an array", change="pass values, or abstract=True")
    faults.raise_if_any()


def _abstract(structure: Structure, parts: Parts) -> Sharded:
    made = [DBuffer.abstract(group.layout, group.dtype) for _, group in each_group(structure.units)]
    rest = tuple(
        jax.ShapeDtypeStruct(jnp.shape(leaf), leaf.dtype, sharding=structure.replicated) for leaf in parts.rest
    )
    return _sharded(structure, made, rest)


def _load(structure: Structure, parts: Parts) -> Sharded:
    """Fills the buffers from arrays that exist, shard by shard."""
    made = [
        DBuffer.from_tensors(
            group.layout, {name: parts.params[group.prefix + name] for name in group.layout.plan.slots}, group.dtype
        )
        for _, group in each_group(structure.units)
    ]
    # Copies: the first step is given their memory, and the user's model lives on.
    return _sharded(structure, made, tuple(copied(leaf, structure.replicated) for leaf in parts.rest))


def _build(structure: Structure, parts: Parts, closed: Any, outputs: Sequence[str]) -> Sharded:
    """Fills the buffers from the traced computation, whose first outputs have the given paths, group by group."""
    with jax.set_mesh(structure.mesh):
        recipe = Recipe.from_jaxpr(closed)
        index: dict[str, Any] = {path: i for i, path in enumerate(outputs)}
        if isinstance(structure.form, RolledForm):
            index |= {path: tuple(index[layer] for layer in layers) for path, layers in structure.form.rows}
        groups = [group for _, group in each_group(structure.units)]
        made = fill(recipe, groups, index)
        others = recipe.slice(range(len(outputs), len(outputs) + len(parts.rest)))
        rest = jax.jit(lambda *values: tuple(others(*values)), out_shardings=structure.replicated)(*others.values)
    return _sharded(structure, made, rest)
