"""Are the docs readable as text, and does what they point to exist?"""

import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = sorted(path for pattern in ("*.md", "docs/**/*.md", "recipes/**/*.md") for path in ROOT.glob(pattern))
WIDTH = 110


def prose(page: Path) -> Iterator[str]:
    """The lines that are neither code, rows of a table, pictures nor quotations, without the targets of their links."""
    inside = False
    for line in page.read_text(encoding="utf-8").splitlines():
        if line.lstrip().startswith("```"):
            inside = not inside
        elif not inside and not line.lstrip().startswith(("|", "!", ">")):
            yield re.sub(r"\]\([^)\s]*\)", "]", line)


def anchors(page: Path) -> set[str]:
    """Of its headings, as GitHub and the site make them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    headings = (re.sub(r"\]\([^)]*\)", "", found) for found in re.findall(r"^#+ (.+)$", text, re.MULTILINE))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def is_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # its package is not there either
        return False


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_is_wrapped(page: Path) -> None:
    assert [line for line in prose(page) if len(line) > WIDTH and " " in line.strip(" -`")[:WIDTH]] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_a_page_points_to_exists(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    links = re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", text)
    assert [link for link in links if not (page.parent / link).exists()] == []
    parts = re.findall(r"\]\(([^)#:\s]*\.md)#([^)\s]+)\)", text)
    assert [part for part in parts if part[1] not in anchors(page.parent / part[0])] == []
    modules = re.findall(r"(?:\b(?:import|from)|python -m) ((?:loopscope|benchmarks)(?:\.\w+)+)", text)
    past = page.name == "CHANGELOG.md"  # which names what was there once, too
    assert [name for name in modules if not past and not is_module(name)] == []
    files = re.findall(r"`((?:[\w-]+/)+[\w-]+\.(?:py|toml|sh))`", text)
    homes = (ROOT, ROOT / "src" / "loopscope", page.parent)
    assert [file for file in files if not any((home / file).exists() for home in homes)] == []


def test_records_of_decisions_are_short() -> None:
    records = (ROOT / "docs" / "decisions.md").read_text(encoding="utf-8").split("\n### ")[1:]
    assert len(records) > 30
    long = {record.partition("\n")[0] for record in records if len(record.partition("\n## ")[0].split()) > 120}
    assert not long
