"""`python -m vescale_jax checkpoint`: what lies in a checkpoint, whether it is whole, and its tensors for others.

In comes the folder of a checkpoint or of a run; out goes a table, JSON or a file. No device is used.
"""

import argparse
import json
from pathlib import Path


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the sub-command."""
    parser = commands.add_parser("checkpoint", help="show, check or export a checkpoint", description=__doc__)
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    show = actions.add_parser("show", help="what a checkpoint holds; of a run, the newest and a list of all")
    show.add_argument("path", type=Path, metavar="PATH", help="a checkpoint, or the folder of a run")
    show.add_argument("--tensors", action="store_true", help="one line a tensor: where and how it is stored")
    show.add_argument("--check", action="store_true", help="read every byte and compare all checksums")
    show.add_argument("--json", action="store_true", help="print JSON, with all tensors")
    show.set_defaults(run=run_show)
    export = actions.add_parser("export", help="write the model's logical tensors to a file of another format")
    export.add_argument("path", type=Path, metavar="PATH", help="a checkpoint, or the folder of a run")
    export.add_argument("target", type=Path, metavar="TARGET", help="NAME.safetensors, or a new folder for orbax")
    export.set_defaults(run=run_export)


def run_show(arguments: argparse.Namespace) -> int:
    """Prints; returns the exit status."""
    from vescale_jax.checkpoint import contents, verify
    from vescale_jax.checkpoint._folder import saved

    found = contents(arguments.path)
    checked = verify(arguments.path) if arguments.check else None
    others = saved(arguments.path) if found.path != arguments.path else []
    if arguments.json:
        record = {**found.record(), "checked_bytes": checked, "saved": [str(item.path) for item in others]}
        print(json.dumps(record))  # noqa: T201 (this is the program's output)
        return 0
    lines = [f"{item.path.name}  step {item.step}" for item in others]
    lines.append(found.table(each=arguments.tensors))
    if checked is not None:
        lines.append(f"checked: {checked:,} bytes of arrays are as they were written")
    print("\n".join(lines))  # noqa: T201 (this is the program's output)
    return 0


def run_export(arguments: argparse.Namespace) -> int:
    """Writes the file; returns the exit status."""
    from vescale_jax.checkpoint import export_orbax, export_safetensors

    export = export_safetensors if arguments.target.suffix == ".safetensors" else export_orbax
    print(export(arguments.path, arguments.target))  # noqa: T201 (this is the program's output)
    return 0
