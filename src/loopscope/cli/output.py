"""How does the command line speak? Tables and JSON on standard output, everything else on standard error.

Names and texts come from files: whatever is printed here is `visible`, so that none of them steers a terminal.
"""

import os
import sys
from typing import TYPE_CHECKING, Any

from loopscope.errors import brief, visible

if TYPE_CHECKING:
    from loopscope.analysis.timings import Machine
    from loopscope.training import RunResult


def percent(share: float, digits: int = 1) -> str:
    return f"{100 * share:.{digits}f} %"


def print_text(text: str) -> None:
    print(visible(text))


def print_note(text: str) -> None:
    print(visible(text), file=sys.stderr)


def print_error(text: str) -> None:
    """One sentence."""
    print(f"loopscope: {brief(text)}", file=sys.stderr)


def print_json(value: object) -> None:
    from loopscope.config import to_json

    print(visible(to_json(value).decode()), end="")


def print_table(title: str, columns: list[str], rows: list[list[str]]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table()
    for index, column in enumerate(columns):
        table.add_column(Text(visible(column)), justify="right" if index else "left")
    for row in rows:
        table.add_row(*(Text(visible(cell)) for cell in row))  # a name may look like markup
    console = Console(width=None if sys.stdout.isatty() else int(os.environ.get("COLUMNS", "110")))
    if title:
        console.print(Text(visible(title), style="bold"))
    console.print(table)


def print_by_loop(title: str, summary: dict[str, Any], by_loop: dict[str, list[float]], as_json: bool) -> None:
    """Losses and shares at every loop; as JSON after a summary."""
    if as_json:
        print_json(summary | by_loop)
        return
    cells = [[f"{x:.4f}" if name == "loss" else percent(x) for x in values] for name, values in by_loop.items()]
    rows = [[str(loop), *row] for loop, row in enumerate(zip(*cells, strict=True), start=1)]
    print_table(title, ["loop", *by_loop], rows)


def print_trained(result: "RunResult", title: str, as_json: bool) -> None:
    """The validation of a finished run at every loop."""
    final = result.final
    if as_json:
        print_json({"run": str(result.folder), "resumed_from": result.resumed_from, **final})
    else:
        print_by_loop(title, {}, {name: final[f"validation_{name}"] for name in ("loss", "accuracy")}, as_json)


def print_measured(result: Any, title: str, columns: list[str], rows: list[list[str]], as_json: bool) -> None:
    """What a benchmark measured, and on which machine."""
    if as_json:
        print_json(result)
    else:
        print_table(f"{title} {machine_line(result.machine)}", columns, rows)


def machine_line(machine: "Machine") -> str:
    """What a benchmark's numbers were measured on."""
    threads = f"{machine.threads} thread{'s' * (machine.threads > 1)}"
    products = f"matrix products of this width on {machine.device} in {machine.dtype}: {machine.gigaflops} GFLOP/s"
    return f"{threads}, {machine.rounds} rounds; {products}."
