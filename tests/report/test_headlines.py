"""Headlines of models at 60 %, at chance, with one loop: do page and terminal say what is true?"""

import html
import json
import re
from pathlib import Path

import pytest
from simulated import pair

import loopscope as ls
import loopscope.report.tables  # the room is imported, and ls.report can be called all the same
from loopscope.analysis.schema import Results
from loopscope.cli import main
from loopscope.config import read_json

MODELS = {
    "demo": pair(right=0.99, late_gate=True),
    "sixty": pair(right=0.47),
    "small": pair(right=0.47, rows=300),
    "chance": pair(right=0.0),
    "single": pair(right=0.8, loops=1),
    "forgets": pair(right=0.9, forgets=True),
}
SILENT = ("chance", "single")


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ls.report(MODELS, tmp_path_factory.mktemp("headlines"))


def cards(page: Path) -> dict[str, str]:
    """The text of every card, by model."""
    found = re.findall(r'<article class="card".*?</article>', page.read_text(), flags=re.DOTALL)
    texts = [" ".join(html.unescape(re.sub(r"<[^>]+>", " ", card)).split()) for card in found]
    return {text.split()[0]: text for text in texts}


@pytest.mark.parametrize("name", MODELS)
def test_a_card_says_what_the_diagnosis_says_and_one_depth_for_one_accuracy(page: Path, name: str) -> None:
    card, diagnosis = cards(page)[name], ls.diagnose(*MODELS[name])
    assert diagnosis.sentence in card
    assert diagnosis.target_sentence in card
    level = diagnosis.target
    if name in SILENT:
        assert "D@full-1, best readout no verdict own gate no verdict fixed depth no verdict best loop" in card
        return
    assert f"D@full-1 ({round(100 * level.accuracy, 2):g}%), best readout" in card
    frontier = ls.sweep(diagnosis.best_readout, *MODELS[name])
    lower = "" if level.reached == level.accuracy else f" @{100 * level.reached:g}%"
    assert f"best readout {frontier.depth_at(level.reached):.2f}{lower}, {diagnosis.best_readout}" in card
    assert "N/A" not in card
    for accuracy, depth in re.findall(r"reaches ([\d.]+)% in ([\d.]+) loops", card):
        assert depth == f"{frontier.depth_at(float(accuracy) / 100):.2f}"


def test_verdicts_are_those_of_the_truth(page: Path) -> None:
    shown = cards(page)
    assert "to blame: readout" in shown["demo"]  # its gate is late
    for name in ("sixty", "small", "forgets"):  # a good gate, and nothing to compare the trajectory with
        assert "cannot tell" in shown[name]
    for name in SILENT:
        assert f"{name} no verdict" in shown[name]
        assert shown[name].count("no verdict") == 7  # the chip, three depths and the three gaps
    assert "fixed depth are read at 59%, the highest whole percent that test data reach at that loop" in shown["small"]
    for name, text in shown.items():
        harm = re.search(r"Loop 2 is [\d.]+ points better than full depth on validation data: depth harms it.", text)
        assert (harm is not None) == (name == "forgets")
    assert "right in 25.0% of 1,500 test examples, and chance is 25%" in shown["chance"]


def test_results_say_which_accuracy_a_relative_target_was(page: Path) -> None:
    results = read_json(Results, page.parent / "results.json", "results")
    assert [target.key for target in results.targets] == ["full-1"]
    for model, (validation, _) in zip(results.models, MODELS.values(), strict=True):
        level = model.targets["full-1"]
        loop = 2 if model.name == "forgets" else validation.num_loops
        assert (level.loop, level.accuracy) == (loop, pytest.approx(validation.correct[:, loop - 1].mean() - 0.01))
        slow = {"patience", "settling"} if model.name == "forgets" else set()  # they look back on loops, and miss it
        depths = [
            frontier.depth_at["full-1"] for frontier in model.frontiers if frontier.readout not in {"oracle", *slow}
        ]
        assert None not in depths


@pytest.mark.parametrize("name", MODELS)
def test_the_terminal_says_the_same(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for recording in MODELS[name]:
        recording.save(tmp_path / str(recording.split))
    diagnosis = ls.diagnose(*MODELS[name])
    assert main(["diagnose", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert out.startswith(diagnosis.sentence)
    assert diagnosis.target_sentence in out
    assert main(["diagnose", str(tmp_path), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["verdict"], answer["target"]["accuracy"]) == (diagnosis.verdict, diagnosis.target.accuracy)
    assert main(["evaluate", str(tmp_path / "validation"), str(tmp_path / "test"), "--readout", "fixed"]) == 0
    out, err = capsys.readouterr()
    assert (diagnosis.sentence in err.splitlines()) == (name in SILENT)
    assert ("depths are read at" in " ".join(out.split())) == (diagnosis.target.reached < diagnosis.target.accuracy)
    depth = ls.sweep("fixed", *MODELS[name]).depth_at(diagnosis.target.reached)
    assert "D@full-1" in out
    assert f"{depth:.2f}" in out
    assert main(["compare", str(tmp_path), "margin", "gate"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert (diagnosis.sentence in out, "D@" in out) == (name in SILENT, name not in SILENT)
    assert main(["diagnose", str(tmp_path), "--at", "0.95"]) == 0  # absolute on request
    assert "The target is" not in capsys.readouterr().out


def test_the_comparison_with_the_paper_alone_has_its_grid() -> None:
    from loopscope.reproduction.products import OURO, PAPER, PRODUCTS

    noted = {
        name
        for name in PAPER | OURO
        if getattr(recipe := PRODUCTS.recipes[name], "note", "").endswith("hundredths of a loop less.")
        or recipe is not (PAPER | OURO)[name]
    }
    assert {"fixed_prior_summary", "gate_summary", "teaser", "ouro_summary"} <= noted
    assert not noted & {"posthoc_summary", "ouro_refitted", "main_signals", "headline", "depths"}


def test_a_report_needs_a_model_and_policies_of_its_models(tmp_path: Path) -> None:
    with pytest.raises(ls.UserError, match="at least one model"):
        ls.report({}, tmp_path)
    with pytest.raises(ls.UserError, match="policies of 'other'"):
        ls.report({"demo": MODELS["demo"]}, tmp_path, policies={"other": [ls.ExitPolicy("fixed", 2)]})


def test_many_models_are_a_table_with_their_gaps(tmp_path: Path) -> None:
    page = ls.report({f"m{seed}": pair(right=0.9, rows=60, late_gate=True, seed=seed) for seed in range(9)}, tmp_path)
    (table,) = re.findall(r'<table class="glance".*?</table>', page.read_text(), flags=re.DOTALL)
    results = read_json(Results, page.parent / "results.json", "results")
    for model in results.models:
        gap = model.diagnosis.readout_gap
        assert gap is not None
        assert f"<td>{gap.value:+.2f} [{gap.low:+.2f}, {gap.high:+.2f}]" in table
