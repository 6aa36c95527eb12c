"""Equations: parts of a traced computation, run by themselves.

Comes in: some equations and the values of what they read. Goes out: the values of what they make.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax.core
from jax.extend.core import DropVar, Jaxpr, JaxprEqn, Var


def evaluate(jaxpr: Jaxpr, eqns: Sequence[JaxprEqn], env: Mapping[Var, Any]) -> dict[Var, Any]:
    """Runs some equations on values that are there.

    Arguments:

    - `jaxpr`: the computation that they are of.
    - `eqns`: which ones, in order.
    - `env`: values of the variables that they read and do not make.

    Returns: values of the variables that they make.
    """
    made = [v for eqn in eqns for v in eqn.outvars if not isinstance(v, DropVar)]
    inner = set(made)
    needed = list(dict.fromkeys(v for eqn in eqns for v in eqn.invars if isinstance(v, Var) and v not in inner))
    piece = jaxpr.replace(constvars=[], invars=needed, eqns=list(eqns), outvars=made)
    return dict(zip(made, jax.core.eval_jaxpr(piece, (), *[env[v] for v in needed]), strict=True))


def opened(jaxpr: Any) -> tuple[Jaxpr, Sequence[Any]]:
    """A computation and its constants, whichever way the JAX version in use keeps the two together."""
    return getattr(jaxpr, "jaxpr", jaxpr), getattr(jaxpr, "consts", ())
