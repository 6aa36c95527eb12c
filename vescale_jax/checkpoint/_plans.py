"""Plans as JSON and back, so that a checkpoint can be read under another plan, or without this library.

Comes in: a `GroupPlan`, or what `json` made of its record. Goes out: a record of plain numbers and strings, or an equal
plan. Offsets and sizes are in elements of the buffer.
"""

from typing import Any

from vescale_planner import Block, Elements, GroupPlan, Rows, Slab, Slot, TensorSpec, Tile, WholeTensor

_BLOCKS: dict[str, type] = {
    "elements": Elements,
    "rows": Rows,
    "tile": Tile,
    "slab": Slab,
    "whole": WholeTensor,
}


def block_record(block: Block) -> list[Any]:
    """A block as `[kind, number, ...]`: `["tile", 32, 32]`."""
    if isinstance(block, Tile):
        return ["tile", block.rows, block.cols]
    if isinstance(block, Slab):
        return ["slab", block.dims, block.count]
    if isinstance(block, Rows):
        return ["rows", block.count]
    return ["elements", block.count] if isinstance(block, Elements) else ["whole"]


def block_of(record: list[Any]) -> Block:
    """The inverse of `block_record`.

    Raises: `KeyError` or `TypeError` for what is no such record.
    """
    kind, *numbers = record
    return _BLOCKS[kind](*numbers)


def plan_record(plan: GroupPlan) -> dict[str, Any]:
    """A plan as a record for JSON: N, S, the alignment and the slots in buffer order."""
    slots = [
        {
            "name": slot.name,
            "shape": list(slot.shape),
            "block": block_record(slot.spec.block),
            "offset": slot.offset,
            "size": slot.size,
            "storage": slot.storage,
        }
        for slot in plan.ordered_slots
    ]
    return {
        "num_shards": plan.num_shards,
        "alignment": plan.alignment,
        "shard_size": plan.shard_size,
        "slots": slots,
    }


def plan_of(record: dict[str, Any]) -> GroupPlan:
    """The inverse of `plan_record`.

    Raises: `KeyError`, `TypeError` or `ValueError` for what is no such record.
    """
    slots = tuple(
        Slot(
            TensorSpec(slot["name"], tuple(slot["shape"]), block_of(slot["block"])),
            slot["offset"],
            slot["size"],
            slot["storage"],
        )
        for slot in record["slots"]
    )
    plan = GroupPlan(record["num_shards"], record["alignment"], record["shard_size"], slots)
    plan.check()
    return plan
