"""The tables in Markdown: a parser of Markdown reads the very names that went in, and nothing else."""

import itertools
import re

import pytest
from hypothesis import example, given, strategies as st
from markdown_it import MarkdownIt
from markdown_it.token import Token

from loopscope.errors import visible
from loopscope.report.products import Product, markdown, markdown_text
from loopscope.report.tables import Table

PARSER = MarkdownIt("commonmark").enable(["table", "strikethrough"])
LETTERS = st.one_of(st.sampled_from("ab_*`|\\[]()<>!~$&;#=- \n\r\t\x1b\u202e\ud800\u2028"), st.characters())


def cells(text: str) -> list[list[Token]]:
    """What a parser finds within every cell of a table."""
    parsed = PARSER.parse(text)
    return [
        token.children or [] for before, token in itertools.pairwise(parsed) if before.type in ("th_open", "td_open")
    ]


def words(tokens: list[Token]) -> str:
    """The text, of which nothing may be markup."""
    assert {token.type for token in tokens} <= {"text", "text_special"}
    return "".join(token.content for token in tokens)


def shown(text: str) -> str:
    """One line, and what is not seen as its code."""
    return visible(" ".join(re.split("[\t-\r\x1c-\x1f\x85\u2028\u2029]+", text)), keep="").strip()


@given(st.text(LETTERS, max_size=30))
@example("[x](javascript:alert(1))")
@example("__init__ and ~~this~~ \\| <!-- -->")
@example("<script>alert(1)</script>")
def test_a_name_is_read_as_it_is(name: str) -> None:
    table = Table("title", "", ["model", "other"], [[name, "b"]])
    found = cells(markdown([Product("made", "title", "", "", table)]))
    assert [words(each).strip() for each in found] == ["model", "other", shown(name), "b"]


@given(st.text(LETTERS, max_size=30))
def test_a_title_is_one_heading(title: str) -> None:
    made = markdown([Product("made", f"D {title}.", f"Of {title}.", "", Table("", "", ["a"], [["b"]]))])
    kinds = [token.type for token in PARSER.parse(made) if token.level == 0 and token.nesting >= 0]
    assert kinds == ["heading_open", "paragraph_open", "table_open"]
    made.encode()  # whatever it was made of


@pytest.mark.parametrize(
    "text", ["hidden_change", "+0.33 [+0.30, +0.39] @97.61 %", "β 0.1, MLP gate (3 of 3)", "a-b/c #1"]
)
def test_ordinary_names_stay_as_they_are(text: str) -> None:
    assert markdown_text(text) == text
