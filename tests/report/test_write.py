"""The written report: complete, self-contained, and safe against hostile names."""

import base64
import hashlib
import html
import re
from pathlib import Path

import msgspec
import pytest
from chromium import opened
from pages import HOSTILE, TARGETS, hostile, two
from playwright.sync_api import Browser

import loopscope as ls
from loopscope.analysis.model_analysis import analyse_models
from loopscope.analysis.results import assemble_results
from loopscope.analysis.schema import Results
from loopscope.analysis.threshold_details import ThresholdDetails
from loopscope.config import read_json
from loopscope.report.page import render
from loopscope.report.products import OVERVIEW, markdown, markdown_text
from loopscope.report.tables import Table
from loopscope.report.write import reported_models, write_report

INJECTED = (
    "<script>window.hacked = 1</script>",
    '<script type="module">window.hacked = 1</script>',
    "<img src=x onerror='window.hacked = 1'>",
    "<a id='clicked' href='javascript:window.hacked=1'>here</a>",
    "<iframe srcdoc='<script>parent.hacked = 1</script>'></iframe>",
    "<base href='https://example.org/'>",
    "<p id='late' style='color: red'></p>",
)

LATER = """() => new Promise((done) => setTimeout(() => {  // by itself: what a debugger evaluates is free of the policy
    document.getElementById("late").innerHTML = "<img src=x onerror='window.hacked = 1'>";
    const script = document.createElement("script");
    script.text = "window.hacked = 1";
    document.body.append(script);
    const tried = [() => eval("window.hacked = 1"), () => Function("window.hacked = 1")()];
    done(tried.map((act) => { try { return act(); } catch (error) { return error.name; } }));
}))"""


def hash_of(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def tables(results: Results) -> list[Table]:
    return [product.table for product in OVERVIEW.make(results, ["overview"]) if product.table is not None]


COMMAND = "loopscope report 'a %b' --out report"


@pytest.fixture(scope="module")
def analysed() -> tuple[Results, list[ThresholdDetails]]:
    return analyse_models(two(), "a", TARGETS)


@pytest.fixture(scope="module")
def report(
    analysed: tuple[Results, list[ThresholdDetails]], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Results]:
    products = OVERVIEW.make(analysed[0], ["overview"])
    return write_report(*analysed, products, tmp_path_factory.mktemp("report"), COMMAND), analysed[0]


def test_everything_is_there(report: tuple[Path, Results]) -> None:
    names = {"frontiers", "forced_exits", "exit_distributions", "signals"}
    expected = {f"{name}.{kind}" for name in names for kind in ("png", "pdf", "svg")}
    expected |= {"report.html", "results.json", "tables.md"}
    folder = report[0].parent
    assert {path.name for path in folder.iterdir()} == expected
    for path in folder.iterdir():
        head = {".png": b"\x89PNG", ".pdf": b"%PDF", ".svg": b"<svg"}.get(path.suffix)
        assert head is None or path.read_bytes().startswith(head)


def test_a_report_has_policies_of_its_models_and_a_folder_of_its_own(tmp_path: Path) -> None:
    model = two()[0]
    models = {"a": (model.validation, model.test)}
    with pytest.raises(ls.UserError, match="policies of 'other'"):  # though the room is imported, it can be called
        ls.report(models, tmp_path / "out", policies={"other": [ls.ExitPolicy("fixed", 2)]})
    with pytest.raises(ls.UserError, match="no style 'poster'; choose one of page, paper"):
        ls.report(models, tmp_path / "out", style="poster")
    model.test.save(tmp_path / "test")
    with pytest.raises(ls.UserError, match="is not only a report's: it holds test"):
        ls.report(models, tmp_path)
    assert [each.name for each in tmp_path.iterdir()] == ["test"]


def test_the_policy_names_the_scripts_that_are_there_and_no_others(report: tuple[Path, Results]) -> None:
    page = report[0].read_text()
    (policy,) = re.findall(r'<meta http-equiv="Content-Security-Policy" content="([^"]*)">', page)
    rules = dict(rule.split(" ", 1) for rule in policy.split("; "))
    assert rules["default-src"] == "'none'"  # the browser itself refuses whatever would be asked for
    bare = re.sub(r'<script type="module">.*?</script>', "", page, flags=re.DOTALL)
    assert not re.findall(r"""(?:src|href|xlink:href)\s*=\s*["']([^"'#][^"']*)""", bare)
    assert "@import" not in bare
    assert "unsafe" not in policy
    for kind, tag in (("script-src", 'script type="module"'), ("style-src", "style")):
        inline = re.findall(rf"<{tag}>(.*?)</{tag.split()[0]}>", page, re.DOTALL)
        assert rules[kind].split() == [hash_of(text) for text in inline]


def test_the_page_says_what_the_tables_say(report: tuple[Path, Results]) -> None:
    page, results = report[0].read_text(), report[1]
    for table in tables(results):
        assert f"<h3>{table.title}</h3>" in page
    for model in results.models:
        assert model.diagnosis.sentence.replace(" %", "\N{NO-BREAK SPACE}%") in html.unescape(page)
    assert page.count('<article class="card"') == 2


def test_a_number_stays_with_its_percent_sign_but_in_what_can_be_copied(report: tuple[Path, Results]) -> None:
    said = html.unescape(report[0].read_text()).partition("<script")[0]
    assert f"<code>{COMMAND}</code>" in said
    assert not re.search(r"\d %", said)
    assert re.search("\\d\N{NO-BREAK SPACE}%", said)


def test_the_same_results_give_the_same_page(
    report: tuple[Path, Results], analysed: tuple[Results, list[ThresholdDetails]]
) -> None:
    results = read_json(Results, report[0].parent / "results.json", "results")
    again = render(results, analysed[1], OVERVIEW.make(results, ["overview"]), COMMAND, "")
    assert again == report[0].read_text()
    assert reported_models(report[0].parent) == ["a", "b"]


def test_hostile_names_are_text() -> None:
    one, (details,) = analyse_models(hostile()[:1], None, TARGETS)
    models = [msgspec.structs.replace(one.models[0], name=HOSTILE[place], group=HOSTILE[place]) for place in (0, 1, 6)]
    results = assemble_results(models, one.targets)
    products = OVERVIEW.make(results, ["overview"])
    page, tables = render(results, [details] * 3, products, COMMAND, ""), markdown(products)
    assert page.count("<script") == 3 + 3 + 4  # the head, the libraries and the script; a part a model; figures
    for text in HOSTILE[:2]:
        assert text not in page
    assert "&lt;img src=x onerror=" in page
    assert "\\u001b[31m" in page  # the name of the run, as it can be seen
    for model in results.models:
        assert f"\n| {markdown_text(model.label)} | " in tables
    for text in (page, tables):
        assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e]", text.replace("\t", ""))


def test_the_headline_has_the_depth_and_the_culprit_of_every_model(report: tuple[Path, Results]) -> None:
    results = report[1]
    headline = tables(results)[0]
    assert headline.columns == ["model", "best loop", "fixed depth", "own gate", "best readout", "to blame"]
    first, second = headline.rows
    assert (first[0], first[3], first[5]) == ("a", "no gate", "the reference")
    gate = next(frontier for frontier in results.models[1].frontiers if frontier.readout == "gate")
    assert second[3] == f"{gate.depth_at['0.6']:.2f}"


def test_what_is_put_into_the_page_does_not_run(report: tuple[Path, Results], tmp_path: Path, browser: Browser) -> None:
    """Whoever gets markup into the page gets no script to run, and neither do the page's own scripts with a text."""
    whole = report[0].read_text()
    (tmp_path / "report.html").write_text(whole.replace("</main>", "".join(INJECTED) + "</main>"))
    refused: list[str] = []
    tab = browser.new_page()
    tab.on("console", lambda said: refused.append(said.text) if "Content Security Policy" in said.text else None)
    tab.goto((tmp_path / "report.html").as_uri())
    tab.wait_for_selector("body[data-ready]")
    assert tab.locator("#exits svg").count() == 1  # the page itself runs
    tab.locator("#clicked").click()
    said = tab.evaluate(LATER)
    assert said == ["EvalError", "EvalError"]
    tab.wait_for_timeout(300)
    assert tab.evaluate("window.hacked") is None
    assert tab.locator("base").count() == 1
    assert tab.evaluate("document.baseURI") == tab.url.split("#")[0]
    assert len(refused) >= len(INJECTED)
    tab.close()


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
