"""Cost: how long one kernel and one collective take, by a stated model.

    kernel      max(FLOPs / (rate * product_efficiency), bytes / (bandwidth * memory_efficiency)) + launch
    collective  max(B (n - 1) / n / link, B (h - 1) / h / (g * network)) + latency, an all-reduce twice

B bytes of the whole buffer, n devices of a group on h nodes of g. FLOPs are those of matrix products; all else is
bound by memory. The efficiencies are what large products, streams and collectives commonly reach, not measurements of
your program.
"""

import math
from dataclasses import dataclass

from ._chip import Chip
from ._collective import Collective
from ._fusion import FREE, Kernels
from ._text import Computation, Instruction, leaves


@dataclass(frozen=True, slots=True)
class Rates:
    """The constants of the model.

    Arguments:

    - `chip`: its rates.
    - `devices_per_node`: devices within reach of its links.
    - `product_efficiency`: of a large product, as a part of the chip's rate.
    - `memory_efficiency`: of a stream through memory, as a part of its bandwidth.
    - `launch_seconds`: of every kernel.
    - `latency_seconds`: of every collective.
    """

    chip: Chip
    devices_per_node: int
    product_efficiency: float = 0.7
    memory_efficiency: float = 0.85
    launch_seconds: float = 2e-6
    latency_seconds: float = 2e-5

    def __post_init__(self) -> None:
        for name in ("product_efficiency", "memory_efficiency"):
            value = getattr(self, name)
            if not 0 < value <= 1:
                raise ValueError(f"Rates: {name}: got {value}; want a part of one; pass for example 0.7")

    def kernel_seconds(self, kernels: Kernels, computation: Computation, instruction: Instruction) -> float:
        """Seconds of an instruction that is neither a collective nor a loop; nothing for one that is no kernel."""
        if instruction.opcode in FREE or instruction.opcode.endswith("-done"):
            return 0.0
        work, dtype = flops(kernels, computation, instruction)
        rate = self.chip.flops_f32 if dtype in ("f32", "f64") else self.chip.flops_bf16
        moved = kernel_bytes(kernels, computation, instruction)
        return (
            max(
                work / (rate * self.product_efficiency),
                moved / (self.chip.memory_bandwidth * self.memory_efficiency),
            )
            + self.launch_seconds
        )

    def collective_seconds(self, collective: Collective) -> float:
        """Seconds of a collective that has the links for itself."""
        n = len(collective.group)
        if n < 2:
            return 0.0
        nodes = len({device // self.devices_per_node for device in collective.group})
        a_node = math.ceil(n / nodes)
        rounds = 2 if collective.kind == "all-reduce" else 1
        inside = collective.nbytes * (n - 1) / n / self.chip.link_bandwidth if a_node > 1 else 0.0
        between = collective.nbytes * (nodes - 1) / nodes / (a_node * self.chip.network_bandwidth)
        return rounds * max(inside, between) + self.latency_seconds


def kernel_bytes(kernels: Kernels, computation: Computation, instruction: Instruction) -> int:
    """Bytes that a kernel reads and writes."""
    written = sum(leaf.written for leaf in kernels.leaves(computation, instruction))
    return sum(kernels.reads(computation, instruction)) + written


def flops(kernels: Kernels, computation: Computation, instruction: Instruction) -> tuple[float, str]:
    """Floating-point operations of the products in a kernel, and the dtype of their operands."""
    if instruction.opcode == "fusion":
        if not kernels.is_product(instruction):
            return 0.0, ""
        fused = kernels.program.computations[instruction.calls[0]]
        found = [flops(kernels, fused, inner) for inner in fused.instructions if kernels.is_product(inner)]
        return sum(work for work, _ in found), next((dtype for _, dtype in found), "")
    if not kernels.is_product(instruction):
        return 0.0, ""
    operands = computation.operands(instruction)
    result = leaves(instruction.shape)[0]
    left = leaves(operands[0].shape)[0]
    return 2.0 * result.elements * _contracted(instruction, left.dims, operands), left.dtype


def _contracted(instruction: Instruction, left: tuple[int, ...], operands: tuple[Instruction, ...]) -> int:
    """Elements that are multiplied and summed for one element of the result."""
    if instruction.opcode == "convolution":
        window = leaves(operands[1].shape)[0]
        labels = instruction.attribute("dim_labels").split("_")[-1].split("->")[0]
        outputs = window.dims[labels.index("o")] if "o" in labels else 1
        return window.elements // max(outputs, 1)
    dims = instruction.numbers("lhs_contracting_dims")
    if not dims and '"lhs_contracting_dimensions":[' in instruction.rest:
        listed = instruction.rest.split('"lhs_contracting_dimensions":[')[1].split("]")[0]
        dims = tuple(int(part.strip('" ')) for part in listed.split(",") if part)
    if "fmha" in instruction.target:  # Attention in one call: two products over the length of the keys.
        lengths = leaves(operands[1].shape)[0].dims
        return 2 * max(lengths[-3:-1], default=1)
    return math.prod(left[dim] for dim in dims) if dims else left[-1] if left else 1
