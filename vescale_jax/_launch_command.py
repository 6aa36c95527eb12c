"""`python -m vescale_jax launch`: a training script on several processes of this machine.

Every process runs the same script, which calls `vs.join_hosts()` first. Process 0 prints as usual; the lines of the
others carry their number. When one process fails, all are ended within seconds, and a message names it. On several
machines a scheduler does this.
"""

import argparse
import sys

from vescale_jax._job import run_job

_EPILOG = """\
examples:
  python -m vescale_jax launch --processes 2 -- examples/train_lm.py --steps 100
  python -m vescale_jax launch --processes 2 --devices-per-process 4 -- -m my_package.train
"""


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the sub-command."""
    parser = commands.add_parser(
        "launch",
        help="run a training script on several processes of this machine",
        description=__doc__,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--processes", type=int, default=2, metavar="P", help="how many processes (default 2)")
    parser.add_argument(
        "--devices-per-process",
        type=int,
        metavar="D",
        help="virtual devices on the CPU, or GPUs, of each process; without it what the script says, or all there are",
    )
    parser.add_argument(
        "--timeout",
        type=float,
        default=60.0,
        metavar="SECONDS",
        help="how long a process may be silent before it counts as dead (default 60)",
    )
    parser.add_argument(
        "command", nargs=argparse.REMAINDER, metavar="-- SCRIPT ...", help="what Python runs: a file, or -m MODULE"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Runs the job; returns its exit status."""
    command = arguments.command[1:] if arguments.command[:1] == ["--"] else arguments.command
    if not command:
        raise ValueError("launch: got no script; want one; write it behind --, such as -- examples/train_lm.py")
    for name, value in (
        ("--processes", arguments.processes),
        ("--devices-per-process", arguments.devices_per_process),
        ("--timeout", arguments.timeout),
    ):
        if value is not None and not value > 0:
            raise ValueError(f"launch: {name}: got {value}; want a positive number; pass one")
    return run_job([sys.executable, *command], arguments.processes, arguments.devices_per_process, arguments.timeout)
