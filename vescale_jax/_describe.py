"""describe: what a sharded model costs, before or after it is built.

Comes in: a `Sharded` model, concrete or abstract. Goes out: a `Description`, numbers by unit and group; printed, it
is a table. Bytes are those of one device unless said otherwise.
"""

import math
from dataclasses import dataclass
from typing import Any

import jax
from rich.console import Console
from rich.table import Table

from ._groups import Group, Unit, each_group
from ._sharded import Sharded, check_sharded


@dataclass(frozen=True, slots=True)
class GroupRow:
    """One group of a unit.

    Attributes:

    - `unit`, `group`: names.
    - `layers`: of a stack; 1 otherwise.
    - `tensors`: parameters in the group.
    - `elements`: of all tensors, without padding.
    - `shard_size`: S, elements on one device, of all layers.
    - `dtype`, `gather_dtype`, `reduce_dtype`: names of dtypes; no `reduce_dtype` without gradients.
    - `shard_bytes`: stored on one device.
    - `gathered_bytes`: of the whole buffer while it is gathered; of a stack, one layer's.
    - `padding`: elements of the buffer that belong to no tensor.
    - `gathers`, `reduce_scatters`: collectives in one training step.
    """

    unit: str
    group: str
    layers: int
    tensors: int
    elements: int
    shard_size: int
    dtype: str
    gather_dtype: str
    reduce_dtype: str | None
    shard_bytes: int
    gathered_bytes: int
    padding: int
    gathers: int
    reduce_scatters: int

    @property
    def padding_ratio(self) -> float:
        """Padding per element of a tensor."""
        return self.padding / self.elements if self.elements else 0.0


@dataclass(frozen=True, slots=True)
class Description:
    """What `describe` found; `print` shows a table.

    Attributes:

    - `groups`: one row a group, units in order.
    - `mesh`, `axis`, `num_shards`: over which devices parameters are cut.
    - `replicated_bytes`: of leaves that are no parameters, whole on every device.
    """

    groups: tuple[GroupRow, ...]
    mesh: dict[str, int]
    axis: str
    num_shards: int
    replicated_bytes: int

    @property
    def parameters(self) -> int:
        """Elements of all parameters, without padding."""
        return sum(row.elements for row in self.groups)

    @property
    def shard_bytes(self) -> int:
        """Bytes of parameters on one device."""
        return sum(row.shard_bytes for row in self.groups)

    @property
    def largest_gathered_bytes(self) -> int:
        """Bytes of the largest unit while it is gathered."""
        by_unit: dict[str, int] = {}
        for row in self.groups:
            by_unit[row.unit] = by_unit.get(row.unit, 0) + row.gathered_bytes
        return max(by_unit.values(), default=0)

    @property
    def padding_ratio(self) -> float:
        """Padding per element of a parameter, over all groups."""
        return sum(row.padding for row in self.groups) / self.parameters if self.parameters else 0.0

    @property
    def all_gathers(self) -> int:
        """All-gathers in one training step."""
        return sum(row.gathers for row in self.groups)

    @property
    def reduce_scatters(self) -> int:
        """Reduce-scatters in one training step."""
        return sum(row.reduce_scatters for row in self.groups)

    def __str__(self) -> str:
        table = Table(caption=self._caption(), caption_justify="left", title_justify="left")
        for column in ("unit", "dtype", "on the wire"):
            table.add_column(column)
        for column in ("tensors", "elements", "bytes/device", "gathered", "padding", "gathers", "reduces"):
            table.add_column(column, justify="right")
        for row in self.groups:
            frozen = row.reduce_dtype is None
            wire = f"{row.gather_dtype}, frozen" if frozen else f"{row.gather_dtype} / {row.reduce_dtype}"
            table.add_row(
                f"{row.unit} x {row.layers}" if row.layers > 1 else row.unit,
                row.dtype,
                wire,
                f"{row.tensors}",
                f"{row.elements:,}",
                _bytes(row.shard_bytes),
                _bytes(row.gathered_bytes),
                f"{row.padding_ratio:.2%}",
                f"{row.gathers}",
                f"{row.reduce_scatters}",
            )
        console = Console(width=120, color_system=None)
        with console.capture() as capture:
            console.print(table)
        return "\n".join(line.rstrip() for line in capture.get().splitlines())

    def _caption(self) -> str:
        return (
            f"{self.parameters:,} parameters over {self.num_shards} devices of axis {self.axis!r}, mesh {self.mesh}: "
            f"{_bytes(self.shard_bytes)} a device, padding {self.padding_ratio:.2%}, at most "
            f"{_bytes(self.largest_gathered_bytes)} gathered in a unit, {_bytes(self.replicated_bytes)} replicated. "
            f"A step: {self.all_gathers} all-gathers, {self.reduce_scatters} reduce-scatters, 1 all-reduce."
        )


def describe(model: Sharded) -> Description:
    """Counts units, groups, bytes, padding and collectives of a sharded model.

    Arguments:

    - `model`: what `fully_shard` returned; with `abstract=True` nothing is allocated.
    """
    structure = check_sharded(model, "describe")
    rows = tuple(_row(unit, group, structure.num_shards) for unit, group in each_group(structure.units))
    replicated = sum(_nbytes(leaf) for leaf in model.rest)
    return Description(rows, dict(structure.mesh.shape), structure.axis, structure.num_shards, replicated)


def _row(unit: Unit, group: Group, num_shards: int) -> GroupRow:
    plan = group.layout.plan
    layers = math.prod(unit.stack)
    collectives = layers if num_shards > 1 else 0
    # A frozen group is gathered again only because gradients flow through it to what is trained.
    again = collectives if unit.reshard_after_forward else 0
    return GroupRow(
        unit=unit.name,
        group=group.name,
        layers=layers,
        tensors=len(plan.slots),
        elements=layers * (plan.buffer_size - plan.padding),
        shard_size=layers * plan.shard_size,
        dtype=str(group.dtype),
        gather_dtype=str(group.gather_dtype),
        reduce_dtype=str(group.reduce_dtype) if group.trainable else None,
        shard_bytes=layers * plan.shard_size * group.dtype.itemsize,
        gathered_bytes=plan.buffer_size * group.gather_dtype.itemsize,
        padding=layers * plan.padding,
        gathers=collectives + again,
        reduce_scatters=collectives if group.trainable else 0,
    )


def _nbytes(leaf: Any) -> int:
    if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.eval_shape(jax.random.key_data, leaf)
    return int(leaf.size) * leaf.dtype.itemsize


def _bytes(n: int) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if n < 1024 or unit == "GiB":
            return f"{n} {unit}" if unit == "B" else f"{n:.1f} {unit}"
        n = n / 1024  # type: ignore[assignment]
    raise AssertionError
