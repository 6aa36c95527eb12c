"""Owners: a plan in which every tensor lies whole on one device, and the devices have equal work.

Comes in: tensors and what each costs. Goes out: a plan like any other, so `redistribute` moves tensors to their owners
and back. The planner proper makes shards small; here the costliest device counts (Muon, where an m x n matrix costs
about min(m, n)^2 max(m, n), and a device that owns nothing waits).
"""

from collections.abc import Callable, Sequence

from vescale_planner import GroupPlan, Slot, TensorSpec, WholeTensor


def choose_owners(costs: Sequence[float | int], sizes: Sequence[int], num_shards: int) -> list[int]:
    """Gives things to devices: the costliest first, each to the device with least to do.

    The longest-processing-time rule (Graham, "Bounds on Multiprocessing Timing Anomalies", 1969): no device has more
    than 4/3 of the least possible cost.

    Arguments:

    - `costs`: of each thing.
    - `sizes`: elements of each; decide between devices that have equally much to do.
    - `num_shards`: N.

    Returns: the device of each thing.
    """
    loads = [(0.0, 0, device) for device in range(num_shards)]
    owners = [0] * len(costs)
    for i in sorted(range(len(costs)), key=lambda i: (-costs[i], -sizes[i], i)):
        cost, size, device = min(loads)
        owners[i] = device
        loads[device] = (cost + costs[i], size + sizes[i], device)
    return owners


def plan_owners(
    tensors: Sequence[TensorSpec],
    num_shards: int,
    alignment: int = 1,
    *,
    cost: Callable[[TensorSpec], float] | None = None,
) -> GroupPlan:
    """A plan with whole tensors, balanced by cost.

    Arguments:

    - `tensors`: names and shapes; their blocks do not matter.
    - `num_shards`: N.
    - `alignment`: the shard size will be a multiple of it.
    - `cost`: of a tensor, in any unit. None: its elements.

    Returns: the plan; the shard size is that of the device which owns most elements.
    """
    specs = [TensorSpec(spec.name, spec.shape, WholeTensor()) for spec in tensors]
    costs = [float(spec.size if cost is None else cost(spec)) for spec in specs]
    owners = choose_owners(costs, [spec.size for spec in specs], num_shards)
    held = [sum(spec.size for spec, owner in zip(specs, owners, strict=True) if owner == k) for k in range(num_shards)]
    size = -(-max(held, default=0) // alignment) * alignment
    slots: list[Slot] = []
    for device in range(num_shards):
        offset = device * size
        for spec, owner in zip(specs, owners, strict=True):
            if owner == device:
                slots.append(Slot(spec, offset, spec.size))
                offset += spec.size
    return GroupPlan(num_shards, alignment, size, tuple(slots), "cost")
