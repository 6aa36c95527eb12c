"""The graph of an update: what an optimizer does to single parameters, written once for all parameters of a buffer.

Comes in: the jaxpr of an optimizer's update, traced over the logical parameters. Goes out: a graph with far fewer nodes
(`_per_parameter_nodes.py`). Equations that do the same to several parameters of a buffer become one node, with these
parameters for members; what differs between them are numbers (a multiplier, the size in a mean) and dims. So the nodes
grow with the kinds of parameters and not with the parameters.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.extend.core import Jaxpr, Primitive, Var
from jax.extend.core import Literal as Constant

from ._per_parameter_nodes import Dims, Home, Member, Node, Nodes, Number, Operand, Store, Value, regroup

_CALLS = {
    name: key
    for key, names in {
        "jaxpr": ("jit", "pjit", "remat", "remat2", "checkpoint"),
        "call_jaxpr": ("closed_call", "core_call", "custom_jvp_call", "custom_vjp_call"),
    }.items()
    for name in names
}
_ELEMENTWISE_NAMES = """
abs acos acosh add add_any and asin asinh atan atan2 atanh cbrt ceil clamp conj
convert_element_type copy copy_p cos cosh digamma div eq erf erf_inv erfc exp exp2 expm1 floor ge gt imag integer_pow
is_finite le lgamma log log1p logistic lt max min mul ne neg nextafter not or population_count pow real
reduce_precision rem round rsqrt select_n shift_left shift_right_arithmetic shift_right_logical sign sin sinh sqrt
square sub tan tanh xor
"""
_ELEMENTWISE = frozenset(_ELEMENTWISE_NAMES.split())
_REDUCTIONS = {"reduce_sum": "sum", "reduce_max": "max", "reduce_min": "min"}
_MOVES = frozenset(["broadcast_in_dim", "copy", "copy_p", "reshape", "squeeze", "transpose", "stop_gradient"])
_REDUCES_SAME = ("reduce_max", "reduce_min", "reduce_and", "reduce_or")
_SMALL = 4096


class Graph:
    """Makes the graph of a jaxpr.

    Arguments:

    - `shapes`: of every parameter, by home.
    - `paths`: of every parameter, by home, for messages.

    `faults` tells, by path, why an update of a parameter is not supported.
    """

    def __init__(self, shapes: Mapping[Home, tuple[int, ...]], paths: Mapping[Home, str]) -> None:
        self.shapes = shapes
        self.paths = paths
        self.nodes = Nodes()
        self.faults: dict[str, str] = {}

    def input_whole(self, position: int, shape: tuple[int, ...], dtype: Any) -> Value:
        """A value that is given and belongs to no parameter."""
        return Value(self.nodes.whole("input", (), position, dtype), splat=not shape)

    def input(self, position: int, home: Home, axes: tuple[Dims, ...] | None, store: Store, dtype: Any) -> Value:
        """A value that is given; `position` is the same for all members of a node."""
        kept = tuple(sorted({dim for dims in axes or () for dim in dims}))
        node = self.nodes.member(("input", store, position), home, store, (), position, dtype, Member(kept))
        return Value(node, home, axes)

    def run(self, jaxpr: Jaxpr, constants: Sequence[Any], arguments: Sequence[Operand]) -> list[Operand]:
        """The outputs of a jaxpr, for arguments that are values already."""
        known: dict[Var, Operand] = {}
        for v, constant in zip(jaxpr.constvars, constants, strict=True):
            known[v] = self._constant(constant)
        known.update(zip(jaxpr.invars, arguments, strict=True))

        def read(v: Any) -> Operand:
            return Number(v.val, _aval(v).dtype) if isinstance(v, Constant) else known[v]

        for eqn in jaxpr.eqns:
            for v, x in zip(eqn.outvars, self._equation(eqn, [read(v) for v in eqn.invars]), strict=True):
                scalar = isinstance(x, Value) and x.home is None and x.node is not None and not _aval(v).shape
                known[v] = Value(x.node, splat=True) if isinstance(x, Value) and scalar else x
        return [read(v) for v in jaxpr.outvars]

    def whole(self, operand: Operand, shape: tuple[int, ...]) -> Value:
        """A value as one that belongs to no parameter; without a node if it is too large for that."""
        if isinstance(operand, Number):
            value = np.asarray(operand.value, operand.dtype)
            return Value(self.nodes.whole("constant", (), value, operand.dtype, value.tobytes()), splat=True)
        if operand.home is None or operand.node is None:
            return operand
        node, axes = operand.node, operand.axes
        own = self.shapes[operand.home]
        if axes is None or (node.store == "shard" and self._size(operand) != 1):
            self.fault(operand.home, "mixes its elements with those of other parameters")
            return Value(None)
        tensor = operand.home[1]
        if node.store == "shard":
            # A parameter of one element.
            key = "reduce", "sum", node
            node = self.nodes.member(key, operand.home, "part", (node,), "sum", node.dtype, Member(()))
        if self._size(operand) == 1:
            return Value(self.nodes.whole("pick", (node,), (tensor, None, None, None), node.dtype), splat=True)
        sizes = tuple(own[dim] for dim in node.members[tensor].kept)
        order = tuple(node.members[tensor].kept.index(dim) for dims in axes for dim in dims)
        lengths = tuple(math.prod(own[dim] for dim in dims) for dims in axes)
        return self.shaped(Value(self.nodes.whole("pick", (node,), (tensor, sizes, order, lengths), node.dtype)), shape)

    def part(self, x: Value, kept: Dims) -> Value:
        """A value that is spread over shards as one that every device has, with the dims that are not of size 1."""
        assert x.node is not None
        assert x.home is not None
        key = "reduce", "sum", x.node
        return Value(
            self.nodes.member(key, x.home, "part", (x.node,), "sum", x.node.dtype, Member(kept)), x.home, x.axes
        )

    def _equation(self, eqn: Any, operands: list[Operand]) -> list[Operand]:
        name = eqn.primitive.name
        if any(isinstance(x, Value) and x.node is None for x in operands):
            return [Value(None, next((x.home for x in operands if isinstance(x, Value) and x.home), None))] * len(
                eqn.outvars
            )
        if name in _CALLS and (inner := eqn.params.get(_CALLS[name])) is not None:
            return self.run(getattr(inner, "jaxpr", inner), getattr(inner, "consts", ()), operands)
        if name == "cond" and not self._fits_whole(eqn, operands):
            return self._branches(eqn, operands)
        if name == "optimization_barrier":
            return operands
        shapes = [v.aval.shape for v in eqn.invars]
        operands = self._one_home(name, operands, shapes)
        if any(isinstance(x, Value) and x.node is None for x in operands):
            return [Value(None)] * len(eqn.outvars)
        home = next((x.home for x in operands if isinstance(x, Value) and x.home), None)
        out = eqn.outvars[0].aval
        if name in _MOVES and (home is not None or self._is_splat(operands[0])):
            return [self._move(name, operands[0], eqn, out)]
        if name in _ELEMENTWISE and (home is not None or all(map(self._is_splat, operands))):
            return [self._elementwise(eqn.primitive, eqn.params, operands, out.shape, out.dtype)]
        if name.startswith("reduce_") and name != "reduce_precision" and len(operands) == 1:
            found = self._reduce(name, operands[0], tuple(map(int, eqn.params.get("axes", ()))), shapes[0])
            if found is not None:
                return [found]
        if name == "dot_general" and home is not None:
            found = self._dot(eqn, operands, shapes)
            if found is not None:
                return [found]
        return self._bind(eqn, operands, shapes)

    def _fits_whole(self, eqn: Any, operands: Sequence[Operand]) -> bool:
        """Whether nothing in it belongs to a parameter, nor is as large as one may be."""
        if any(isinstance(x, Value) and x.home is not None for x in operands):
            return False
        return all(math.prod(v.aval.shape) <= _SMALL for v in [*eqn.invars, *eqn.outvars])

    def _one_home(self, name: str, operands: list[Operand], shapes: Sequence[tuple[int, ...]]) -> list[Operand]:
        """The operands, of one parameter at most: single numbers of others are taken for wholes."""
        homes = {x.home for x in operands if isinstance(x, Value) and x.home is not None}
        # One more addend of a sum over parameters.
        more = name in ("add", "add_any") and not any(shapes) and any(map(_is_sum, operands))
        if len(homes) < 2 and not more:
            return operands
        large = [
            x.home
            for x in operands
            if isinstance(x, Value) and x.home and x.node and x.node.store == "shard" and self._size(x) != 1
        ]
        stays = large[0] if name != "concatenate" and len(set(large)) == 1 else None
        return [
            self.whole(x, shape) if isinstance(x, Value) and x.home not in (None, stays) else x
            for x, shape in zip(operands, shapes, strict=True)
        ]

    def _elementwise(
        self,
        primitive: Primitive,
        params: Mapping[str, Any],
        operands: Sequence[Operand],
        shape: tuple[int, ...],
        dtype: Any,
    ) -> Value:
        home = next((x.home for x in operands if isinstance(x, Value) and x.home), None)
        detail = primitive, dict(params)
        described = primitive.name, str(sorted(params.items(), key=lambda item: item[0]))
        if home is None:
            nodes = tuple(self.whole(x, ()).node for x in operands)
            adds = primitive.name in ("add", "add_any") and any(x and x.op in ("pick", "total") for x in nodes)
            if adds and not shape:
                return Value(self.nodes.whole("total", nodes, None, dtype), splat=True)
            return Value(self.nodes.whole("apply", nodes, detail, dtype, described), splat=True)
        axes: list[Dims] = [()] * len(shape)
        known = True
        for x in operands:
            if not isinstance(x, Value) or x.home is None:
                continue
            if x.axes is None:
                known = False
                continue
            for k, dims in enumerate(x.axes):
                if dims and axes[k] and axes[k] != dims:
                    return self.fault(home, "combines its rows with its columns")
                axes[k] = axes[k] or dims
        known = known or any(axes)
        own = self.shapes[home]
        everything = tuple(range(len(own)))
        kept = tuple(sorted({dim for dims in axes for dim in dims}))
        nodes_: list[Node | None] = []
        numbers: list[Any] = []
        for x in operands:
            if isinstance(x, Number):
                nodes_.append(None)
                numbers.append(np.asarray(x.value, x.dtype)[()])
            elif x.home is None and not x.splat:
                return self.fault(home, "takes an array of its shape from elsewhere (such as random numbers)")
            else:
                nodes_.append(x.node)
        shard = any(x is not None and x.store == "shard" for x in nodes_) or (bool(own) and kept == everything)
        member = Member(everything if shard else kept, tuple(numbers))
        store: Store = "shard" if shard else "part"
        types = tuple(str(x.dtype) for x in operands if isinstance(x, Number))
        key = "apply", store, described, tuple(nodes_), types
        node = self.nodes.member(key, home, store, tuple(nodes_), detail, dtype, member)
        return Value(node, home, tuple(axes) if known else None)

    def _by(self, function: Callable[..., Any], operands: Sequence[Operand], shape: tuple[int, ...]) -> Value:
        """A function of scalars that is one primitive, element by element; operands of its result's dtype may stay."""
        dtypes = [x.dtype if isinstance(x, Number) else x.node.dtype if x.node else jnp.float32 for x in operands]
        eqns = jax.make_jaxpr(function)(*(jax.ShapeDtypeStruct((), dtype) for dtype in dtypes)).jaxpr.eqns
        (first,) = eqns or (None,)
        if first is None or any(isinstance(x, Value) and x.node is None for x in operands):
            return next(x for x in operands if isinstance(x, Value))
        return self._elementwise(first.primitive, first.params, operands, shape, _aval(first.outvars[0]).dtype)

    def _move(self, name: str, x: Operand, eqn: Any, out: Any) -> Operand:
        """Copies, reshapes and the like: another view of the same node."""
        if isinstance(x, Number) or x.home is None or x.axes is None or name.startswith(("copy", "stop")):
            return x
        own, axes, params = self.shapes[x.home], x.axes, eqn.params
        if name == "broadcast_in_dim":
            places = {place: k for k, place in enumerate(params["broadcast_dimensions"])}
            old = eqn.invars[0].aval.shape
            moved = tuple(
                axes[places[k]] if k in places and old[places[k]] == size else () for k, size in enumerate(out.shape)
            )
        elif name == "squeeze":
            moved = tuple(dims for k, dims in enumerate(axes) if k not in params["dimensions"])
        elif name == "transpose":
            moved = tuple(axes[k] for k in params["permutation"])
        else:
            moved = regroup(axes, eqn.invars[0].aval.shape, out.shape, own)
            if moved is None:
                return self.fault(x.home, "reshapes it in a way that splits a dim")
        return Value(x.node, x.home, moved)

    def _reduce(self, name: str, x: Operand, reduced: Sequence[int], shape: tuple[int, ...]) -> Value | None:
        """A reduction over some dims; None where it has to be bound."""
        if isinstance(x, Number) or (x.home is None and x.splat):
            x = self.whole(x, shape)
            count = math.prod(shape[k] for k in reduced)
            return self._times(x, count) if name == "reduce_sum" else x if name in _REDUCES_SAME else None
        if x.home is None or x.node is None:
            return None
        if x.axes is None:
            return x
        if name in ("reduce_and", "reduce_or"):
            # Counted, so that it goes with the sums.
            if name == "reduce_and":
                x = self._by(lax.bitwise_not, [x], shape)
            x = self._by(lambda x: lax.convert_element_type(x, jnp.float32), [x], shape)
            found = self._reduce("reduce_sum", x, reduced, shape)
            if found is None or found.node is None:
                return found
            left = tuple(size for k, size in enumerate(shape) if k not in reduced)
            compare = lax.eq if name == "reduce_and" else lax.ne
            return self._by(compare, [found, Number(0.0, np.dtype(np.float32))], left)
        if name not in _REDUCTIONS or x.home is None or x.axes is None or x.node is None:
            return None
        left = tuple(dims for k, dims in enumerate(x.axes) if k not in reduced)
        gone = {dim for k in reduced for dim in x.axes[k]}
        found = x.node
        if gone:
            kept = tuple(sorted({dim for dims in left for dim in dims}))
            reducer = _REDUCTIONS[name]
            key = "reduce", reducer, x.node
            found = self.nodes.member(key, x.home, "part", (x.node,), reducer, x.node.dtype, Member(kept))
        count = math.prod(shape[k] for k in reduced if not x.axes[k])
        out = Value(found, x.home, left)
        if name != "reduce_sum" or count == 1:
            return out
        return self._times(out, count, tuple(size for k, size in enumerate(shape) if k not in reduced))

    def _times(self, x: Value, count: int, shape: tuple[int, ...] = ()) -> Value:
        assert x.node is not None
        return self._by(lax.mul, [x, Number(count, x.node.dtype)], shape)

    def _dot(self, eqn: Any, operands: list[Operand], shapes: Sequence[tuple[int, ...]]) -> Value | None:
        """A scalar product of two arrays that lie alike: a product and a sum."""
        (left, right), batch = eqn.params["dimension_numbers"]
        rank = len(shapes[0])
        if any(batch) or tuple(left) != tuple(right) or len(left) != rank or shapes[0] != shapes[1]:
            return None
        dtype = eqn.outvars[0].aval.dtype
        cast = [self._by(lambda x: lax.convert_element_type(x, dtype), [x], shapes[0]) for x in operands]
        product = self._by(lax.mul, cast, shapes[0])
        return product if product.node is None else self._reduce("reduce_sum", product, tuple(range(rank)), shapes[0])

    def _branches(self, eqn: Any, operands: list[Operand]) -> list[Operand]:
        """A branch on a scalar: all branches, of which one is selected, element by element."""
        index, *operands = operands
        branches = [self.run(branch.jaxpr, branch.consts, operands) for branch in eqn.params["branches"]]
        kind = eqn.invars[0].aval.dtype
        if kind != jnp.bool_:
            last = Number(len(branches) - 1, kind)
            index = self._by(lax.min, [self._by(lax.max, [index, Number(0, kind)], ()), last], ())
            if len(branches) == 2:
                index = self._by(lax.ne, [index, Number(0, kind)], ())
        out: list[Operand] = []
        for v, *found in zip(eqn.outvars, *branches, strict=True):
            if all(x == found[0] for x in found):
                out.append(found[0])
                continue
            chosen = self._one_home("select_n", [index, *found], [(), *[v.aval.shape] * len(found)])
            bad = next((x for x in chosen if isinstance(x, Value) and x.node is None), None)
            if bad is not None:
                out.append(bad)
            elif all(not isinstance(x, Value) or x.home is None for x in chosen) and not all(
                map(self._is_splat, chosen)
            ):
                shaped = [self.shaped(self.whole(x, v.aval.shape), v.aval.shape).node for x in chosen[1:]]
                nodes = self.whole(chosen[0], ()).node, *shaped
                out.append(Value(self.nodes.whole("bind", nodes, (lax.select_n_p, {}, False), v.aval.dtype)))
            else:
                out.append(self._by(lax.select_n, chosen, v.aval.shape))
        return out

    def _bind(self, eqn: Any, operands: Sequence[Operand], shapes: Sequence[tuple[int, ...]]) -> list[Operand]:
        """Anything else, on small arrays that every device has."""
        home = next((x.home for x in operands if isinstance(x, Value) and x.home), None)
        for x in operands:
            if not isinstance(x, Value) or x.home is None or x.node is None:
                continue
            if x.axes is None:
                return [x] * len(eqn.outvars)
            if x.node.store == "shard" and self._size(x) > 1:
                self.fault(x.home, f"needs it whole ({eqn.primitive.name})")
                return [Value(None, home)] * len(eqn.outvars)
        wholes = [self.shaped(self.whole(x, shape), shape) for x, shape in zip(operands, shapes, strict=True)]
        if any(x.node is None for x in wholes):
            return [Value(None, home)] * len(eqn.outvars)
        several = eqn.primitive.multiple_results
        # What has a jaxpr inside is never taken for another: its constants do not show.
        plain = not any("axpr" in type(leaf).__name__ for leaf in jax.tree.leaves(list(eqn.params.values())))
        described = (eqn.primitive.name, str(sorted(eqn.params.items(), key=lambda item: item[0]))) if plain else None
        detail = eqn.primitive, eqn.params, several
        node = self.nodes.whole("bind", tuple(x.node for x in wholes), detail, eqn.outvars[0].aval.dtype, described)
        if not several:
            return [Value(node)]
        return [Value(self.nodes.whole("result", (node,), k, v.aval.dtype)) for k, v in enumerate(eqn.outvars)]

    def shaped(self, x: Value, shape: tuple[int, ...]) -> Value:
        """A whole with its real shape."""
        if not x.splat or x.node is None:
            return x
        return Value(self.nodes.whole("broadcast", (x.node,), shape, x.node.dtype)) if shape else Value(x.node)

    def _constant(self, constant: Any) -> Operand:
        key = jax.dtypes.issubdtype(constant.dtype, jax.dtypes.extended)
        if not isinstance(constant, Tracer) and np.shape(constant) == () and not key:
            return Number(np.asarray(constant)[()], constant.dtype)
        return Value(self.nodes.whole("constant", (), constant, constant.dtype, id(constant)))

    def _is_splat(self, x: Operand) -> bool:
        return isinstance(x, Number) or (x.home is None and x.splat)

    def _size(self, x: Value) -> int:
        """Elements of the parameter that a value stands for."""
        own = self.shapes[x.home] if x.home else ()
        return math.prod(own[dim] for dims in x.axes or () for dim in dims)

    def fault(self, home: Home, why: str) -> Value:
        """Notes why the update of a parameter is not supported."""
        self.faults.setdefault(self.paths[home], why)
        return Value(None, home)


def _is_sum(x: Operand) -> bool:
    return isinstance(x, Value) and x.home is None and x.node is not None and x.node.op in ("pick", "total")


def _aval(v: Any) -> Any:
    """The shape and the dtype of a variable."""
    return v.aval
