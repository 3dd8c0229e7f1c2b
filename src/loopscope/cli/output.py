"""How does the command line speak? Tables and JSON on standard output, everything else on standard error.

Names and texts come from files: whatever is printed here is `visible`, so that none of them steers a terminal.
"""

import argparse
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from loopscope.errors import brief, visible
from loopscope.progress import ProgressCallback, silent, track

if TYPE_CHECKING:
    from loopscope.analysis.timings import Machine
    from loopscope.training import RunResult


_BETWEEN = 2
_NARROWEST = 20
"""What a name must have, however wide the rest is."""
_WIDEST = 44
"""What is longer breaks its lines."""


def percent(share: float, digits: int = 1) -> str:
    return f"{100 * share:z.{digits}f} %"


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


@contextmanager
def watched(options: argparse.Namespace, title: str) -> Iterator[ProgressCallback]:
    """Progress of work that takes seconds: for whoever sits before it, and not in a log or beside JSON."""
    if options.json or not sys.stderr.isatty():
        yield silent
        return
    with track(title) as advance:
        yield advance


def print_table(title: str, columns: list[str], rows: list[list[str]], keys: int = 1) -> None:
    """A table that fits the terminal, or 80 columns; what does not goes below, beside the first `keys` columns."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(width=None if sys.stdout.isatty() else int(os.environ.get("COLUMNS", "80")))
    if title:
        console.print(Text(visible(title), style="bold"))
    for part in _fitting(columns, rows, keys, console.width):
        table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
        for index in part:
            breaks = index < keys or max((len(row[index]) for row in rows), default=0) > _WIDEST
            table.add_column(Text(visible(columns[index])), justify="right" if index else "left", no_wrap=not breaks)
        for row in rows:
            table.add_row(*(Text(visible(row[index])) for index in part))  # a name may look like markup
        console.print(table)
    console.print()


def _fitting(columns: list[str], rows: list[list[str]], keys: int, width: int) -> list[list[int]]:
    """The columns that stand beside each other; only names and texts break their lines, where they must."""
    widths = [
        min(max((len(text) for text in (*column.split(), *(row[index] for row in rows))), default=0), _WIDEST)
        + _BETWEEN
        for index, column in enumerate(columns)
    ]
    names = sum(min(each, _NARROWEST) for each in widths[:keys])
    parts: list[list[int]] = [[]]
    for index in range(keys, len(columns)):
        if parts[-1] and names + sum(widths[each] for each in parts[-1]) + widths[index] > width:
            parts.append([])
        parts[-1].append(index)
    return [[*range(keys), *part] for part in parts]


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


def print_measured(
    result: Any, title: str, columns: list[str], rows: list[list[str]], as_json: bool, keys: int = 1
) -> None:
    """What a benchmark measured, and on which machine."""
    if as_json:
        print_json(result)
    else:
        print_table(f"{title} {machine_line(result.machine)}", columns, rows, keys)


def machine_line(machine: "Machine") -> str:
    """What a benchmark's numbers were measured on."""
    threads = f"{machine.threads} thread{'s' * (machine.threads > 1)}"
    products = f"matrix products of this width on {machine.device} in {machine.dtype}: {machine.gigaflops} GFLOP/s"
    rounds = f"{machine.rounds} round{'s' * (machine.rounds > 1)}"
    return f"{threads}, {rounds}; {products}."
