"""Layout: a plan bound to the axis of a mesh.

Comes in: a plan for N shards and a mesh with an axis of N devices. Goes out: the sharding of the buffer, the
placement of every tensor, and the device and position of any logical element. A layout holds no array and is
hashable, so it can ride in the static part of a pytree.

Layers that are alike may be stacked: the plan is then that of one layer, and the buffer has a dim of layers before the
flat one, (L, G), of which every device holds (L, S).
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from jax.sharding import Mesh, NamedSharding, PartitionSpec

from vescale_planner import GroupPlan

from ._ragged import RaggedShard


@dataclass(frozen=True, slots=True)
class Location:
    """Where one logical element lies.

    Attributes:

    - `device`: index along the mesh axis.
    - `position`: elements from the start of that device's shard.
    - `offset`: elements from the start of the whole buffer.
    """

    device: int
    position: int
    offset: int


@dataclass(frozen=True, eq=False)
class Layout:
    """A plan bound to one axis of a mesh.

    Arguments:

    - `plan`: order, slots and shard size of one group.
    - `mesh`: the devices.
    - `axis`: the mesh axis over which the buffer is cut; it has `plan.num_shards` devices.
    - `stack`: numbers of layers, outermost first, if the buffer holds a stack of them; not cut.

    Raises: `ValueError` if the mesh has no such axis or another number of devices on it.
    """

    plan: GroupPlan
    mesh: Mesh
    axis: str
    stack: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        sizes = dict(self.mesh.shape)
        if self.axis not in sizes:
            raise ValueError(f"Layout: got axis {self.axis!r}; want one of the mesh's axes {list(sizes)}")
        if sizes[self.axis] != self.plan.num_shards:
            raise ValueError(
                f"Layout: got a plan for {self.plan.num_shards} shards; want {sizes[self.axis]}, the devices of axis "
                f"{self.axis!r}; plan the group for this mesh"
            )

    @functools.cached_property
    def _hash(self) -> int:
        return hash((self.plan, self.mesh, self.axis, self.stack))

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        # Layouts are compared at every dispatch of a jitted step, nearly always with themselves.
        if self is other:
            return True
        if not isinstance(other, Layout):
            return NotImplemented
        mine = (self._hash, self.axis, self.stack, self.mesh, self.plan)
        return mine == (other._hash, other.axis, other.stack, other.mesh, other.plan)

    @property
    def layer(self) -> "Layout":
        """The layout of one layer of the stack; of the group itself if it is none."""
        return Layout(self.plan, self.mesh, self.axis) if self.stack else self

    @property
    def spec(self) -> PartitionSpec:
        """The partition spec of the buffer, and of everything with the stack's dims before one that is cut."""
        return PartitionSpec(*[None] * len(self.stack), self.axis)

    @property
    def sharding(self) -> NamedSharding:
        """The sharding of the buffer: an even cut of its last dim, since the plan made all shards equal."""
        return NamedSharding(self.mesh, self.spec)

    @property
    def shard_size(self) -> int:
        """S, elements on one device."""
        return self.plan.shard_size

    @property
    def buffer_size(self) -> int:
        """G = N * S, elements of the whole buffer; of one layer of a stack."""
        return self.plan.buffer_size

    @property
    def buffer_shape(self) -> tuple[int, ...]:
        """`(*stack, G)`."""
        return (*self.stack, self.plan.buffer_size)

    @property
    def local_shape(self) -> tuple[int, ...]:
        """`(*stack, S)`, what one device holds."""
        return (*self.stack, self.plan.shard_size)

    @functools.cached_property
    def placements(self) -> Mapping[str, RaggedShard]:
        """The placement of every tensor, by name, in buffer order."""
        n, size = self.plan.num_shards, self.plan.shard_size
        return MappingProxyType({name: RaggedShard.from_slot(s, n, size) for name, s in self.plan.slots.items()})

    def locate(self, name: str, index: tuple[int, ...] = ()) -> Location:
        """Says where one logical element lies.

        Arguments:

        - `name`: the tensor.
        - `index`: its element, one integer a dim.

        Raises: `KeyError` if the group has no such tensor; `IndexError` if the tensor has no such element.
        """
        if name not in self.plan.slots:
            raise KeyError(f"Layout: got tensor {name!r}; want one of {list(self.plan.slots)}")
        slot = self.plan.slots[name]
        if len(index) != len(slot.shape) or any(not 0 <= i < d for i, d in zip(index, slot.shape, strict=True)):
            raise IndexError(f"Layout: {name}: got index {index}; want one integer a dim, inside shape {slot.shape}")
        offset = slot.offset + slot.position(index)
        device, position = divmod(offset, self.plan.shard_size)
        return Location(device=device, position=position, offset=offset)

    def __repr__(self) -> str:
        return (
            f"Layout({len(self.plan.slots)} tensors, {self.plan.num_shards} shards of {self.plan.shard_size} "
            f"elements over {self.axis!r}{f', stack {self.stack}' if self.stack else ''})"
        )

    def __str__(self) -> str:
        return f"axis {self.axis!r} of mesh {dict(self.mesh.shape)}\n{self.plan}"
