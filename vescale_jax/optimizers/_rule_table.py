"""describe: which rule an optimizer has for each parameter, in which blocks, and what state that costs.

Comes in: an optimizer or its state, and the sharded model. Goes out: a `RuleTable`, one row a parameter; printed, it is
a table. A state says itself what it did: every node of it with a method `rules` (see `RuleState`) is asked. What no
such node speaks for belongs to an element-wise optimizer.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np
from rich.console import Console
from rich.table import Table

from vescale_jax._groups import each_group
from vescale_jax._sharded import Sharded, check_sharded, shardings
from vescale_layouts import DBuffer

from ._per_parameter import PerParameter

PathOf = Callable[[str, str, str], str]
"""The path of a parameter, from the names of its unit, its group and its slot."""


@dataclass(frozen=True, slots=True)
class RuleRow:
    """What an optimizer does with one parameter.

    Attributes:

    - `path`: of the parameter, as `fully_shard` was given it.
    - `shape`: of the parameter.
    - `rule`: the rule's name, such as `"shampoo"`, `"adamw"` or `"element-wise"`.
    - `reason`: why it has this rule, in words, such as `"vector"`.
    - `blocks`: what is worked on as a whole, in words, such as `"tile:128,128"`; empty for single elements.
    - `state_bytes`: of its state, over all devices and without padding.
    - `fell_back`: why it does not have the rule or the blocks that were asked for; empty where it has.
    """

    path: str
    shape: tuple[int, ...]
    rule: str
    reason: str
    blocks: str
    state_bytes: int
    fell_back: str = ""


@runtime_checkable
class RuleState(Protocol):
    """A node of an optimizer's state that knows what the optimizer does."""

    def rules(self, path_of: PathOf) -> Iterable[RuleRow]:
        """A row for each parameter that it holds state of.

        Arguments:

        - `path_of`: gives the path of a parameter, from the names of its unit, its group and its slot.
        """
        ...


@dataclass(frozen=True, slots=True)
class RuleTable:
    """What `describe` found; `print` shows a table.

    Attributes:

    - `rows`: one a parameter that is trained; units in order, in each unit by path.
    - `device_bytes`: of state on one device, padding included.
    """

    rows: tuple[RuleRow, ...]
    device_bytes: int

    def __getitem__(self, path: str) -> RuleRow:
        """The row of one parameter."""
        for row in self.rows:
            if row.path == path:
                return row
        raise KeyError(f"RuleTable: got {path!r}; want one of {[row.path for row in self.rows]}")

    def __iter__(self) -> Iterator[RuleRow]:
        return iter(self.rows)

    @property
    def state_bytes(self) -> int:
        """Bytes of the state of all parameters, over all devices and without padding."""
        return sum(row.state_bytes for row in self.rows)

    @property
    def fallen_back(self) -> tuple[RuleRow, ...]:
        """The parameters that do not have what was asked for."""
        return tuple(row for row in self.rows if row.fell_back)

    def __str__(self) -> str:
        table = Table(caption=self._caption(), caption_justify="left")
        for column in ("parameter", "shape", "rule", "why", "blocks"):
            table.add_column(column, overflow="fold")
        table.add_column("state bytes", justify="right")
        for row in self.rows:
            why = f"{row.reason}; FELL BACK: {row.fell_back}" if row.fell_back else row.reason
            shape = "x".join(map(str, row.shape)) or "scalar"
            table.add_row(row.path, shape, row.rule, why, row.blocks, f"{row.state_bytes:,}")
        console = Console(width=140, color_system=None)
        with console.capture() as capture:
            console.print(table)
        return "\n".join(line.rstrip() for line in capture.get().splitlines())

    def _caption(self) -> str:
        fallen = f"{len(self.fallen_back)} fell back" if self.fallen_back else "none fell back"
        rules = ", ".join(f"{number} {rule}" for rule, number in Counter(row.rule for row in self.rows).items())
        return (
            f"{len(self.rows)} parameters ({rules}), {fallen}; {self.state_bytes:,} bytes of state in all, "
            f"{self.device_bytes:,} on one device with padding"
        )


def describe(optimizer: Any, model: Sharded) -> RuleTable:
    """Says which rule each parameter has, and what it costs.

    Arguments:

    - `optimizer`: an optax transformation, or the state that one made for this model, abstract or not. Which parameters
      `per_parameter` treats alike, and their labels, is known of what it returned only.
    - `model`: what `fully_shard` returned; with `abstract=True` nothing is allocated.
    """
    structure = check_sharded(model, "optimizers.describe")
    state = jax.eval_shape(optimizer.init, model.params) if callable(getattr(optimizer, "init", None)) else optimizer
    groups = {
        (unit.name, group.name): group
        for unit, group in each_group(structure.units)
        if group.name in model.params.get(unit.name, {})
    }

    def path_of(unit: str, group: str, name: str) -> str:
        return groups[unit, group].prefix + name

    ways = optimizer.ways() if isinstance(optimizer, PerParameter) else {}
    rows: dict[str, RuleRow] = {}
    buffers: list[tuple[tuple[str, str], DBuffer]] = []
    for keys, node in jax.tree_util.tree_leaves_with_path(state, is_leaf=_ends):
        if isinstance(node, RuleState):
            rows |= {row.path: row for row in node.rules(path_of)}
        elif isinstance(node, DBuffer):
            unit, group = [str(getattr(key, "key", key)) for key in keys[-2:]]
            buffers.append(((unit, group), node))
    for (unit, name), group in groups.items():
        held = [node.data.dtype.itemsize for where, node in buffers if where == (unit, name)]
        for slot in group.layout.plan.slots.values():
            path = group.prefix + slot.name
            if path not in rows:
                cost = sum(held) * slot.spec.size
                why = ways.get(path, "as the buffer")
                rows[path] = RuleRow(path, slot.shape, "element-wise", why, "", cost)
    units = list(dict.fromkeys(unit for unit, _ in groups))
    order = sorted((units.index(unit), path) for (unit, _), group in groups.items() for path in group.paths)
    return RuleTable(tuple(rows[path] for _, path in order), _device_bytes(state, structure.replicated))


def _ends(node: Any) -> bool:
    return isinstance(node, RuleState | DBuffer)


def _device_bytes(state: Any, replicated: Any) -> int:
    targets = jax.tree.leaves(shardings(state, replicated))
    return sum(
        int(np.prod(sharding.shard_shape(leaf.shape))) * leaf.dtype.itemsize
        for leaf, sharding in zip(jax.tree.leaves(state), targets, strict=True)
    )
