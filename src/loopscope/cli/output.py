"""How does the command line speak? Tables and JSON on standard output, everything else on standard error.

Names and texts come from files: whatever is printed here is `visible`, so that none of them steers a terminal.
"""

import argparse
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from typing import TYPE_CHECKING, Any, Literal

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from loopscope.config import to_json
from loopscope.errors import visible
from loopscope.progress import ProgressCallback, silent, track

if TYPE_CHECKING:
    from loopscope.analysis.schema import Machine


_GAP = 2
"""Characters between two columns."""
_MIN_NAME = 20
"""Characters that a name must have, however wide the rest is."""
_MAX_CELL = 44
"""Characters; a longer cell breaks its lines."""
_NUMBER = re.compile(r"\[?[+-]?\d|[≤≥] |(N/A|none|no verdict|no gate|-|)$")
"""The beginning of a cell with a number, or the whole cell if it has none."""
_TERMS = {
    "oracle": "oracle: exits at the first right loop, which takes the labels (one point, no D@X)",
    "labels known": "labels known: the cheapest rule that knows the labels",
    "stopper:": "stopper:NAME: a rule learned from all signals together",
}
"""The terms of tables that no option explains."""


def percent(share: float, digits: int = 1) -> str:
    """A share as a percentage for the terminal."""
    return f"{100 * share:z.{digits}f} %"


def print_text(text: str) -> None:
    """Print text on standard output, with control characters made visible."""
    print(visible(text))


def print_sentences(text: str) -> None:
    """Print sentences, wrapped at the width of the terminal."""
    print(_wrapped_at_terminal(text))


def print_note(text: str) -> None:
    """Print a note on standard error."""
    print(visible(text), file=sys.stderr)


def print_json(value: object) -> None:
    """Print a value as JSON on standard output."""
    print(visible(to_json(value).decode()), end="")


def show(value: object, as_json: bool, print_words: Callable[[], None]) -> None:
    """Print a result as JSON, or as words and tables."""
    if as_json:
        print_json(value)
    else:
        print_words()


def announce_device(options: argparse.Namespace) -> None:
    """Print once which device `auto` means, when the work begins."""
    note = getattr(options, "chosen_device", None)
    if note is not None and os.environ.get("RANK", "0") == "0":
        print_note(note)
    options.chosen_device = None


@contextmanager
def working(options: argparse.Namespace, title: str, *notes: str, unit: str = "") -> Iterator[ProgressCallback]:
    """Show progress on standard error; its first step prints the device and these notes."""
    waiting = list(notes)
    with track(title, unit=unit) as advance:
        here = sys.stderr  # that of the work may be kept from other libraries

        def announced(done: int, total: int, note: str) -> None:
            with redirect_stderr(here):
                announce_device(options)
                while waiting:
                    print_note(waiting.pop(0))
            advance(done, total, note)

        yield announced


@contextmanager
def watched(options: argparse.Namespace, title: str) -> Iterator[ProgressCallback]:
    """Show progress of work that takes seconds, but not in a log or beside JSON."""
    if options.json or not sys.stderr.isatty():
        yield silent
        return
    with track(title) as advance:
        yield advance


def _wrapped_at_terminal(text: str) -> str:
    """Wrap text at the width of the terminal (or at 80 columns); a number stays with its percent sign."""
    width = shutil.get_terminal_size().columns
    lines = (line.replace(" %", "\xa0%") for line in visible(text).split("\n"))
    filled = (textwrap.fill(line, width, break_long_words=False, break_on_hyphens=False) for line in lines)
    return "\n".join(filled).replace("\xa0%", " %")


def print_table(title: str, columns: list[str], rows: list[list[str]], keys: int = 1) -> None:
    """Print a table that fits the terminal (or 80 columns); columns that do not fit go below it.

    Below it stands what its words mean that no option explains.
    """
    width = shutil.get_terminal_size().columns
    console = Console(width=width)
    columns, rows = [visible(each) for each in columns], [[visible(cell) for cell in row] for row in rows]
    cells = [[row[index] for row in rows] for index in range(len(columns))]
    if title:
        console.print(Text(_wrapped_at_terminal(title), style="bold"))
    for part in _columns_that_fit(columns, cells, keys, width):
        table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
        for index, header in part.items():
            numbers = index > 0 and all(map(_NUMBER.match, cells[index]))
            breaks = index < keys or max(map(len, cells[index]), default=0) > _MAX_CELL
            side: Literal["left", "right"] = "right" if numbers else "left"
            table.add_column(Text(header), justify=side, no_wrap=not breaks, overflow="fold")
        for row in rows:
            table.add_row(*(Text(row[index]) for index in part))  # a name may look like markup
        console.print(table)
    found = [words for term, words in _TERMS.items() if any(term in cell for row in rows for cell in row)]
    if found:
        console.print(Text(_wrapped_at_terminal(f"{'; '.join(found)}.")))
    console.print()


def _columns_that_fit(columns: list[str], cells: list[list[str]], keys: int, width: int) -> list[dict[int, str]]:
    """Split the columns of a table into parts that fit the width, with wrapped headers; leave out empty columns.

    Of the cells only names and texts break their lines, where they must.
    """
    shown = [index for index in range(len(columns)) if index < keys or not cells[index] or any(cells[index])]
    widest = [min(max(map(len, each), default=0), _MAX_CELL) for each in cells]
    for index, texts in enumerate(cells[:keys]):
        longest_word = max((len(word) for text in texts for word in text.split()), default=0)
        widest[index] = min(widest[index], max(_MIN_NAME, longest_word))
    sizes = [max(wide, len(column)) + _GAP for column, wide in zip(columns, widest, strict=True)]
    if sum(sizes[index] for index in shown) <= width + _GAP:
        return [{index: columns[index] for index in shown}]
    sizes = [max(wide, *map(len, column.split()), 1) + _GAP for column, wide in zip(columns, widest, strict=True)]
    headers = [textwrap.fill(column, size - _GAP) for column, size in zip(columns, sizes, strict=True)]
    parts = [list(range(keys))]
    for index in shown[keys:]:
        if len(parts[-1]) > keys and sum(sizes[each] for each in (*parts[-1], index)) > width + _GAP:
            parts.append(list(range(keys)))
        parts[-1].append(index)
    return [{index: headers[index] for index in part} for part in parts]


def print_by_loop(title: str, summary: dict[str, Any], by_loop: dict[str, list[float]], as_json: bool) -> None:
    """Print losses and shares at every loop; as JSON after a summary."""
    if as_json:
        print_json(summary | by_loop)
        return
    cells = [[f"{x:.4f}" if name == "loss" else percent(x) for x in values] for name, values in by_loop.items()]
    rows = [[str(loop), *row] for loop, row in enumerate(zip(*cells, strict=True), start=1)]
    print_table(title, ["loop", *by_loop], rows)


def machine_line(machine: "Machine") -> str:
    """The line about the machine on which timings were measured."""
    products = f"matrix products of this width on {machine.device} in {machine.dtype}: {machine.gigaflops} GFLOP/s"
    return f"Threads: {machine.threads}, rounds: {machine.rounds}; {products}."
