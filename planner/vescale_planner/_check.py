"""The proof that a plan solves its problem, made from the slots alone and not from how they were found.

In comes a plan, out comes nothing or one error with every violation. The constraints are those of arXiv 2602.22437:
contiguous slots inside the buffer, disjoint, whole blocks on every shard, and the same shard size everywhere.
"""

from typing import TYPE_CHECKING

from ._faults import Faults

if TYPE_CHECKING:  # a plan checks itself, so this module comes first
    from ._plan import GroupPlan, Slot


def check_plan(plan: "GroupPlan") -> None:
    """Raises `ValueError` with every constraint that `plan` violates."""
    faults = Faults("GroupPlan.check")
    cursor = 0
    for slot in plan.ordered_slots:
        size = slot.cuts.size
        if slot.size != size:
            faults.add(slot.name, got=f"{slot.size} elements", want=f"{size}", change="plan the group again")
        if slot.offset < cursor:
            want = f"a start at or behind {cursor}, where the slot before it ends"
            faults.add(slot.name, got=f"offset {slot.offset}", want=want, change="plan the group again")
        cursor = max(cursor, slot.stop)
        if slot.stop > plan.buffer_size:
            want = f"an end within the buffer's {plan.buffer_size} elements"
            faults.add(slot.name, got=f"an end at {slot.stop}", want=want, change="plan the group again")
        _check_cuts(plan, slot, faults)
    faults.raise_if_any()


def _check_cuts(plan: "GroupPlan", slot: "Slot", faults: Faults) -> None:
    """Notes the first shard boundary that cuts a block of `slot`."""
    if not slot.size or not plan.shard_size:
        return
    cuts = slot.cuts
    first = (slot.offset // plan.shard_size + 1) * plan.shard_size
    # Boundaries that lie whole blocks apart are all cuts when the first is; a million of them need no look.
    apart = cuts.granularity if cuts.is_uniform else cuts.period
    stop = slot.stop if plan.shard_size % apart else min(slot.stop, first + 1)
    for boundary in range(first, stop, plan.shard_size):
        if not cuts.allows(boundary - slot.offset):
            got = f"the end of shard {boundary // plan.shard_size - 1} at element {boundary - slot.offset} of the slot"
            want = f"a cut between blocks of at most {cuts.granularity} elements"
            faults.add(slot.name, got=got, want=want, change="plan the group again")
            return
