"""Schedule: the backward pass, run with each unit gathered before its first use and reduced after its last.

Comes in: the traced backward pass, and two functions that gather a unit and reduce its gradients. Goes out: nothing;
the second function has been given all gradients.

XLA sees one large graph, in which every gather could run at once and every reduction last: a compiler that orders for
speed does about that, and all units are alive together. So gathers are made to wait. The gather of a unit depends, by
an optimization barrier, on the reduced gradients of the unit gathered two before it: one unit is at work, one is on
its way, and no gradient of a whole unit is put off.

An activation checkpoint puts a barrier of its own before what it computes again, over parameters too; behind it XLA
copies them out of their buffers. Here that barrier holds everything but the parameters.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

import jax
import jax.core
from jax import lax
from jax.extend.core import DropVar, Jaxpr, JaxprEqn, Literal, Var

from ._equations import evaluate, opened
from ._origins import CHECKPOINTS


def run_backward(
    jaxpr: Jaxpr,
    inputs: Sequence[Any],
    missing: Mapping[int, str],
    outputs: Sequence[str],
    unit_of: Mapping[str, str],
    fetch: Callable[[str, Any, Sequence[Any]], Mapping[str, jax.Array]],
    finish: Callable[[str, dict[str, jax.Array]], Any],
    start: Any,
) -> None:
    """Runs a traced backward pass unit by unit.

    Arguments:

    - `jaxpr`: the backward pass, without constants.
    - `inputs`: its inputs; what stands for a missing one does not matter.
    - `missing`: inputs that are freed parameters, by position, with their paths.
    - `outputs`: the parameters' paths, one for each gradient.
    - `unit_of`: the unit of every parameter.
    - `fetch`: gathers a unit once its second argument, any array, is there; the third is what the backward pass has
      left so far: the last unit's reduced gradients and those that are not reduced yet. Returns at least the unit's
      freed parameters.
    - `finish`: takes the gradients of a unit, all of them; returns an array that is there when they are reduced.
    - `start`: an array that is there when the backward pass may begin.
    """
    freed = {jaxpr.invars[i]: path for i, path in missing.items()}
    env: dict[Var, Any] = {v: x for v, x in zip(jaxpr.invars, inputs, strict=True) if v not in freed}
    paths_of: dict[Any, list[str]] = defaultdict(list)
    for path, v in zip(outputs, jaxpr.outvars, strict=True):
        paths_of[v if isinstance(v, Var) else path].append(path)
    left = Counter(unit_of[path] for path in outputs)
    gathered: list[str] = []
    reduced: dict[str, Any] = {}
    waiting: dict[str, Var] = {}
    weights = set(freed)
    pending: list[JaxprEqn] = []

    def flush() -> None:
        if pending:
            env.update(evaluate(jaxpr, pending, env))
            pending.clear()

    def close(unit: str) -> None:
        mine = {path: v for path, v in zip(outputs, jaxpr.outvars, strict=True) if unit_of[path] == unit}
        flush()
        reduced[unit] = finish(unit, {path: env[v] if isinstance(v, Var) else v.val for path, v in mine.items()})
        for path in mine:
            waiting.pop(path, None)

    for eqn in jaxpr.eqns:
        for v in eqn.invars:
            if isinstance(v, Var) and v in freed and v not in env:
                unit = unit_of[freed[v]]
                flush()
                earlier = (reduced[u] for u in reversed(gathered[:-1]) if u in reduced)
                left_so_far = [start, *list(reduced.values())[-1:], *[env[w] for w in waiting.values()]]
                tensors = fetch(unit, next(earlier, start), left_so_far)
                gathered.append(unit)
                env.update((w, tensors[path]) for w, path in freed.items() if path in tensors)
        inputs_of = [v for v in eqn.invars if isinstance(v, Var)]
        if inputs_of and weights.issuperset(inputs_of):
            weights.update(v for v in eqn.outvars if not isinstance(v, DropVar))
        if eqn.primitive.name in CHECKPOINTS and weights.intersection(inputs_of):
            flush()
            env.update(_again(eqn, env, weights))
        else:
            pending.append(eqn)
        for v in eqn.outvars:
            for path in paths_of.pop(v, ()):
                unit = unit_of[path]
                waiting[path] = v
                left[unit] -= 1
                if not left[unit]:
                    close(unit)
    flush()
    for unit, number in left.items():
        if number:  # A gradient that no equation makes: zero, or an input handed on.
            close(unit)


def _again(eqn: JaxprEqn, env: Mapping[Var, Any], weights: Container[Var]) -> dict[Var, Any]:
    """Runs a checkpoint's part of the backward pass behind a barrier over all that is no parameter."""
    values = [v.val if isinstance(v, Literal) else env[v] for v in eqn.invars]
    tied = [i for i, v in enumerate(eqn.invars) if isinstance(v, Var) and v not in weights]
    if eqn.params["prevent_cse"] and tied:
        for i, x in zip(tied, lax.optimization_barrier([values[i] for i in tied]), strict=True):
            values[i] = x
    results = jax.core.eval_jaxpr(*opened(eqn.params["jaxpr"]), *values)
    return {v: x for v, x in zip(eqn.outvars, results, strict=True) if not isinstance(v, DropVar)}
