"""What each storage order saves: the question "why is this tensor not simply row-major?", answered by planning again.

In comes a plan, out goes a number for each tensor that is stored otherwise.
"""

from ._arrange import arrange
from ._plan import GroupPlan
from ._storage import Storage


def storage_savings(plan: GroupPlan) -> dict[str, int]:
    """Padding, in elements of the buffer, that would come back if the tensor were stored row-major.

    Tensors of equal shape and block change together, since they were chosen together; each is listed with what all of
    them save. Row-major tensors are left out. A number may be 0 where two changes only help together.
    """
    slots = plan.ordered_slots
    savings: dict[str, int] = {}
    done: dict[object, int] = {}
    for changed in slots:
        if changed.storage == "row_major":
            continue
        kind = (changed.shape, changed.spec.block)
        if kind not in done:
            storages: list[Storage] = ["row_major" if (s.shape, s.spec.block) == kind else s.storage for s in slots]
            found = arrange([s.spec for s in slots], storages, plan.num_shards, plan.alignment, "search", 0.01)
            done[kind] = (found.shard_size - plan.shard_size) * plan.num_shards
        savings[changed.name] = done[kind]
    return savings
