"""The command line: `python -m vescale_jax COMMAND ...`.

Every command is a module with one function, `add_parser(commands)`, that adds its sub-parser and sets `run` to what
does the work: `run(arguments)` returns the exit status. To add a command, write such a module and name it in
`COMMANDS`.
"""

import argparse
import sys
from collections.abc import Sequence

from vescale_jax import _checkpoint_command, _launch_command, _plan_command, _preflight_command

COMMANDS = (_plan_command, _checkpoint_command, _launch_command, _preflight_command)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit status; mistakes of the user are one message on stderr and status 2."""
    parser = argparse.ArgumentParser(
        prog="python -m vescale_jax", description="Fully sharded training for JAX and Flax."
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in COMMANDS:
        command.add_parser(commands)
    chosen = parser.parse_args(arguments)
    try:
        return chosen.run(chosen)
    except (ValueError, TypeError, ImportError) as mistake:
        print(mistake, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
