"""Blocks of Shampoo and SOAP: which parameters are preconditioned, and in which tiles.

Comes in: the layout of a group. Goes out: a view of the matrices in tiles, and one of all other parameters, element by
element. Both follow from the global shape of a parameter and the block it was planned with, never from what one device
holds; so they are the same on every mesh and under every grouping.
"""

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from vescale_layouts import BlockView, Layout
from vescale_planner import Elements, Faults, Slot, Tile

from ._rule_table import PathOf, RuleRow


@dataclass(frozen=True, slots=True)
class Choice:
    """What decides how a parameter is treated.

    Attributes:

    - `block_size`: a number n: tiles of n x n, or a parameter's own tile if it was planned with `Tile`. A `Tile`: that.
    - `min_size`: of a parameter that is preconditioned, in elements.
    """

    block_size: int | Tile
    min_size: int

    def block(self, slot: Slot) -> Tile | None:
        """The tile of a parameter that is preconditioned; None for one that is not."""
        if reason(slot) or slot.spec.size < self.min_size:
            return None
        if isinstance(self.block_size, Tile):
            return self.block_size
        return slot.spec.block if isinstance(slot.spec.block, Tile) else Tile(self.block_size, self.block_size)


def reason(slot: Slot) -> str:
    """Why a parameter cannot be preconditioned, in words; empty if it can."""
    if len(slot.shape) < 2:
        return "vector" if slot.shape else "scalar"
    return "one row or one column" if min(slot.shape[-2:]) < 2 else ""


@dataclass(frozen=True, slots=True)
class Views:
    """The parameters of a group.

    Attributes:

    - `tiles`: those that are preconditioned.
    - `rest`: the others; one element a block where their storage allows.
    """

    tiles: BlockView
    rest: BlockView


@dataclass(frozen=True, slots=True)
class Costs:
    """Bytes of state of a group's parameters.

    Attributes:

    - `tiles`: the parameters that are preconditioned.
    - `element`, `block`: of an element of theirs, and of a block from its rows and cols.
    - `rest`: of an element of the others.
    """

    tiles: BlockView
    element: int
    block: Callable[[int, int], int]
    rest: int


@functools.lru_cache(maxsize=1024)
def views(choice: Choice, layout: Layout) -> Views:
    """Both views of a group: the same objects for equal arguments.

    Raises: `ValueError` that names every parameter whose tiles its plan may cut.
    """
    slots = layout.plan.slots
    tiles = {name: choice.block(slot) for name, slot in slots.items()}
    # One element a block: the plan's cuts do not matter then.
    rest = {
        name: Elements(1) if slot.storage == "row_major" else slot.spec.block
        for name, slot in slots.items()
        if tiles[name] is None
    }
    return Views(BlockView.of(layout, {n: b for n, b in tiles.items() if b is not None}), BlockView.of(layout, rest))


def filled(layout: Layout, value: bool | float) -> jax.Array:
    """An array like the buffer, bool or float32, that holds one value; split, `True` says which elements exist."""
    return jax.device_put(jnp.full(layout.buffer_shape, value, bool if value is True else jnp.float32), layout.sharding)


def rule_rows(groups: Any, rule: str, of_tiles: Callable[[Any], Costs], path_of: PathOf) -> Iterator[RuleRow]:
    """A row for each parameter of an optimizer's state.

    Arguments:

    - `groups`: the parameters' tree with what the optimizer holds in the place of every buffer.
    - `rule`: the name of what is done to tiles.
    - `of_tiles`: from what is held of a group, its `Costs`.
    - `path_of`: see `RuleState`.
    """
    for keys, held in jax.tree_util.tree_leaves_with_path(groups, is_leaf=lambda node: hasattr(node, "_fields")):
        if not hasattr(held, "_fields"):
            continue
        unit, group = (str(getattr(key, "key", key)) for key in keys[-2:])
        costs = of_tiles(held)
        layout, tiles = costs.tiles.layout, dict(costs.tiles.blocks)
        layers = math.prod(layout.stack)
        for name, slot in layout.plan.slots.items():
            size, shape, path = layers * slot.spec.size, (*layout.stack, *slot.shape), path_of(unit, group, name)
            if name not in tiles:
                why = reason(slot) or "below min_size"
                yield RuleRow(path, shape, "adamw", why, "", size * costs.rest)
                continue
            number, _ = costs.tiles.index.order(name)
            batch, count = costs.tiles.batches[number], math.prod(costs.tiles.index.shape(name))
            cost = size * costs.element + layers * count * costs.block(batch.rows, batch.cols)
            yield RuleRow(path, shape, rule, "matrix", f"{tiles[name]}, {layers * count} of them", cost)


def check_numbers(faults: Faults, block_size: Any, min_size: Any, chunk: Any, every: Any, numbers: Any) -> None:
    """Notes what is wrong with the arguments that Shampoo and SOAP share.

    Arguments:

    - `block_size`, `min_size`, `chunk`: as the optimizers take them.
    - `every`: name and value of the number of steps between refreshes.
    - `numbers`: for each of the other arguments: name, value, whether it is legal, what is wanted, an example.
    """
    for name, value, legal, want, example in numbers:
        if not legal:
            faults.add(name, got=repr(value), want=want, change=f"pass {example}")
    if not isinstance(block_size, Tile) and not (isinstance(block_size, int) and block_size >= 2):
        want = "a number of at least 2, or a Tile"
        faults.add("block_size", got=repr(block_size), want=want, change="pass 128, or Tile(128, 128)")
    whole = (("min_size", min_size, 0, "4096"), ("chunk", chunk, 1, "2**20"), (*every, 1, "10"))
    for name, value, least, example in whole:
        if not isinstance(value, int) or value < least:
            faults.add(name, got=repr(value), want=f"an integer of at least {least}", change=f"pass {example}")
