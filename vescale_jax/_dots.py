"""Dots: gradients of matrices computed in the orientation in which they are packed.

Comes in: the traced backward pass. Goes out: the same computation, in which no gradient is the transpose of a product.

Autodiff computes the gradient of a kernel (in, out) as the product (out, in) and transposes it. A gradient that goes on
into a flat buffer has to be laid out as the kernel is; XLA folds the transpose into the product, after it has laid out
the operands for the other orientation, and on CPU pays a slower product or a copy. The transpose of a product is the
product with its operands exchanged, so it is exchanged here, before XLA chooses.
"""

from typing import Any

from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var


def untranspose(jaxpr: Jaxpr) -> Jaxpr:
    """Replaces every transpose of a product that exchanges the product's two sides.

    Arguments:

    - `jaxpr`: a traced computation; those nested in it are treated alike.
    """
    producers: dict[Var, JaxprEqn] = {}
    eqns: list[JaxprEqn] = []
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "transpose" and not isinstance(eqn.invars[0], Literal):
            product = producers.get(eqn.invars[0])
            if product is not None and _exchanges(product, eqn.params["permutation"]):
                eqn = _exchanged(product, eqn)
        elif eqn.primitive.name == "dot_general":
            producers[eqn.outvars[0]] = eqn
        else:
            eqn = _nested(eqn)
        eqns.append(eqn)
    return jaxpr.replace(eqns=eqns)


def _exchanges(product: JaxprEqn, permutation: tuple[int, ...]) -> bool:
    """Whether a permutation of the product's dims puts those of the right side before those of the left."""
    (left, _), (batch, _) = product.params["dimension_numbers"]
    ndim = len(permutation)
    free = len(getattr(product.invars[0].aval, "shape", ())) - len(left) - len(batch)
    start = len(batch)
    return permutation == (*range(start), *range(start + free, ndim), *range(start, start + free))


def _exchanged(product: JaxprEqn, transpose: JaxprEqn) -> JaxprEqn:
    (contract, batch), precision = product.params["dimension_numbers"], product.params["precision"]
    params = dict(
        product.params,
        dimension_numbers=(contract[::-1], batch[::-1]),
        precision=precision[::-1] if isinstance(precision, tuple) else precision,
    )
    return product.replace(invars=product.invars[::-1], outvars=transpose.outvars, params=params)


def _nested(eqn: JaxprEqn) -> JaxprEqn:
    changed: dict[str, Any] = {}
    for name, value in eqn.params.items():
        if isinstance(value, Jaxpr):
            changed[name] = untranspose(value)
        elif isinstance(getattr(value, "jaxpr", None), Jaxpr):
            changed[name] = value.replace(jaxpr=untranspose(value.jaxpr))
    return eqn.replace(params={**eqn.params, **changed}) if changed else eqn
