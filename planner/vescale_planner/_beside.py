"""Tensors that are sharded on another mesh axis as well, such as tensor or expert parallelism.

In comes the spec of a whole tensor with the dim and the number of parts of the other axis; out goes the spec of one
part, which is what the planner then places. Every part has the same plan, so a buffer of such tensors is (parts, N*S).

Two rules, both of veScale's RaggedShard: along dim 0 a part is a run of the tensor and its blocks are counted in the
part (the strided form). Along a later dim a cut must never enter that dim, or the pieces of two parts would not make a
box of the whole tensor: the granularity becomes the LCM of the block's own and of what lies from that dim on.
"""

import math
from dataclasses import replace

from ._blocks import Elements, WholeTensor
from ._faults import Faults
from ._specs import TensorSpec
from ._storage import cuts_of


def part_of(spec: TensorSpec, dim: int, parts: int) -> TensorSpec:
    """The spec of one part of a tensor that another axis shards along `dim`.

    Arguments:

    - `spec`: the whole tensor.
    - `dim`: the dim that the other axis shards; negative ones count from the end.
    - `parts`: the size of the other axis.

    Raises `ValueError` when there is no such dim or `parts` does not divide it.
    """
    faults = Faults("part_of")
    dims = len(spec.shape)
    if not -dims <= dim < dims:
        faults.add(
            spec.name, got=f"dim {dim} of shape {spec.shape}", want=f"a dim below {dims}", change="pass another dim"
        )
    elif parts < 1 or spec.shape[dim] % parts:
        got, want = f"{parts} parts of dim {dim} of shape {spec.shape}", f"a divisor of {spec.shape[dim]}"
        faults.add(spec.name, got=got, want=want, change="shard another dim or resize the other axis")
    faults.raise_if_any()
    dim %= dims
    shape = (*spec.shape[:dim], spec.shape[dim] // parts, *spec.shape[dim + 1 :])
    part = replace(spec, shape=shape)
    if dim == 0 or isinstance(spec.block, WholeTensor) or not part.size:
        return part
    own = cuts_of(shape, spec.block, "row_major").modulus
    return replace(part, block=Elements(math.lcm(own, math.prod(shape[dim:]))))
