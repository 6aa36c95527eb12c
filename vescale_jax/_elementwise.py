"""Element-wise or not: whether an optimizer does to flat buffers what it does to the parameters themselves.

Comes in: an optax transformation and a sharded model. Goes out: nothing, or a `ValueError`. Buffers have one dim and
hold many parameters, so four kinds of optimizer would quietly do something else to them: those that choose
parameters by rank or name (weight-decay masks), those that reduce over one parameter (LAMB, adaptive clipping, Muon),
those whose state has a shape of its own (Adafactor), and those that draw random numbers for every element.

The update is traced twice, over the buffers and over the parameters, shapes only. For each parameter it has to use the
same inputs in the same element-wise operations as its buffer does, and reduce over all parameters or over none. Ours,
which take buffers alone, step aside (`_step_aside.py`), so that what is chained with them is checked. What else cannot
be traced over parameters, an optimizer made for buffers, is its maker's concern. `optimizers.per_parameter` runs most
of what is refused here.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
from jax.extend.core import Jaxpr, Literal, Var

from vescale_planner import Faults

from ._sharded import Buffers, is_buffer
from ._step_aside import aside

_INLINED = frozenset(["jit", "pjit", "closed_call", "core_call", "custom_jvp_call", "custom_vjp_call"])
_OPAQUE = frozenset(["cond", "while", "scan", "shard_map"])
_LAYOUT = frozenset(["broadcast_in_dim", "convert_element_type", "copy", "reshape", "squeeze", "transpose"])
_CHANGE = "run it on the parameters: tx = vs.optimizers.per_parameter(tx, model)"
_BESIDE = "run it alone on the parameters: tx = optax.chain(..., vs.optimizers.per_parameter(it, model), ...)"
_MIXING = ("reduce", "arg", "dot_general", "cum", "sort", "conv", "gather", "scatter", "top_k")


@dataclass(frozen=True)
class _Use:
    """What an update of one tensor was made of.

    Attributes:

    - `own`: which of its gradient and its parameter, element by element.
    - `reduced`: tensors that were reduced on the way.
    - `operations`: element-wise operations on it, with their constants.
    """

    own: frozenset[str]
    reduced: frozenset[str]
    operations: Counter[Any]


def check_elementwise(tx: Any, params: Buffers, what: str) -> None:
    """Refuses an optimizer that would do something else to buffers than to the parameters in them.

    Arguments:

    - `tx`: an optax transformation.
    - `params`: the trainable buffers, concrete or abstract.
    - `what`: the public name of the caller, for messages.

    Raises: `ValueError` that names every parameter which would be treated otherwise.
    """
    flat = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
    whole = jax.tree.map(_tensors, flat, is_leaf=is_buffer)
    try:
        with aside(True):
            whole_state, whole_uses, _ = _uses(tx, whole)
            flat_state, flat_uses, draws = _uses(tx, flat)
    except (AttributeError, KeyError, TypeError, ValueError):
        return
    faults = Faults(what)
    change = _change(tx, whole)
    want = "one that treats all parameters of a buffer alike, element by element"
    everything = frozenset(whole_uses)
    if draws:
        got = "an optimizer that draws random numbers for buffers, which are others than for parameters"
        faults.add("tx", got=got, want="one without noise", change="leave it out, or add it to the gradients yourself")
    for path, use in whole_uses.items() if flat_uses else ():
        fault = _difference(use, flat_uses[path.rsplit("'][", 1)[0] + "'].data"], everything)
        if fault:
            got = f"an optimizer that {fault}"
            faults.add(_readable(path), got=got, want=want, change=change)
    expanded = jax.tree.map(_tensors, flat_state, is_leaf=is_buffer)
    if not faults and (_odd_buffers(flat_state) or _described(whole_state) != _described(expanded)):
        got = "an optimizer whose state depends on single parameters (such as Adafactor or NovoGrad)"
        faults.add("tx", got=got, want=want, change=change)
    faults.raise_if_any()


def _change(tx: Any, whole: Any) -> str:
    """What to do about an optimizer that is refused; what is chained with one for buffers has to be wrapped alone."""
    try:
        jax.eval_shape(tx.init, whole)
    except (AttributeError, KeyError, TypeError, ValueError):
        return _BESIDE
    return _CHANGE


def _odd_buffers(state: Any) -> bool:
    """Whether some state belongs to a buffer and has not its size: one value for all its parameters."""
    nodes = [node for node in jax.tree.leaves(state, is_leaf=is_buffer) if is_buffer(node)]
    return any(leaf.shape != node.layout.buffer_shape for node in nodes for leaf in jax.tree.leaves(node.data))


def _tensors(node: Any) -> Any:
    """A buffer as a dict of its tensors, where it still has its size; what it holds otherwise, for each of them."""
    if not is_buffer(node):
        return node
    slots, data = node.layout.plan.slots, node.data
    if getattr(data, "shape", None) == node.layout.buffer_shape:
        stack = node.layout.stack
        return {name: jax.ShapeDtypeStruct((*stack, *slot.shape), data.dtype) for name, slot in slots.items()}
    return dict.fromkeys(slots, data)


def _described(state: Any) -> Any:
    leaves, treedef = jax.tree.flatten(state)
    return treedef, [(leaf.shape, leaf.dtype) for leaf in leaves]


def _uses(tx: Any, params: Any) -> tuple[Any, dict[str, _Use], bool]:
    """The optimizer's state, shapes only; how the update of each leaf of `params` is made, by key path; and whether
    arrays of random numbers are drawn.

    The second is empty where a loop or a branch takes several parameters and nothing can be told.
    """
    state = jax.eval_shape(tx.init, params)
    closed = jax.make_jaxpr(lambda grads, params, state: tx.update(grads, state, params)[0])(params, params, state)
    shapes = {jax.tree_util.keystr(path): leaf.shape for path, leaf in jax.tree_util.tree_flatten_with_path(params)[0]}
    draws = any(name == "random_bits" and out[0].aval.shape for name, _, out, _ in _flattened(closed.jaxpr, {}))
    return state, _uses_of(closed.jaxpr, shapes), draws


def _uses_of(jaxpr: Jaxpr, shapes: dict[str, tuple[int, ...]]) -> dict[str, _Use]:
    """How each output of an update is made; its inputs are the gradients, the parameters and the state."""
    names = list(shapes)
    own: dict[Var, dict[str, frozenset[str]]] = {}
    for kind, variables in (("gradient", jaxpr.invars), ("parameter", jaxpr.invars[len(names) :])):
        for name, v in zip(names, variables, strict=False):
            own[v] = {name: frozenset([kind])}
    reduced: dict[Var, frozenset[str]] = {}
    operations: dict[Var, Counter[Any]] = {}
    constants: dict[Var, str | None] = {}
    renamed: dict[Var, Any] = {}
    for primitive, invars, outvars, _ in _flattened(jaxpr, renamed):
        operands = [v for v in invars if not isinstance(v, Literal)]
        values = [str(v.val) if isinstance(v, Literal) else constants.get(v) for v in invars]
        # A constant is the same in any shape: scalars take it as it is, arrays broadcast it first.
        constants |= dict.fromkeys(outvars, values[0] if primitive in _LAYOUT and values else None)
        joined: dict[str, frozenset[str]] = {}
        for v in operands:
            for name, kinds in own.get(v, {}).items():
                joined[name] = joined.get(name, frozenset()) | kinds
        through = frozenset().union(*(reduced.get(v, frozenset()) for v in operands))
        done: Counter[Any] = Counter()
        for v in operands:
            done |= operations.get(v, Counter())
        if primitive in _OPAQUE and len(joined) > 1:
            return {}
        if primitive.startswith(_MIXING):
            through, joined, done = through | frozenset(joined), {}, Counter()
        elif len(joined) == 1 and primitive not in _LAYOUT and outvars[0].aval.shape == shapes[next(iter(joined))]:
            done = done + Counter([(primitive, tuple(value for value in values if value is not None))])
        for v in outvars:
            own[v], reduced[v], operations[v] = joined, through, done
    uses: dict[str, _Use] = {}
    for name, out in zip(names, jaxpr.outvars, strict=True):
        v = renamed.get(out, out) if isinstance(out, Var) else None
        uses[name] = _Use(
            own.get(v, {}).get(name, frozenset()) if v is not None else frozenset(),
            reduced.get(v, frozenset()) if v is not None else frozenset(),
            operations.get(v, Counter()) if v is not None else Counter(),
        )
    return uses


def _flattened(jaxpr: Jaxpr, renamed: dict[Var, Any]) -> Iterator[tuple[str, list[Any], list[Any], Any]]:
    """All equations, those of inner calls included; `renamed` maps variables of inner calls to those outside."""

    def outer(v: Any) -> Any:
        while isinstance(v, Var) and v in renamed:
            v = renamed[v]
        return v

    for eqn in jaxpr.eqns:
        inner = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr")) if eqn.primitive.name in _INLINED else None
        if inner is None:
            yield eqn.primitive.name, [outer(v) for v in eqn.invars], list(eqn.outvars), eqn.params
            continue
        inner = getattr(inner, "jaxpr", inner)
        # One inner computation may be called many times: its variables stand for the latest call.
        for v, given in zip(inner.invars, eqn.invars, strict=False):
            renamed[v] = outer(given)
        fresh = {id(v): v for e in inner.eqns for v in e.outvars}
        for v in fresh.values():
            renamed.pop(v, None)
        yield from _flattened(inner, renamed)
        for v, made in zip(eqn.outvars, inner.outvars, strict=True):
            yield "copy", [outer(made)], [v], {}


def _difference(use: _Use, buffer: _Use, everything: frozenset[str]) -> str | None:
    """In words, why an update of a parameter is not what its buffer gets; None if it is."""
    if use.reduced and use.reduced != everything:
        return "reduces over single parameters (such as LAMB, adaptive clipping or Muon)"
    if use.own != buffer.own or use.operations != buffer.operations:
        return "treats it differently from its buffer (such as a mask by rank or by name)"
    return None


def _readable(path: str) -> str:
    """`['root']['float32']['a/b']` as `root/a/b`."""
    unit, _, name = path.strip("[]'").split("']['")
    return name if unit == "root" or name.startswith(unit) else f"{unit}/{name}"
