"""The state of an optimizer over single parameters, kept in flat buffers.

Comes in: the state that the optimizer has over logical parameters, shapes only. Goes out: `StateSpec`, which says where
each leaf of it is kept. A tree like that of the parameters is a *column*, one leaf a parameter:

- leaves of the parameters' shapes lie in buffers, each where its parameter lies. Columns that have no parameter in
  common, such as the moments of two labels, share one buffer, so that labels cost no memory;
- smaller leaves, such as one number a parameter or the sums of rows, lie in one small vector a buffer, which every
  device has whole. So do leaves of the parameters' shapes where a buffer would hold little else than padding, such as
  the second moments of the vectors in Adafactor.

All other leaves are as they are.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax

from vescale_layouts import DBuffer
from vescale_planner import Faults

from ._per_parameter_nodes import Dims, Home
from ._per_parameter_target import Buffer, Target

# A buffer of which less than this part would be used is none.
_SMALL_PART = 16


@jax.tree_util.register_pytree_with_keys_class
class Columns:
    """State by parameter that is not just one buffer a group: a pytree node.

    Arguments:

    - `shards`: for each column of leaves like the parameters, buffers by unit and group; those that another column
      holds as well are left out.
    - `parts`: for each column of smaller leaves, vectors by unit and group.
    - `names`: static: for each column of smaller leaves the parameters in it with their shapes, by unit and group.
    """

    __slots__ = ("names", "parts", "shards")

    def __init__(self, shards: Sequence[Any], parts: Sequence[Any], names: "Names") -> None:
        self.shards = tuple(shards)
        self.parts = tuple(parts)
        self.names = names

    def tensors(self) -> tuple[dict[str, Any], ...]:
        """The smaller leaves by the parameter's path, for each column of them; can be traced."""
        found: list[dict[str, Any]] = []
        for column, names in zip(self.parts, self.names, strict=True):
            leaves: dict[str, Any] = {}
            for unit, group, members in names:
                end = 0
                for path, shape in members:
                    size = math.prod(shape)
                    leaves[path] = column[unit][group][end : end + size].reshape(shape)
                    end += size
            found.append(leaves)
        return tuple(found)

    def tree_flatten_with_keys(self) -> tuple[tuple[tuple[Any, Any], ...], "Names"]:
        """The buffers and the vectors; names are static."""
        key = jax.tree_util.GetAttrKey
        return ((key("shards"), self.shards), (key("parts"), self.parts)), self.names

    def tree_flatten(self) -> tuple[tuple[Any, Any], "Names"]:
        """The buffers and the vectors; names are static."""
        return (self.shards, self.parts), self.names

    @classmethod
    def tree_unflatten(cls, names: "Names", children: Sequence[Any]) -> "Columns":
        """Puts any leaves back: a pytree node may not judge what `jax.tree.map` made."""
        new = object.__new__(cls)
        new.shards, new.parts, new.names = children[0], children[1], names
        return new

    def __repr__(self) -> str:
        return f"Columns({len(self.shards)} of buffers, {len(self.names)} of vectors)"


Names: TypeAlias = tuple[tuple[tuple[str, str, tuple[tuple[str, tuple[int, ...]], ...]], ...], ...]


@dataclass(frozen=True)
class Cell:
    """One array of the state: what a column, or several that share it, has in one buffer.

    Attributes:

    - `buffer`: its number; -1 for leaves that belong to no parameter.
    - `shard`: whether it is cut as the buffer is, or a small vector.
    - `dtype`: of the array.
    - `leaves`: for each parameter, by number in slot order, the leaf of the logical state.
    - `shapes`: of the leaves.
    - `kept`: of vectors: which dims of the parameter each leaf has; None where its shape does not tell.
    """

    buffer: int
    shard: bool
    dtype: Any
    leaves: Mapping[int, int]
    shapes: Mapping[int, tuple[int, ...]]
    kept: Mapping[int, Dims | None]


@dataclass(frozen=True)
class StateSpec:
    """Where the state is kept.

    Attributes:

    - `logical`: the state over logical parameters, shapes only.
    - `treedef`: of it, with one leaf for each column node.
    - `entries`: for each leaf of it the numbers of its cells: one for a leaf that belongs to no parameter, else a list
      for each column of shards and one for each column of parts.
    - `cells`: all arrays.
    - `buffers`: of the model.
    """

    logical: Any

    treedef: Any
    entries: tuple[Any, ...]
    cells: tuple[Cell, ...]
    buffers: tuple[Buffer, ...]

    def pack(self, arrays: Sequence[Any]) -> Any:
        """The state, for arrays in the order of `cells`."""
        return self.treedef.unflatten([self._entry(entry, arrays) for entry in self.entries])

    def unpack(self, state: Any) -> list[Any]:
        """The arrays of a state, in the order of `cells`."""
        arrays: list[Any] = [None] * len(self.cells)
        for entry, node in zip(self.entries, self.treedef.flatten_up_to(state), strict=True):
            if isinstance(entry, int):
                arrays[entry] = node
                continue
            shards, parts = entry
            columns = (node.shards, node.parts) if _is_several(entry) else ((node,), ())
            for numbers, column in zip((*shards, *parts), itertools.chain(*columns), strict=True):
                for number in numbers:
                    buffer = self.buffers[self.cells[number].buffer]
                    leaf = column[buffer.unit][buffer.group]
                    arrays[number] = leaf.data if isinstance(leaf, DBuffer) else leaf
        return arrays

    def _entry(self, entry: Any, arrays: Sequence[Any]) -> Any:
        if isinstance(entry, int):
            return arrays[entry]
        shards, parts = entry
        if not _is_several(entry):
            return self._column(shards[0], arrays)
        names = tuple(tuple(self._names(number) for number in numbers) for numbers in parts)
        return Columns([self._column(x, arrays) for x in shards], [self._column(x, arrays) for x in parts], names)

    def _column(self, numbers: Sequence[int], arrays: Sequence[Any]) -> Any:
        column: dict[str, dict[str, Any]] = {}
        for number in numbers:
            cell = self.cells[number]
            buffer = self.buffers[cell.buffer]
            leaf = DBuffer(arrays[number], buffer.layout) if cell.shard else arrays[number]
            column.setdefault(buffer.unit, {})[buffer.group] = leaf
        return column

    def _names(self, number: int) -> tuple[str, str, tuple[tuple[str, tuple[int, ...]], ...]]:
        cell = self.cells[number]
        buffer = self.buffers[cell.buffer]
        slots = buffer.layout.plan.ordered_slots
        return (
            buffer.unit,
            buffer.group,
            tuple((buffer.prefix + slots[i].name, cell.shapes[i]) for i in sorted(cell.leaves)),
        )


def _is_several(entry: Any) -> bool:
    shards, parts = entry
    return len(shards) != 1 or bool(parts)


def state_spec(tx: Any, target: Target) -> StateSpec:
    """Finds the columns of an optimizer's state and where to keep them.

    Arguments:

    - `tx`: the optimizer.
    - `target`: its parameters.

    Raises: `ValueError` that names the parameters whose state has a shape that is not made of their dims.
    """
    logical = jax.eval_shape(tx.init, target.tree)
    leaves, whole = jax.tree.flatten(logical)
    numbered = whole.unflatten(range(len(leaves)))
    places = jax.tree.unflatten(jax.tree.structure(target.tree), [Place(home) for home in target.homes])
    nodes, treedef = jax.tree.flatten(numbered, is_leaf=lambda node: _is_column(places, node))
    faults = Faults("per_parameter")
    cells: list[Cell] = []
    entries: list[Any] = []
    small: list[tuple[Any, list[Cell]]] = []
    for node in nodes:
        if not _is_column(places, node):
            leaf = leaves[node]
            entries.append(len(cells))
            cells.append(Cell(-1, False, leaf.dtype, {0: node}, {0: leaf.shape}, {}))
            continue
        columns: dict[tuple[str, bool], dict[Home, int]] = {}
        for home, subtree in _pairs(places, node):
            for path, number in jax.tree_util.tree_leaves_with_path(subtree):
                like = leaves[number].shape == target.shapes[home]
                columns.setdefault((jax.tree_util.keystr(path), like), {})[home] = number
        entry: tuple[list[list[int]], list[list[int]]] = ([], [])
        for (_, like), column in columns.items():
            found = _cells(column, like, leaves, target, faults)
            few = [cell for cell in found if like and _is_small(cell, target)]
            mine = [_place(cell, cells) for cell in found if cell not in few]
            entry[0 if like else 1].append([number for number in mine if number is not None])
            small.append((entry, few))
        entries.append(entry)
    faults.raise_if_any()
    # The rest goes where there is room, when all else has a place, or is kept whole by every device.
    for entry, few in small:
        numbers = [_place(cell, cells, replace(cell, shard=False)) for cell in few]
        if any(number is not None for number in numbers):
            entry[1].append([number for number in numbers if number is not None])
    return StateSpec(logical, treedef, tuple(entries), tuple(cells), target.buffers)


def column_homes(target: Target, logical: Any) -> list[tuple[tuple[Any, ...], tuple[Home, ...]]]:
    """For each column of a state: its path, and the parameters that have a leaf in it.

    Arguments:

    - `target`: the parameters.
    - `logical`: the state over them, shapes only.
    """
    leaves, whole = jax.tree.flatten(logical)
    places = jax.tree.unflatten(jax.tree.structure(target.tree), [Place(home) for home in target.homes])
    nodes = jax.tree_util.tree_leaves_with_path(
        whole.unflatten(range(len(leaves))), is_leaf=lambda node: _is_column(places, node)
    )
    columns = [(path, node) for path, node in nodes if _is_column(places, node)]
    return [
        (path, tuple(home for home, held in _pairs(places, node) if jax.tree.leaves(held))) for path, node in columns
    ]


def _cells(
    column: Mapping[Home, int],
    like: bool,
    leaves: Sequence[Any],
    target: Target,
    faults: Faults,
) -> list[Cell]:
    """A column, a cell for each buffer and dtype."""
    grouped: dict[tuple[int, Any], dict[int, int]] = {}
    for (buffer, tensor), number in column.items():
        grouped.setdefault((buffer, leaves[number].dtype), {})[tensor] = number
    if len({buffer for buffer, _ in grouped}) < len(grouped):
        want = "one dtype for all parameters of a buffer"
        faults.add(
            "tx", got="an optimizer with state of several dtypes", want=want, change="give all of them one dtype"
        )
    found: list[Cell] = []
    for (buffer, dtype), numbers in grouped.items():
        kept: dict[int, Dims | None] = {}
        for tensor, number in numbers.items() if not like else ():
            choices = _dims_of(leaves[number].shape, target.shapes[buffer, tensor])
            if not choices:
                got = f"state of shape {leaves[number].shape} for a parameter of shape {target.shapes[buffer, tensor]}"
                want, change = "state over some dims of the parameter", "choose another optimizer"
                faults.add(target.paths[buffer, tensor], got=got, want=want, change=change)
            kept[tensor] = choices[0] if len(choices) == 1 else None
        if like:
            kept = {i: tuple(dim for dim, size in enumerate(leaves[k].shape) if size != 1) for i, k in numbers.items()}
        sizes = {tensor: leaves[number].shape for tensor, number in numbers.items()}
        found.append(Cell(buffer, like, dtype, numbers, sizes, kept))
    return found


def _dims_of(shape: Dims, own: Dims) -> list[Dims]:
    """Which dims of a parameter a smaller array may stand for, in ascending order."""
    if math.prod(shape) == 1:
        return [()]
    real = [size for size in shape if size != 1]
    candidates = [k for k, size in enumerate(own) if size != 1]
    found = itertools.combinations(candidates, len(real))
    return [dims for dims in found if [own[dim] for dim in dims] == real]


def _place(cell: Cell, cells: list[Cell], otherwise: Cell | None = None) -> int | None:
    """Puts a cell into one that has room, or adds it, perhaps in another form; the number of a new one."""
    for number, other in enumerate(cells):
        if cell.shard and _has_room(other, cell):
            shapes = {**other.shapes, **cell.shapes}
            cells[number] = replace(other, leaves={**other.leaves, **cell.leaves}, shapes=shapes)
            return None
    cells.append(otherwise or cell)
    return len(cells) - 1


def _is_small(cell: Cell, target: Target) -> bool:
    """Whether a buffer would hold next to nothing: on any mesh, the same."""
    layout = target.buffers[cell.buffer].layout
    held = sum(math.prod(shape) for shape in cell.shapes.values())
    plain = all(layout.plan.ordered_slots[tensor].storage != "tiled" for tensor in cell.leaves)
    whole = math.prod(layout.stack) * layout.plan.tensor_size
    return plain and jnp.issubdtype(cell.dtype, jnp.floating) and held * _SMALL_PART <= whole


def _has_room(other: Cell, cell: Cell) -> bool:
    same = (other.buffer, other.shard, np.dtype(other.dtype)) == (cell.buffer, cell.shard, np.dtype(cell.dtype))
    return same and not other.leaves.keys() & cell.leaves.keys()


def _children(node: Any) -> tuple[list[Any], Any]:
    """One level of a pytree."""
    return jax.tree.flatten(node, is_leaf=lambda x: x is not node)


def _is_column(tree: Any, node: Any) -> bool:
    """Whether a node has the structure of the parameters' tree, and nothing in it has."""
    if not _is_like(tree, node, top=True):
        return False
    inner = [child for child in _children(node)[0] if child is not node]
    return not any(_is_column(tree, x) for child in inner for x in _inside(child))


def _inside(node: Any) -> list[Any]:
    """A node and all nodes below it."""
    found = [node]
    for child in _children(node)[0]:
        if child is not node:
            found += _inside(child)
    return found


def _is_like(tree: Any, node: Any, top: bool = False) -> bool:
    if isinstance(node, optax.MaskedNode):
        return not top
    if _is_home(tree):
        return not top or isinstance(node, int)
    mine, structure = _children(tree)
    theirs, other = _children(node)
    return structure == other and all(_is_like(a, b) for a, b in zip(mine, theirs, strict=True))


def _pairs(tree: Any, node: Any) -> list[tuple[Home, Any]]:
    """Parameters with what a column has for each of them."""
    if isinstance(node, optax.MaskedNode):
        return []
    if _is_home(tree):
        return [(tree.home, node)]
    return [pair for a, b in zip(_children(tree)[0], _children(node)[0], strict=True) for pair in _pairs(a, b)]


def _is_home(node: Any) -> bool:
    return isinstance(node, Place)


@dataclass(frozen=True)
class Place:
    """A leaf in the tree of parameters that says which parameter it is."""

    home: Home
