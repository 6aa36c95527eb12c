"""`python -m vescale_jax plan`: how a group of tensors would lie on the devices, without any device.

In come a known model or a user's own module, a block and a number of shards; out go a table, JSON or a picture. Only
`--module` needs JAX to do anything.
"""

import argparse
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from rich.console import Console

from vescale_jax._model_shapes import MODELS, Tensor, model_shapes
from vescale_jax._plan_report import Planned, as_json, overview, slot_table, summary
from vescale_planner import (
    Block,
    Elements,
    Rows,
    Slab,
    TensorSpec,
    Tile,
    WholeTensor,
    advise,
    plan_unit,
)

_BLOCKS: dict[str, tuple[Callable[..., Block], int, int]] = {
    "elements": (Elements, 1, 1),
    "rows": (Rows, 1, 1),
    "tile": (Tile, 2, 2),
    "slab": (Slab, 1, 2),
    "whole": (WholeTensor, 0, 0),
}

_ADVISE_FROM = 0.03
"""Padding ratio from which the command says what could be better."""

_WIDTH_IN_A_FILE = 150
"""Characters of a line where there is no terminal whose width could be used."""

_EPILOG = """\
examples:
  python -m vescale_jax plan --model gpt-oss-120b --group experts --block rows:128 --shards 1024
  python -m vescale_jax plan --model llama-3-70b --block tile:32,32 --shards 8:1024:8 --json
  python -m vescale_jax plan --module my_package.model:make --block '*bias=whole' --block 'rows:32' --shards 64
"""


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the sub-command."""
    parser = commands.add_parser(
        "plan",
        help="plan the flat buffer of a group of tensors",
        description=__doc__,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--model", help=f"a known model: {', '.join(MODELS)}")
    source.add_argument(
        "--module", metavar="PACKAGE.FILE:FUNCTION", help="a function that makes a Flax module or arrays"
    )
    parser.add_argument("--group", default="", help="layer, experts, attention, ...; with --module a path or pattern")
    parser.add_argument(
        "--block",
        action="append",
        default=[],
        metavar="[PATTERN=]BLOCK",
        help="elements:N, rows:N, tile:R,C, slab:DIMS or whole; of several that match a path the first one counts",
    )
    parser.add_argument(
        "--shards", required=True, metavar="N or FIRST:LAST:STEP", help="shards; a range with both ends"
    )
    parser.add_argument("--alignment", type=int, default=8, help="elements that divide the shard size (default 8)")
    parser.add_argument("--order", default="search", help="default, block, shape, size or search (default)")
    parser.add_argument("--search-seconds", type=float, default=0.05, help="what the search may cost (default 0.05)")
    parser.add_argument("--storage", default="free", help="free (default) or row_major; only tiles have a choice")
    parser.add_argument("--max-padding", type=float, default=0.01, help="bearable padding ratio (default 0.01)")
    parser.add_argument(
        "--copy-weight", type=float, default=1.0, help="padded elements as bad as a copied one (default 1)"
    )
    parser.add_argument(
        "--most-groups", type=int, help="collectives per unit; default 2 with free storage and tiles, else 1"
    )
    parser.add_argument("--json", action="store_true", help="print JSON; of a range a list, without slots")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw a picture: .png or .svg")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Plans, prints, draws; returns the exit status."""
    request = Request.of(arguments)
    planned = [_plan(request, num_shards, arguments) for num_shards in request.shards]
    if arguments.json:
        records = [as_json(plan, with_slots=len(planned) == 1) for plan in planned]
        head = {"source": request.source, "group": arguments.group or "all", "block": arguments.block}
        records = [{**head, **record} for record in records]
        print(json.dumps(records[0] if len(records) == 1 else records))  # noqa: T201 (this is the program's output)
    else:
        _print(request, planned)
    if arguments.plot:
        _draw(request, planned, arguments.plot)
    return 0


@dataclass(frozen=True, slots=True)
class Request:
    """What one call asks for.

    Attributes:

    - `source`: where the shapes are from.
    - `title`: model and group, for people.
    - `specs`: the tensors.
    - `shards`: the numbers of shards.
    """

    source: str
    title: str
    specs: tuple[TensorSpec, ...]
    shards: tuple[int, ...]

    @staticmethod
    def of(arguments: argparse.Namespace) -> "Request":
        """Reads the arguments; raises `ValueError` for those that mean nothing."""
        rules = [_rule(text) for text in arguments.block] or [("*", Elements(1))]
        if arguments.model:
            model = model_shapes(arguments.model)
            source, tensors = model.source, model.group(arguments.group or "layer")
            arguments.group = arguments.group or "layer"
        else:
            from vescale_jax._module_shapes import module_shapes  # needs JAX

            source, tensors = arguments.module, _matching(module_shapes(arguments.module), arguments.group)
        for pattern, block in rules:
            if tensors and not any(fnmatchcase(path, pattern) for path, _ in tensors):
                names = ", ".join(path for path, _ in tensors[:3])
                raise ValueError(
                    f"--block: got {pattern}={block}, which matches nothing; want a pattern for names such as {names}; "
                    "mend or drop it"
                )
        plot = arguments.plot
        if plot and (plot.suffix not in (".png", ".svg") or not plot.parent.is_dir()):
            raise ValueError(f"--plot: got {plot}; want a .png or .svg file in a folder that exists; name such a file")
        specs = tuple(TensorSpec(path, shape, _block_of(path, rules)) for path, shape in tensors)
        title = f"{arguments.model or arguments.module} {arguments.group}".strip()
        return Request(source, title, specs, _shards(arguments.shards))


def parse_block(text: str) -> Block:
    """`"rows:128"` as `Rows(128)`, and so on.

    Raises `ValueError` for anything that names no block.
    """
    name, _, numbers = text.partition(":")
    parts = numbers.split(",") if numbers else []
    if name in _BLOCKS and all(part.isdigit() for part in parts):
        make, least, most = _BLOCKS[name]
        if least <= len(parts) <= most:
            return make(*map(int, parts))
    want = "elements:N, rows:N, tile:R,C, slab:DIMS or whole"
    raise ValueError(f"--block: got {text!r}; want {want}; write for example rows:128")


def _rule(text: str) -> tuple[str, Block]:
    """A pattern and its block."""
    pattern, equals, block = text.rpartition("=")
    return (pattern, parse_block(block)) if equals else ("*", parse_block(text))


def _block_of(path: str, rules: Sequence[tuple[str, Block]]) -> Block:
    """The block of the first rule that matches."""
    return next((block for pattern, block in rules if fnmatchcase(path, pattern)), Elements(1))


def _matching(tensors: Sequence[Tensor], group: str) -> tuple[Tensor, ...]:
    """The tensors under a path or of a pattern; all without one."""
    if not group:
        return tuple(tensors)
    chosen = tuple(t for t in tensors if t[0] == group or t[0].startswith(group + "/") or fnmatchcase(t[0], group))
    if not chosen:
        known = ", ".join(sorted({path.partition("/")[0] for path, _ in tensors}))
        raise ValueError(f"--group: got {group!r}; want a path or pattern below {known}; choose one of these")
    return chosen


def _shards(text: str) -> tuple[int, ...]:
    """One number, or a range that includes its last number."""
    parts = text.split(":")
    if len(parts) > 3 or not all(part.isdigit() and int(part) for part in parts):
        raise ValueError(f"--shards: got {text!r}; want N or FIRST:LAST:STEP; write for example 64 or 8:1024:8")
    first, last, step = (*map(int, parts), *(int(parts[0]), 1)[len(parts) - 1 :])
    if last < first:
        raise ValueError(f"--shards: got {text!r}; want FIRST up to LAST; swap them")
    return tuple(range(first, last + 1, step))


def _plan(request: Request, num_shards: int, arguments: argparse.Namespace) -> Planned:
    """One plan, timed."""
    tiles = any(isinstance(spec.block, Tile) for spec in request.specs)
    most_groups = arguments.most_groups
    if most_groups is None:
        most_groups = 2 if arguments.storage == "free" and tiles else 1
    start = time.perf_counter()
    plans = plan_unit(
        request.specs,
        num_shards,
        arguments.alignment,
        most_groups=most_groups,
        order=arguments.order,
        search_seconds=arguments.search_seconds,
        storage=arguments.storage,
        max_padding=arguments.max_padding,
        copy_weight=arguments.copy_weight,
    )
    return Planned(plans, time.perf_counter() - start)


def _print(request: Request, planned: Sequence[Planned]) -> None:
    """Tables for people."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=_WIDTH_IN_A_FILE)
    console.print(f"[bold]{request.title}[/bold]  ({request.source})", highlight=False)
    if len(planned) > 1:
        console.print(overview(planned))
        return
    console.print(summary(planned[0]))
    for plan in planned[0].plans:
        console.print(slot_table(plan))
    if planned[0].padding_ratio > _ADVISE_FROM:
        first = planned[0].plans[0]
        for advice in advise(request.specs, first.num_shards, first.alignment):
            console.print(f"[yellow]could be better:[/yellow] {advice.text}", highlight=False)


def _draw(request: Request, planned: Sequence[Planned], path: Path) -> None:
    """The picture: devices of one plan, or padding over the number of shards."""
    from vescale_jax._plan_picture import draw_devices, draw_padding

    if len(planned) == 1:
        draw_devices(planned[0].plans, path, request.title)
    else:
        points = [(plan.plans[0].num_shards, plan.padding_ratio) for plan in planned]
        draw_padding({"vescale_jax": points}, path, request.title)
