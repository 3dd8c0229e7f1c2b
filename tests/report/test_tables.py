"""Tables of models at 60 %, at chance, with one loop: do page and terminal say what is true?"""

import html
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import msgspec
import numpy as np
import pytest
from pages import of_seeds
from simulated import pair

import loopscope as ls
from loopscope.analysis.diagnosis import Diagnosis
from loopscope.analysis.formatting import rounded_percent
from loopscope.analysis.model_analysis import ModelRecordings, analyse_models
from loopscope.analysis.schema import Results
from loopscope.analysis.threshold_details import ThresholdDetails
from loopscope.cli import main
from loopscope.config import read_json
from loopscope.report import tables
from loopscope.report.curves import frontier_panel
from loopscope.report.page import page_head, render, scope_sentence
from loopscope.report.products import OVERVIEW
from loopscope.report.verdicts import summary

MODELS = {
    "demo": pair(right=0.99, rows=400, late_gate=True),
    "sixty": pair(right=0.47, rows=400),
    "small": pair(right=0.47, rows=300),
    "chance": pair(right=0.0, rows=400, seed=1),
    "single": pair(right=0.8, rows=400, loops=1),
    "forgets": pair(right=0.9, rows=400, forgets=True),
}
SILENT = ("chance", "single")
TABLES = [name for name, recipe in OVERVIEW.recipes.items() if callable(recipe)]


def analysed(
    names: Sequence[str], reference: str | None = None, targets: Sequence[float] | None = None
) -> tuple[Results, list[ThresholdDetails]]:
    return analyse_models([ModelRecordings(name, *MODELS[name]) for name in names], reference, targets)


@cache
def diagnosis_of(name: str) -> Diagnosis:
    return ls.diagnose(*MODELS[name])


@pytest.fixture(scope="module")
def made() -> tuple[Results, list[ThresholdDetails]]:
    return analysed(list(MODELS))


@pytest.fixture(scope="module")
def results(made: tuple[Results, list[ThresholdDetails]]) -> Results:
    return made[0]


@pytest.fixture(scope="module")
def shown(made: tuple[Results, list[ThresholdDetails]]) -> dict[str, str]:
    return cards(page_of(*made))


def only(results: Results, *names: str) -> Results:
    """As though only these models had been analysed."""
    models = [model for model in results.models if model.name in names]
    groups = [group for group in results.groups if group.names[0] in names]
    return msgspec.structs.replace(results, models=models, groups=groups)


def page_of(results: Results, details: list[ThresholdDetails]) -> str:
    """Without figures, which take longest."""
    return render(results, details, OVERVIEW.make(results, TABLES), "loopscope report", "")


def card_texts(page: str) -> list[str]:
    found = re.findall(r'<article class="card".*?</article>', page, flags=re.DOTALL)
    return [" ".join(html.unescape(re.sub(r"<[^>]+>", " ", card)).split()).replace(" ,", ",") for card in found]


def cards(page: str) -> dict[str, str]:
    """The text of every card, by model."""
    return {text.split()[0]: text for text in card_texts(page)}


@pytest.mark.parametrize("name", MODELS)
def test_a_card_says_what_the_diagnosis_says_and_one_depth_for_one_accuracy(shown: dict[str, str], name: str) -> None:
    card, diagnosis = shown[name], diagnosis_of(name)
    assert diagnosis.sentence in card
    assert diagnosis.target_sentence in card
    level = diagnosis.target
    if name in SILENT:
        assert "D@full-1, best readout no verdict own gate no verdict fixed depth no verdict best loop" in card
        return
    assert f"D@full-1 ({round(100 * level.accuracy, 2):g} %, from validation data), best readout" in card
    frontier = ls.sweep(diagnosis.best_readout, *MODELS[name])
    lower = "" if level.reached == level.accuracy else f" @{100 * level.reached:g} %"
    assert f"best readout {frontier.depth_at(level.reached):.2f}{lower}, {diagnosis.best_readout}" in card
    assert "N/A" not in card
    for accuracy, depth in re.findall(r"reaches ([\d.]+) % in ([\d.]+) loops", card):
        assert depth == f"{frontier.depth_at(float(accuracy) / 100):.2f}"


def test_verdicts_are_those_of_the_truth(shown: dict[str, str]) -> None:
    assert "its readout (the gate) is to blame" in shown["demo"]  # its gate is late
    for name in ("sixty", "small", "forgets"):  # a good gate, and nothing to compare the trajectory with
        assert "open with these data" in shown[name]
    for name in SILENT:
        assert f"{name} no verdict" in shown[name]
        assert shown[name].count("no verdict") == 7  # the chip, three depths and all gaps but the trajectory's
        assert "trajectory gap no reference" in shown[name]
    assert "fixed depth are read at 59 %, the highest whole percent that test data reach at that loop" in shown["small"]
    for name, text in shown.items():
        harm = re.search(r"Loop 2 is [\d.]+ points better than full depth on validation data: depth harms it.", text)
        assert (harm is not None) == (name == "forgets")
    assert re.search("% of 400 test examples, and chance, or always the commonest answer, in", shown["chance"])


def test_without_a_verdict_no_table_has_a_depth(results: Results) -> None:
    depths = tables.depths(results)
    for label, readout, depth, *_ in depths.rows:
        assert depth == "-" if readout == "oracle" else (depth == "no verdict") == (label in SILENT)
    for model in results.models:
        assert (frontier_panel("", [], [model]).target is None) == (model.name in SILENT)
    other = analysed(["demo"], targets=[0.9, 0.2])[0]  # which guessing reaches
    assert {row[3] for row in tables.depths(other).rows if row[1] != "oracle"} == {"no verdict"}
    assert "no verdict" not in {row[2] for row in tables.depths(other).rows}


def test_of_texts_everything_says_what_it_counts(
    results: Results, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for recording in pair(right=0.9, rows=300):
        replace(recording, sequences=np.arange(300) // 10).save(tmp_path / "texts" / str(recording.split))
    said = "texts: 300 test tokens of 30 sequences): means are over tokens, and intervals draw whole sequences."
    assert main(["report", str(tmp_path / "texts"), "--out", str(tmp_path / "report")]) == 0
    assert f"Examples are tokens ({said}" in " ".join(capsys.readouterr().out.split())
    shown = (tmp_path / "report" / "tables.md").read_text()
    assert shown.count(f"Examples are tokens ({said}") == shown.count("\n| --- |")  # below every heading
    whole = html.unescape((tmp_path / "report" / "report.html").read_text())
    assert "1 run; 300 test tokens of 30 sequences. Of sequences, means are over tokens, and intervals draw" in whole
    (model,) = read_json(Results, tmp_path / "report" / "results.json", "results").models
    assert (model.test_examples, model.sequences) == (300, 30)
    both = msgspec.structs.replace(results, models=[model, results.models[0]])
    assert f"Some examples are tokens ({said}" in tables.of_sequences(both)
    assert main(["compare", str(tmp_path / "texts"), "gate", "margin"]) == 0
    assert "Compared on 300 test tokens of 30 sequences, of which" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("name", ["small", "chance"])
def test_the_terminal_says_the_same(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    for recording in MODELS[name]:
        recording.save(tmp_path / str(recording.split))
    diagnosis = diagnosis_of(name)
    assert main(["diagnose", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    out = " ".join(out.split())
    assert out.startswith(diagnosis.sentence)
    assert diagnosis.target_sentence in out
    assert main(["sweep", str(tmp_path / "validation"), str(tmp_path / "test"), "--readout", "fixed"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert (out.startswith(diagnosis.sentence), "D@" in out) == (name in SILENT, name not in SILENT)
    if name not in SILENT:
        assert "depths are read at" in out
        assert f"fixed {ls.sweep('fixed', *MODELS[name]).depth_at(diagnosis.target.reached):.2f} " in out
    assert main(["compare", str(tmp_path), "margin", "gate"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert (out.startswith(diagnosis.sentence), "D@" in out) == (name in SILENT, name not in SILENT)
    assert main(["diagnose", str(tmp_path), "--at", "0.95"]) == 0  # absolute on request
    assert "The target is" not in capsys.readouterr().out


@pytest.mark.parametrize("name", SILENT)
def test_without_a_verdict_nothing_is_learned(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Learning stoppers takes longer than all the rest, and here nobody would see them."""

    def learned(*_: object, **__: object) -> None:
        raise AssertionError

    monkeypatch.setattr("loopscope.learned.stopper_fitting.fit_out_of_bag", learned)
    for recording in MODELS[name]:
        recording.save(tmp_path / str(recording.split))
    assert main(["diagnose", str(tmp_path)]) == 0
    with pytest.raises(AssertionError):
        ls.diagnose(*MODELS["demo"])


def test_room_left_splits_into_what_was_reached_and_what_was_not(shown: dict[str, str], results: Results) -> None:
    table = tables.learned_stoppers(results)
    rows = {row[0]: dict(zip(table.columns, row, strict=True)) for row in table.rows}
    assert set(rows) == set(MODELS) - set(SILENT)
    for model in results.models:
        diagnosis = model.diagnosis
        assert diagnosis.room_sentence in shown[model.name]
        if model.name in SILENT:
            continue
        room, reachable, row = diagnosis.room_left, diagnosis.reachable_room, rows[model.name]
        assert room is not None
        assert reachable is not None
        cell = f"{reachable.value:+.2f} [{reachable.low:+.2f}, {reachable.high:+.2f}]"
        assert f"reachable room {cell}" in shown[model.name]
        assert row["reachable room"].startswith(cell)
        assert row["room left"].startswith(f"{room.value:.2f}")
        assert row["remaining"] == f"{room.value - reachable.value:.2f}"  # all of them are at one accuracy
        assert row["seeds better, worse"] == f"{int(reachable.sign > 0)}, {int(reachable.sign < 0)}"
        for kind in ("induction", "classifier"):
            frontier = model.frontier(f"stopper:{kind}")
            assert frontier is not None
            depth = frontier.depth_at["full-1"]
            assert row[kind].startswith("N/A" if depth is None else f"{depth:.2f}")


def test_seeds_of_a_learned_stopper_are_counted_together() -> None:
    results = analyse_models(of_seeds("seed", right=0.9, rows=150), None, [0.7, 0.6])[0]
    table = tables.learned_stoppers(results)
    row, lower = table.rows
    assert [dict(zip(table.columns, each, strict=True))["target"] for each in (row, lower)] == ["D@70", "D@60"]
    at_60 = [model.rooms["0.6"].reachable_room for model in results.models]
    values = [gap.value for gap in at_60 if gap is not None]
    assert dict(zip(table.columns, lower, strict=True))["reachable room"].startswith(f"{np.mean(values):z.2f} ±")
    cells = dict(zip(table.columns, row, strict=True))
    gaps = [model.diagnosis.reachable_room for model in results.models]
    values = [gap.value for gap in gaps if gap is not None]
    assert len(values) == 2
    mean = f"{np.mean(values):.2f} ± {np.std(values, ddof=1):.2f} (2 of 2)"
    assert cells["reachable room"].startswith(f"{mean}: {values[0]:+.2f} [")
    assert f"; {values[1]:+.2f} [" in cells["reachable room"]
    assert "(2 of 2)" in cells["induction"]


def test_every_one_of_many_models_shows_its_gaps() -> None:
    one, (details,) = analyse_models([ModelRecordings("m", *pair(right=0.9, rows=60, late_gate=True))], None)
    names = [f"m{number}" for number in range(9)]
    models = [msgspec.structs.replace(one.models[0], name=name) for name in names]
    groups = [msgspec.structs.replace(one.groups[0], names=[name]) for name in names]
    results = msgspec.structs.replace(one, models=models, groups=groups)
    shown = card_texts(page_of(results, [details] * 9))
    gap = one.models[0].diagnosis.readout_gap
    assert gap is not None
    assert len(shown) == 9
    for card in shown:
        assert f"readout gap {gap.value:+.2f} [{gap.low:+.2f}, {gap.high:+.2f}]" in card
        assert "reachable room nothing learned" in card  # of 60 examples


def test_a_missed_target_is_replaced_by_a_relative_one_where_there_is_one() -> None:
    model = ModelRecordings("a", *pair(right=0.47, rows=90))
    both = analyse_models([model], None, [0.99, ls.Target(below_full_depth=0.05)])[0]
    ((_, _, *cells, _),) = tables.headline(both).rows
    frontier = both.models[0].frontier("fixed")
    assert frontier is not None
    level = both.models[0].targets["full-5"]
    assert cells[0] == f"{frontier.depth_at['full-5']:.2f} @{round(100 * level.reached, 2):g} %"
    assert not any("N/A" in cell for cell in cells)
    ((_, _, *cells, _),) = tables.headline(msgspec.structs.replace(both, targets=both.targets[:1])).rows
    assert all(cell.startswith("N/A") for cell in cells)


def test_a_readout_that_does_not_reach_the_target_is_not_named() -> None:
    """It was chosen at an accuracy at which nothing is compared."""
    results, details = analysed(["small"], targets=[0.95])
    (row,) = tables.headline(results).rows
    assert row[4] == "N/A"
    (model,) = results.models
    assert model.diagnosis.readout_gap is not None
    compared = model.diagnosis.compared_readouts
    assert compared[0] == model.diagnosis.readout_gap.second
    assert page_head(results, details, [])["models"][0]["best"] == compared


def test_a_reference_whose_gate_is_to_blame_is_said_to_be() -> None:
    results = analysed(["demo", "chance"], "demo", [0.9])[0]
    model = results.models[0]
    assert model.diagnosis.blamed == ("readout",)
    assert model.verdict == "readout (the reference)"
    assert "the readout is to blame in 1 that is the reference" in summary(results)


def test_the_seeds_of_the_reference_are_the_reference() -> None:
    other = [ModelRecordings(name, *pair(right=0.9, rows=90, seed=7)) for name in ("other",)]
    results = analyse_models([*of_seeds("seed", right=0.9), *other], "seed-0", [0.7])[0]
    assert [len(group.names) for group in results.groups] == [2, 1]
    first, second, _ = results.models
    assert (first.verdict, second.verdict == "the reference") == ("the reference", False)
    said = summary(results)
    assert "1 is the reference" in said
    assert "disagree" not in said


def test_a_summary_is_good_english(results: Results) -> None:
    both = only(results, "small", "chance")
    assert summary(both) == ("Of 2 models, whether a part is to blame cannot be told in 1, and 1 gets no verdict.")
    assert scope_sentence(both).startswith("2 runs; 300 to 400 test examples each")
    assert scope_sentence(only(results, "chance")).startswith("1 run; 400 test examples.")


def test_the_terminal_says_of_which_seed_it_speaks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for made in of_seeds("seed", right=0.9, late_gate=True):
        for recording in (made.validation, made.test):
            recording.save(tmp_path / made.name / str(recording.split))
    runs = [str(tmp_path / f"seed-{seed}") for seed in (0, 1)]
    words = ["report", *runs, "--out", str(tmp_path / "report")]
    assert main(words) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "seed 0 (one of 2 seeds; the other: the same verdict): The readout is to blame" in out
    assert main([*words, "--reference", "seed-0"]) == 0
    assert "seed 0 (the reference, one of 2 seeds; the other: " in " ".join(capsys.readouterr().out.split())


def test_without_a_verdict_a_model_without_a_gate_has_none_and_the_reference_has_no_verdict() -> None:
    ungated = ModelRecordings("bare", *(replace(each, gate_logits=None) for each in MODELS["chance"]))
    results, details = analyse_models([ungated, ModelRecordings("chance", *MODELS["chance"])], "bare")
    shown = cards(page_of(results, details))
    bare, chance = tables.headline(results).rows
    assert (bare[3], chance[3]) == ("no gate", "no verdict")
    assert (bare[-1], chance[-1]) == ("the reference, no verdict", "no verdict")
    assert [list(tables.gap_cells(model, True).values())[:2] for model in results.models] == [
        ["no gate", "is the reference"],
        ["no verdict", "no verdict"],
    ]
    assert "own gate no gate" in shown["bare"]
    assert "the reference, without a verdict" in shown["bare"]
    assert summary(results) == "Of 2 models, 1 gets no verdict, and 1 is the reference, which gets no verdict either."


def test_forced_exits_by_difficulty_are_the_examples_of_that_difficulty(results: Results) -> None:
    rows = tables.forced_by_difficulty(results).rows
    for name, (_, test) in MODELS.items():
        shown = {row[1]: row[2:] for row in rows if row[0] == name}
        assert test.difficulty is not None
        assert list(shown) == [f"{level:g}" for level in np.unique(test.difficulty)]
        for level, cells in shown.items():
            shares = test.correct[test.difficulty == float(level)].mean(axis=0)
            missing = ["-"] * (len(cells) - len(shares))
            assert cells == [rounded_percent(share) for share in shares] + missing


def test_what_can_have_no_value_is_a_dash_and_every_column_has_a_name(results: Results) -> None:
    notes = {}
    for product in OVERVIEW.make(results, TABLES):
        assert product.table is not None
        assert all(product.table.columns), product.name
        assert all(cell for row in product.table.rows for cell in row), product.name
        notes[product.name] = product.note
    assert "Remaining: room left minus reachable room" in notes["stoppers"]
    assert "opponent is the readout without a gate whose chosen threshold is the most accurate" in notes["paired"]
    (single,) = [row for row in tables.forced(results).rows if row[:2] == ["single", "accuracy"]]
    assert single[3:] == ["-"] * 3
