"""Ways: which parameters an optimizer treats alike, and which label each has.

Comes in: the graph of an update, and the optimizer's state over logical parameters. Goes out: words for each parameter.

A mask is known by what it does: the updates of two parameters are made in one way if they are made by the same steps
with the same numbers. A label of `optax.multi_transform` is known by name where its state has a leaf for the parameter;
labels without such state, as those of plain SGD, leave no trace, nor do the names of masks.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from ._per_parameter_graph import Graph
from ._per_parameter_nodes import Home, Node, Value
from ._per_parameter_output import Wanted
from ._per_parameter_state import column_homes
from ._per_parameter_target import Target


def ways(target: Target, graph: Graph, updates: Sequence[Wanted], logical: Any) -> dict[str, str]:
    """Words such as `"label decayed, way 1 of 2"` for each parameter, by path.

    Arguments:

    - `target`: the parameters.
    - `graph`: of an update that was given parameters.
    - `updates`: for each buffer the values of its parameters.
    - `logical`: the state over logical parameters.
    """
    signs = _signs(graph, len(target.buffers))
    found: dict[Home, Any] = {}
    for want in updates:
        for tensor, value in want.values.items():
            home = want.buffer, tensor
            known = isinstance(value, Value) and value.node is not None
            found[home] = signs(value.node, tensor) if known else str(getattr(value, "value", value))
    order = list(dict.fromkeys(found[home] for home in target.homes))
    labels = _labels(target, logical)
    words = {home: f"way {order.index(found[home]) + 1} of {len(order)}" for home in target.homes}
    return {
        target.paths[home]: f"label {labels[home]}, {word}" if home in labels else word for home, word in words.items()
    }


def _signs(graph: Graph, buffers: int) -> Any:
    """A function of a node and a member: equal for nodes of different buffers that come about alike."""
    numbers: dict[Any, int] = {}
    known: dict[tuple[int, int], int] = {}

    def make(node: Node, tensor: int) -> int:
        if node.store == "whole":
            sign: Any = "whole", node.number
        elif node.op == "input":
            # Gradients come first, then parameters, then state, of which each buffer has arrays of its own.
            sign = "input", node.store, min(node.detail // buffers, 2)
        else:
            member = node.members[tensor]
            operands = tuple(known[x.number, tensor if x.members else -1] if x else None for x in node.operands)
            sign = (
                node.op,
                node.store,
                str(node.detail),
                operands,
                tuple(np.asarray(x).tobytes() for x in member.numbers),
            )
        return numbers.setdefault(sign, len(numbers))

    # Operands come before what is made of them.
    for node in graph.nodes.made:
        for tensor in node.members or (-1,):
            known[node.number, tensor] = make(node, tensor)
    return lambda node, tensor: known[node.number, tensor if node.members else -1]


def _labels(target: Target, logical: Any) -> Mapping[Home, str]:
    """The label of each parameter that has state of one."""
    found: dict[Home, str] = {}
    for path, homes in column_homes(target, logical):
        names = [getattr(key, "name", None) for key in path]
        if "inner_states" in names[:-1]:
            label = path[names.index("inner_states") + 1]
            found |= dict.fromkeys(homes, jax.tree_util.keystr((label,), simple=True))
    return found
