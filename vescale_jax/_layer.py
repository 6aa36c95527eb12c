"""Layer: one turn of a loop over layers, cut into its forward and its backward half.

Comes in: the body of a loop as a function of one layer's parameters, of what all turns share, of the carry, and of this
turn's slices. Goes out: two computations. The forward half returns what the body returns and what the backward half
cannot have otherwise: activations. What is made of parameters and of shared values alone is computed again, from
parameters that are gathered again; slices and shared values are there anyway. Activation checkpointing inside the body
keeps its meaning, since the body is differentiated as it is.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.core
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, Var
from jax.interpreters import partial_eval

from ._leaves import ArrayLeaves
from ._origins import BATCH, FREED, NOTHING, propagate


class Operands(NamedTuple):
    """What one turn is given, or something for each of it, such as its gradient.

    Attributes:

    - `tensors`: one layer's parameters.
    - `shared`: what is the same in all turns.
    - `carry`: what the turn before returned.
    - `slices`: this turn's part of what the loop goes along.
    """

    tensors: Sequence[Any]
    shared: Sequence[Any]
    carry: Sequence[Any]
    slices: Sequence[Any]

    @property
    def flat(self) -> list[Any]:
        """All of it, in order."""
        return [x for part in self for x in part]

    def like(self, flat: Sequence[Any]) -> "Operands":
        """A flat list, cut as this is."""
        values = iter(flat)
        return Operands(*[[next(values) for _ in part] for part in self])


@dataclass(frozen=True, eq=False)
class Layer:
    """The two halves of a turn; made by `Layer.of`.

    Attributes:

    - `forward_half`: of the operands; returns the body's outputs, then what has to be stored.
    - `wanted`: for which operands there is a gradient.
    - `active`: which outputs of the body have one.
    - `stored`: for each residual its place among what is stored; -1 if it is computed again.
    - `recompute`: computes those, of the operands that `used` selects.
    - `restore`: makes the linear backward function of all residuals.
    """

    forward_half: ClosedJaxpr
    wanted: Operands
    active: tuple[bool, ...]
    stored: tuple[int, ...]
    recompute: Jaxpr
    used: tuple[bool, ...]
    restore: Callable[[Sequence[Any]], Callable[[Any], Any]]

    @classmethod
    def of(cls, body: Callable[[Operands], Sequence[Any]], shapes: Operands, wanted: Operands) -> "Layer":
        """Cuts a body.

        Arguments:

        - `body`: a function of one turn's operands that returns the new carry and then the turn's results.
        - `shapes`: the shapes and dtypes of the operands.
        - `wanted`: bools, for which operands gradients are needed.
        """
        chosen = [i for i, want in enumerate(wanted.flat) if want]
        made: list[tuple[ArrayLeaves, tuple[bool, ...]]] = []

        def forward(*operands: Any) -> tuple[list[Any], list[Any]]:
            def active_outputs(values: Sequence[Any]) -> tuple[list[Any], list[Any]]:
                given = dict(zip(chosen, values, strict=True))
                outputs = list(body(shapes.like([given.get(i, x) for i, x in enumerate(operands)])))
                return [x for x in outputs if is_float(x)], outputs

            _, pull, outputs = jax.vjp(active_outputs, [operands[i] for i in chosen], has_aux=True)
            made.append((ArrayLeaves.of(pull), tuple(map(is_float, outputs))))
            return outputs, made[-1][0].arrays(pull)

        closed, out = jax.make_jaxpr(forward, return_shape=True)(*shapes.flat)
        leaves, active = made[-1]
        jaxpr = closed.jaxpr.replace(constvars=[], invars=[*closed.jaxpr.constvars, *closed.jaxpr.invars])
        number = len(out[0])
        outputs, residuals = jaxpr.outvars[:number], jaxpr.outvars[number:]
        again = _computed_again(jaxpr, shapes, len(closed.consts), number)
        kept = list(dict.fromkeys(v for v, free in zip(residuals, again, strict=True) if not free))
        places = {v: i for i, v in enumerate(kept)}
        recompute, used = partial_eval.dce_jaxpr(jaxpr, [False] * number + again)
        half = closed.jaxpr.replace(outvars=[*outputs, *kept])
        return cls(
            forward_half=ClosedJaxpr(half, closed.consts),
            wanted=wanted,
            active=active,
            stored=tuple(-1 if free else places[v] for v, free in zip(residuals, again, strict=True)),
            recompute=recompute,
            used=tuple(used),
            restore=leaves.restore,
        )

    def forward(self, operands: Operands) -> tuple[list[Any], list[Any]]:
        """The body's outputs, and what to store for the backward half."""
        values = jax.core.eval_jaxpr(self.forward_half.jaxpr, self.forward_half.consts, *operands.flat)
        number = len(self.active)
        return values[:number], values[number:]

    def backward(self, operands: Operands, stored: Sequence[Any], cotangents: Sequence[Any]) -> Operands:
        """The gradients of one turn.

        Arguments:

        - `operands`: as given to `forward`; the carry is not read.
        - `stored`: what `forward` stored.
        - `cotangents`: of the active outputs, in order.

        Returns: a gradient for each wanted operand, None for the others.
        """
        consts = self.forward_half.consts
        chosen = [x for x, use in zip([*consts, *operands.flat], self.used, strict=True) if use]
        again = iter(jax.core.eval_jaxpr(self.recompute, (), *chosen))
        residuals = [next(again) if place < 0 else stored[place] for place in self.stored]
        (found,) = self.restore(residuals)(list(cotangents))
        gradients = iter(found)
        return self.wanted.like([next(gradients) if want else None for want in self.wanted.flat])


def is_float(x: Any) -> bool:
    """Whether an array can have a gradient."""
    return jnp.issubdtype(x.dtype, jnp.inexact)


def _computed_again(jaxpr: Jaxpr, shapes: Operands, consts: int, outputs: int) -> list[bool]:
    """Which residuals, the outputs after the first, need not be stored.

    Those are slices as they are, and what is made of parameters and shared values alone.
    """
    slices = set(jaxpr.invars[len(jaxpr.invars) - len(shapes.slices) :])
    origins = [NOTHING] * consts + shapes.like(
        [FREED] * len(shapes.tensors)
        + [NOTHING] * len(shapes.shared)
        + [BATCH] * (len(shapes.carry) + len(shapes.slices))
    ).flat
    found = propagate(jaxpr, origins)[outputs:]
    return [
        isinstance(v, Literal) or (isinstance(v, Var) and v in slices) or not origin & BATCH
        for v, origin in zip(jaxpr.outvars[outputs:], found, strict=True)
    ]
