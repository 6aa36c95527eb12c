"""GroupPlan: where every tensor of a group lies in the flat buffer.

Made by `plan_group`, read by everything else. The buffer has G = N*S elements, N shards of S elements each; shard k
owns [k*S, (k+1)*S). A plan is pure data and makes good static data for `jax.jit`: frozen, hashable with a hash that is
computed once, and equal to itself without a look at its slots.
"""

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from ._blocks import Tile
from ._check import check_plan
from ._cuts import Cuts
from ._faults import Faults
from ._specs import TensorSpec
from ._storage import Storage, cuts_of, position_of
from ._table import draw
from ._tiles import TileOrder, matrices_of


@dataclass(frozen=True, slots=True)
class Slot:
    """Where one tensor lies in the buffer; all numbers in elements.

    Attributes:

    - `spec`: the tensor.
    - `offset`: start in the buffer.
    - `size`: elements occupied; more than `spec.size` only where tiled storage has to fill up edge tiles.
    - `storage`: order of the elements inside the slot. `"row_major"`: as they are. `"transposed"`: (..., R, C) is
      stored as (..., C, R), row-major. `"tiled"`: every tile is one run, in the order that `TileOrder` describes.
      `position` gives the position of any element, for all three.
    """

    spec: TensorSpec
    offset: int
    size: int
    storage: Storage = "row_major"

    @property
    def name(self) -> str:
        """Name of the tensor."""
        return self.spec.name

    @property
    def shape(self) -> tuple[int, ...]:
        """Logical shape of the tensor."""
        return self.spec.shape

    @property
    def stop(self) -> int:
        """End in the buffer."""
        return self.offset + self.size

    @property
    def cuts(self) -> Cuts:
        """Where a shard boundary may fall inside the slot."""
        return cuts_of(self.spec.shape, self.spec.block, self.storage)

    @property
    def granularity(self) -> int:
        """Elements of the largest run that no shard boundary cuts."""
        return self.cuts.granularity

    @property
    def tile_order(self) -> TileOrder | None:
        """Where each tile lies, for array code that unpacks tiled storage; None for the other storage orders."""
        if self.storage != "tiled" or not isinstance(self.spec.block, Tile):
            return None
        return TileOrder.of(matrices_of(self.spec.shape), self.spec.block.rows, self.spec.block.cols)

    def position(self, index: tuple[int, ...]) -> int:
        """Position of the element at `index` of the tensor, from the start of the slot.

        Raises `IndexError` when `index` lies outside the shape.
        """
        return position_of(self.spec.shape, self.spec.block, self.storage, index)


@dataclass(frozen=True, slots=True)
class Piece:
    """What one shard holds of one tensor; all numbers in elements.

    Attributes:

    - `name`: the tensor.
    - `start`, `stop`: the part of the slot, counted from the slot's start.
    - `offset`: where that part starts within the shard.
    """

    name: str
    start: int
    stop: int
    offset: int


@dataclass(frozen=True, slots=True)
class LowerBound:
    """A proven lower bound on the shard size, for any order of the same slots.

    Attributes:

    - `shard_size`: no plan with these tensors, as stored, has smaller shards; elements.
    - `reason`: the argument, in words.
    """

    shard_size: int
    reason: str


@dataclass(frozen=True, slots=True, eq=False)
class GroupPlan:
    """Order, slots and shard size of one group. `plan_group` makes it.

    Attributes:

    - `num_shards`: N.
    - `alignment`: the shard size is a multiple of it; elements.
    - `shard_size`: S, elements on every shard; 0 only when the group holds no element.
    - `ordered_slots`: the slots in buffer order.
    - `order`: how the order was found: "default", "block", "shape", "size" or "search".
    - `bound`: a proven lower bound on S.

    Raises `ValueError` when two slots share a name or the numbers cannot be those of a buffer.
    """

    num_shards: int
    alignment: int
    shard_size: int
    ordered_slots: tuple[Slot, ...]
    order: str = "default"
    bound: LowerBound = LowerBound(0, "none")
    _by_name: dict[str, Slot] = field(init=False, repr=False)
    _offsets: tuple[int, ...] = field(init=False, repr=False)
    _hash: int = field(init=False, repr=False)

    def __post_init__(self) -> None:
        faults = Faults("GroupPlan")
        by_name = {slot.name: slot for slot in self.ordered_slots}
        if len(by_name) < len(self.ordered_slots):
            faults.add("slots", got="a name twice", want="unique names", change="rename one of the tensors")
        if self.num_shards < 1 or self.alignment < 1 or self.shard_size < 0 or self.shard_size % self.alignment:
            got = f"{self.num_shards} shards of {self.shard_size}, alignment {self.alignment}"
            faults.add("shard_size", got=got, want="whole aligned shards", change="make the plan with plan_group")
        faults.raise_if_any()
        object.__setattr__(self, "_by_name", by_name)
        object.__setattr__(self, "_offsets", tuple(slot.offset for slot in self.ordered_slots))
        object.__setattr__(self, "_hash", hash((self.num_shards, self.alignment, self.shard_size, self.ordered_slots)))

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, GroupPlan):
            return NotImplemented
        return (
            self._hash == other._hash
            and (self.num_shards, self.alignment, self.shard_size)
            == (other.num_shards, other.alignment, other.shard_size)
            and self.ordered_slots == other.ordered_slots
        )

    def __reduce__(self) -> tuple[object, ...]:
        # Rebuilt, not copied: the hash of a string differs from process to process.
        fields = (self.num_shards, self.alignment, self.shard_size, self.ordered_slots, self.order, self.bound)
        return GroupPlan, fields

    def __str__(self) -> str:
        return draw(self)

    @property
    def slots(self) -> Mapping[str, Slot]:
        """The slots by tensor name, in buffer order; read-only."""
        return MappingProxyType(self._by_name)

    @property
    def buffer_size(self) -> int:
        """G = N*S, elements of the buffer."""
        return self.num_shards * self.shard_size

    @property
    def tensor_size(self) -> int:
        """Elements of all tensors, without padding."""
        return sum(slot.spec.size for slot in self.ordered_slots)

    @property
    def padding(self) -> int:
        """Elements of the buffer that belong to no tensor."""
        return self.buffer_size - self.tensor_size

    @property
    def padding_ratio(self) -> float:
        """`padding` over the elements of all tensors; 0.0 when there are none."""
        return self.padding / self.tensor_size if self.tensor_size else 0.0

    @property
    def copied(self) -> int:
        """Elements of tensors in tiled storage, which a gather has to copy to unpack."""
        return sum(slot.spec.size for slot in self.ordered_slots if slot.storage == "tiled")

    @property
    def copied_ratio(self) -> float:
        """`copied` over the elements of all tensors; 0.0 when there are none."""
        return self.copied / self.tensor_size if self.tensor_size else 0.0

    @property
    def lower_bound_ratio(self) -> float:
        """`shard_size` over its proven lower bound: 1.0 is optimal."""
        return self.shard_size / self.bound.shard_size if self.bound.shard_size else 1.0

    @property
    def gaps(self) -> tuple[tuple[int, int], ...]:
        """Start and stop of every run of padding between and behind the slots, ascending, in elements of the buffer."""
        gaps: list[tuple[int, int]] = []
        cursor = 0
        for slot in self.ordered_slots:
            if slot.offset > cursor:
                gaps.append((cursor, slot.offset))
            cursor = slot.stop
        if cursor < self.buffer_size:
            gaps.append((cursor, self.buffer_size))
        return tuple(gaps)

    def pieces(self, shard: int) -> tuple[Piece, ...]:
        """What lies on one shard, ascending; tensors without elements there are left out.

        Raises `IndexError` when there is no such shard.
        """
        if not 0 <= shard < self.num_shards:
            raise IndexError(f"shard {shard} of a plan for {self.num_shards} shards")
        begin, end = shard * self.shard_size, (shard + 1) * self.shard_size
        pieces: list[Piece] = []
        for slot in self.ordered_slots[max(bisect_right(self._offsets, begin) - 1, 0) :]:
            if slot.offset >= end:
                break
            start, stop = max(slot.offset, begin), min(slot.stop, end)
            if start < stop:
                pieces.append(Piece(slot.name, start - slot.offset, stop - slot.offset, start - begin))
        return tuple(pieces)

    def check(self) -> None:
        """Proves the constraints of the problem again, from the slots alone.

        Every slot has the length its storage needs and lies inside the buffer, slots are disjoint, every shard has the
        same aligned number of elements, and no shard boundary cuts a block.

        Raises `ValueError` with every violation.
        """
        check_plan(self)
