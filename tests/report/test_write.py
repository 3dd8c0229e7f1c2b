"""The written report: complete, self-contained, and safe against hostile names."""

import re
from pathlib import Path

import pytest
from chromium import opened
from pages import HOSTILE, hostile, two, written
from playwright.sync_api import Browser

from loopscope.analysis.schema import Results
from loopscope.report.tables import Table
from loopscope.reproduction.products import PRODUCTS


def tables(results: Results) -> list[Table]:
    return [product.table for product in PRODUCTS.make(results, ["overview"]) if product.table is not None]


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Results]:
    return written(two(), tmp_path_factory.mktemp("report"), "a")


def test_everything_is_there(report: tuple[Path, Results]) -> None:
    names = {"frontiers", "forced_exits", "exit_distributions", "signals"}
    expected = {f"{name}.{kind}" for name in names for kind in ("png", "pdf")} | {
        "report.html",
        "results.json",
        "tables.md",
    }
    folder = report[0].parent
    assert {path.name for path in folder.iterdir()} == expected
    for path in folder.iterdir():
        head = {".png": b"\x89PNG", ".pdf": b"%PDF"}.get(path.suffix)
        assert head is None or path.read_bytes().startswith(head)


def test_the_page_needs_nothing_from_elsewhere(report: tuple[Path, Results]) -> None:
    page = report[0].read_text()
    page = re.sub(r'<script type="module">.*?</script>', "", page, flags=re.DOTALL)
    links = re.findall(r"""(?:src|href|xlink:href)\s*=\s*["']([^"'#][^"']*)""", page)
    assert links == []
    assert "@import" not in page
    assert "default-src 'none'" in page  # the browser itself refuses whatever would be asked for


def test_the_page_says_what_the_tables_say(report: tuple[Path, Results]) -> None:
    page, results = report[0].read_text(), report[1]
    for table in tables(results):
        assert f"<h3>{table.title}</h3>" in page
    for model in results.models:
        assert model.diagnosis.sentence in page
    assert page.count('<article class="card"') == 2


def test_the_same_results_give_the_same_page(report: tuple[Path, Results], tmp_path: Path) -> None:
    again, _ = written(two(), tmp_path / "again", "a")
    assert again.read_bytes() == report[0].read_bytes()


def test_hostile_names_are_text(tmp_path: Path) -> None:
    page = written(hostile()[:2], tmp_path / "report")[0].read_text()
    assert page.count("<script") == 3 + 2 + 4  # the head, the libraries and the script; a part a model; figures
    for text in HOSTILE[:2]:
        assert text not in page
    assert "&lt;img src=x onerror=" in page


def test_the_headline_has_the_depth_and_the_culprit_of_every_model(report: tuple[Path, Results]) -> None:
    results = report[1]
    headline = tables(results)[0]
    assert headline.columns == ["model", "best loop", "fixed depth", "own gate", "best readout", "to blame"]
    first, second = headline.rows
    assert (first[0], first[3], first[5]) == ("a", "no gate", "the reference")
    gate = next(frontier for frontier in results.models[1].frontiers if frontier.readout == "gate")
    assert second[3] == f"{gate.depth_at['0.6']:.2f}"


def test_the_page_works_in_a_browser(report: tuple[Path, Results], browser: Browser) -> None:
    """The smoke test: it opens, draws, asks nobody for anything, and the slider moves the table."""
    page, results = report
    margin = results.models[1].frontier("margin")
    assert margin is not None
    with opened(browser, page) as tab:
        assert tab.locator("#frontier-chart canvas").count() == 1
        assert tab.locator("#exits svg").count() == 1
        tab.locator("#legend-readouts label", has_text="margin").locator("input").check()
        for target, depth in margin.depth_at.items():
            tab.locator("#target").evaluate(
                "(slider, value) => { slider.value = value; slider.dispatchEvent(new Event('input')); }",
                round(200 * float(target)) - 1,
            )
            row = tab.locator("#depth-table tbody tr", has_text="margin").last
            assert row.locator("td").nth(2).inner_text() == ("N/A" if depth is None else f"{depth:.2f}")
