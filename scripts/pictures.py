"""Draws the pictures of the README and of the docs' first pages into docs/figures.

python -m scripts.pictures            the curves of three models, and the page's slider, of the example recordings
python -m scripts.pictures runs/demo  and the figures and the page of a finished run of `loopscope demo`

The pictures of the page need Playwright and a Chromium; `make browser` installs one.
"""

import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import vl_convert
from playwright.sync_api import Page

import loopscope as ls
from tests.report.chromium import find, opened, started

FIGURES = Path(__file__).parents[1] / "docs" / "figures"
TARGET = 0.95
CURVES = {
    "fixed-geometric": ("fixed prior", "#000000"),
    "decoupled-gate": ("decoupled gate", "#009E73"),
    "mlp-gate": ("the same gate, trained jointly", "#D55E00"),
}


def hero() -> None:
    """Accuracy against average loops of three models: each by its own gate, or by the best readout without one."""
    models = ls.load_example("demo")
    curves: list[dict[str, Any]] = []
    marks: list[dict[str, Any]] = []
    for name, (label, _) in CURVES.items():
        validation, test = models[name]
        own = test.gate_logits is not None
        readout = "gate" if own else ls.diagnose(validation, test).best_readout
        frontier = ls.sweep(readout, validation, test)
        depth = frontier.depth_at(TARGET)
        assert depth is not None
        points = sorted(set(zip(frontier.average_loops.tolist(), frontier.accuracy.tolist(), strict=True)))
        curves += [{"model": label, "loops": loops, "accuracy": accuracy} for loops, accuracy in points]
        marks.append(
            {
                "model": label,
                "loops": depth,
                "accuracy": TARGET,
                "text": f"{depth:.2f} loops: {label}" + ("" if own else f", exits by {readout}"),
            }
        )
    marks.sort(key=lambda mark: mark["loops"])
    for row, mark in enumerate(marks):
        mark["row"] = 0.86 - 0.045 * row  # one text below the other, where no curve is
    x: dict[str, Any] = {
        "field": "loops",
        "type": "quantitative",
        "scale": {"domain": [1, 4], "nice": False},
        "axis": {"title": "loops, on average", "values": [1, 1.5, 2, 2.5, 3, 3.5, 4], "labelFlush": False},
    }
    y: dict[str, Any] = {
        "field": "accuracy",
        "type": "quantitative",
        "scale": {"domain": [0.5, 1]},
        "axis": {"title": "test accuracy", "format": "%"},
    }
    looks = {"domain": [label for label, _ in CURVES.values()], "range": [colour for _, colour in CURVES.values()]}
    colour = {"field": "model", "type": "nominal", "scale": looks, "legend": None}
    text = {"align": "left", "fontSize": 14, "dx": 10}
    chart = {
        "$schema": "https://vega.github.io/schema/vega-lite/v5.json",
        "width": 640,
        "height": 300,
        "title": {
            "text": "One stop-gradient gives back the loops that joint gate training costs",
            "subtitle": "Marks: the least average loops with which a model gets 95 % of the test examples right (D@95)",
            "anchor": "start",
            "fontSize": 17,
            "subtitleFontSize": 13,
        },
        "encoding": {"x": x, "y": y, "color": colour},
        "layer": [
            {
                "data": {"values": [{"accuracy": TARGET}]},
                "mark": {"type": "rule", "strokeDash": [4, 4]},
                "encoding": {"x": {"value": 0}, "x2": {"value": 640}, "color": {"value": "#777777"}},
            },
            {"data": {"values": curves}, "mark": {"type": "line", "strokeWidth": 2.5}},
            {"data": {"values": marks}, "mark": {"type": "point", "filled": True, "size": 130, "opacity": 1}},
            {
                "data": {"values": marks},
                "mark": {"type": "text", "fontWeight": "bold", **text},
                "encoding": {
                    "x": {"datum": 2.2},
                    "y": {"field": "row", "type": "quantitative"},
                    "text": {"field": "text"},
                },
            },
        ],
        "config": {"background": "#FFFFFF", "font": "DejaVu Sans", "axis": {"labelFontSize": 12, "titleFontSize": 13}},
    }
    (FIGURES / "hero.png").write_bytes(vl_convert.vegalite_to_png(chart, scale=2))


def threshold_slider(page: Page) -> None:
    """The part of the page in which a threshold is chosen."""
    page.locator("#close").evaluate("(fold) => (fold.open = true)")
    page.locator("#exits :is(svg, canvas)").first.wait_for()
    page.locator("#jumps button").first.click()
    page.wait_for_timeout(1000)
    top, bottom = (page.locator(place).first.bounding_box() for place in (".policy", "#exits :is(svg, canvas)"))
    assert top is not None
    assert bottom is not None
    start = top["y"] + page.evaluate("scrollY") - 10
    size = {"width": 1000, "height": bottom["y"] + bottom["height"] - top["y"] + 10}
    page.screenshot(path=FIGURES / "page_threshold.png", full_page=True, clip={"x": 0, "y": start, **size})


def first_screen(page: Page) -> None:
    page.screenshot(path=FIGURES / "page_diagnosis.png")


def photograph(report: Path, picture: Callable[[Page], None]) -> None:
    browser_path = find()
    if browser_path is None:
        raise SystemExit("There is no Chromium; run: make browser")
    size: dict[str, Any] = {"width": 1000, "height": 800, "device_scale_factor": 1.6}
    with started(browser_path) as browser, opened(browser, report / "report.html", folded=True, **size) as page:
        page.locator("body[data-drawn]").wait_for()
        picture(page)


def main(run: Path | None) -> None:
    hero()
    with tempfile.TemporaryDirectory() as folder:
        ls.report(ls.load_example("demo"), folder, reference="fixed-geometric")
        photograph(Path(folder), threshold_slider)
    if run is not None:
        photograph(run / "report", first_screen)
        for figure in ("frontiers", "forced_exits"):
            shutil.copyfile(run / "report" / f"{figure}.png", FIGURES / f"demo_{figure}.png")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if sys.argv[1:] else None)
