"""How are the numbers and tables of a result printed as text? Percentages, and lines of at most 80 characters."""

import re
import textwrap
from collections.abc import Sequence

WIDTH = 80
_UNBREAKABLE = re.compile(r" (?=%)|(?<=[\d\]]) (?=\[)|(?<=,) (?=[+-]\d)|(?<=%) (?=interval)")
"""Blanks at which no line ends: before a percent sign, in an interval and before it."""
_NO_BREAK = "\N{NO-BREAK SPACE}"
_BETWEEN_COLUMNS = "  "


def percent_text(share: float) -> str:
    """Write a share as a percentage with at most two decimals: `95 %`, `60.33 %`."""
    return f"{round(100 * share, 2):g} %"


def rounded_percent(share: float) -> str:
    """Write a share as a percentage with one decimal: `95.0 %`."""
    return f"{100 * share:.1f} %"


def wrapped(text: str, width: int = WIDTH) -> str:
    """Break a text into lines of at most `width` characters; a longer word keeps a line of its own."""
    whole = _UNBREAKABLE.sub(_NO_BREAK, text)
    return textwrap.fill(whole, width, break_long_words=False, break_on_hyphens=False).replace(_NO_BREAK, " ")


def aligned(rows: Sequence[Sequence[str]], width: int = WIDTH) -> list[str]:
    """Lay out a table in lines of at most `width` characters: the widest columns break their cells."""
    columns = list(zip(*rows, strict=True))
    widths = [max(map(len, column)) for column in columns]
    least = [max(len(word) for cell in column for word in _unbroken_words(cell)) for column in columns]
    while sum(widths) + len(_BETWEEN_COLUMNS) * (len(widths) - 1) > width and widths != least:
        _, widest = max((size, place) for place, size in enumerate(widths) if size > least[place])
        widths[widest] -= 1
    lines = []
    for row in rows:
        cells = [wrapped(cell, size).split("\n") for cell, size in zip(row, widths, strict=True)]
        for number in range(max(map(len, cells))):
            parts = [cell[number] if number < len(cell) else "" for cell in cells]
            padded = (part.ljust(size) for part, size in zip(parts, widths, strict=True))
            lines.append(_BETWEEN_COLUMNS.join(padded).rstrip())
    return lines


def _unbroken_words(cell: str) -> list[str]:
    """The parts of a table cell that stay on one line, such as a number with its percent sign."""
    return _UNBREAKABLE.sub(_NO_BREAK, cell).split(" ")
