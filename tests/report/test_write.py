"""The written report: complete, self-contained, and safe against hostile names."""

import re
from pathlib import Path

import pytest
from conftest import random_trajectory

from loopscope.report import Results, Source, Table, collect
from loopscope.report.products import make_products
from loopscope.report.write import write_report


def sources(name: str = "b") -> list[Source]:
    return [
        Source(
            label,
            random_trajectory(seed=10 + seed, split="validation", **changes),
            random_trajectory(seed=20 + seed, split="test", **changes),
        )
        for seed, (label, changes) in enumerate((("a", {"gate_logits": None}), (name, {})))
    ]


def written(results: Results, folder: Path) -> Path:
    return write_report(results, make_products(results, ["overview"]), folder, "loopscope report a b")


def tables(results: Results) -> list[Table]:
    return [product.table for product in make_products(results, ["overview"]) if product.table is not None]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    written(collect(sources(), "a", [0.6, 0.9]), folder)
    return folder


def test_everything_is_there(folder: Path) -> None:
    names = {"frontiers", "forced_exits", "exit_distributions", "signals"}
    expected = {f"{name}.{kind}" for name in names for kind in ("png", "pdf")} | {
        "report.html",
        "results.json",
        "tables.md",
    }
    assert {path.name for path in folder.iterdir()} == expected
    for path in folder.iterdir():
        head = {".png": b"\x89PNG", ".pdf": b"%PDF"}.get(path.suffix)
        assert head is None or path.read_bytes().startswith(head)


def test_the_page_needs_nothing_from_elsewhere(folder: Path) -> None:
    page = (folder / "report.html").read_text()
    links = re.findall(r"""(?:src|href|xlink:href)\s*=\s*["']([^"'#][^"']*)""", page)
    assert links == []
    assert "@import" not in page
    assert "<script" not in page
    assert page.count("<svg") == 4


def test_the_page_says_what_the_tables_say(folder: Path) -> None:
    page = (folder / "report.html").read_text()
    results = collect(sources(), "a", [0.6, 0.9])
    for table in tables(results):
        assert f">{table.title}</h2>" in page
    assert results.models[1].diagnosis.best_readout in page
    assert page.count('class="verdict"') == 2


def test_hostile_names_are_text(tmp_path: Path) -> None:
    name = "<script>alert('x')</script>\"&\u202e\x1b[red]" + "y" * 500
    page = written(collect(sources(name), "a", [0.6]), tmp_path / "report").read_text()
    assert "<script" not in page
    assert "&lt;script&gt;" in page


def test_the_headline_has_the_depth_and_the_culprit_of_every_model() -> None:
    results = collect(sources(), "a", [0.6, 0.9])
    headline = tables(results)[0]
    assert headline.columns == ["model", "best loop", "fixed depth", "own gate", "best readout", "to blame"]
    first, second = headline.rows
    assert (first[0], first[3], first[5]) == ("a", "no gate", "the reference")
    gate = next(frontier for frontier in results.models[1].frontiers if frontier.readout == "gate")
    assert second[3] == f"{gate.depth_at['0.6']:.2f}"
