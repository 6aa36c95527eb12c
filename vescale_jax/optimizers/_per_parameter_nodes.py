"""Nodes: the steps of an optimizer's update, each for all parameters of a buffer at once.

A node has one of three stores:

- *shard*: an element for every element of the members; it will be an array like the local shard;
- *part*: for every member an array over some of its dims, the *kept* ones; none for a norm, the rows for a mean over
  columns. It will be a small vector, the same on every device;
- *whole*: what belongs to no parameter, such as a count or a global norm; it will be an array of its own shape.

A value of the jaxpr is a node seen from one parameter, with the dims of the parameter that each of its own dims stands
for; none where it is constant along a dim. So transposes, reshapes and broadcasts cost nothing.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import numpy as np

Store = Literal["shard", "part", "whole"]
Home: TypeAlias = tuple[int, int]
"""A parameter: the number of its buffer, and its own in slot order."""
Dims: TypeAlias = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Member:
    """What a node is for one parameter.

    Attributes:

    - `kept`: the parameter's dims that the node has, ascending.
    - `numbers`: in the place of the operands that are None.
    """

    kept: Dims
    numbers: tuple[Any, ...] = ()


@dataclass(eq=False, slots=True)
class Node:
    """One step of an update.

    Attributes:

    - `op`: `"input"`, `"constant"`, `"apply"` (a primitive, element by element), `"reduce"`, `"pick"` (one member's
      part as a whole), `"bind"` (a primitive on wholes) with `"result"`, or `"total"` (a sum of single numbers).
    - `store`: see the module.
    - `buffer`: whose members; -1 for wholes.
    - `operands`: nodes; None for a number of each member.
    - `detail`: of the op.
    - `dtype`: of the elements.
    - `number`: in the order of creation, operands first.
    - `members`: by number in slot order; empty for wholes.
    """

    op: str
    store: Store
    buffer: int
    operands: "tuple[Node | None, ...]"
    detail: Any
    dtype: Any
    number: int
    members: dict[int, Member] = field(default_factory=dict)

    def __repr__(self) -> str:
        return f"Node({self.number}: {self.op}, {self.store} of buffer {self.buffer}, {len(self.members)} members)"


@dataclass(frozen=True, slots=True)
class Value:
    """A variable of the jaxpr.

    Attributes:

    - `node`: None where something unsupported was met on the way.
    - `home`: the parameter it belongs to; None for wholes.
    - `axes`: for each dim the parameter's dims it stands for. None: not known yet, for state of an ambiguous shape.
    - `splat`: of a whole: whether the node is a scalar that stands for any shape.
    """

    node: Node | None
    home: Home | None = None
    axes: tuple[Dims, ...] | None = ()
    splat: bool = False


@dataclass(frozen=True, slots=True)
class Number:
    """A constant scalar, of whatever shape it is broadcast to."""

    value: Any
    dtype: Any


Operand: TypeAlias = Value | Number


class Nodes:
    """The nodes made so far, each once; `made` has them in the order of creation."""

    def __init__(self) -> None:
        self.made: list[Node] = []
        self._found: dict[Any, list[Node]] = {}

    def whole(self, op: str, operands: Iterable[Node | None], detail: Any, dtype: Any, described: Any = None) -> Node:
        """A node that belongs to no parameter; one that is `described`, or not bound, is never made twice."""
        node = Node(op, "whole", -1, tuple(operands), detail, dtype, len(self.made))
        if op == "bind" and described is None:
            self.made.append(node)
            return node
        key = op, node.operands, described if described is not None else detail, str(dtype)
        found = self._found.setdefault(key, [])
        if not found:
            found.append(node)
            self.made.append(node)
        return found[0]

    def member(
        self, key: Any, home: Home, store: Store, operands: Any, detail: Any, dtype: Any, member: Member
    ) -> Node:
        """The node of a key in which a parameter is, or can become, such a member."""
        buffer, tensor = home
        found = self._found.setdefault((buffer, str(dtype), *key), [])
        for node in found:
            held = node.members.get(tensor)
            if held is None or _equal(held, member):
                node.members[tensor] = member
                return node
        op = key[0]
        found.append(Node(op, store, buffer, operands, detail, dtype, len(self.made), {tensor: member}))
        self.made.append(found[-1])
        return found[-1]


def _equal(one: Member, other: Member) -> bool:
    pairs = zip(one.numbers, other.numbers, strict=True)
    return one.kept == other.kept and all(np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in pairs)


def regroup(
    axes: Sequence[Dims], old: Sequence[int], new: Sequence[int], own: Sequence[int]
) -> tuple[Dims, ...] | None:
    """The axes after a reshape; None if it splits a dim.

    Arguments:

    - `axes`: before it.
    - `old`, `new`: the shapes.
    - `own`: the parameter's shape.
    """
    atoms: list[tuple[Dims, int]] = []
    for dims, size in zip(axes, old, strict=True):
        atoms += [((dim,), own[dim]) for dim in dims if own[dim] != 1] if dims else [((), size)] if size != 1 else []
    found: list[Dims] = []
    for size in new:
        dims: Dims = ()
        got, mixed = 1, set[bool]()
        while got < size and atoms:
            more, length = atoms.pop(0)
            dims, got = dims + more, got * length
            mixed.add(bool(more))
        if got != size or len(mixed) > 1:
            return None
        found.append(dims)
    return tuple(found)
