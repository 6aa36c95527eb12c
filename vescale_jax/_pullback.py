"""Pullback: reverse-mode differentiation that frees the gathered parameters between forward and backward.

Comes in: a loss of whole parameters. Goes out: its value, and a pullback that is given the parameters once more.

`jax.vjp` keeps for the backward pass whatever that needs: activations, but also parameters, and what the model made of
parameters alone (a transposed embedding, a cast, a merged adapter). So the forward pass is traced first, and its
residuals are sorted by what they were computed from: those of freed parameters, and of nothing that depends on the
batch, are not kept but computed again in the backward pass, from parameters that are gathered again. Everything else is
kept, as without resharding. `jax.checkpoint` with a policy cannot say this: it decides by the kind of an equation, not
by what flows into it.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.core
from jax.extend.core import Jaxpr
from jax.interpreters import partial_eval

from ._dots import untranspose
from ._form import is_key
from ._leaves import ArrayLeaves
from ._origins import BATCH, FREED, KEY, NOTHING, handed_on, propagate

Tensors = dict[str, jax.Array]
"""Parameters by path, whole, in the gathered dtype."""


@dataclass(frozen=True)
class Pullback:
    """The backward half of a loss.

    Attributes:

    - `kept`: residuals that stay alive; None stands for one that is computed again.
    - `recompute`: computes those, of the forward pass's inputs that `inputs` selects.
    - `consts`: what the forward pass closed over; they come before its arguments.
    - `restore`: makes the linear backward function of all residuals.
    """

    kept: tuple[Any, ...]
    recompute: Jaxpr
    inputs: tuple[bool, ...]
    consts: tuple[Any, ...]
    restore: Callable[[Sequence[Any]], Callable[[Any], tuple[Tensors]]]

    def trace(
        self, cotangent: jax.Array, params: Tensors, frozen: Tensors, rest: Any, batch: Any
    ) -> tuple[Jaxpr, list[Any]]:
        """Traces the backward pass, so that it can be run piece by piece.

        Arguments:

        - `cotangent`: of the loss, a scalar.
        - the others: as given to `value_and_pullback`; of freed parameters only shapes count.

        Returns: a computation without constants, and the values of its inputs, of which the leaves of the last four
        arguments come last and in order. Its outputs are the gradients, in the order of the sorted paths.
        """
        operands = (params, frozen, rest, batch)
        alive = [value for value in self.kept if value is not None]

        def backward(cotangent: jax.Array, alive: list[Any], consts: Sequence[Any], operands: Any) -> Tensors:
            chosen = [x for x, use in zip([*consts, *jax.tree.leaves(operands)], self.inputs, strict=True) if use]
            again = iter(jax.core.eval_jaxpr(self.recompute, (), *chosen))
            kept = iter(alive)
            residuals = [next(again) if value is None else next(kept) for value in self.kept]
            return self.restore(residuals)(cotangent)[0]

        arguments = (cotangent, alive, self.consts, operands)
        closed = jax.make_jaxpr(backward)(*arguments)
        jaxpr = closed.jaxpr.replace(constvars=[], invars=[*closed.jaxpr.constvars, *closed.jaxpr.invars])
        return untranspose(jaxpr), [*closed.consts, *jax.tree.leaves(arguments)]


def value_and_pullback(
    fn: Callable[[Tensors, Tensors, Any, Any], tuple[jax.Array, Any]],
    freed: Collection[str],
    params: Tensors,
    frozen: Tensors,
    rest: Any,
    batch: Any,
) -> tuple[jax.Array, Any, Any, Pullback]:
    """Evaluates a loss and prepares its backward pass.

    Arguments:

    - `fn`: a function of the next four that returns the loss, a scalar, and anything else.
    - `freed`: paths of the parameters that are freed after the forward pass.
    - `params`: what is differentiated for.
    - `frozen`: parameters without gradient.
    - `rest`, `batch`: pytrees of arrays. The batch and random keys in the rest differ from device to device.

    Returns: the loss; what else `fn` returned; for each array of that, whether it can differ from device to device; and
    the pullback.
    """
    made: list[ArrayLeaves] = []

    def forward(*operands: Any) -> tuple[Any, list[jax.Array]]:
        total, pull, aux = jax.vjp(lambda p: fn(p, *operands[1:]), operands[0], has_aux=True)
        made.append(ArrayLeaves.of(pull))
        return (total, aux), made[-1].arrays(pull)

    operands = (params, frozen, rest, batch)
    closed, shapes = jax.make_jaxpr(forward, return_shape=True)(*operands)
    leaves = jax.tree.leaves(operands)
    outputs = jax.core.eval_jaxpr(closed.jaxpr, closed.consts, *leaves)
    outputs = [x if i is None else leaves[i] for x, i in zip(outputs, handed_on(closed.jaxpr), strict=True)]
    results = jax.tree.structure(shapes[0])
    total, aux = jax.tree.unflatten(results, outputs[: results.num_leaves])
    residuals = outputs[results.num_leaves :]

    consts = tuple(closed.consts)
    jaxpr = closed.jaxpr.replace(constvars=[], invars=[*closed.jaxpr.constvars, *closed.jaxpr.invars])
    origins = [NOTHING] * len(consts) + _origins(freed, operands)
    found = propagate(jaxpr, origins)
    apart = propagate(jaxpr, origins, loops=True)[: results.num_leaves]
    varies = jax.tree.unflatten(results, [bool(origin & (BATCH | KEY)) for origin in apart])[1]
    again = [bool(origin & FREED) and not origin & BATCH for origin in found[results.num_leaves :]]
    recompute, used = partial_eval.dce_jaxpr(jaxpr, [False] * results.num_leaves + again)
    kept = tuple(None if free else value for value, free in zip(residuals, again, strict=True))
    return total, aux, varies, Pullback(kept, recompute, tuple(used), consts, made[-1].restore)


def _origins(freed: Collection[str], operands: tuple[Tensors, Tensors, Any, Any]) -> list[int]:
    """The origin of every leaf. Kept parameters and the rest are alive anyway: they count as nothing."""
    params, frozen, rest, batch = operands
    marked = [{path: FREED if path in freed else NOTHING for path in tensors} for tensors in (params, frozen)]
    keys = jax.tree.map(lambda leaf: KEY if is_key(leaf) else NOTHING, rest)
    tree = (*marked, keys, jax.tree.map(lambda _: BATCH, batch))
    return jax.tree.leaves(tree)
