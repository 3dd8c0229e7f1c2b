"""How does the command line speak? Tables and JSON on standard output, everything else on standard error."""

import os
import sys


def percent(share: float, digits: int = 1) -> str:
    return f"{100 * share:.{digits}f} %"


def say(text: str) -> None:
    print(text, file=sys.stderr)


def print_json(value: object) -> None:
    from loopscope.config import to_json

    print(to_json(value).decode(), end="")


def print_table(title: str, columns: list[str], rows: list[list[str]]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table()
    for index, column in enumerate(columns):
        table.add_column(Text(column), justify="right" if index else "left")
    for row in rows:
        table.add_row(*map(Text, row))  # a name may look like markup
    console = Console(width=None if sys.stdout.isatty() else int(os.environ.get("COLUMNS", "110")))
    if title:
        console.print(Text(title, style="bold"))
    console.print(table)
