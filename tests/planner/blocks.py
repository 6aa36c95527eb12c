"""The blocks of a tensor, element by element, and a proof that a plan cuts none: for small tensors only.

Nothing here shares code with the planner's cuts: which block an element belongs to follows from the block's definition.
"""

from itertools import product

from vescale_planner import Elements, GroupPlan, Rows, Slab, TensorSpec, Tile


def block_of(spec: TensorSpec, index: tuple[int, ...]) -> object:
    """A label that all elements of one block share, and no others."""
    flat = 0
    for dim, i in zip(spec.shape, index, strict=True):
        flat = flat * dim + i
    block = spec.block
    if isinstance(block, Elements):
        return flat // block.count
    if isinstance(block, Rows):
        return flat // (spec.shape[-1] if spec.shape else 1) // block.count
    if isinstance(block, Slab):
        lead = 0
        for dim, i in zip(spec.shape[: block.dims], index, strict=False):
            lead = lead * dim + i
        return lead // block.count if block.dims else 0
    if isinstance(block, Tile):
        row = index[-2] if len(index) > 1 else 0
        col = index[-1] if index else 0
        return index[:-2], row // block.rows, col // block.cols
    return 0


def indices(shape: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Every index of a tensor, in row-major order."""
    return list(product(*(range(dim) for dim in shape)))


def assert_blocks_whole(plan: GroupPlan) -> None:
    """Every element has its own place in the buffer, and every block lies on one shard."""
    taken: set[int] = set()
    shards: dict[tuple[str, object], set[int]] = {}
    for slot in plan.slots.values():
        for index in indices(slot.shape):
            place = slot.offset + slot.position(index)
            assert slot.offset <= place < slot.stop <= plan.buffer_size
            assert place not in taken
            taken.add(place)
            shards.setdefault((slot.name, block_of(slot.spec, index)), set()).add(place // plan.shard_size)
    assert all(len(where) == 1 for where in shards.values())
    assert len(taken) + plan.padding == plan.buffer_size
