"""Origins: what each value of a traced computation was computed from.

Comes in: a computation and the origin of every input, as bits. Goes out: the origin of every output; and which outputs
are inputs that were handed on.
"""

import functools
import operator
from collections.abc import Mapping, Sequence
from typing import Any

from jax.extend.core import Jaxpr, Literal, Var

# Bits, joined by or. Constants are made of nothing.
NOTHING, FREED, BATCH, KEY = 0, 1, 2, 4

_CALLS = frozenset(["jit", "pjit"])
CHECKPOINTS = frozenset(["checkpoint", "remat", "remat2"])


def propagate(jaxpr: Jaxpr, inputs: Sequence[int]) -> list[int]:
    """The origin of every output of a computation."""
    origin: dict[Var, int] = dict.fromkeys(jaxpr.constvars, NOTHING)
    origin.update(zip(jaxpr.invars, inputs, strict=True))

    def read(v: Any) -> int:
        return NOTHING if isinstance(v, Literal) else origin[v]

    for eqn in jaxpr.eqns:
        operands = [read(v) for v in eqn.invars]
        if set(operands) - {NOTHING} and eqn.primitive.name in _CALLS:
            # A jitted function may hand on both what it made of parameters and what it made of the batch.
            results = propagate(eqn.params["jaxpr"].jaxpr, operands)
        else:
            joined = functools.reduce(operator.or_, operands, NOTHING)
            results = [joined] * len(eqn.outvars)
        origin.update(zip(eqn.outvars, results, strict=True))
    return [read(v) for v in jaxpr.outvars]


def handed_on(jaxpr: Jaxpr) -> list[int | None]:
    """Which outputs of a computation are inputs, unchanged: the input's index, or None.

    `nnx.scan` returns all of a layer's state, changed or not, as new arrays; this tells which are the old ones.
    """
    source: dict[Var, int] = {v: i for i, v in enumerate(jaxpr.invars)}

    def read(v: Any) -> int | None:
        return None if isinstance(v, Literal) else source.get(v)

    for eqn in jaxpr.eqns:
        inner = eqn.params.get("jaxpr") if eqn.primitive.name in _TRANSPARENT else None
        if inner is None:
            continue
        inside = handed_on(getattr(inner, "jaxpr", inner))
        if eqn.primitive.name == "scan":
            consts, carries = scan_counts(eqn.params)
            # A carry is the same in all turns if every turn hands it on; slices are stacked as they were.
            inside = [
                i if i is not None and (i == consts + n if n < carries else i >= consts + carries) else None
                for n, i in enumerate(inside)
            ]
        for v, i in zip(eqn.outvars, inside, strict=True):
            origin = None if i is None else read(eqn.invars[i])
            if origin is not None:
                source[v] = origin
    return [read(v) for v in jaxpr.outvars]


def scan_counts(params: Mapping[str, Any]) -> tuple[int, int]:
    """How many of a scan's operands are constants, and how many carries."""
    if "num_carry" in params:  # JAX 0.10
        return params["num_consts"], params["num_carry"]
    consts, carries, _ = (len(list(part)) for part in params["ft_in"].unpack())
    return consts, carries


_TRANSPARENT = _CALLS | CHECKPOINTS | {"closed_call", "scan"}
