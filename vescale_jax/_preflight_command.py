"""`python -m vescale_jax preflight`: compiles a training step for chips that are not there, and says what it will do.

In come the name of a function that makes the step for a mesh, a chip and a topology; out go tables, JSON, a picture.
What the numbers mean, and what they cannot know, is in docs/preflight.md.
"""

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

if TYPE_CHECKING:
    from vescale_jax.preflight import Rates, Report

_WIDTH_IN_A_FILE = 150
"""Characters of a line where there is no terminal whose width could be used."""

_CHIP_RATES = {
    "link_bandwidth": "bytes/s a device sends to others of its node, one way",
    "network_bandwidth": "bytes/s a device sends to other nodes, one way",
    "memory_bandwidth": "bytes/s of device memory",
    "memory_bytes": "bytes of device memory",
    "flops_bf16": "FLOP/s of bfloat16 products",
    "flops_f32": "FLOP/s of float32 products",
}

_MODEL_RATES = {
    "product_efficiency": "part of the FLOP/s that products reach (default 0.7)",
    "memory_efficiency": "part of the memory bandwidth that streams reach (default 0.85)",
    "latency_seconds": "of every collective (default 2e-5)",
    "launch_seconds": "of every kernel (default 2e-6)",
}

_EPILOG = """\
The function takes a mesh, and what --set gives it, and returns a vescale_jax.preflight.Workload, or a tuple of a step,
an abstract state and an abstract batch.

examples:
  python -m vescale_jax preflight --module examples.preflight_model:llama --chip h100 --topology 1x1x8 --set layers=4
  python -m vescale_jax preflight --module my_package.train:workload --chip h100 --topology 1x128x8 --json
  python -m vescale_jax preflight --module examples.preflight_model:llama --chip cpu --topology 8 --plot step.png
"""


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the sub-command."""
    parser = commands.add_parser(
        "preflight",
        help="compile a training step for chips that are not there",
        description=__doc__,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--module", required=True, metavar="PACKAGE.FILE:FUNCTION", help="a function of a mesh that makes a step"
    )
    parser.add_argument("--chip", required=True, help="h100, h200, a100, b200, v5e, v5p, v6e or cpu")
    parser.add_argument("--topology", required=True, help="partitions x hosts x GPUs, such as 1x128x8; or a TPU slice")
    parser.add_argument(
        "--mesh", default="", metavar="AXIS=N,...", help="axes of the mesh; default: all devices on the axis fsdp"
    )
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="an argument for the function")
    parser.add_argument(
        "--option",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a compiler option of XLA, over the defaults",
    )
    for names in (_CHIP_RATES, _MODEL_RATES):
        for name, what in names.items():
            parser.add_argument(f"--{name.replace('_', '-')}", type=float, metavar="NUMBER", help=what)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the schedule: .png or .svg")
    parser.add_argument("--hlo", type=Path, metavar="FILE", help="write the text of the compiled program")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Compiles, prints, draws; returns the exit status."""
    settings = _pairs("--set", arguments.set, "layers=4")
    options = _pairs("--option", arguments.option, "xla_cpu_enable_fast_math=false")
    plot = arguments.plot
    if plot and (plot.suffix not in (".png", ".svg") or not plot.parent.is_dir()):
        raise ValueError(f"--plot: got {plot}; want a .png or .svg file in a folder that exists; name such a file")
    hlo = arguments.hlo
    if hlo and (hlo.is_dir() or not hlo.parent.is_dir()):
        raise ValueError(f"--hlo: got {hlo}; want a file in a folder that exists; name such a file")
    from vescale_jax.preflight import preflight
    from vescale_jax.preflight._workload import load_workload

    rates = _rates(arguments)
    _use_cpu(rates, arguments.topology)
    workload = load_workload(arguments.module, _mesh(rates, arguments), settings)
    report, text = preflight(workload, rates, options)
    if hlo:
        hlo.write_text(text)
    _print(report, arguments)
    if plot:
        from vescale_jax.preflight._picture import draw_schedule

        draw_schedule(report, plot, f"{arguments.module} on {report.num_devices} x {rates.chip.name}")
    return 0


def _rates(arguments: argparse.Namespace) -> "Rates":
    """The chip and the constants, with what the arguments replace."""
    from vescale_jax.preflight import Rates, chip, devices_per_node

    changes = {name: getattr(arguments, name) for name in _CHIP_RATES if getattr(arguments, name) is not None}
    chosen = chip(arguments.chip, **changes)
    constants = {name: getattr(arguments, name) for name in _MODEL_RATES if getattr(arguments, name) is not None}
    return Rates(chosen, devices_per_node(chosen, arguments.topology), **constants)


def _use_cpu(rates: "Rates", topology: str) -> None:
    """Keeps JAX from looking for devices, and makes as many virtual ones as `--chip cpu` needs."""
    import jax

    from vescale_jax.preflight._topology import sizes

    jax.config.update("jax_platforms", "cpu")
    if rates.chip.platform == "cpu":
        try:
            jax.config.update("jax_num_cpu_devices", math.prod(sizes(topology)))
        except RuntimeError:
            return  # JAX has started already; the topology is checked against the devices that there are.


def _mesh(rates: "Rates", arguments: argparse.Namespace) -> Any:
    """The devices of the topology as a mesh."""
    import numpy as np
    from jax.sharding import Mesh

    from vescale_jax.preflight import devices

    found = devices(rates.chip, arguments.topology)
    axes = _pairs("--mesh", arguments.mesh.split(","), "replica=2,fsdp=4") if arguments.mesh else {"fsdp": len(found)}
    if not all(isinstance(size, int) for size in axes.values()) or math.prod(axes.values()) != len(found):
        raise ValueError(
            f"--mesh: got {arguments.mesh!r}; want sizes whose product is {len(found)}, the devices of "
            f"{arguments.topology}; write for example replica=2,fsdp={max(1, len(found) // 2)}"
        )
    return Mesh(np.array(found).reshape(tuple(axes.values())), tuple(axes))


def _pairs(argument: str, texts: Sequence[str], example: str) -> dict[str, Any]:
    """`NAME=VALUE`s as a dictionary; numbers and true and false are read as such."""
    pairs: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not (name and equals and value):
            raise ValueError(f"{argument}: got {text!r}; want NAME=VALUE; write for example {example}")
        if name in pairs:
            raise ValueError(f"{argument}: got {name} twice; want it once; drop one")
        pairs[name] = _value(value)
    return pairs


def _value(text: str) -> bool | int | float | str:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _print(report: "Report", arguments: argparse.Namespace) -> None:
    if arguments.json:
        record = {"module": arguments.module, "topology": arguments.topology, **report.as_json()}
        print(json.dumps(record))  # noqa: T201 (this is the program's output)
        return
    from vescale_jax.preflight._table import tables

    console = Console()
    if not console.is_terminal:
        console = Console(width=_WIDTH_IN_A_FILE)
    title = f"{arguments.module}: {report.num_devices} x {report.rates.chip.name}, topology {arguments.topology}"
    console.print(tables(report, title), highlight=False)
