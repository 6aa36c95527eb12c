"""precisions: which parameters `adamw_8bit` keeps in 8 bits, in which blocks, and at what cost.

Comes in: an optimizer state, concrete or abstract, alone or inside of what `optax.chain` and the like make of it. Goes
out: one row a parameter; printed, each is a line.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax

from ._adamw_8bit import AdamW8bitState, Moments8bit


@dataclass(frozen=True, slots=True)
class Precision:
    """How the moments of one parameter are kept.

    Attributes:

    - `unit`, `group`, `name`: the parameter, by the names that the layout has.
    - `elements`: of the parameter.
    - `dtype`: of a moment: `"uint8"` or `"float32"`.
    - `block`: what shares a scale, in words; empty without one.
    - `state_bytes`: of both moments, scales included, over all devices and without padding.
    """

    unit: str
    group: str
    name: str
    elements: int
    dtype: str
    block: str
    state_bytes: int

    def __str__(self) -> str:
        how = f"{self.dtype}, {self.block}" if self.block else f"{self.dtype}, below min_size"
        per = self.state_bytes / max(self.elements, 1)
        return f"{self.unit} {self.name}: {self.elements:,} elements, {how}, {per:.3f} bytes an element"


def precisions(state: Any) -> tuple[Precision, ...]:
    """How `adamw_8bit` keeps the moments of every parameter.

    Arguments:

    - `state`: the optimizer's state, or any pytree with it inside, such as a `TrainState`; abstract ones will do.

    Returns: a row a parameter with elements, in the order of units, groups and slots; nothing for other optimizers.
    """
    leaves = jax.tree.leaves(state, is_leaf=lambda node: isinstance(node, AdamW8bitState))
    found: list[Precision] = []
    for node in leaves:
        if isinstance(node, AdamW8bitState):
            moments = jax.tree_util.tree_leaves_with_path(
                node.moments, is_leaf=lambda node: isinstance(node, Moments8bit)
            )
            for path, pair in moments:
                if isinstance(pair, Moments8bit):
                    keys = [str(getattr(key, "key", key)) for key in path]
                    found += _rows("/".join(keys[:-1]), "".join(keys[-1:]), pair)
    return tuple(found)


def _rows(unit: str, group: str, moments: Moments8bit) -> Iterator[Precision]:
    coded, small = moments.mean.scales.view, moments.mean.small.view
    for view, dtype in ((coded, "uint8"), (small, "float32")):
        for name, block in view.blocks:
            size = view.layout.plan.slots[name].spec.size
            cost = 2 * size + 8 * math.prod(view.index.shape(name)) if dtype == "uint8" else 8 * size
            yield Precision(unit, group, name, size, dtype, str(block) if dtype == "uint8" else "", cost)
