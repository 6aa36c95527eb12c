"""Origins: what each value of a traced computation was computed from.

Comes in: a computation and the origin of every input, as bits. Goes out: the origin of every output; and which outputs
are inputs that were handed on.
"""

import functools
import operator
from collections.abc import Mapping, Sequence
from typing import Any

from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

# Bits, joined by or. Constants are made of nothing.
NOTHING, FREED, BATCH, KEY = 0, 1, 2, 4

_CALLS = frozenset(["jit", "pjit"])
CHECKPOINTS = frozenset(["checkpoint", "remat", "remat2"])


def propagate(jaxpr: Jaxpr, inputs: Sequence[int], *, loops: bool = False) -> list[int]:
    """The origin of every output of a computation.

    Arguments:

    - `jaxpr`: the computation.
    - `inputs`: the origin of every input.
    - `loops`: whether to look into loops, branches and checkpoints too. Without it what comes out of one is made of all
      that went in, which is as it has to be computed: a loop is not run again for the part of it that needs no batch.
    """
    origin: dict[Var, int] = dict.fromkeys(jaxpr.constvars, NOTHING)
    origin.update(zip(jaxpr.invars, inputs, strict=True))

    def read(v: Any) -> int:
        return NOTHING if isinstance(v, Literal) else origin[v]

    for eqn in jaxpr.eqns:
        operands = [read(v) for v in eqn.invars]
        joined = _join(operands)
        # A jitted function may hand on both what it made of parameters and what it made of the batch.
        if joined != NOTHING and eqn.primitive.name in _CALLS:
            results = propagate(eqn.params["jaxpr"].jaxpr, operands, loops=loops)
        elif joined != NOTHING and loops:
            results = _inside(eqn, operands) or [joined] * len(eqn.outvars)
        else:
            results = [joined] * len(eqn.outvars)
        origin.update(zip(eqn.outvars, results, strict=True))
    return [read(v) for v in jaxpr.outvars]


def _join(origins: Sequence[int]) -> int:
    return functools.reduce(operator.or_, origins, NOTHING)


def _inside(eqn: JaxprEqn, operands: list[int]) -> list[int] | None:
    """The origin of every output of an equation with computations in it; None if there are none to look into."""
    name, params = eqn.primitive.name, eqn.params
    if name == "scan":
        consts, carries = scan_counts(params)
        return _repeated(params["jaxpr"].jaxpr, operands, consts, carries)
    if name == "while":
        first, second = params["cond_nconsts"], params["body_nconsts"]
        of_body = operands[first:]
        found = _repeated(params["body_jaxpr"].jaxpr, of_body, second, len(of_body) - second)
        # How often depends on the condition.
        decides = propagate(params["cond_jaxpr"].jaxpr, [*operands[:first], *found], loops=True)
        return [origin | decides[0] for origin in found]
    if name == "cond":
        ways = [propagate(branch.jaxpr, operands[1:], loops=True) for branch in params["branches"]]
        return [_join([operands[0], *origins]) for origins in zip(*ways, strict=True)]
    called = params.get("jaxpr", params.get("call_jaxpr", params.get("fun_jaxpr")))
    called = getattr(called, "jaxpr", called)
    if name in _TRANSPARENT | _CUSTOM and isinstance(called, Jaxpr) and len(called.invars) == len(operands):
        return propagate(called, operands, loops=True)
    return None


def _repeated(jaxpr: Jaxpr, operands: list[int], consts: int, carries: int) -> list[int]:
    """Of a computation whose first outputs are its carries of the next turn."""
    while True:
        results = propagate(jaxpr, operands, loops=True)
        after = [a | b for a, b in zip(operands[consts : consts + carries], results[:carries], strict=True)]
        if after == operands[consts : consts + carries]:
            return [*after, *results[carries:]]
        operands = [*operands[:consts], *after, *operands[consts + carries :]]


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
_CUSTOM = frozenset(["core_call", "custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr"])
