"""TensorSpec: what the planner needs to know of one tensor.

In come a name, a shape and a block; out goes a frozen value that can be hashed, compared and put in a plan. Shapes may
be anything: scalars, empty tensors, and tensors that no block divides.
"""

import math
import operator
from dataclasses import dataclass
from typing import cast

from ._blocks import Block, Elements, Slab, type_of_block
from ._faults import Faults
from ._storage import cuts_of


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of a group.

    Arguments:

    - `name`: unique within the group, such as `"layers/0/attention/query/kernel"`.
    - `shape`: the logical shape; `()` is a scalar, a 0 makes the tensor empty.
    - `block`: the piece that is never cut.

    Raises `ValueError` for an empty name, a negative dim or a `Slab` over more dims than there are, and `TypeError` for
    anything that is no string, shape or block.
    """

    name: str
    shape: tuple[int, ...]
    block: Block = Elements(1)

    def __post_init__(self) -> None:
        self._check_types()
        faults = Faults("TensorSpec")
        if not self.name:
            faults.add("name", got="''", want="a name", change="pass the parameter's path")
        if any(dim < 0 for dim in self.shape):
            want = "dims of at least 0"
            faults.add(self.name, got=f"shape {self.shape}", want=want, change="pass array.shape")
        if isinstance(self.block, Slab) and self.block.dims > len(self.shape):
            faults.add(
                self.name,
                got=f"Slab({self.block.dims}) on shape {self.shape}",
                want=f"at most {len(self.shape)} dims",
                change=f"use Slab({len(self.shape)}) or another block",
            )
        faults.raise_if_any()

    def _check_types(self) -> None:
        """Makes `shape` a tuple of plain integers and raises `TypeError` for what cannot be one."""
        faults = Faults("TensorSpec")
        name, block = cast(object, self.name), cast(object, self.block)
        if not isinstance(name, str):
            faults.add("name", got=repr(name), want="a string", change="pass the parameter's path")
        try:
            object.__setattr__(self, "shape", tuple(operator.index(dim) for dim in self.shape))
        except TypeError:
            faults.add(str(name), got=f"shape {self.shape!r}", want="a tuple of integers", change="pass array.shape")
        if not isinstance(block, type_of_block):
            want = "Elements, Rows, Tile, Slab or WholeTensor"
            faults.add(str(name), got=f"block {block!r}", want=want, change="pass an instance of one of them")
        faults.raise_if_any(TypeError)

    @property
    def size(self) -> int:
        """Elements of the tensor."""
        return math.prod(self.shape)

    @property
    def granularity(self) -> int:
        """Elements of the largest run that a shard boundary must not cut when the tensor is stored row-major."""
        return cuts_of(self.shape, self.block, "row_major").granularity
