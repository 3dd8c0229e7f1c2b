"""How does a finding print without a terminal's help? In lines of at most 80 letters, as the command line's are."""

import re
import textwrap
from collections.abc import Iterable, Sequence

WIDTH = 80
_BETWEEN = "  "
_WHOLE = re.compile(r" (?=%)|(?<=[\d\]]) (?=\[)|(?<=,) (?=[+-]\d)|(?<=%) (?=interval)")
"""Blanks at which no line ends: before a percent sign, in an interval and before it."""
_KEPT = "\N{NO-BREAK SPACE}"


def broken(text: str, width: int = WIDTH) -> str:
    """The text in lines of this width, where no word is longer."""
    whole = _WHOLE.sub(_KEPT, text)
    return textwrap.fill(whole, width, break_long_words=False, break_on_hyphens=False).replace(_KEPT, " ")


def aligned(rows: Sequence[Sequence[str]], width: int = WIDTH) -> list[str]:
    """The lines of a table; its widest columns break their cells until it fits, as far as its words let it."""
    columns = list(zip(*rows, strict=True))
    widths = [max(map(len, column)) for column in columns]
    least = [_longest_word(column) for column in columns]
    while sum(widths) + len(_BETWEEN) * (len(widths) - 1) > width and widths != least:
        _, widest = max((size, place) for place, size in enumerate(widths) if size > least[place])
        widths[widest] -= 1
    return [line for row in rows for line in _lines(row, widths)]


def _lines(row: Sequence[str], widths: Sequence[int]) -> list[str]:
    cells = [broken(cell, width).split("\n") for cell, width in zip(row, widths, strict=True)]
    height = max(map(len, cells))
    filled = [[*cell, *[""] * (height - len(cell))] for cell in cells]
    return [
        _BETWEEN.join(part.ljust(width) for part, width in zip(line, widths, strict=True)).rstrip()
        for line in zip(*filled, strict=True)
    ]


def _longest_word(cells: Iterable[str]) -> int:
    return max((len(word) for cell in cells for word in _WHOLE.sub(_KEPT, cell).split(" ")), default=0)
