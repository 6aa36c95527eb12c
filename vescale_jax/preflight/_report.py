"""Report: everything a preflight finds.

Comes in: a workload, a chip, a topology. Goes out: a `Report`, as an object and as JSON; `_table` prints it.
"""

import re
import resource
import sys
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax

from vescale_jax._compiler_options import compiler_options
from vescale_jax._describe import describe
from vescale_jax._train import TrainState

from ._collective import Collective, collectives
from ._cost import Rates
from ._fusion import FREE, Kernels
from ._gradients import gradient_copy_bytes
from ._memory import Memory, memory_of
from ._text import Program, read_program
from ._timeline import Timeline, walk
from ._weights import WeightCopies, weight_copies
from ._workload import Workload

MFU_FORMULA = "(6 * parameters + attention FLOPs a token) * tokens / (step seconds * devices * bfloat16 FLOP/s)"
"""Forward and backward pass take six FLOPs a parameter and token (Kaplan et al. 2020, arXiv 2001.08361, section 2.1);
utilisation as in PaLM (Chowdhery et al. 2022, arXiv 2204.02311, appendix B)."""


@dataclass(frozen=True)
class Report:
    """What a preflight found out about a training step.

    Attributes:

    - `num_devices`: it was compiled for.
    - `memory`: bytes of one device.
    - `collectives`: all of them, in order.
    - `weights`: copies of weights.
    - `gradient_copy_bytes`: written again before they are sent, in one step on one device.
    - `kernels`: how many of each kind run in one step.
    - `timeline`: the schedule with estimated times.
    - `tokens`: of the global batch.
    - `parameters`: that a token meets.
    - `mfu`: model FLOPs utilisation by `MFU_FORMULA`; None without tokens or parameters.
    - `compile_seconds`, `lower_seconds`: what compiling took, and tracing before it.
    - `host_memory_bytes`: the most that this process has held so far.
    - `hlo_bytes`: of the compiled text.
    - `rates`: the constants of the cost model.
    """

    num_devices: int
    memory: Memory
    collectives: tuple[Collective, ...]
    weights: WeightCopies
    gradient_copy_bytes: int
    kernels: dict[str, int]
    timeline: Timeline
    tokens: int
    parameters: int
    mfu: float | None
    compile_seconds: float
    lower_seconds: float
    host_memory_bytes: int
    hlo_bytes: int
    rates: Rates

    @property
    def weight_copy_bytes(self) -> int:
        """Bytes of weights copied between an all-gather and a product, in one step on one device."""
        return sum(copy.nbytes for copy in self.weights.copies)

    @property
    def merged_gemm_bytes(self) -> int:
        """Bytes of weights that XLA puts side by side for one product."""
        return sum(copy.nbytes for copy in self.weights.merged)

    @property
    def tokens_per_second(self) -> float:
        """Estimated tokens a second and device."""
        return self.tokens / self.num_devices / self.timeline.seconds if self.timeline.seconds else 0.0

    def as_json(self) -> dict[str, Any]:
        """Numbers for a machine; bytes and counts are those of one device and one step."""
        memory, stored = self.memory, self.memory.stored
        return {
            "chip": self.rates.chip.name,
            "devices": self.num_devices,
            "jax": jax.__version__,
            "argument_bytes": memory.argument_bytes,
            "temp_bytes": memory.temp_bytes,
            "output_bytes": memory.output_bytes,
            "alias_bytes": memory.alias_bytes,
            "total_bytes": memory.total_bytes,
            "device_bytes": memory.device_bytes,
            "fits": memory.fits,
            "gathered_bytes": memory.gathered_bytes,
            "activation_bytes": memory.activation_bytes,
            "stored_bytes": None
            if stored is None
            else {name: getattr(stored, name) for name in stored.__dataclass_fields__},
            "weight_copy_bytes": self.weight_copy_bytes,
            "merged_gemm_bytes": self.merged_gemm_bytes,
            "other_weight_move_bytes": sum(copy.nbytes for copy in self.weights.others),
            "gradient_copy_bytes": self.gradient_copy_bytes,
            "hidden_fraction": self.hidden_fraction(),
            "hidden_fraction_with_ends": self.hidden_fraction(everything=True),
            "collectives": [
                {
                    "kind": kind, "dtype": dtype, "bytes": size, "devices": group, "asynchronous": is_async,
                    "in_loop": in_loop, "count": count,
                }
                for (kind, dtype, size, group, is_async, in_loop), count in self.counted_collectives().items()
            ],
            "kernels": self.kernels,
            "step_seconds": self.timeline.seconds,
            "product_seconds": self.timeline.product_seconds,
            "tokens_per_second_per_device": self.tokens_per_second,
            "parameters": self.parameters,
            "mfu": self.mfu,
            "mfu_formula": MFU_FORMULA,
            "lower_seconds": self.lower_seconds,
            "compile_seconds": self.compile_seconds,
            "host_memory_bytes": self.host_memory_bytes,
            "hlo_bytes": self.hlo_bytes,
        }  # fmt: skip

    def hidden_fraction(self, *, everything: bool = False) -> dict[str, float | None]:
        """The shares of collectives' time that are hidden, of both passes; see `Timeline.hidden_fraction`.

        None for TPUs: their compiler fuses parts of collectives with other work, and the text does not tell when.
        """
        if self.rates.chip.platform == "tpu":
            return {"forward": None, "backward": None}
        return {
            "forward": self.timeline.hidden_fraction(False, everything=everything),
            "backward": self.timeline.hidden_fraction(True, everything=everything),
        }

    def counted_collectives(self) -> dict[tuple[str, str, int, int, bool, bool], int]:
        """How often each kind of collective runs: by kind, dtype, bytes, devices, asynchronous, inside a loop."""
        counts: Counter[tuple[str, str, int, int, bool, bool]] = Counter()
        for one in self.collectives:
            counts[one.kind, one.dtype, one.nbytes, len(one.group), one.is_async, one.turns > 1] += one.turns
        return dict(counts)


def preflight(workload: Workload, rates: Rates, options: Mapping[str, Any] | None = None) -> tuple[Report, str]:
    """Compiles a training step and says what it will do.

    Arguments:

    - `workload`: the step and its shapes, on the mesh to compile for.
    - `rates`: the chip and the constants of the cost model.
    - `options`: compiler options over `compiler_options` of the platform and those of the step.

    Returns: the report, and the compiled program's text.
    """
    chosen = {
        **compiler_options(rates.chip.platform),
        **(getattr(workload.step, "compiler_options", None) or {}),
        **_without_a_device(rates.chip.platform),
        **(options or {}),
    }
    began = time.perf_counter()
    lowered = workload.step.lower(workload.state, workload.batch)
    lowered_at = time.perf_counter()
    compiled = _compile(lowered, chosen, rates.chip.name)
    seconds = (lowered_at - began, time.perf_counter() - lowered_at)
    text = compiled.as_text()
    return examine(compiled, text, workload, rates, seconds), text


def _compile(lowered: Any, options: Mapping[str, Any], chip: str) -> Any:
    try:
        return lowered.compile(compiler_options=dict(options) or None)
    except jax.errors.JaxRuntimeError as error:
        unknown = re.search(r"No such compile option: '(.*?)'", str(error))
        if unknown:
            raise ValueError(
                f"preflight: got the compiler option {unknown[1]!r}; want one that XLA has for {chip}; mend --option, "
                "or the step's compiler_options"
            ) from error
        if "find a suitable version of ptxas" not in str(error):
            raise
        raise ImportError(
            f"--chip {chip}: got no ptxas; want CUDA's assembler, on the PATH or as a package; install the extra: pip "
            "install 'vescale_jax[cuda-aot]'"
        ) from error


def examine(
    compiled: Any, text: str, workload: Workload, rates: Rates, seconds: tuple[float, float] = (0.0, 0.0)
) -> Report:
    """Says what a compiled step will do.

    Arguments:

    - `compiled`, `text`: the step and its text.
    - `workload`: what it was compiled from.
    - `rates`: the chip and the constants of the cost model.
    - `seconds`: that lowering and compiling took.
    """
    program = read_program(text)
    kernels = Kernels(program)
    num_devices = _num_devices(workload)
    found = collectives(program, num_devices)
    timeline = walk(program, kernels, rates, num_devices)
    parameters = workload.active_parameters or _parameters(workload.state)
    tokens = workload.num_tokens
    work = (6 * parameters + workload.flops_per_token) * tokens
    available = timeline.seconds * num_devices * rates.chip.flops_bf16
    return Report(
        num_devices=num_devices,
        memory=memory_of(compiled, program, workload.state, rates.chip.memory_bytes),
        collectives=found,
        weights=weight_copies(program, kernels),
        gradient_copy_bytes=gradient_copy_bytes(program, kernels, found),
        kernels=count_kernels(program, kernels),
        timeline=timeline,
        tokens=tokens,
        parameters=parameters,
        mfu=work / available if work and parameters and available else None,
        compile_seconds=seconds[1],
        lower_seconds=seconds[0],
        host_memory_bytes=_peak_host_bytes(),
        hlo_bytes=len(text),
        rates=rates,
    )


def count_kernels(program: Program, kernels: Kernels) -> dict[str, int]:
    """How many kernels of each kind run in one step: products, copies, other fusions, collectives, others."""
    counts: Counter[str] = Counter()
    for computation, turns in program.scheduled():
        for one in computation.instructions:
            if one.opcode in FREE or one.opcode.endswith("-done") or one.opcode in ("while", "call", "conditional"):
                continue
            if kernels.is_product(one):
                kind = "product"
            elif one.opcode.startswith(("all-", "reduce-scatter", "collective", "async-start")):
                kind = "collective"
            elif all(leaf.is_copy for leaf in kernels.leaves(computation, one)):
                kind = "copy"
            else:
                kind = "fusion" if one.opcode == "fusion" else "other"
            counts[kind] += turns
    return dict(sorted(counts.items()))


def _without_a_device(platform: str) -> dict[str, Any]:
    """Options without which nothing can be compiled for a chip that is not there."""
    return {"xla_gpu_autotune_level": 0} if platform == "gpu" else {}


def _num_devices(workload: Workload) -> int:
    for leaf in jax.tree.leaves((workload.state, workload.batch)):
        if sharding := getattr(leaf, "sharding", None):
            return len(sharding.device_set)
    raise ValueError("preflight: state: got no leaf with a sharding; want shapes on a mesh; shard the model first")


def _parameters(state: Any) -> int:
    return describe(state.model).parameters if isinstance(state, TrainState) else 0


def _peak_host_bytes() -> int:
    """The largest resident size of this process: in KiB on Linux, in bytes on macOS."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
