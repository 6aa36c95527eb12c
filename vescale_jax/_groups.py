"""Groups: what of a unit shares one flat buffer, planned and bound to the mesh.

Comes in: the parameters of a unit, the policy, and the rules for blocks and trainability. Goes out: `Unit`s of
`Group`s, frozen and hashable. A group has one dtype and is trained as a whole or not at all; arrays of integers and
booleans are never trained. Within a group, names are relative to the unit, so that identical layers have one plan.
"""

import functools
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from vescale_layouts import Layout, sum_dtype
from vescale_planner import Block, Faults, GroupPlan, TensorSpec, advise, plan_group, plan_unit

from ._policy import MixedPrecisionPolicy

# NCCL wants addresses that are multiples of 16 bytes: all-gathers of other sizes are many times slower.
_ALIGNMENT_BYTES = 16

# Padding, per element of a tensor, that nobody needs to hear of; nor of less than so many bytes.
_BEARABLE_PADDING = 0.03
_WORTH_A_WARNING_BYTES = 2**20

Storage = Literal["row_major", "free"]
"""Whether every tensor is stored row-major, or the planner may store tensors with `Tile` blocks transposed or tiled."""


@dataclass(frozen=True, slots=True)
class Group:
    """Parameters that share one flat buffer.

    Attributes:

    - `name`: unique within its unit.
    - `prefix`: what the layout's names lack to be parameter paths: `"layers/0/"`.
    - `layout`: where each parameter lies.
    - `dtype`: of the stored shards.
    - `gather_dtype`: of the all-gather and of the gathered tensors.
    - `reduce_dtype`: of the reduce-scatter.
    - `trainable`: whether there are gradients and optimizer state.
    """

    name: str
    prefix: str
    layout: Layout
    dtype: Any
    gather_dtype: Any
    reduce_dtype: Any
    trainable: bool

    @property
    def paths(self) -> tuple[str, ...]:
        """The parameters, in slot order."""
        return tuple(self.prefix + name for name in self.layout.plan.slots)


@dataclass(frozen=True, slots=True)
class Unit:
    """Groups that are gathered together.

    Attributes:

    - `name`: path of the layer, or `root`.
    - `groups`: one for each dtype and trainability.
    - `reshard_after_forward`: whether the backward pass gathers again instead of keeping the tensors.
    - `stack`: `(L,)` if the unit is a stack of L layers, each of which is gathered by itself; its groups are then laid
      out as one layer is.
    - `prefetch`: layers of a stack that are gathered ahead of the one that computes.
    """

    name: str
    groups: tuple[Group, ...]
    reshard_after_forward: bool
    stack: tuple[int, ...] = ()
    prefetch: int = 0


@dataclass(frozen=True, eq=False)
class Treatment:
    """How the parameters of a model are to be treated.

    Attributes:

    - `blocks`, `trainable`: by path.
    - `policy`: the dtypes.
    - `mesh`, `axis`: what plans are bound to.
    - `storage`: see `fully_shard`.
    """

    blocks: Mapping[str, Block]
    trainable: Mapping[str, bool]
    policy: MixedPrecisionPolicy
    mesh: Mesh
    axis: str
    storage: Storage


def stored_dtype(leaf: Any, policy: MixedPrecisionPolicy) -> Any:
    """The dtype in which a parameter is kept."""
    dtype = jax.dtypes.canonicalize_dtype(leaf.dtype)
    return jnp.dtype(policy.param_dtype) if policy.param_dtype and jnp.issubdtype(dtype, jnp.floating) else dtype


def gathered_dtype(stored: Any, policy: MixedPrecisionPolicy) -> Any:
    """The dtype in which a parameter stored as `stored` is gathered."""
    return jnp.dtype(policy.gather_dtype) if policy.gather_dtype and jnp.issubdtype(stored, jnp.floating) else stored


def make_groups(
    unit: str,
    paths: Sequence[str],
    leaves: Mapping[str, Any],
    treatment: Treatment,
    faults: Faults,
    stack: tuple[int, ...] = (),
) -> tuple[Group, ...]:
    """Plans the groups of one unit.

    Arguments:

    - `unit`: its name.
    - `paths`: its parameters.
    - `leaves`: parameters by path, one layer of each in a stack; only shapes and dtypes are read.
    - `treatment`: of all parameters.
    - `faults`: takes blocks that do not fit their tensor.
    - `stack`: `(L,)` for a stack of L layers.

    Returns: the groups, trainable ones first.
    """
    policy, mesh, axis = treatment.policy, treatment.mesh, treatment.axis
    keyed: dict[tuple[Any, bool], list[str]] = {}
    for path in paths:
        dtype = stored_dtype(leaves[path], policy)
        keyed.setdefault((dtype, treatment.trainable[path] and jnp.issubdtype(dtype, jnp.floating)), []).append(path)
    prefix = f"{unit}/" if all(path.startswith(f"{unit}/") for path in paths) else ""
    groups: list[Group] = []
    for (dtype, trains), members in sorted(keyed.items(), key=lambda item: (not item[0][1], str(item[0][0]))):
        gather = gathered_dtype(dtype, policy)
        specs: list[tuple[str, tuple[int, ...], Block]] = []
        for path in members:
            shape = tuple(leaves[path].shape)
            try:
                TensorSpec(path, shape, treatment.blocks[path])
            except (TypeError, ValueError) as error:
                faults.absorb(error)
            else:
                specs.append((path.removeprefix(prefix), shape, treatment.blocks[path]))
        if len(specs) < len(members):
            continue
        plans = _plan(tuple(specs), mesh.shape[axis], _alignment(dtype, gather), treatment.storage)
        _warn_of_padding(unit, plans, gather.itemsize)
        for i, plan in enumerate(plans):
            group = Group(
                name=f"{dtype}{'' if trains else '_frozen'}{f'.{i}' if i else ''}",
                prefix=prefix,
                layout=Layout(plan, mesh, axis, stack),
                dtype=dtype,
                gather_dtype=gather,
                reduce_dtype=jnp.dtype(policy.reduce_dtype or sum_dtype(dtype)),
                trainable=trains,
            )
            groups.append(group)
    return tuple(groups)


def _alignment(stored: Any, gathered: Any) -> int:
    """Elements that fill the collective's unit in either dtype."""
    return max(1, _ALIGNMENT_BYTES // min(stored.itemsize, gathered.itemsize))


@functools.lru_cache(maxsize=256)
def _plan(
    specs: tuple[tuple[str, tuple[int, ...], Block], ...], num_shards: int, alignment: int, storage: Storage
) -> tuple[GroupPlan, ...]:
    """Plans what may share a buffer; identical layers are planned once."""
    tensors = [TensorSpec(*spec) for spec in specs]
    if storage == "free":
        return plan_unit(tensors, num_shards, alignment, storage="free")
    return (plan_group(tensors, num_shards, alignment),)


def _warn_of_padding(unit: str, plans: Sequence[GroupPlan], itemsize: int) -> None:
    """Says so when a unit's blocks waste memory and bandwidth, and what would help."""
    padding, size = sum(plan.padding for plan in plans), sum(plan.tensor_size for plan in plans)
    if padding <= _BEARABLE_PADDING * size or padding * itemsize < _WORTH_A_WARNING_BYTES:
        return
    specs = [slot.spec for plan in plans for slot in plan.ordered_slots]
    cures = [advice.text for advice in advise(specs, plans[0].num_shards, plans[0].alignment)]
    warnings.warn(
        f"fully_shard: unit {unit}: {padding / size:.1%} padding, {padding * itemsize:,} bytes a gather, since its "
        f"blocks do not fit {plans[0].num_shards} equal shards. What would help: "
        f"{'; '.join(cures) or 'smaller blocks'}.",
        stacklevel=2,
    )


def each_group(units: Sequence[Unit]) -> Iterator[tuple[Unit, Group]]:
    """All groups, unit by unit."""
    for unit in units:
        for group in unit.groups:
            yield unit, group
