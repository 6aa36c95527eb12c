"""A report as tables, for people."""

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ._report import MFU_FORMULA, Report


def tables(report: Report, title: str) -> RenderableType:
    """A report as tables.

    Arguments:

    - `report`: what `preflight` returned.
    - `title`: above them.
    """
    return Group(Text(title, style="bold"), _memory(report), _collectives(report), _rest(report))


def size(nbytes: float) -> str:
    """Bytes in a unit that reads well; powers of 1000, as data sheets have them."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(nbytes) < 1000 or unit == "GB":
            return f"{nbytes:,.0f} {unit}" if unit == "B" else f"{nbytes:,.2f} {unit}"
        nbytes /= 1000
    raise AssertionError


def _memory(report: Report) -> Table:
    memory, stored = report.memory, report.memory.stored
    table = Table("bytes of one device", "", title_justify="left")
    table.columns[1].justify = "right"
    if stored:
        table.add_row("parameters", size(stored.parameters))
        table.add_row("optimizer state", size(stored.optimizer_state))
        table.add_row("rest of the model, replicated", size(stored.rest))
        table.add_row("gradients, while they are there", size(stored.gradients))
        table.add_row("padding, in all of these", size(stored.padding))
    table.add_row("gathered buffers, most at once", size(memory.gathered_bytes))
    table.add_row("activations and workspaces", size(memory.activation_bytes))
    table.add_section()
    table.add_row("arguments (compiler's account)", size(memory.argument_bytes))
    table.add_row("temporary (compiler's account)", size(memory.temp_bytes))
    verdict = "fits" if memory.fits else "[red]does not fit[/red]"
    table.add_row(f"in all, of {size(memory.device_bytes)}: {verdict}", size(memory.total_bytes))
    return table


def _collectives(report: Report) -> Table:
    table = Table("collective", "dtype", "bytes", "devices", "asynchronous", "in a loop", "a step")
    for column in (2, 3, 6):
        table.columns[column].justify = "right"
    for (kind, dtype, nbytes, group, is_async, in_loop), count in report.counted_collectives().items():
        marks = ("yes" if is_async else "no", "yes" if in_loop else "no")
        table.add_row(kind, dtype, size(nbytes), str(group), *marks, str(count))
    return table


def _rest(report: Report) -> Table:
    inner, ends = report.hidden_fraction(), report.hidden_fraction(everything=True)
    table = Table("one step", "")
    for name in ("forward", "backward"):
        text = f"{_share(inner[name])} (with first and last layer {_share(ends[name])})"
        table.add_row(f"collectives hidden, {name}", text)
    table.add_row("weights copied before a product", size(report.weight_copy_bytes))
    table.add_row("weights merged by XLA for one product", size(report.merged_gemm_bytes))
    table.add_row("gradients copied before they are sent", size(report.gradient_copy_bytes))
    table.add_row("kernels", ", ".join(f"{count} {kind}" for kind, count in report.kernels.items()))
    table.add_row(
        "estimated seconds", f"{report.timeline.seconds:.4g}, of products {report.timeline.product_seconds:.4g}"
    )
    if report.tokens:
        table.add_row("tokens/s/device", f"{report.tokens_per_second:,.0f}")
    if report.mfu is not None:
        table.add_row("MFU", f"{report.mfu:.1%} = {MFU_FORMULA}, {report.parameters:,} parameters")
    table.add_row("compile seconds", f"{report.lower_seconds:.1f} tracing + {report.compile_seconds:.1f} compiling")
    table.add_row("host memory, text of the program", f"{size(report.host_memory_bytes)}, {size(report.hlo_bytes)}")
    return table


def _share(fraction: float | None) -> str:
    return "not known" if fraction is None else f"{fraction:.1%}"
