"""What a page says first: the question it answers, and of every model its loops and why they are as many."""

from dataclasses import replace

import msgspec
import pytest
from pages import of_seeds
from simulated import pair

from loopscope.analysis.gaps import Gap
from loopscope.analysis.model_analysis import ModelRecordings, analyse_models
from loopscope.analysis.schema import Results
from loopscope.analysis.targets import Target
from loopscope.analysis.verdict_text import UNDECIDED, gap_words
from loopscope.report.verdicts import needed_loops, short_title, title, verdict_lines

GAP = Gap("gate", "margin", 0.9, 0.9, 2.6, 2.5, 0.10, 0.07, 0.13, 1.0, 1.0, 1.0, 1500, 1500)


@pytest.fixture(autouse=True)
def unlearned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without learned stoppers, which take longest."""
    monkeypatch.setattr("loopscope.analysis.diagnosis.with_stoppers", lambda *recordings: recordings)


def analysed(
    models: list[ModelRecordings], reference: str | None = None, targets: list[float] | None = None
) -> Results:
    return analyse_models(models, reference, targets)[0]


def named(name: str, **changes: object) -> ModelRecordings:
    return ModelRecordings(name, *pair(rows=300, **changes))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({}, "worse than margin by 0.10 loops [0.07, 0.13] at 90 %"),
        ({"room": 2.0}, "slightly worse than margin by 0.10 loops [0.07, 0.13] at 90 %"),
        ({"value": -0.1, "low": -0.13, "high": -0.07}, "better than margin by 0.10 loops [0.07, 0.13] at 90 %"),
        ({"value": 0.0, "low": 0.0, "high": 0.0}, "as good as margin at 90 % (as many loops)"),
        ({"value": 0.01, "low": -0.02, "high": 0.04}, "as good as margin at 90 % (+0.01 loops [-0.02, +0.04])"),
        ({"value": 0.01, "low": -0.2, "high": 0.04}, "no worse than margin at 90 % (+0.01 loops [-0.20, +0.04])"),
        ({"low": -0.1, "high": 0.3}, f"{UNDECIDED} (+0.10 loops [-0.10, +0.30] against margin at 90 %)"),
        ({"units": 20}, f"{UNDECIDED} (+0.10 loops [+0.07, +0.13] against margin at 90 %)"),
        ({"first": "margin"}, "the best readout at 90 % (by validation data)"),
        (
            {"low": -0.1, "first_reaches_target": 0.0},
            "worse than margin (it misses the target that margin reaches; at 90 %, which both reach: "
            "+0.10 loops [-0.10, +0.13])",
        ),
    ],
)
def test_a_gap_in_words_that_mean_what_they_say(changes: dict[str, float], text: str) -> None:
    room = replace(GAP, value=changes.pop("room")) if "room" in changes else None
    assert str(gap_words(replace(GAP, **changes), "margin", room)) == text


def test_the_title_says_what_the_report_is_of() -> None:
    results = analysed([named("a"), named("b", seed=1)], targets=[0.6])
    assert title(results) == "How many loops do a and b need to reach 60 % accuracy?"
    assert short_title(results) == "2 models"
    own = analysed(of_seeds("seed"))
    (label,) = {group.label for group in own.groups}
    assert title(own) == f"mano: how many loops does {label} need to come within 1 point of full depth?"
    assert short_title(own) == f"mano, {label}"
    exact = msgspec.structs.replace(results, targets=[Target(below_full_depth=0.0)])
    assert title(exact).endswith("need to be as accurate as at full depth?")


def test_a_line_says_the_loops_and_both_parts() -> None:
    models = [named("first"), named("late", late_gate=True), named("guesses", right=0.0, seed=4)]
    results = analysed(models, "first", [0.9])
    first, late, guesses = verdict_lines(results)
    assert [line.verdict for line in (first, late, guesses)] == ["the reference", "readout", "no verdict"]
    assert first.parts[0].words == "the reference"
    needed = needed_loops(results.models[1], results.targets)
    assert needed is not None
    assert late.loops == f"{needed.loops:.2f} [{needed.low:.2f}, {needed.high:.2f}]"
    trajectory, gate = late.parts
    assert (trajectory.words, trajectory.blamed) == ("as good as the reference", False)
    assert (gate.words, gate.blamed) == ("worse than the best readout", True)
    gap = results.models[1].diagnosis.readout_gap
    assert gap is not None
    assert f"by {gap.value:.2f} loops [{gap.low:.2f}, {gap.high:.2f}]" in gate.figures
    assert needed_loops(results.models[2], results.targets) is None
    assert (guesses.loops, [part.name for part in guesses.parts]) == ("", ["No verdict"])
    assert len({line.colour for line in (first, late, guesses)}) == 3


def test_without_a_gate_or_a_reference_a_line_says_so() -> None:
    ungated = ModelRecordings("bare", *(replace(each, gate_logits=None) for each in pair(rows=300)))
    (line,) = verdict_lines(analysed([ungated]))
    assert [(part.words, part.figures) for part in line.parts] == [("not judged", "without a reference"), ("none", "")]


def test_seeds_that_disagree_are_counted() -> None:
    seeds = of_seeds("seed")
    late = pair(rows=90, seed=1, late_gate=True)
    second = [replace(each, provenance=seeds[1].test.provenance) for each in late]
    (line,) = verdict_lines(analysed([seeds[0], ModelRecordings("seed-1", *second)]))
    assert (line.verdict, line.short) == ("mixed", "its seeds disagree")
    assert "±" in line.loops
    gate = line.parts[1]
    assert gate.blamed
    assert "worse than the best readout (1 of 2 seeds)" in gate.words
    assert gate.figures.startswith("over seeds: ")
