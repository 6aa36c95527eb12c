"""Topology: the devices of chips that need not be there.

In come a chip and a topology such as `1x128x8`; out go JAX devices that can be compiled for. GPUs and TPUs are made by
the compilers in JAX's plugins; CPU devices are virtual ones of this process.
"""

import importlib.util
import math
import sys
from typing import Any

import jax

from ._chip import Chip, target_config


def sizes(topology: str) -> tuple[int, ...]:
    """The numbers in a topology.

    Raises: `ValueError` if it is not made of positive numbers with an x between.
    """
    parts = topology.split("x")
    if not all(part.isdigit() and int(part) for part in parts):
        raise ValueError(
            f"--topology: got {topology!r}; want numbers with an x between, the last one the devices of a node; write "
            "for example 1x128x8"
        )
    return tuple(map(int, parts))


def devices_per_node(chip: Chip, topology: str) -> int:
    """Devices within reach of each other's links: of a GPU the node's, of a TPU the slice's."""
    numbers = sizes(topology)
    return numbers[-1] if chip.platform == "gpu" else math.prod(numbers)


def devices(chip: Chip, topology: str) -> list[Any]:
    """The devices of a topology.

    Arguments:

    - `chip`: the kind of device.
    - `topology`: for GPUs partitions x hosts x GPUs of a host; fewer numbers are the last ones. For TPUs the shape of
      the slice, as Cloud TPU names it. For CPUs any numbers: their product counts.

    Raises: `ImportError` that says what to install where the chip's compiler is missing, `ValueError` for a topology
    that cannot be had.
    """
    numbers = sizes(topology)
    if chip.platform == "gpu":
        return _gpus(chip, numbers, topology)
    if chip.platform == "tpu":
        return _tpus(chip, topology)
    count = math.prod(numbers)
    found = jax.devices("cpu")
    if len(found) < count:
        raise ValueError(
            f"--topology: got {topology!r} for {len(found)} CPU devices; want no more than there are; start the "
            "command by itself, or call jax.config.update('jax_num_cpu_devices', N) before JAX is used"
        )
    return found[:count]


def _gpus(chip: Chip, numbers: tuple[int, ...], topology: str) -> list[Any]:
    if len(numbers) > 3:
        raise ValueError(f"--topology: got {topology!r}; want partitions x hosts x GPUs; write for example 1x128x8")
    if jax.__version_info__ < (0, 11):
        python = ".".join(map(str, sys.version_info[:2]))
        raise ImportError(
            f"--chip {chip.name}: got JAX {jax.__version__} on Python {python}; want JAX 0.11 or newer, which needs "
            "Python 3.12, to compile for GPUs that are not there; use such a Python, or --chip cpu"
        )
    if not any(importlib.util.find_spec(name) for name in ("jax_cuda13_plugin", "jax_cuda12_plugin")):
        raise ImportError(
            f"--chip {chip.name}: got no CUDA plugin of JAX; want one, to compile for GPUs; install the extra: pip "
            "install 'vescale_jax[cuda-aot]'"
        )
    from jax.experimental import topologies

    # XLA's partition is what shares links, and that is a node. Told of 64 GPUs in one, it puts a small all-reduce into
    # a kernel for one node, which does not compile (JAX 0.12).
    gpus = numbers[-1:]
    full = (math.prod(numbers[:-1]), 1, *gpus)
    made = topologies.get_topology_desc(
        platform="cuda",
        topology_name=chip.name,
        target_config=target_config(chip),
        topology="x".join(map(str, full)),
    )
    return list(made.devices)


def _tpus(chip: Chip, topology: str) -> list[Any]:
    if not importlib.util.find_spec("libtpu"):
        raise ImportError(
            f"--chip {chip.name}: got no libtpu; want the TPU compiler; install it: pip install libtpu, of the version "
            "that your JAX names in its extra jax[tpu]"
        )
    from jax.experimental import topologies

    made = topologies.get_topology_desc(platform="tpu", topology_name=f"{chip.name}:{topology}")
    return list(made.devices)
