"""Scans: the loops over stacks of layers in the user's function, found in its trace and run layer by layer.

Comes in: a function of whole parameters. Goes out: the same function, given shards in the place of stacked parameters.
It is traced with whole stacks, of which only shapes exist, and run from the trace: a `lax.scan` along a stack, which is
what `nnx.scan` and linen's `nn.scan` become, is run as a `Loop` that gathers one layer at a time. So the user's code
need not know. What else reads a stack makes it whole at once, with a warning.
"""

import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
from jax import lax
from jax.extend.core import ClosedJaxpr, DropVar, Jaxpr, JaxprEqn, Literal, Var
from jax.interpreters import partial_eval

from ._equations import evaluate, opened
from ._groups import Group, Unit
from ._layer import Operands
from ._loop import Loop
from ._origins import CHECKPOINTS, handed_on, scan_counts
from ._region import Region, UnequalLayersError, find_region, take_rows
from ._whole import whole_stack

_INLINED = frozenset(["jit", "pjit", "closed_call", "core_call"])
# Operations that do to every layer what they do to the stack, whatever the number of dims.
_LAYERWISE = frozenset(["convert_element_type", "copy", "copy_p", "name", "reduce_precision", "stop_gradient"])


@dataclass(frozen=True, eq=False)
class Source:
    """Where the parameters of a stack's group come from.

    Attributes:

    - `unit`, `group`: whose they are.
    - `shard`: of the group, `(L, S)`.
    - `sink`: whose gradient is that of the group's buffers, if they are not to be reduced; see `Loop`.
    - `start`: a zero that is there when the stack may be gathered.
    """

    unit: Unit
    group: Group
    shard: jax.Array
    sink: Any
    start: Any

    @property
    def key(self) -> str:
        """Of the group's shards."""
        return stack_key(self.unit, self.group)

    @functools.cached_property
    def whole(self) -> dict[str, jax.Array]:
        """All layers of all parameters of the group, gathered once."""
        return whole_stack(self.group, self.shard, self.sink)


@dataclass(frozen=True, eq=False)
class Stacked:
    """A parameter of a stack in the place of its whole value.

    Attributes:

    - `source`: of its group.
    - `slot`: its name in the group.
    - `steps`: what the user's function did to it since, layer by layer.
    """

    source: Source
    slot: str
    steps: tuple[Callable[[jax.Array], jax.Array], ...] = ()

    def finish(self, tensor: jax.Array) -> jax.Array:
        """What the function has at this point of one layer's parameter."""
        for step in self.steps:
            tensor = step(tensor)
        return tensor


def stack_key(unit: Unit, group: Group) -> str:
    """The name under which a group's shards go in the place of its parameters."""
    return f"{unit.name}[{group.name}]"


def start_key(unit: Unit) -> str:
    """The name of the zero that is there when a stack may be gathered, among frozen parameters."""
    return f"{unit.name}[start]"


def with_loops(fn: Callable[..., Any], stacks: Sequence[Unit]) -> Callable[..., Any]:
    """Makes a function take the shards of stacks, and run along them layer by layer.

    Arguments:

    - `fn`: a function of two dicts of whole parameters by path, trainable and frozen, and of more.
    - `stacks`: the units whose parameters have layers on dim 0.

    Returns: a function that takes in these dicts, instead of the stacks' parameters, their shards by `stack_key`. Where
    both dicts have something under the same key, the trainable one is the sink of the other; see `Loop`.
    """
    if not stacks:
        return fn

    def looped(params: Mapping[str, Any], frozen: Mapping[str, Any], *more: Any) -> Any:
        given = [dict(params), dict(frozen)]
        for unit in stacks:
            start = given[1].pop(start_key(unit), 0)
            for group in unit.groups:
                own, other = (tensors.pop(stack_key(unit, group), None) for tensors in given)
                shard, sink = (other, own) if other is not None else (own, None)
                source = Source(unit, group, shard, sink, start)
                given[own is None].update(
                    (group.prefix + slot, Stacked(source, slot)) for slot in group.layout.plan.slots
                )
        arguments = (*given, *more)
        shapes = jax.tree.map(
            lambda x: _whole_shape(x) if isinstance(x, Stacked) else x, arguments, is_leaf=_is_stacked
        )
        closed, out = jax.make_jaxpr(fn, return_shape=True)(*shapes)
        leaves = jax.tree.leaves(arguments, is_leaf=_is_stacked)
        same = handed_on(closed.jaxpr)
        jaxpr, _ = partial_eval.dce_jaxpr(closed.jaxpr, [i is None for i in same], instantiate=True)
        jaxpr, regions = _rolled(jaxpr, leaves)
        made = iter(_Run(jaxpr, closed.consts, regions)(leaves))
        values = [next(made) if i is None else leaves[i] for i in same]
        values = [_gathered(x, "the function's result") if _is_stacked(x) else x for x in values]
        return jax.tree.unflatten(jax.tree.structure(out), values)

    return looped


def _rolled(jaxpr: Jaxpr, leaves: Sequence[Any]) -> tuple[Jaxpr, list[Region]]:
    """Finds the stacks whose layers the function takes out one by one, and runs along; says so where it cannot."""
    stands = {v: x for v, x in zip(jaxpr.invars, leaves, strict=True) if _is_stacked(x)}
    eqns, takers, rows = take_rows(jaxpr, stands)
    regions: list[Region] = []
    failed: set[Var] = set()
    for unit in {stands[stack].source.unit.name: stands[stack].source.unit for stack, _ in rows.values()}.values():
        mine = {v: row for v, row in rows.items() if stands[row[0]].source.unit is unit}
        try:
            regions.append(find_region(jaxpr.replace(eqns=eqns), mine, unit.stack[0]))
        except UnequalLayersError as error:
            failed.update(stack for stack, _ in mine.values())
            warnings.warn(
                f"rolled: the layers of {unit.name} cannot run as one loop: {error}. All of them are gathered at once "
                "and stay alive; leave the list out of rolled, or make its layers equal.",
                stacklevel=2,
            )
    # A layer that is taken out for nothing would be an equation that reads a stack.
    kept = [eqn for eqn in takers if eqn.invars[0] in failed or rows.get(eqn.outvars[0], (None,))[0] in failed]
    shifted = [replace(r, start=r.start + len(kept), stop=r.stop + len(kept)) for r in regions]
    return jaxpr.replace(eqns=[*kept, *eqns]), shifted


def _is_stacked(x: Any) -> bool:
    return isinstance(x, Stacked)


def _whole_shape(stand: Stacked) -> jax.ShapeDtypeStruct:
    group = stand.source.group
    shape = (*group.layout.stack, *group.layout.plan.slots[stand.slot].shape)
    return jax.ShapeDtypeStruct(shape, group.gather_dtype)


@dataclass
class _Run:
    """Evaluates a computation, of whose values some are stacks that are nowhere whole; so may be its outputs."""

    jaxpr: Jaxpr
    consts: Sequence[Any]
    regions: Sequence[Region] = ()
    env: dict[Var, Any] = field(default_factory=dict)
    pending: list[JaxprEqn] = field(default_factory=list)

    def __call__(self, arguments: Sequence[Any]) -> list[Any]:
        self.env.update(zip(self.jaxpr.constvars, self.consts, strict=True))
        self.env.update(zip(self.jaxpr.invars, arguments, strict=True))
        stacks = {v for v, x in self.env.items() if _is_stacked(x)}
        starts = {region.start: region for region in self.regions}
        inside = {i for region in self.regions for i in range(region.start, region.stop)}
        for index, eqn in enumerate(self.jaxpr.eqns):
            if index in starts:
                self._flush()
                self._loop(starts[index])
            if index in inside:
                continue
            if not stacks.intersection(v for v in eqn.invars if isinstance(v, Var)):
                self.pending.append(eqn)
                continue
            self._flush()
            outputs = self._special(eqn, [self._read(v) for v in eqn.invars])
            for v, x in zip(eqn.outvars, outputs, strict=True):
                if not isinstance(v, DropVar):
                    self.env[v] = x
                    stacks |= {v} if _is_stacked(x) else set()
        self._flush()
        return [self._read(v) for v in self.jaxpr.outvars]

    def _read(self, v: Any) -> Any:
        return v.val if isinstance(v, Literal) else self.env[v]

    def _flush(self) -> None:
        """Evaluates what has been put off: equations that have nothing to do with stacks."""
        if self.pending:
            self.env.update(evaluate(self.jaxpr, self.pending, self.env))
        self.pending.clear()

    def _loop(self, region: Region) -> None:
        """Layers that follow each other, as a loop."""
        stands = [self.env[v] for v in region.stacks]
        body = _without_barriers(region.body)

        def one(turn: Operands) -> list[Any]:
            tensors = [stand.finish(x) for stand, x in zip(stands, turn.tensors, strict=True)]
            return jax.core.eval_jaxpr(body, (), *tensors, *turn.shared, *turn.carry, *turn.slices)

        carry = [jnp.asarray(self._read(v), v.aval.dtype) for v in region.carry]  # type: ignore[attr-defined]
        shared = [self._read(v) for v in region.shared]
        slices = [jnp.stack([self.env[v] for v in layers]) for layers in region.slices]
        loop = _loop_along(stands, one, length=stands[0].source.unit.stack[0], reverse=False, unroll=1)
        last, results = loop(shared, carry, slices)
        self.env.update((v, x) for v, x in zip(region.last, last, strict=True) if v is not None)
        for layers, stacked in zip(region.results, results, strict=True):
            self.env.update((v, stacked[i]) for i, v in enumerate(layers) if v is not None)

    def _special(self, eqn: JaxprEqn, operands: list[Any]) -> Sequence[Any]:
        """An equation that reads a stack."""
        name = eqn.primitive.name
        if name in _INLINED:
            return _Run(*opened(eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))))(operands)
        if name in CHECKPOINTS:
            return _checkpointed(eqn, operands)
        if name in _LAYERWISE and len(operands) == 1:
            return [_then(operands[0], lambda x: eqn.primitive.bind(x, **eqn.params))]
        if name == "transpose" and eqn.params["permutation"][0] == 0:
            dims = tuple(dim - 1 for dim in eqn.params["permutation"][1:])
            return [_then(operands[0], lambda x: lax.transpose(x, dims))]
        if name == "scan":
            return _scanned(eqn, operands)
        where = f"an operation outside of the loop over layers ({name})"
        whole = [_gathered(x, where) if _is_stacked(x) else x for x in operands]
        given = {v: x for v, x in zip(eqn.invars, whole, strict=True) if isinstance(v, Var)}
        made = evaluate(self.jaxpr, [eqn], given)
        return [made.get(v) for v in eqn.outvars]


def _then(stand: Stacked, step: Callable[[jax.Array], jax.Array]) -> Stacked:
    return replace(stand, steps=(*stand.steps, step))


def _gathered(stand: Stacked, where: str) -> jax.Array:
    """All layers of a parameter at once."""
    unit, path = stand.source.unit, stand.source.group.prefix + stand.slot
    warnings.warn(
        f"stacks: {path}: read by {where}; all {unit.stack[0]} layers of {unit.name} are gathered "
        "at once for that, and stay alive; read the layers inside of the loop, or leave the unit out of stacks",
        stacklevel=2,
    )
    return jax.vmap(stand.finish)(stand.source.whole[stand.slot])


def _checkpointed(eqn: JaxprEqn, operands: list[Any]) -> Sequence[Any]:
    """A checkpoint around a loop: the loop inside is run as such, and the whole of it again in the backward pass."""
    sources = {x.source.key: x.source for x in operands if _is_stacked(x)}
    handed: list[Any] = []

    def inner(values: list[Any], known: dict[str, tuple[Any, Any, Any]]) -> list[Any]:
        inside = {
            key: replace(source, shard=shard, sink=sink, start=start)
            for (key, source), (shard, sink, start) in zip(sources.items(), known.values(), strict=True)
        }
        plain = iter(values)
        given = [replace(x, source=inside[x.source.key]) if _is_stacked(x) else next(plain) for x in operands]
        outputs = _Run(*opened(eqn.params["jaxpr"]))(given)
        handed[:] = [x if _is_stacked(x) else None for x in outputs]
        return [x for x in outputs if not _is_stacked(x)]

    wrapped = jax.checkpoint(inner, policy=eqn.params["policy"], prevent_cse=eqn.params["prevent_cse"])
    known = {key: (source.shard, source.sink, source.start) for key, source in sources.items()}
    made = iter(wrapped([x for x in operands if not _is_stacked(x)], known))
    # Stacks that the checkpoint hands on are those outside of it.
    return [next(made) if x is None else replace(x, source=sources[x.source.key]) for x in handed]


def _scanned(eqn: JaxprEqn, operands: list[Any]) -> Sequence[Any]:
    """A scan along a stack, as a loop that gathers layer by layer."""
    consts, carries = scan_counts(eqn.params)
    start = consts + carries
    before = [_gathered(x, "all turns of a loop, as a whole") if _is_stacked(x) else x for x in operands[:start]]
    along = operands[start:]
    stands = [x for x in along if _is_stacked(x)]
    jaxpr, values = opened(eqn.params["jaxpr"])
    if not stands:
        return _plain_scan(eqn, jaxpr, values, before, along, consts)
    if min(stand.source.unit.prefetch for stand in stands) or eqn.params["unroll"] < eqn.params["length"]:
        jaxpr = _without_barriers(jaxpr)

    def body(turn: Operands) -> list[Any]:
        tensors = iter([stand.finish(x) for stand, x in zip(stands, turn.tensors, strict=True)])
        rest = iter(turn.slices)
        slices = [next(tensors) if _is_stacked(x) else next(rest) for x in along]
        return jax.core.eval_jaxpr(jaxpr, values, *turn.shared, *turn.carry, *slices)

    params = eqn.params
    loop = _loop_along(stands, body, length=params["length"], reverse=params["reverse"], unroll=params["unroll"])
    carry, results = loop(before[:consts], before[consts:], [x for x in along if not _is_stacked(x)])
    return [*carry, *results]


def _loop_along(
    stands: Sequence[Stacked], body: Callable[[Operands], list[Any]], *, length: int, reverse: bool, unroll: int
) -> Callable[..., tuple[list[Any], list[Any]]]:
    """A function of shared values, carry and slices that goes along some stacks."""
    sources = {stand.source.key: stand.source for stand in stands}
    units = [source.unit for source in sources.values()]
    loop = Loop(
        body=body,
        groups={key: source.group for key, source in sources.items()},
        tensors=tuple((stand.source.key, stand.slot) for stand in stands),
        length=length,
        reverse=reverse,
        unroll=unroll,
        prefetch=min(unit.prefetch for unit in units),
        reshard=all(unit.reshard_after_forward for unit in units),
    )
    shards = {key: source.shard for key, source in sources.items()}
    sinks = {key: source.sink for key, source in sources.items() if source.sink is not None}
    return functools.partial(loop, shards, sinks, stands[0].source.start)


def _without_barriers(jaxpr: Jaxpr) -> Jaxpr:
    """The body of a loop, whose checkpoints put no barrier before what they compute again.

    The barrier is there lest a compiler take the second computation for the first. In a loop it cannot, since forward
    and backward turns are in different loops; and behind a barrier a parameter is copied out of its buffer.
    """
    eqns: list[JaxprEqn] = []
    for eqn in jaxpr.eqns:
        changed: dict[str, Any] = {}
        if eqn.primitive.name in CHECKPOINTS:
            changed["prevent_cse"] = False
        inner = eqn.params.get("jaxpr")
        if isinstance(inner, ClosedJaxpr):
            changed["jaxpr"] = inner.replace(jaxpr=_without_barriers(inner.jaxpr))
        elif isinstance(inner, Jaxpr):
            changed["jaxpr"] = _without_barriers(inner)
        eqns.append(eqn.replace(params={**eqn.params, **changed}) if changed else eqn)
    return jaxpr.replace(eqns=eqns)


def _plain_scan(
    eqn: JaxprEqn, jaxpr: Jaxpr, values: Sequence[Any], before: list[Any], along: list[Any], consts: int
) -> Sequence[Any]:
    """A scan that reads whole stacks."""
    number = len(before) - consts

    def turn(carry: list[Any], slices: list[Any]) -> tuple[list[Any], list[Any]]:
        out = jax.core.eval_jaxpr(jaxpr, values, *before[:consts], *carry, *slices)
        return out[:number], out[number:]

    params = eqn.params
    carry, results = lax.scan(
        turn, before[consts:], along, length=params["length"], reverse=params["reverse"], unroll=params["unroll"]
    )
    return [*carry, *results]
