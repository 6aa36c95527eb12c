"""The state of `muon`: what is kept for each group, and what became of each parameter.

Comes in: buffers and per-element arrays that lie as the parameters do. Goes out: a pytree; its static part says which
rule each parameter took, and `optimizers.describe` prints that.
"""

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax

from vescale_layouts import Layout

from ._muon_rules import Ruling
from ._rule_table import PathOf, RuleRow


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["momentum", "mean", "rms"], meta_fields=["layout", "rulings"]
)
@dataclass(frozen=True)
class MuonMoments:
    """What is kept for one group.

    Attributes:

    - `momentum`: a `DBuffer` of the gradient's mean; None where the group has no matrices.
    - `mean`, `rms`: AdamW's moments, of the second the root, float32: `DBuffer`s, or `BlockArrays` of its own
      parameters where most of the group are matrices; None where all are.
    - `layout`: of the group.
    - `rulings`: what becomes of each parameter, in slot order.
    """

    momentum: Any
    mean: Any
    rms: Any
    layout: Layout
    rulings: tuple[Ruling, ...]


class MuonState(NamedTuple):
    """The state of `muon`.

    Attributes:

    - `count`: steps done, an int32 scalar.
    - `moments`: the parameters' tree, with `MuonMoments` in the place of every buffer.
    """

    count: Any
    moments: Any

    def rules(self, path_of: PathOf) -> Iterator[RuleRow]:
        """A row for each parameter; see `optimizers.describe`."""
        for path, moments in jax.tree_util.tree_leaves_with_path(self.moments, is_leaf=is_moments):
            unit, group = [str(getattr(key, "key", key)) for key in path[-2:]]
            for ruling in moments.rulings:
                yield _row(path_of(unit, group, ruling.name), moments, ruling)


def is_moments(node: Any) -> bool:
    """Whether a node of a tree is what is kept for a group."""
    return isinstance(node, MuonMoments)


def _row(path: str, moments: MuonMoments, ruling: Ruling) -> RuleRow:
    stack, slot = moments.layout.stack, moments.layout.plan.slots[ruling.name]
    layers, shape = math.prod(stack), (*stack, *slot.shape)
    size = layers * slot.spec.size
    if ruling.matrix is None:
        return RuleRow(path, shape, "adamw", ruling.reason, "", 8 * size)
    parts = ", ".join(f"{layers * b} x ({m}, {n})" for b, m, n in ruling.matrix.shapes(slot.shape))
    return RuleRow(path, shape, "muon", ruling.reason, parts, moments.momentum.data.dtype.itemsize * size)
