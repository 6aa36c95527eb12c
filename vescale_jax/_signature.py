"""Signature: a hashable description of a computation, equal for computations that do the same.

Comes in: a traced computation or one of its equations. Goes out: a value to compare, or to look up a compiled program
by.
"""

from collections.abc import Hashable, Mapping
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

_RULED = frozenset(["custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr"])


def signature(jaxpr: Jaxpr) -> Any:
    """A hashable description of a computation, equal for equal computations: variables by number."""
    number: dict[Var, int] = {v: i for i, v in enumerate([*jaxpr.constvars, *jaxpr.invars])}
    lines: list[Any] = [tuple(str(v.aval) for v in number)]
    for eqn in jaxpr.eqns:
        operands = tuple(_operand(number, v) for v in eqn.invars)
        number.update({v: len(number) + i for i, v in enumerate(eqn.outvars)})
        lines.append((eqn.primitive.name, _params(eqn), operands))
    return (*lines, tuple(_operand(number, v) for v in jaxpr.outvars))


def signature_of(eqn: JaxprEqn) -> Any:
    """The same for one equation, without its operands but for their shapes and dtypes."""
    shapes = tuple(str(v.aval) for v in (*eqn.invars, *eqn.outvars))
    return eqn.primitive.name, _params(eqn), shapes


def _params(eqn: JaxprEqn) -> Any:
    """The parameters of an equation; of functions with rules of their own, what they compute counts, not the rules."""
    if eqn.primitive.name not in _RULED:
        return _value(eqn.params)
    return _value({name: value for name, value in eqn.params.items() if isinstance(value, Jaxpr | ClosedJaxpr | int)})


def _operand(number: dict[Var, int], v: Any) -> Any:
    return (str(v.aval), _value(v.val)) if isinstance(v, Literal) else number[v]


def _value(value: Any) -> Any:
    """A hashable stand-in for a parameter of an equation; what cannot be compared is equal to itself alone."""
    if isinstance(value, Jaxpr):
        return signature(value), tuple(map(_value, getattr(value, "consts", ())))
    if isinstance(value, ClosedJaxpr):
        return signature(value.jaxpr), tuple(map(_value, value.consts))
    if isinstance(value, Mapping):
        return tuple((name, _value(value[name])) for name in sorted(value))
    if isinstance(value, tuple | list):
        return tuple(map(_value, value))
    if isinstance(value, np.ndarray | np.generic | jax.Array):
        return str(value.dtype), np.shape(value), np.asarray(value).tobytes()
    return value if isinstance(value, Hashable) else id(value)
