"""Entries: what a training state consists of, by names that no mesh, plan, unit or grouping changes.

Comes in: a `TrainState` or a `Sharded` model, with or without values. Goes out: one entry for each of its arrays, in
the order of its leaves. A *field* is the path of a buffer without the names of unit and group: `model`,
`opt_state/0/mu` or `opt_state/moments/mean/codes`. A field and a parameter's path say what a piece of a buffer is,
wherever it lies.
"""

import itertools
import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import numpy as np

from vescale_jax._groups import Group, each_group
from vescale_jax._sharded import Sharded, check_sharded, is_buffer
from vescale_jax._train import TrainState
from vescale_jax.optimizers import Columns, Moment8bit, MuonMoments
from vescale_layouts import Batch, BlockArrays, BlockView, DBuffer, Layout

MODEL = "model"


@dataclass(frozen=True, slots=True)
class Tensors:
    """A buffer: tensors in the slots of a plan.

    Attributes:

    - `field`: see above.
    - `prefix`: what slot names lack to be parameter paths.
    - `layout`: where each tensor lies.
    - `array`: `layout.buffer_shape`, with or without values.
    - `names`: the tensors that mean something, in slot order. Others are in an optimizer's buffer only because the rest
      of their group is, such as vectors in Muon's momentum.
    """

    field: str
    prefix: str
    layout: Layout
    array: Any
    names: tuple[str, ...]

    @property
    def width(self) -> int:
        """Elements on one shard, of one layer of a stack."""
        return self.layout.shard_size


@dataclass(frozen=True, slots=True)
class Blocks:
    """One array of `BlockArrays`: something for every block of one shape.

    Attributes:

    - `field`, `prefix`: see `Tensors`.
    - `view`, `number`: whose blocks; the batch.
    - `array`: `(*stack, N * B, ...)`, with or without values.
    """

    field: str
    prefix: str
    view: BlockView
    number: int
    array: Any

    @property
    def layout(self) -> Layout:
        """Of the group."""
        return self.view.layout

    @property
    def batch(self) -> Batch:
        """The blocks."""
        return self.view.batches[self.number]

    @property
    def names(self) -> tuple[str, ...]:
        """The tensors that the blocks are of."""
        return self.batch.names

    @property
    def each(self) -> tuple[int, ...]:
        """The shape of what one block has."""
        return tuple(self.array.shape[len(self.layout.stack) + 1 :])

    @property
    def width(self) -> int:
        """Elements on one shard, of one layer of a stack."""
        return self.batch.count * math.prod(self.each)


@dataclass(frozen=True, slots=True)
class Value:
    """An array that every device has whole.

    Attributes:

    - `path`: where it is in the state.
    - `array`: an array, or a number.
    """

    path: str
    array: Any


@dataclass(frozen=True, slots=True)
class Parts:
    """A vector that every device has whole, made of something small for each of some parameters.

    Attributes:

    - `field`: see above.
    - `members`: parameter paths with the shape of what each has, in the vector's order, which is that of a plan.
    - `array`: the vector.
    """

    field: str
    members: tuple[tuple[str, tuple[int, ...]], ...]
    array: Any


Entry: TypeAlias = Tensors | Blocks | Value | Parts


def entries(state: Any, what: str) -> list[Entry]:
    """One entry for each leaf of a state, in the order of `jax.tree.leaves`.

    Arguments:

    - `state`: a `TrainState` or a `Sharded` model.
    - `what`: the public name of the caller, for messages.

    Raises: `TypeError` for anything else.
    """
    model = state.model if isinstance(state, TrainState) else state
    structure = check_sharded(model, what)
    groups = {(unit.name, group.name): group for unit, group in each_group(structure.units)}
    found: list[Entry] = []
    for path, node in jax.tree_util.tree_leaves_with_path(state, is_leaf=_is_node):
        names = _names(path)
        if isinstance(node, Sharded):
            found += _of_model(node)
            continue
        # In what an optimizer keeps for a group, one part says what another is for.
        inner = jax.tree_util.tree_leaves_with_path(node, is_leaf=lambda x: isinstance(x, DBuffer | BlockArrays))
        for more, leaf in inner:
            below = _names(more)
            if isinstance(node, Columns) and below[0] == "parts":
                found.append(_of_parts(leaf, names, below, node))
            else:
                found += _of_node(leaf, names + below, groups, _live(node, below))
    return found


def _names(path: tuple[Any, ...]) -> tuple[str, ...]:
    return tuple(jax.tree_util.keystr((key,), simple=True) for key in path)


def _live(node: Any, below: tuple[str, ...]) -> Collection[str] | None:
    """Which tensors of a buffer mean something; None: all."""
    if isinstance(node, Moment8bit) and below == ("codes",):
        return dict(node.scales.view.blocks)
    if isinstance(node, MuonMoments):
        return [ruling.name for ruling in node.rulings if (ruling.matrix is not None) == (below == ("momentum",))]
    return None


def _of_parts(leaf: Any, names: tuple[str, ...], below: tuple[str, ...], node: Columns) -> Parts:
    _, column, unit, group = below
    members = next(held for u, g, held in node.names[int(column)] if (u, g) == (unit, group))
    return Parts("/".join((*names, *below[:2])), members, leaf)


def _is_node(node: Any) -> bool:
    return isinstance(node, DBuffer | BlockArrays | Sharded | Moment8bit | MuonMoments | Columns)


def _of_model(model: Sharded) -> Iterator[Entry]:
    structure = model.structure
    groups = {(unit.name, group.name): group for unit, group in each_group(structure.units)}
    # Trainable and frozen parameters share a field, so that a parameter may be thawed between two runs.
    for buffers in (model.params, model.frozen):
        flat = jax.tree_util.tree_leaves_with_path(buffers, is_leaf=is_buffer)
        for path, buffer in flat:
            unit, group = (jax.tree_util.keystr((key,), simple=True) for key in path)
            yield Tensors(
                MODEL, groups[unit, group].prefix, buffer.layout, buffer.data, tuple(buffer.layout.plan.slots)
            )
    for path, leaf in zip(structure.form.rest_paths, model.rest, strict=True):
        yield Value(f"{MODEL}/rest/{path}", leaf)


def _of_node(
    node: Any, names: tuple[str, ...], groups: Mapping[tuple[str, str], Group], live: Collection[str] | None
) -> Iterator[Entry]:
    if isinstance(node, DBuffer):
        if tuple(np.shape(node.data)) == node.layout.buffer_shape:
            slots = node.layout.plan.slots
            kept = tuple(name for name in slots if live is None or name in live)
            yield Tensors(*_field(names, node.layout, groups), node.layout, node.data, kept)
        else:
            yield Value("/".join(names), node.data)
    elif isinstance(node, BlockArrays):
        layout = node.view.layout
        for i, (array, batch) in enumerate(zip(node.data, node.view.batches, strict=True)):
            rows = (*layout.stack, layout.plan.num_shards * batch.count)
            if tuple(np.shape(array))[: len(rows)] == rows:
                yield Blocks(*_field(names, layout, groups), node.view, i, array)
            else:
                yield Value("/".join((*names, str(i))), array)
    else:
        yield Value("/".join(names), node)


def _field(names: tuple[str, ...], layout: Layout, groups: Mapping[tuple[str, str], Group]) -> tuple[str, str]:
    """Field and prefix. Where a path has no unit and group in it, it stays whole, and so does its grouping."""
    for i, pair in enumerate(itertools.pairwise(names)):
        group = groups.get(pair)
        if group is not None and group.layout == layout:
            return "/".join((*names[:i], *names[i + 2 :])), group.prefix
    return "/".join(names), ""
