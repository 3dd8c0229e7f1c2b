"""How do tables read in a repository? As Markdown, in which a name from a file is a name, whatever it looks like."""

import re
from collections.abc import Sequence

from loopscope.errors import visible
from loopscope.report.products import Product
from loopscope.report.tables import Table

_BREAKS = re.compile("[\t-\r\x1c-\x1f\x85\u2028\u2029]+")
_MARKUP = re.compile(r"[\\|`*<~$&]|(?<![^\W_])_|_(?![^\W_])|(?<=\])[(\[]")
"""What Markdown would read as more than a letter: `_` at the edge of a word, brackets where they would be a link."""


def markdown(products: Sequence[Product]) -> str:
    """All tables of a report."""
    parts = []
    for each in products:
        if each.table is not None:
            paper = f", the counterpart of the paper's {each.paper}" if each.paper else ""
            title, note = markdown_text(each.title), markdown_text(each.note)
            parts.append(f"## {title}\n\n`{each.name}`{paper}. {note}\n\n{_table(each.table)}\n")
    return "\n".join(parts)


def markdown_text(text: str) -> str:
    """A text in one line, as Markdown that shows every letter of it; tables.js does the same to what is copied."""
    return _MARKUP.sub(r"\\\g<0>", visible(_BREAKS.sub(" ", text), keep=""))


def _table(table: Table) -> str:
    rows = [table.columns, ["---"] * len(table.columns), *table.rows]
    return "\n".join("| " + " | ".join(map(markdown_text, row)) + " |" for row in rows)
