"""Chips: rates and sizes of one device, from its maker's data sheets.

Rates are those printed for dense products, links count one direction. The cost model multiplies them by efficiencies;
every number can be replaced.
"""

import dataclasses
import difflib
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Chip:
    """What the cost model and the compiler need to know of a chip.

    Attributes:

    - `name`: as given to `--chip`.
    - `platform`: `gpu`, `tpu` or `cpu`.
    - `flops_bf16`: FLOP/s of dense bfloat16 products.
    - `flops_f32`: FLOP/s of float32 products in JAX's default precision: TF32 on GPUs, one bfloat16 pass on TPUs.
    - `memory_bytes`: of the device's memory.
    - `memory_bandwidth`: bytes/s of it.
    - `link_bandwidth`: bytes/s that one device can send to its neighbours in the same node or slice, in one direction.
    - `network_bandwidth`: bytes/s that it can send to other nodes or slices.
    - `source`: where the numbers are from.
    - `target`: for GPUs, what the compiler needs beyond them.
    """

    name: str
    platform: str
    flops_bf16: float
    flops_f32: float
    memory_bytes: int
    memory_bandwidth: float
    link_bandwidth: float
    network_bandwidth: float
    source: str
    target: "GpuTarget | None" = None


@dataclass(frozen=True, slots=True)
class GpuTarget:
    """What of a GPU decides how XLA compiles for it.

    Attributes:

    - `description`: the name that the driver reports.
    - `capability`: major and minor.
    - `feature_extension`: of the capability; Hopper and later have `ACCELERATED_FEATURES`.
    - `cores`: streaming multiprocessors.
    - `clock_ghz`: the boost clock.
    - `l2_bytes`: of the level 2 cache.
    - `shared_per_core`, `shared_per_block`: bytes of shared memory, of a block the most it may ask for.
    - `links`: NVLinks.
    """

    description: str
    capability: tuple[int, int]
    feature_extension: str
    cores: int
    clock_ghz: float
    l2_bytes: int
    shared_per_core: int
    shared_per_block: int
    links: int


_GIB = 2**30

_HOPPER = GpuTarget("NVIDIA H100 80GB HBM3", (9, 0), "ACCELERATED_FEATURES", 132, 1.98, 50 << 20, 233472, 232448, 18)

CHIPS = {
    chip.name: chip
    for chip in (
        Chip(
            "h100", "gpu", 989.4e12, 494.7e12, 80 * _GIB - 956301312, 3352.32e9, 450e9, 50e9,
            "NVIDIA H100 Tensor Core GPU data sheet, SXM5: half of the figures with sparsity; NVLink 900 GB/s in both "
            "directions; one 400 Gb/s port a GPU as in DGX H100",
            _HOPPER,
        ),
        Chip(
            "h200", "gpu", 989.4e12, 494.7e12, 141 * _GIB, 4800e9, 450e9, 50e9,
            "NVIDIA H200 Tensor Core GPU data sheet, SXM; links as H100",
            dataclasses.replace(_HOPPER, description="NVIDIA H200"),
        ),
        Chip(
            "a100", "gpu", 312e12, 156e12, 80 * _GIB - 850395136, 2039e9, 300e9, 25e9,
            "NVIDIA A100 Tensor Core GPU data sheet, 80 GB SXM; NVLink 600 GB/s in both directions; one 200 Gb/s port "
            "a GPU as in DGX A100",
            GpuTarget("NVIDIA A100-SXM4-80GB", (8, 0), "", 108, 1.41, 40 << 20, 167936, 166912, 12),
        ),
        Chip(
            "b200", "gpu", 2250e12, 1125e12, 180_000_000_000, 8000e9, 900e9, 50e9,
            "NVIDIA DGX B200 data sheet, an eighth of the system, half of the figures with sparsity; NVLink 14.4 TB/s "
            "in both directions over 8 GPUs; one 400 Gb/s port a GPU",
            GpuTarget("NVIDIA B200", (10, 0), "ACCELERATED_FEATURES", 148, 1.965, 126 << 20, 233472, 232448, 18),
        ),
        Chip(
            "v5e", "tpu", 197e12, 197e12, 16_000_000_000, 819e9, 200e9, 3.125e9,
            "Google Cloud, TPU v5e: 400 GB/s in both directions between chips; 6.4 Tb/s of network for 256 chips",
        ),
        Chip(
            "v5p", "tpu", 459e12, 459e12, 95_000_000_000, 2765e9, 600e9, 6.25e9,
            "Google Cloud, TPU v5p: 4800 Gb/s between chips; network: 200 Gb/s a host of four chips, an assumption",
        ),
        Chip(
            "v6e", "tpu", 918e12, 918e12, 32_000_000_000, 1638e9, 400e9, 12.5e9,
            "Google Cloud, TPU v6e: 800 GB/s in both directions between chips; network: 25.6 Tb/s for 256 chips",
        ),
        Chip(
            "cpu", "cpu", 50e9, 50e9, 16 * _GIB, 20e9, 5e9, 1e9,
            "no data sheet: round numbers of one virtual device on a shared machine; bytes and counts mean something "
            "here, times do not",
        ),
    )
}  # fmt: skip
"""The chips that are known, by name."""


def chip(name: str, **changes: float) -> Chip:
    """A chip by name, with some of its numbers replaced.

    Arguments:

    - `name`: such as `h100`.
    - `changes`: attributes of `Chip` to set, such as `link_bandwidth=200e9`.

    Raises: `ValueError` for a name that is not known, or a number that is not positive.
    """
    if name not in CHIPS:
        near = difflib.get_close_matches(name, CHIPS, 1)
        hint = f"did you mean {near[0]}?" if near else "choose the nearest and replace its numbers"
        raise ValueError(f"chip: got {name!r}; want one of {', '.join(CHIPS)}; {hint}")
    for key, value in changes.items():
        if not value > 0:
            raise ValueError(f"chip: {key}: got {value}; want a positive number; leave it out for the chip's own")
    return dataclasses.replace(CHIPS[name], **changes)


def target_config(chip: Chip) -> str:
    """The text with which XLA compiles for a GPU that is not there.

    Arguments:

    - `chip`: with a `target`.

    Returns: XLA's `GpuTargetConfigProto` as text.

    Raises: `ValueError` for a chip that is no GPU.
    """
    gpu = chip.target
    if gpu is None:
        raise ValueError(f"target_config: got {chip.name}, a {chip.platform}; want a GPU; only GPUs have a target")
    feature = f" feature_extension: {gpu.feature_extension}" if gpu.feature_extension else ""
    return f"""\
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: {gpu.shared_per_core}
  threads_per_core_limit: 2048
  core_count: {gpu.cores}
  fpus_per_core: {64 if gpu.capability == (8, 0) else 128}
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: {int(chip.memory_bandwidth)}
  l2_cache_size: {gpu.l2_bytes}
  clock_rate_ghz: {gpu.clock_ghz}
  device_memory_size: {int(chip.memory_bytes)}
  shared_memory_per_block_optin: {gpu.shared_per_block}
  cuda_compute_capability {{ major: {gpu.capability[0]} minor: {gpu.capability[1]}{feature} }}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  name: "{gpu.description}"
  driver_version: "13.0.0"
  runtime_version: "12.8.0"
  compile_time_toolkit_version: "12.8.0"
  dnn_version: "9.10.0"
  device_interconnect_info {{ active_links: {gpu.links} }}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
device_description_str: "{gpu.description}"
"""
