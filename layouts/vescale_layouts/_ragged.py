"""RaggedShard: where the elements of one tensor lie, block by block.

Comes in: a slot of a plan, the number of shards N and the shard size S in elements. Goes out: how many whole blocks
each device holds. A device holds one contiguous run of the tensor's storage order, in device order, and may hold
none. With one-element blocks this is FSDP1's flat parameter, with rows and even counts FSDP2's `Shard(0)`, with one
block it is a tensor owned by a single device (veScale-FSDP, section 4.1; the open RaggedShard of veScale calls the
counts `local_units`).
"""

import bisect
import math
from dataclasses import dataclass
from itertools import accumulate, pairwise

from vescale_planner import Slot


@dataclass(frozen=True, slots=True)
class RaggedShard:
    """The placement of one tensor over the devices of one mesh axis.

    Arguments:

    - `shape`: the tensor's logical shape.
    - `granularity`: elements a block holds; the last block of the tensor may be shorter.
    - `units`: whole blocks on each device, in device order; zeros are allowed.
    - `size`: elements in storage, where tiled storage fills up edge tiles; 0 stands for those of `shape`.
    - `period`: elements after which blocks start afresh, such as those of one matrix of a batch; the last block of a
      period may be shorter. 0: blocks run through.

    Raises: `ValueError` if the counts do not add up to the tensor's blocks.
    """

    shape: tuple[int, ...]
    granularity: int
    units: tuple[int, ...]
    size: int = 0
    period: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", self.size or math.prod(self.shape))
        object.__setattr__(self, "period", self.period or max(self.size, 1))
        if self.granularity < 1:
            raise ValueError(f"RaggedShard: got granularity {self.granularity}; want at least one element a block")
        if any(count < 0 for count in self.units) or not self.units:
            raise ValueError(f"RaggedShard: got units {self.units}; want a count of at least 0 for every device")
        if sum(self.units) != self.num_blocks:
            raise ValueError(
                f"RaggedShard: got units {self.units}, in all {sum(self.units)}; want {self.num_blocks}, the blocks of "
                f"{self.granularity} elements in a tensor of shape {self.shape}; change the counts or the granularity"
            )

    @classmethod
    def from_slot(cls, slot: Slot, num_shards: int, shard_size: int) -> "RaggedShard":
        """Reads the placement of one tensor out of its plan.

        Arguments:

        - `slot`: where the tensor lies in the buffer.
        - `num_shards`: N, the devices of the axis.
        - `shard_size`: S, elements of the buffer on one device.
        """
        starts = [min(max(k * shard_size, slot.offset), slot.stop) - slot.offset for k in range(num_shards)]
        cuts = slot.cuts
        blocks = [
            _blocks_before(position, slot.size, cuts.granularity, cuts.period) for position in (*starts, slot.size)
        ]
        units = tuple(stop - start for start, stop in pairwise(blocks))
        return cls(slot.shape, cuts.granularity, units, slot.size, cuts.period)

    @property
    def num_blocks(self) -> int:
        """Blocks of the tensor, short ones included."""
        return _blocks_before(self.size, self.size, self.granularity, self.period)

    def elements(self, device: int) -> range:
        """The elements, counted in storage order, that one device holds.

        Raises: `IndexError` if there is no such device.
        """
        if not 0 <= device < len(self.units):
            raise IndexError(f"RaggedShard: got device {device}; want 0 to {len(self.units) - 1}")
        first = sum(self.units[:device])
        return range(self._start(first), self._start(first + self.units[device]))

    def owner(self, element: int) -> int:
        """The device that holds one element, counted in storage order.

        Raises: `IndexError` if the tensor has no such element.
        """
        if not 0 <= element < self.size:
            raise IndexError(f"RaggedShard: got element {element}; want 0 to {self.size - 1}, shape {self.shape}")
        periods, within = divmod(element, self.period)
        block = periods * -(-self.period // self.granularity) + within // self.granularity
        return bisect.bisect_right(list(accumulate(self.units)), block)

    def _start(self, block: int) -> int:
        """The first element of a block, or the end of the tensor."""
        periods, within = divmod(block, -(-self.period // self.granularity))
        return min(periods * self.period + min(within * self.granularity, self.period), self.size)

    def __str__(self) -> str:
        counts = ", ".join(f"{k}: {n}" for k, n in enumerate(self.units) if n)
        return f"RaggedShard(shape {self.shape}, blocks of {self.granularity} elements; device: blocks {{{counts}}})"


def _blocks_before(position: int, size: int, granularity: int, period: int) -> int:
    """How many blocks start before a position that is a legal cut."""
    periods, within = divmod(min(position, size), period)
    return periods * -(-period // granularity) + -(-within // granularity)
