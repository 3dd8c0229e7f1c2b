"""The page in a real browser: what it shows is what Python computes, whatever is done to it and whatever it is of."""

import csv
import io
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chromium import opened
from conftest import outcome_of
from pages import HOSTILE, hostile, never_exits, predictions_only, source, two, with_policy, written
from playwright.sync_api import Browser, Page
from simulated import pair

import loopscope as ls
from loopscope.analysis.bootstrap import interval, resampled_curves
from loopscope.analysis.model_analysis import ModelRecordings
from loopscope.analysis.schema import Results
from loopscope.analysis.threshold_details import OUTCOMES
from loopscope.frontier import accuracy_and_loops
from loopscope.learned.stopper_fitting import with_stoppers
from loopscope.paper.counterparts import PRODUCTS
from loopscope.readouts.replay import available_readouts
from loopscope.report.verdicts import needed_loops

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Results]:
    return written(two(), tmp_path_factory.mktemp("page"), "a")


@pytest.fixture
def tab(report: tuple[Path, Results], browser: Browser) -> Iterator[Page]:
    with opened(browser, report[0], permissions=["clipboard-read", "clipboard-write"]) as tab:
        yield tab


def slide(tab: Page, slider: str, value: int) -> None:
    tab.locator(slider).evaluate(
        "(it, value) => { it.value = value; it.dispatchEvent(new Event('input', { bubbles: true })); }", value
    )


def cells(tab: Page, table: str) -> list[list[str]]:
    return [row.locator("td").all_inner_texts() for row in tab.locator(f"{table} tbody tr").all()]


def see_figures(tab: Page) -> None:
    """They are drawn when they are scrolled to."""
    for figure in tab.locator(".chart.figure").all():
        figure.scroll_into_view_if_needed()
        figure.locator("svg").first.wait_for()


def copied(tab: Page, product: str, kind: str) -> str:
    """What the button of a table puts on the clipboard."""
    tab.locator(f"#{product} .tools").get_by_role("button", name=kind).click()
    tab.wait_for_timeout(100)
    return str(tab.evaluate("navigator.clipboard.readText()"))


def saved(tab: Page, figure: str, kind: str) -> bytes:
    """What the button below a figure downloads."""
    with tab.expect_download() as download:
        tab.locator(figure).locator("xpath=following-sibling::*[1]").get_by_role("button", name=kind).click()
    return Path(download.value.path()).read_bytes()


def choose(tab: Page, model: int, readout: str) -> None:
    tab.select_option("#model", str(model))
    tab.wait_for_function(
        "(name) => [...document.querySelectorAll('#readout option')].some((o) => o.value === name)", arg=readout
    )
    tab.select_option("#readout", readout)


def test_the_slider_gives_the_depths_that_python_computes(tab: Page) -> None:
    for box in tab.locator("#legend-readouts input").all():
        box.check()
    learned = {each.name: with_stoppers(each.validation, each.test) for each in two()}
    frontiers = {
        (model, name): ls.sweep(name, *both) for model, both in learned.items() for name in available_readouts(*both)
    }
    resampled = {
        (model, name): resampled_curves(name, each.thresholds, learned[model][1])
        for (model, name), each in frontiers.items()
    }
    for percent in (40, 60, 72.5, 90, 100):
        slide(tab, "#target", round(2 * percent) - 1)
        assert tab.locator("#depth-table th").nth(2).inner_text().startswith(f"D@{percent:g}")
        rows = cells(tab, "#depth-table")
        assert {(row[0], row[1]) for row in rows} == set(frontiers)
        for model, readout, depth, bounds, reached in rows:
            if readout == "oracle":  # one point
                assert (depth, bounds, reached) == ("-", "-", "-")
                continue
            expected = frontiers[model, readout].depth_at(percent / 100)
            assert depth == ("N/A" if expected is None else f"{expected:.2f}")
            known = interval(resampled[model, readout].depth_at(percent / 100))
            assert reached == f"{100 * (known.reached if known else 0):.1f} %"
            assert (bounds == "-") == (known is None)
            if known is not None:
                low, high = map(float, re.findall(r"[\d.]+", bounds))
                assert (low, high) == pytest.approx((known.low, known.high), abs=0.0051)


def test_the_legend_switches_lines(tab: Page) -> None:
    assert tab.locator("#paper-note").is_hidden()  # none of the paper's numbers is beside these models
    assert {row[1] for row in cells(tab, "#depth-table")} >= {"oracle"}
    tab.locator("#legend-readouts label", has_text="oracle").locator("input").uncheck()
    assert "oracle" not in {row[1] for row in cells(tab, "#depth-table")}
    tab.locator("#legend-models label", has_text="b").locator("input").uncheck()
    assert {row[0] for row in cells(tab, "#depth-table")} == {"a"}
    tab.get_by_role("button", name="None").click()
    assert tab.locator("#depth-summary").inner_text() == "No line is switched on."
    tab.get_by_role("button", name="All", exact=True).click()
    assert {row[0] for row in cells(tab, "#depth-table")} == {"a", "b"}
    tab.select_option("#colour-by", "readout")


@pytest.mark.parametrize("width", [1400, 390])
def test_learned_stoppers_are_told_from_single_signals(
    report: tuple[Path, Results], browser: Browser, width: int
) -> None:
    with opened(browser, report[0], width=width, color_scheme="dark") as tab:
        for name, mark in (("stopper:induction", "◇"), ("stopper:classifier", "□"), ("gate", "◆")):
            label = tab.locator(f"#legend-readouts label[data-readout='{name}']")
            assert label.locator(".swatch").inner_text() == mark
            label.locator("input").check()
        assert tab.locator("#gap-reachable svg").count() == 1
        gap = report[1].models[1].diagnosis.reachable_room
        assert gap is not None
        assert f"{gap.value:+.2f} [{gap.low:+.2f}, {gap.high:+.2f}]" in tab.locator(".card").nth(1).inner_text()
        tab.select_option("#colour-by", "readout")
        drawn = saved(tab, "#frontier-chart", "SVG").decode()
        induction, gate = "#DC267F", "#D55E00"
        assert f'stroke="{induction}"' in drawn
        assert f'fill="{induction}"' not in drawn  # hollow, in the chart and in its key
        assert f'fill="{gate}"' in drawn
        assert tab.evaluate("document.documentElement.scrollWidth") <= width


def test_zooming_changes_the_chart_and_comes_back(tab: Page) -> None:
    canvas = tab.locator("#frontier-chart canvas")
    canvas.scroll_into_view_if_needed()

    def pixels() -> Any:
        tab.wait_for_timeout(300)
        return canvas.evaluate("(it) => it.toDataURL()")

    whole = pixels()
    tab.click("#zoom-in")
    assert pixels() != whole
    tab.click("#zoom-reset")
    assert pixels() == whole
    canvas.hover(position={"x": 300, "y": 200})
    tab.keyboard.down("Shift")
    tab.mouse.wheel(0, -300)
    tab.keyboard.up("Shift")
    assert pixels() != whole


def test_a_point_tells_its_threshold_and_interval(tab: Page) -> None:
    canvas = tab.locator("#frontier-chart canvas")
    canvas.scroll_into_view_if_needed()
    box = canvas.bounding_box()
    assert box is not None
    tip = tab.locator("#vg-tooltip-element.visible")
    for x in range(60, int(box["width"]), 3):  # along the frontiers, from the left
        for y in range(10, 400, 12):
            tab.mouse.move(box["x"] + x, box["y"] + y)
            if tip.count():
                said = tip.inner_text()
                if "threshold" in said:
                    assert re.search(r"accuracy\s+[\d.]+ % \[[\d.]+, [\d.]+\]", said)
                    assert re.search(r"average loops\s+[\d.]+ \[[\d.]+, [\d.]+\]", said)
                    return
    pytest.fail("no point answered")


@pytest.mark.parametrize("readout", ["margin", "gate", "fixed", "oracle", "kl"])
def test_the_threshold_explorer_says_what_the_policy_does(
    tab: Page, report: tuple[Path, Results], readout: str
) -> None:
    model = two()[1]
    choose(tab, 1, readout)
    size = int(tab.locator("#threshold").get_attribute("max") or 0) + 1
    grid = [None] if readout == "oracle" else shown_thresholds(report[1], model, readout)
    assert len(grid) == size
    for place in {0, size // 2, size - 1}:
        slide(tab, "#threshold", place)
        said = tab.locator("#threshold-text").inner_text()
        policy = ls.ExitPolicy(readout, grid[place])
        if readout not in ("oracle", "fixed"):
            if place == size - 1:
                assert said == "never, the strictest"
            else:
                assert float(said.split(",")[0]) == pytest.approx(policy.threshold, rel=1e-3)
        accuracy, loops = accuracy_and_loops(policy, model.test)
        names, values = (tab.locator(f"#point {part}").all_inner_texts() for part in ("dt", "dd"))
        facts = dict(zip(names, values, strict=True))
        assert facts["accuracy"].startswith(f"{100 * accuracy:.1f} %")
        assert facts["average loops"].startswith(f"{loops:.2f} ")
        exits = policy.exit_loops(model.test)
        told = [outcome_of(row, loop) for row, loop in zip(model.test.correct.tolist(), exits.tolist(), strict=True)]
        assert {name: facts[name] for name in OUTCOMES} == {name: f"{told.count(name) / 2:.1f} %" for name in OUTCOMES}
        shares = [
            mark.get_attribute("aria-label") or "" for mark in tab.locator("#exit-map .mark-rect [aria-label]").all()
        ]
        for label in shares:
            found = re.search(r"loop: (\d); difficulty: (\d);.* share: ([\d.]+) %", label)
            assert found is not None, label
            loop, level, share = int(found[1]), int(found[2]), float(found[3])
            chosen = model.test.difficulty == level
            assert share == pytest.approx(100 * (exits[chosen] == loop).mean(), abs=0.051)
        assert len(shares) == 12


def shown_thresholds(results: Results, model: ModelRecordings, readout: str) -> list[float]:
    """Laxest first: some of the grid, and the certified ones."""
    frontier = results.models[1].frontier(readout)
    assert frontier is not None
    assert set(frontier.thresholds) <= set(ls.sweep(readout, model.validation, model.test).thresholds)
    certified = [each.threshold for each in model.policies if each.readout == readout and each.threshold is not None]
    return sorted({*frontier.thresholds, *certified}, reverse=readout == "kl")


def test_a_certified_threshold_is_marked_with_its_guarantee(tab: Page, report: tuple[Path, Results]) -> None:
    (mark,) = report[1].models[1].certified
    assert mark.guarantee is not None
    choose(tab, 1, "entropy")
    assert tab.locator("#guarantee").is_hidden()
    tab.get_by_role("button", name="Certified: margin").click()
    assert tab.locator("#readout").input_value() == "margin"
    assert mark.guarantee.sentence in tab.locator("#guarantee").inner_text()
    assert "kept" in tab.locator("#guarantee").inner_text() or "refuted" in tab.locator("#guarantee").inner_text()
    assert float(tab.locator("#threshold-text").inner_text()) == pytest.approx(mark.threshold, rel=1e-3)


def test_filters_show_the_right_examples(tab: Page, report: tuple[Path, Results]) -> None:
    model = two()[1]
    assert model.test.examples is not None
    for readout, place in (("margin", 5), ("gate", 30)):
        choose(tab, 1, readout)
        slide(tab, "#threshold", place)
        thresholds = shown_thresholds(report[1], model, readout)
        exits = ls.ExitPolicy(readout, float(thresholds[place])).exit_loops(model.test).tolist()
        told = [outcome_of(row, loop) for row, loop in zip(model.test.correct.tolist(), exits, strict=True)]
        for kind, name in [(None, "all"), *enumerate(OUTCOMES)]:
            tab.check(f"#filters input[value='{'all' if kind is None else kind}']")
            expected = {row for row, each in enumerate(told) if kind is None or each == name}  # all 200 are listed
            shown = {
                int(row.get_attribute("data-example") or -1) for row in tab.locator("#example-table tbody tr").all()
            }
            assert shown == expected, name
            for text, _, answer, said, exit_loop, result in cells(tab, "#example-table")[:10]:
                row = model.test.examples.index(text)
                assert (answer, exit_loop, result) == (str(model.test.required_labels[row]), str(exits[row]), told[row])
                assert [each.strip()[0] for each in said.split(",")] == [
                    str(each) for each in model.test.predicted[row]
                ]
    tab.check("#filters input[value='all']")
    tab.fill("#find", "- 17 1")
    assert {row[0] for row in cells(tab, "#example-table")} == {
        text for text in model.test.examples if "- 17 1" in text
    }


def test_a_click_shows_the_trajectory_of_an_example(tab: Page) -> None:
    model = two()[1]  # the first with a gate
    row = tab.locator("#example-table tbody tr").nth(4)
    number = int(row.get_attribute("data-example") or -1)
    row.click()
    detail = tab.locator("#example-detail")
    assert detail.locator("h3").inner_text() == f"Example {number}: answer {model.test.required_labels[number]}"
    assert detail.locator("svg").count() == 1
    table = {line[0]: line[1:] for line in cells(tab, "#example-detail")}
    entropy = ls.signal("entropy", model.test)[number]
    assert [float(value) for value in table["entropy"]] == pytest.approx(entropy.tolist(), rel=1e-3)
    assert table["kl"][0] == "-"  # there is no loop before


def test_copied_tables_parse(tab: Page, report: tuple[Path, Results]) -> None:
    for product in PRODUCTS.make(report[1], ["overview"]):
        if product.table is None:
            continue
        whole = [product.table.columns, *product.table.rows]
        whole = [[re.sub(r"\s+", " ", cell.strip()) for cell in row] for row in whole]
        markdown, latex, values = (copied(tab, product.name, kind) for kind in ("Markdown", "LaTeX", "CSV"))
        assert list(csv.reader(io.StringIO(values))) == whole
        lines = [re.split(r"(?<!\\) ?\| ?", line.strip())[1:-1] for line in markdown.splitlines()]
        assert set(lines.pop(1)) == {"---"}
        assert [[re.sub(r"\\([\\|])", r"\1", cell) for cell in line] for line in lines] == whole
        body = [line for line in latex.splitlines() if line.endswith("\\\\")]
        assert len(body) == len(whole)
        assert all(len(re.split(r"(?<!\\)&", line)) == len(product.table.columns) for line in body)
        assert latex.count("\\begin{tabular}") == latex.count("\\end{tabular}") == 1


def test_columns_sort_as_numbers_with_what_is_missing_last(tab: Page) -> None:
    for box in tab.locator("#legend-readouts input").all():
        box.check()
    missing = 0
    for percent in range(60, 100):  # the first that some lines miss
        slide(tab, "#target", 2 * percent - 1)
        if missing := sum(row[2] == "N/A" for row in cells(tab, "#depth-table")):
            break
    assert missing
    header = tab.locator("#depth-table th").nth(2)
    for order in ("ascending", "descending"):
        header.locator("button").click()
        assert header.get_attribute("aria-sort") == order
        depths = [row[2] for row in cells(tab, "#depth-table") if row[1] != "oracle"]
        known = [float(depth) for depth in depths if depth != "N/A"]
        assert known == sorted(known, reverse=order == "descending")
        assert depths[len(known) :] == ["N/A"] * (len(depths) - len(known))
        assert 0 < len(known) < len(depths)
    gaps = tab.locator("#diagnosis th").nth(2)
    for _ in range(2):  # ascending, then descending: model a has no gate, and stays last
        gaps.locator("button").click()
        assert cells(tab, "#diagnosis")[-1][2] == "no gate"
    slide(tab, "#target", 2 * 40 - 1)  # the order stays
    known = [float(row[2]) for row in cells(tab, "#depth-table") if row[2] not in ("N/A", "-")]
    assert known == sorted(known, reverse=True)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_figures_are_saved_for_a_paper(report: tuple[Path, Results], browser: Browser, scheme: Any) -> None:
    with opened(browser, report[0], color_scheme=scheme) as tab:
        assert tab.locator("html").get_attribute("data-theme") == scheme
        for figure in ("#frontier-chart", "#forced-map", "[data-figure=frontiers]"):
            place = tab.locator(figure)
            place.scroll_into_view_if_needed()
            place.locator("canvas, svg").first.wait_for()
            assert saved(tab, figure, "PNG").startswith(b"\x89PNG")
            drawn = saved(tab, figure, "SVG")
            assert ElementTree.fromstring(drawn).tag.endswith("svg")
            assert b'fill="white"' in drawn  # whatever the ground of the page


def test_light_and_dark(tab: Page) -> None:
    def ground() -> str:
        return str(tab.evaluate("getComputedStyle(document.body).backgroundColor"))

    light = ground()
    tab.get_by_role("button", name="Switch between light and dark").click()
    assert ground() != light
    tab.wait_for_timeout(500)
    ink = tab.locator("#exits svg text").first.evaluate("(it) => getComputedStyle(it).fill")
    assert ink == "rgb(232, 236, 240)"


def test_everything_can_be_reached_by_keyboard(tab: Page) -> None:
    unnamed = tab.evaluate(
        """() => [...document.querySelectorAll("button, input, select")]
            .filter((it) => !(it.ariaLabel || it.textContent.trim() || it.labels?.length)).map((it) => it.outerHTML)"""
    )
    assert unnamed == []
    tab.keyboard.press("Tab")
    assert tab.evaluate("document.activeElement.textContent") == "Skip to the diagnosis"
    tab.focus("#target")
    before = tab.locator("#target-text").inner_text()
    tab.keyboard.press("ArrowLeft")
    assert tab.locator("#target-text").inner_text() != before
    tab.focus("#threshold")
    before = tab.locator("#point").inner_text()
    tab.keyboard.press("Home")
    assert tab.locator("#point").inner_text() != before
    tab.locator("#example-table tbody button").nth(3).focus()
    tab.keyboard.press("Enter")
    assert "current" in (tab.locator("#example-table tbody tr").nth(3).get_attribute("class") or "")
    tab.locator("#depth-table th button").nth(1).focus()
    tab.keyboard.press("Enter")
    assert tab.locator("#depth-table th").nth(1).get_attribute("aria-sort") == "ascending"


@pytest.mark.parametrize(("width", "longest"), [(1400, 1400), (390, 3500)])
def test_it_opens_with_a_picture_and_a_line_a_model(
    report: tuple[Path, Results], browser: Browser, width: int, longest: int
) -> None:
    with opened(browser, report[0], width=width, folded=True) as tab:
        assert (
            tab.locator("h1").inner_text() == "How many loops do a and b need to reach 60\N{NO-BREAK SPACE}% accuracy?"
        )
        assert tab.title() == "2 models: LoopScope report"
        assert tab.locator("#hero svg").bounding_box()["y"] < 250  # type: ignore[index]
        lines = tab.locator(".verdicts li").all_inner_texts()
        drawn = " ".join(
            mark.get_attribute("aria-label") or ""
            for mark in tab.locator("#hero svg [aria-roledescription=point]").all()
        )
        for line, model in zip(lines, report[1].models, strict=True):
            needed = needed_loops(model, report[1].targets)
            assert needed is not None
            assert line.split("\n")[0].endswith(model.label)
            assert f"{needed.loops:.2f} [{needed.low:.2f}, {needed.high:.2f}] by {needed.readout}" in line
            assert f"{needed.loops:.2f} [{needed.low:.2f}, {needed.high:.2f}]" in drawn
        if width == 1400:
            last = tab.locator(".verdicts li").last.bounding_box()
            assert last is not None
            assert last["y"] + last["height"] < 900
        assert not tab.locator(".card").first.is_visible()
        assert not tab.locator("#paper-shown").is_checked()
        assert tab.evaluate("document.documentElement.scrollHeight") < longest
        tab.click("#unfold")
        assert tab.locator(".card").first.is_visible()
        assert tab.locator("#unfold").inner_text() == "Fold all"


def test_the_four_gaps_have_one_scale(tab: Page) -> None:
    labels = [
        tuple(axis.locator("text").all_text_contents())
        for chart in tab.locator("[data-gap]:has(svg)").all()
        for axis in chart.locator("svg .role-axis-label").all()
    ]
    scales = [axis for axis in labels if axis and not any(name in axis for name in "ab")]  # the others name the models
    assert len(scales) == tab.locator("[data-gap]:has(svg)").count()
    assert len(set(scales)) == 1
    assert tab.locator("[data-gap]:has(svg)").count() > 1


def test_on_paper_it_is_unfolded_with_its_figures(report: tuple[Path, Results], browser: Browser) -> None:
    with opened(browser, report[0], folded=True) as tab:
        tab.locator("body[data-drawn]").wait_for()
        figures = tab.locator(".chart.figure")
        assert figures.count() > 1
        assert tab.locator(".chart.figure svg").count() >= figures.count()
        unfolded = "[...document.querySelectorAll('details.fold')].filter((fold) => fold.open).length"
        tab.evaluate("dispatchEvent(new Event('beforeprint'))")
        tab.emulate_media(media="print")
        assert tab.evaluate(unfolded) == tab.locator("details.fold").count()
        assert not tab.locator("nav").is_visible()
        key = tab.locator(".legend label:visible")
        assert key.count() == tab.locator(".legend fieldset input:checked").count()
        cut = "[...document.querySelectorAll('.scroll')].filter((it) => getComputedStyle(it).overflow !== 'visible')"
        assert tab.evaluate(f"{cut}.length") == 0
        tab.emulate_media(media="screen")
        tab.evaluate("dispatchEvent(new Event('afterprint'))")
        assert tab.evaluate(unfolded) == 0


@pytest.mark.parametrize("width", [1400, 390])
def test_terms_are_explained_where_they_stand(report: tuple[Path, Results], browser: Browser, width: int) -> None:
    with opened(browser, report[0], width=width) as tab:
        tip = tab.locator("#tip")
        for term in tab.locator("#diagnosis-top .term").all():
            term.focus()
            assert tip.inner_text() == term.get_attribute("data-tip")
            box = tip.bounding_box()
            assert box is not None
            assert 0 <= box["x"] <= box["x"] + box["width"] <= width
        tab.keyboard.press("Escape")
        assert not tip.is_visible()


@pytest.mark.parametrize("width", [1400, 390])
def test_hostile_text_is_text(tmp_path: Path, browser: Browser, width: int) -> None:
    page, _ = written(hostile(), tmp_path / "hostile")
    with opened(browser, page, width=width, permissions=["clipboard-read", "clipboard-write"]) as tab:
        assert tab.locator("img, b, main script").count() == 0
        assert tab.evaluate("document.documentElement.scrollWidth") <= width
        for model in range(len(hostile())):
            choose(tab, model, "margin")
            texts = " ".join(tab.locator("#example-table tbody td:first-child").all_inner_texts())
            assert HOSTILE[1] in texts
            assert HOSTILE[3] in texts
        tab.fill("#find", "0 \u202e<b>x")
        tab.locator("#example-table tbody button").first.click()
        said = tab.locator("#example-detail .whole").text_content() or ""
        assert said.startswith("0 \u202e<b>x</b>")
        assert "more characters]" in said
        assert tab.evaluate("document.documentElement.scrollWidth") <= width
        rows = list(csv.reader(io.StringIO(copied(tab, "headline", "CSV"))))
        assert {row[0] for row in rows} >= {HOSTILE[0], HOSTILE[1], HOSTILE[3], "'" + HOSTILE[5]}
        lines = copied(tab, "headline", "Markdown").splitlines()
        tables = re.sub(" +", " ", (page.parent / "tables.md").read_text())
        assert set(lines) <= set(tables.splitlines())
        drawn = ElementTree.fromstring(saved(tab, "#frontier-chart", "SVG"))
        assert not [each for each in drawn.iter() if each.tag.rpartition("}")[2] in ("script", "img", "a")]
        assert tab.evaluate("window.hacked") is None
        see_figures(tab)


def bare(name: str, **changes: object) -> ModelRecordings:
    return source(name, 3, **changes)


PARTIAL = {
    "one model without a gate": [bare("one", gate_logits=None)],
    "no difficulties, no texts, no states": [bare("bare", difficulty=None, examples=None, hidden=None)],
    "a readout that never exits": [
        ModelRecordings("never", never_exits(source("x", 1).validation), never_exits(source("x", 1).test))
    ],
    "only predictions": [
        ModelRecordings("said", predictions_only(source("x", 1).validation), predictions_only(source("x", 1).test))
    ],
    "one loop": [bare("single", loops=1)],
    "right by chance": [bare("chance", labels=np.arange(200) % 5)],
    "ten examples": [bare("few", rows=10)],
    "one example": [bare("only", rows=1)],
}


@pytest.mark.parametrize("kind", PARTIAL)
def test_a_partial_study_makes_sense(tmp_path: Path, browser: Browser, kind: str) -> None:
    page, results = written(PARTIAL[kind], tmp_path / "partial")
    model = results.models[0]
    with opened(browser, page) as tab:
        assert model.diagnosis.sentence in tab.locator(".card").inner_text().replace("\N{NO-BREAK SPACE}", " ")
        for name in [frontier.readout for frontier in model.frontiers]:
            choose(tab, 0, name)
            for place in (0, 10_000):
                slide(tab, "#threshold", place)
                assert re.match(r"[\d.]+ %", tab.locator("#point dd").first.inner_text())
        for percent in (1, 99):
            slide(tab, "#target", 2 * percent - 1)
            assert cells(tab, "#depth-table")
        for kind_of_exit in range(5):
            tab.check(f"#filters input[value='{kind_of_exit}']")
        see_figures(tab)
        text = tab.locator("main").inner_text()
        assert not re.search(r"\b(NaN|undefined|null|Infinity)\b", text)


@pytest.mark.parametrize("width", [1400, 390])
def test_without_a_verdict_the_page_states_no_gap_and_no_depth(tmp_path: Path, browser: Browser, width: int) -> None:
    page, results = written(
        [bare(name, labels=np.arange(200) % 5) for name in ("chance", "other")], tmp_path / "none", "chance"
    )
    assert {model.diagnosis.verdict for model in results.models} == {"no verdict"}
    with opened(browser, page, width=width) as tab:
        assert tab.locator("#gaps-silent").is_visible()
        for part in ("#gaps-shown", "#target-controls", "#depth-table", "#ticks-note"):
            assert not tab.locator(part).is_visible(), part
        assert tab.locator("#depth-summary").inner_text() == (
            "No depths are shown: none of these models gets a verdict."
        )
        assert tab.locator("#frontier-chart canvas").count() == 1  # curves are shown all the same
        choose(tab, 0, "margin")
        assert not tab.get_by_role("button", name="D@60 on test data").count()
        assert tab.get_by_text("Tap a mark").is_visible() == (width == 390)
        tab.click("#zoom-in")


def test_lines_without_a_verdict_or_below_chance_have_no_depth(tmp_path: Path, browser: Browser) -> None:
    models = {"sixty": pair(right=0.47, rows=90), "chance": pair(right=0.0, rows=90)}
    with opened(browser, ls.report(models, tmp_path / "some")) as tab:
        tab.locator("#legend-readouts label", has_text="margin").locator("input").check()
        slide(tab, "#target", 2 * 45 - 1)
        rows = [row for row in cells(tab, "#depth-table") if row[1] != "oracle"]
        assert {row[2] for row in rows if row[0] == "chance"} == {"no verdict"}
        assert not {row[2] for row in rows if row[0] == "sixty"} & {"no verdict", "not above chance"}
        own = [row for row in rows if row[0] == "sixty"]
        assert f" of {len(own)} lines (the oracle apart) reach 45 %" in tab.locator("#depth-summary").inner_text()
        slide(tab, "#target", 2 * 20 - 1)  # chance is 25 %
        assert {row[2] for row in cells(tab, "#depth-table") if row[0] == "sixty"} == {"not above chance", "-"}
        slide(tab, "#target", 2 * 99 - 1)
        assert {(row[2], row[3]) for row in cells(tab, "#depth-table") if row[0] == "sixty"} == {
            ("N/A", "-"),
            ("-", "-"),
        }
        assert tab.locator("#depth-summary").inner_text() == "No line that is shown reaches 99 %."


def test_names_in_the_charts_of_gaps_are_whole_and_no_row_is_empty(tmp_path: Path, browser: Browser) -> None:
    models = {f"decoupled MLP gate, geometric 0.3, β {beta}": pair(right=0.9, rows=90) for beta in (0.1, 0.2)}
    ungated = [replace(each, gate_logits=None) for each in pair(right=0.9, rows=90)]
    with opened(browser, ls.report({**models, "without a gate": tuple(ungated)}, tmp_path / "names")) as tab:
        shown = tab.locator("#gap-readout svg .role-axis-label text").all_text_contents()
        assert not [text for text in shown if "…" in text or text.endswith("β")]
        assert [text for text in shown if text.endswith(("β\N{NO-BREAK SPACE}0.1", "β\N{NO-BREAK SPACE}0.2"))]
        assert "without a gate" not in shown
        assert "without a gate" in tab.locator("#gap-room svg .role-axis-label text").all_text_contents()
        assert tab.locator("#gap-trajectory").inner_text() == (
            "No model here has this gap: there is no reference to compare with."
        )


def test_without_difficulties_nothing_speaks_of_them(tmp_path: Path, browser: Browser) -> None:
    with opened(browser, written([bare("bare", difficulty=None)], tmp_path / "ungraded")[0]) as tab:
        assert tab.locator("#trajectories h4").inner_text() == "Signals by loop"
        assert "difficult" not in tab.locator("#trajectories").inner_text()
        assert "difficulty" not in " ".join(tab.locator("#forced-map svg text").all_text_contents())


def test_twenty_large_models_stay_small_and_open(tmp_path: Path, browser: Browser) -> None:
    """Eight loops, forty difficulties, questions of a thousand characters: the page is below 8 MB."""
    rng = np.random.default_rng(0)
    words = rng.integers(0, 5000, (400, 170))
    examples = [" ".join(f"w{word}" for word in row) for row in words]
    changes: dict[str, Any] = {"rows": 400, "loops": 8, "examples": examples}
    changes |= {"difficulty": rng.integers(1, 41, 400), "hidden": None}
    changes |= {"gate_logits": rng.normal(size=(400, 8))}
    page, _ = written([with_policy(source(f"m{number}", number, **changes)) for number in range(20)], tmp_path / "many")
    assert page.stat().st_size < 8_000_000
    with opened(browser, page) as tab:
        tab.get_by_role("button", name="All", exact=True).click()
        assert len({row[0] for row in cells(tab, "#depth-table")}) == 20
        choose(tab, 19, "entropy")
        assert len(tab.locator("#exit-map .mark-rect [aria-label]").all()) == 40 * 8


def test_a_relative_target_is_where_the_slider_begins_whatever_test_data_say(tmp_path: Path, browser: Browser) -> None:
    models = {"sixty": pair(right=0.47), "chance": pair(right=0.0), "single": pair(right=0.8, loops=1)}
    page = ls.report(models, tmp_path / "relative")
    with opened(browser, page) as tab:
        assert "N/A" not in tab.locator("#diagnosis-top").inner_text()
        diagnosis = ls.diagnose(*models["sixty"])  # the only one with a verdict
        said = float(tab.locator("#target-text").inner_text().removesuffix(" %"))
        assert 0 <= 100 * diagnosis.target.accuracy - said < 0.5
        choose(tab, 0, diagnosis.best_readout)
        chosen = tab.get_by_role("button", name="Most accurate on validation data")
        assert chosen.get_attribute("aria-pressed") == "true"
        tab.get_by_role("button", name="D@full-1 on test data").click()
        facts = tab.locator("#point dd").all_inner_texts()
        depth = ls.sweep(diagnosis.best_readout, *models["sixty"]).depth_at(diagnosis.target.reached)
        assert facts[1].startswith(f"{depth:.2f} ")
        assert not re.search(r"\b(NaN|undefined|null|Infinity)\b|e\+308", tab.locator("main").inner_text())


@pytest.mark.parametrize("width", [1400, 390])
def test_links_land_where_they_say(report: tuple[Path, Results], browser: Browser, width: int) -> None:
    def place(tab: Page, name: str) -> float:
        """How far below the top it is, or beyond what the end of the page allows."""
        return float(
            tab.evaluate(
                """(name) => document.getElementById(name).getBoundingClientRect().top
                - Math.max(0, scrollY + innerHeight - document.documentElement.scrollHeight + 2) * 1e6""",
                name,
            )
        )

    with opened(browser, report[0], width=width) as tab:
        names = [str(link.get_attribute("href"))[1:] for link in tab.locator("nav a, .contents a").all()]
        assert {"closer", "signals", "paired", "made"} <= set(names)
        for name in names:
            tab.evaluate("(name) => { location.hash = name; }", name)
            tab.wait_for_timeout(700)  # figures on the way are drawn, and push it down
            assert place(tab, name) <= 130, name
            assert place(tab, name) >= 0 or place(tab, name) < -1e5, name
    for name in ("trajectories", "signals", "ordering"):  # opened there
        tab = browser.new_page(viewport={"width": width, "height": 900})
        tab.goto(f"{report[0].as_uri()}#{name}")
        tab.wait_for_selector("body[data-ready]")
        tab.wait_for_timeout(1500)
        assert 0 <= place(tab, name) <= 130, name
        tab.close()


def test_a_phone_has_a_menu_whole_names_and_hints_for_fingers(report: tuple[Path, Results], browser: Browser) -> None:
    with opened(browser, report[0], width=390, height=800, has_touch=True, is_mobile=True) as tab:
        links = tab.locator("nav a")
        assert not links.first.is_visible()
        tab.tap("#sections")
        assert all(link.is_visible() for link in links.all())
        tab.tap("nav a[href='#frontiers-all']")
        assert not links.first.is_visible()
        assert tab.get_by_text("Tap a mark").is_visible()
        assert not tab.get_by_text("Point at a mark").is_visible()
        for box in tab.locator("#legend-readouts input").all():
            box.check()
        lines = tab.evaluate(
            """() => [...document.querySelectorAll("#depth-table td:nth-child(2) bdi")].map((it) => {
                const range = document.createRange();
                range.selectNodeContents(it);
                return [it.textContent, new Set([...range.getClientRects()].map((box) => box.top)).size];
            })"""
        )
        assert {"stopper:classifier", "hidden_change"} <= {name for name, _ in lines}
        assert {count for _, count in lines} == {1}
        first = tab.locator("#depth-table td").first
        tab.locator("#depth-table").evaluate("(it) => it.parentNode.scrollBy(80, 0)")
        box = first.bounding_box()
        assert box is not None
        assert box["x"] >= 0  # which model it is stays in sight
        assert tab.evaluate("document.documentElement.scrollWidth") <= 390


def test_many_models_open_with_a_summary_and_filters(tmp_path: Path, browser: Browser) -> None:
    models = {f"late{seed}": pair(right=0.9, rows=60, late_gate=True, seed=seed) for seed in range(7)}
    models |= {f"good{seed}": pair(right=0.9, rows=60, seed=seed) for seed in range(2)}
    page = ls.report(models, tmp_path)
    with opened(browser, page) as tab:
        blamed = [ls.diagnose(*each).verdict for each in models.values()].count("readout")
        assert f"Of 9 models, the readout is to blame in {blamed}" in tab.locator(".summary").inner_text()
        rows, cards = tab.locator(".verdicts li:visible"), tab.locator(".card:visible")
        assert (rows.count(), cards.count()) == (6, 6)
        tab.click("#model-all")
        assert (rows.count(), cards.count()) == (9, 9)
        tab.fill("#model-find", "good")
        assert (rows.count(), cards.count()) == (2, 2)
        tab.fill("#model-find", "")
        tab.check("#model-filters input[value='readout']")
        assert rows.count() == blamed
        tab.fill("#model-find", "late3")
        assert tab.locator("#gap-room svg").count() == 1
        tab.evaluate("location.hash = 'card-8'")  # hidden by both filters
        tab.locator("#card-8").wait_for(state="visible")
        assert (rows.count(), tab.locator("#model-find").input_value()) == (9, "")


def test_what_is_zero_everywhere_is_said_and_not_drawn(tmp_path: Path, browser: Browser) -> None:
    """Without logits no other signal is as good as the gate."""

    def gate_only(made: ls.Trajectory) -> ls.Trajectory:
        fields = {"labels": made.labels, "gate_logits": made.gate_logits, "split": made.split}
        return ls.Trajectory(predictions=made.predicted, **fields)

    models = {name: tuple(map(gate_only, pair(right=0.99, seed=seed))) for seed, name in enumerate("ab")}
    diagnoses = [ls.diagnose(*each) for each in models.values()]
    assert {each.best_readout for each in diagnoses} == {"gate"}
    with opened(browser, ls.report(models, tmp_path)) as tab:
        assert tab.locator("#gap-readout").inner_text() == (
            "Zero for every model here that has a gate: it is its best readout."
        )
        assert tab.locator("#gap-readout svg").count() == 0
        assert tab.locator("#gap-room svg").count() == 1


def test_nothing_is_minus_zero(browser: Browser) -> None:
    script = (files("loopscope.report") / "assets" / "data.js").read_text()
    tab = browser.new_page()
    shown = tab.evaluate(
        f"() => {{ {script}; return [fixed(-0.001, 2), fixed(-0.006, 2), percent(-1e-9), fixed(0.125, 2)]; }}"
    )
    assert shown == ["0.00", "-0.01", "0.0 %", "0.12"]
    tab.close()
