"""Region: equal layers that follow each other in a computation, found so that they can run as one loop.

Comes in: the equations of a traced function, and which of its variables are one layer's part of a stack. Goes out:
where the layers stand, what one of them computes, and what it takes from the layer before, from outside, and from its
own part of what differs from layer to layer. The user's code stays a Python loop over a list of layers.

A layer has no marked end in a trace. It begins at the first equation that reads its parameters, or some equations
earlier if those are alike before all layers, such as a normalisation that comes before its gain; of all beginnings
under which the layers are equal, the one with the least to hand on from layer to layer is taken.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jax.extend.core import DropVar, Jaxpr, JaxprEqn, Literal, Var

from ._signature import signature_of

Atom = Var | Literal


@dataclass(frozen=True, eq=False)
class Region:
    """Equal layers in a computation.

    Attributes:

    - `start`, `stop`: the equations that are theirs.
    - `body`: one layer: inputs are parameters, shared values, carry and slices, in this order; outputs are the new
      carry and the layer's results.
    - `stacks`: for each parameter the variable of its stack.
    - `shared`: what all layers take from outside.
    - `carry`: what the first layer is given of what the others take from the layer before.
    - `slices`: what each layer has of its own beside parameters: one variable a layer.
    - `last`: the variables of the last layer's carry; None where nobody reads it.
    - `results`: one variable a layer, None where nobody reads it.
    """

    start: int
    stop: int
    body: Jaxpr
    stacks: tuple[Var, ...]
    shared: tuple[Atom, ...]
    carry: tuple[Atom, ...]
    slices: tuple[tuple[Var, ...], ...]
    last: tuple[Var | None, ...]
    results: tuple[tuple[Var | None, ...], ...]


class UnequalLayersError(Exception):
    """Why layers cannot run as one loop."""


def find_region(jaxpr: Jaxpr, rows: Mapping[Var, tuple[Var, int]], length: int) -> Region:
    """Finds the layers of one stack.

    Arguments:

    - `jaxpr`: the computation; what makes the rows is no equation of it.
    - `rows`: for each variable that is one layer's part of a stack, the stack's variable and the layer.
    - `length`: L.

    Raises: `UnequalLayersError` with the reason if the layers are not equal, or do not follow each other.
    """
    eqns = jaxpr.eqns
    first, final = [len(eqns)] * length, -1
    for index, eqn in enumerate(eqns):
        layers = {rows[v][1] for v in eqn.invars if isinstance(v, Var) and v in rows}
        if len(layers) > 1:
            raise UnequalLayersError(f"one operation ({eqn.primitive.name}) reads layers {sorted(layers)}")
        for layer in layers:
            first[layer] = min(first[layer], index)
            final = index
    if len(eqns) in first:
        raise UnequalLayersError(f"layer {first.index(len(eqns))} is not used")
    step = first[1] - first[0] if length > 1 else final + 1 - first[0]
    for layer in range(1, length):
        if first[layer] - first[layer - 1] != step or step < 1:
            raise UnequalLayersError(
                f"layers {layer - 1} and {layer} differ in the number of operations, or are in another order"
            )
    kinds = _kinds(eqns)
    shift, found, why = 0, [], UnequalLayersError("they differ")
    while True:
        try:
            found.append(_match(jaxpr, rows, length, first[0] - shift, step, kinds))
        except UnequalLayersError as error:
            why = error if not shift else why
        shift += 1
        before = {kinds[index - shift] for index in first} if first[0] >= shift else ()
        if shift >= step or len(before) != 1 or length == 1:
            break
    if not found:
        raise why
    return min(found, key=_handed_on)


def _handed_on(region: Region) -> int:
    """Elements that a layer hands on to the next, and that are stacked beside its parameters."""
    own = [v for vs in (*region.slices, *region.results) for v in vs if v is not None]
    return sum(math.prod(v.aval.shape) for v in (*region.carry, *own))  # type: ignore[attr-defined]


def _kinds(eqns: Sequence[JaxprEqn]) -> list[int]:
    """A number for each equation, equal for operations that are alike but for their operands."""
    numbers: dict[Any, int] = {}
    return [numbers.setdefault(signature_of(eqn), len(numbers)) for eqn in eqns]


def _match(
    jaxpr: Jaxpr, rows: Mapping[Var, tuple[Var, int]], length: int, start: int, step: int, kinds: Sequence[int]
) -> Region:
    """The region of layers of `step` equations from `start` on, if they are equal."""
    eqns, stop = jaxpr.eqns, start + length * step
    if start < 0 or stop > len(eqns):
        raise UnequalLayersError("the last layer ends early")
    for index in range(start, stop):
        if kinds[index] != kinds[start + (index - start) % step]:
            layer = (index - start) // step
            raise UnequalLayersError(f"layer {layer} has another operation than layer 0: {eqns[index].primitive.name}")
    made = {
        v: (i, p)
        for i in range(length)
        for p, v in enumerate(_outputs(eqns[start + i * step : start + (i + 1) * step]))
    }
    late = {v for eqn in eqns[stop:] for v in eqn.outvars}
    roles = _Roles(rows, made, late)
    for t in range(step):
        for operands in zip(*[eqns[start + i * step + t].invars for i in range(length)], strict=True):
            roles.add(operands)
    template = min(1, length - 1)
    mine = eqns[start + template * step : start + (template + 1) * step]
    outputs = _outputs(mine)
    last, results = _read_outside(jaxpr, stop, made, roles.carry, length)
    before = {p: v for v, (i, p) in made.items() if i == template - 1}
    stacks = list(roles.tensors)
    body = jaxpr.replace(
        constvars=[],
        invars=[
            *[roles.tensors[stack][template] for stack in stacks],
            *[v for v in roles.shared if isinstance(v, Var)],
            *[before[p] for p in roles.carry],
            *[layers[template] for layers in roles.slices],
        ],
        eqns=list(mine),
        outvars=[outputs[p] for p in (*roles.carry, *results)],
    )
    if len(set(body.invars)) < len(body.invars):
        raise UnequalLayersError("one value is given to the layers in two ways")
    return Region(
        start=start,
        stop=stop,
        body=body,
        stacks=tuple(stacks),
        shared=tuple(roles.shared),
        carry=tuple(roles.carry.values()),
        slices=tuple(roles.slices),
        last=tuple(last.get(p) for p in roles.carry),
        results=tuple(tuple(layers) for layers in results.values()),
    )


def _outputs(eqns: Sequence[JaxprEqn]) -> list[Var]:
    return [v for eqn in eqns for v in eqn.outvars]


@dataclass(init=False, eq=False)
class _Roles:
    """What each operand of a layer is to the loop."""

    def __init__(
        self, rows: Mapping[Var, tuple[Var, int]], made: Mapping[Var, tuple[int, int]], late: set[Var]
    ) -> None:
        self.rows, self.made, self.late = rows, made, late
        self.tensors: dict[Var, tuple[Var, ...]] = {}
        self.shared: dict[Var, None] = {}
        self.carry: dict[int, Atom] = {}
        self.slices: dict[tuple[Var, ...], None] = {}

    def add(self, operands: tuple[Atom, ...]) -> None:
        """Finds the role of one operand, given what it is in each layer."""
        first, others = operands[0], operands[1:]
        variables = [v for v in operands if isinstance(v, Var)]
        places = [self.made.get(v) if isinstance(v, Var) else None for v in operands]
        if any(v in self.rows for v in variables):
            self._tensor(operands)
        elif places[0] is not None:
            if places != [(i, places[0][1]) for i in range(len(operands))]:
                raise UnequalLayersError("a value inside of a layer comes from elsewhere in another one")
        elif others and places[1] is not None:
            place = places[1][1]
            if places[1:] != [(i, place) for i in range(len(others))] or self.carry.get(place, first) != first:
                raise UnequalLayersError("layers do not all take the same from the layer before")
            self._outside(first)
            self.carry[place] = first
        elif not variables:
            if any(v.val != first.val for v in others):  # type: ignore[union-attr]
                raise UnequalLayersError(f"a constant differs: {', '.join(str(v) for v in operands[:4])}")
        elif len(set(variables)) == 1 and len(variables) == len(operands):
            self._outside(first)
            self.shared[variables[0]] = None
        elif len(variables) == len(operands):
            for v in variables:
                self._outside(v)
            self.slices[tuple(variables)] = None
        else:
            raise UnequalLayersError("a constant of one layer is a variable in another one")

    def _tensor(self, operands: tuple[Atom, ...]) -> None:
        found = [self.rows.get(v) if isinstance(v, Var) else None for v in operands]
        stack = found[0][0] if found[0] else None
        if stack is None or found != [(stack, i) for i in range(len(operands))]:
            raise UnequalLayersError("layers do not all read the same parameter in the same place")
        self.tensors[stack] = tuple(operands)  # type: ignore[arg-type]

    def _outside(self, v: Atom) -> None:
        if isinstance(v, Var) and (v in self.made or v in self.late):
            raise UnequalLayersError("a value is made by another layer than the one before, or after all layers")


def _read_outside(
    jaxpr: Jaxpr, stop: int, made: Mapping[Var, tuple[int, int]], carry: Mapping[int, Atom], length: int
) -> tuple[dict[int, Var], dict[int, list[Var | None]]]:
    """What is read after the layers: the carry of the last one by place, and results by place and layer."""
    last: dict[int, Var] = {}
    results: dict[int, list[Var | None]] = {}
    for v in [*[v for eqn in jaxpr.eqns[stop:] for v in eqn.invars], *jaxpr.outvars]:
        if isinstance(v, Var) and v in made and not isinstance(v, DropVar):
            layer, place = made[v]
            if place in carry and layer == length - 1:
                last[place] = v
            else:
                results.setdefault(place, [None] * length)[layer] = v
    return last, results


def take_rows(
    jaxpr: Jaxpr, stacks: Collection[Var]
) -> tuple[list[JaxprEqn], list[JaxprEqn], dict[Var, tuple[Var, int]]]:
    """Parts the equations that take one layer out of a stack from the others.

    Arguments:

    - `jaxpr`: the computation.
    - `stacks`: the variables of stacks.

    Returns: the other equations; those that take layers out; and for each variable that is one layer's part of a stack,
    the stack's variable and the layer.
    """
    others: list[JaxprEqn] = []
    takers: list[JaxprEqn] = []
    slices: dict[Var, tuple[Var, int]] = {}
    rows: dict[Var, tuple[Var, int]] = {}
    for eqn in jaxpr.eqns:
        v = eqn.invars[0] if eqn.invars else None
        if eqn.primitive.name == "slice" and isinstance(v, Var) and v in stacks and _is_row(eqn):
            slices[eqn.outvars[0]] = v, eqn.params["start_indices"][0]
        elif eqn.primitive.name in ("squeeze", "reshape") and isinstance(v, Var) and v in slices and _drops_layers(eqn):
            rows[eqn.outvars[0]] = slices[v]
        else:
            others.append(eqn)
            continue
        takers.append(eqn)
    return others, takers, rows


def _is_row(eqn: JaxprEqn) -> bool:
    """Whether a slice takes all of one layer."""
    start, limit = eqn.params["start_indices"], eqn.params["limit_indices"]
    shape = eqn.invars[0].aval.shape  # type: ignore[attr-defined]
    whole = all(low == 0 for low in start[1:]) and tuple(limit[1:]) == shape[1:]
    return whole and limit[0] == start[0] + 1 and not any(step != 1 for step in eqn.params["strides"] or ())


def _drops_layers(eqn: JaxprEqn) -> bool:
    return eqn.outvars[0].aval.shape == eqn.invars[0].aval.shape[1:]  # type: ignore[attr-defined]
