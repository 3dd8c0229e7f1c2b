"""What the page looks up: is it what the policies do?"""

import numpy as np
import pytest
from pages import TARGETS, source, two

import loopscope as ls
from loopscope.analysis import WITHIN_A_POINT, Target, interval, resampled_curves
from loopscope.analysis.model_analysis import analyse_models
from loopscope.analysis.schema import Results
from loopscope.analysis.threshold_details import ThresholdDetails, slider_targets
from loopscope.exits.policy import accuracy_and_loops
from loopscope.report.page.data import _STEPS, _coarser, _shorter, thinned


@pytest.fixture(scope="module")
def made() -> tuple[Results, list[ThresholdDetails]]:
    return analyse_models(two(), "a", TARGETS)


def test_every_threshold_says_what_the_policy_does(made: tuple[Results, list[ThresholdDetails]]) -> None:
    for model, details in zip(two(), made[1], strict=True):
        for curve in details.curves:
            for place in range(0, len(curve.accuracy), 9):
                threshold = curve.thresholds[place] if curve.thresholds else None
                accuracy, loops = accuracy_and_loops(ls.ExitPolicy(curve.readout, threshold), model.subject.test)
                assert curve.accuracy[place] == pytest.approx(accuracy, rel=1e-4)
                assert curve.loops[place] == pytest.approx(loops, rel=1e-4)
                assert curve.accuracy_low[place] <= curve.accuracy[place] <= curve.accuracy_high[place]
            assert curve.loops == sorted(curve.loops)  # laxest first


def test_depths_are_those_of_the_frontier(made: tuple[Results, list[ThresholdDetails]]) -> None:
    model, details = two()[1], made[1][1]
    subject = model.subject
    for curve in details.curves:
        frontier = ls.sweep(curve.readout, subject.validation, subject.test)
        resampled = resampled_curves(curve.readout, frontier.thresholds, subject.test)
        for place in range(0, len(details.slider_targets), 11):
            stop = details.slider_targets[place]
            depth = frontier.depth_at(stop)
            assert curve.depth[place] == (None if depth is None else pytest.approx(depth, rel=1e-4))
            bounds = interval(resampled.depth_at(stop))
            said = (curve.depth_low[place], curve.depth_high[place], curve.depth_reached[place])
            expected = (None, None, 0.0) if bounds is None else (bounds.low, bounds.high, bounds.reached)
            assert said == tuple(value if value is None else pytest.approx(value, rel=1e-4) for value in expected)


def test_the_targets_are_among_the_stops() -> None:
    stops = slider_targets([Target(0.95), Target(0.333), WITHIN_A_POINT])
    assert 0.95 in stops
    assert 0.333 in stops
    assert stops == sorted(stops)


def test_a_certified_threshold_is_marked_and_no_part_of_the_curve(made: tuple[Results, list[ThresholdDetails]]) -> None:
    certified = made[0].models[1].certified[0]
    curve = next(each for each in made[1][1].curves if each.readout == "margin")
    (mark,) = curve.certified
    assert curve.thresholds[mark.place] == certified.threshold
    assert curve.extra == [mark.place]
    assert certified.guarantee is not None
    assert mark.guarantee == certified.guarantee.sentence
    frontier = made[0].models[1].frontier("margin")
    assert frontier is not None
    assert sorted(set(curve.thresholds) - {certified.threshold}) == sorted(frontier.thresholds)
    assert curve.thresholds[curve.chosen] == frontier.selected.threshold


def test_examples_exit_where_the_policy_says(made: tuple[Results, list[ThresholdDetails]]) -> None:
    model, details = two()[1], made[1][1]
    sheet = details.deep.examples
    assert sheet.texts is not None
    assert model.test.examples is not None
    assert sheet.texts == [model.test.examples[row] for row in sheet.rows]
    assert sheet.answers == model.test.predicted[sheet.rows].tolist()
    for curve in details.curves:
        for place in range(0, len(curve.accuracy), 13):
            policy = ls.ExitPolicy(curve.readout, curve.thresholds[place] if curve.thresholds else None)
            exits = policy.exit_loops(model.subject.test)[sheet.rows].tolist()
            assert [1 + sum(count <= place for count in row) for row in sheet.crossed[curve.readout]] == exits


def test_a_large_study_keeps_fewer_examples() -> None:
    rng = np.random.default_rng(0)
    noise = ["".join(map(chr, rng.integers(0x4E00, 0x9FFF, 2000))) for _ in range(200)]  # does not compress
    results, details = analyse_models([source("a", 0, examples=noise)], None, TARGETS)
    few, note = thinned(results, details, 5_000_000)
    assert f"at most {_STEPS[0][0]} test examples" in note
    many = Results(results.schema_version, results.loopscope, results.targets, results.models * 20, results.groups)
    parts, note = thinned(many, details * 20, 5_000_000)
    assert f"at most {_STEPS[0][0]} test examples" not in note
    assert sum(map(len, parts)) < 5_000_000 < 20 * len(few[0])


def test_fewer_examples_are_of_every_pattern_still() -> None:
    made = source("a", 0, rows=1500)
    _, details = analyse_models([made], None, TARGETS)
    patterns = {tuple(row) for row in made.test.correct.tolist()}
    short = _shorter(details[0].deep.examples, 25, 100)
    assert len(short.rows) == 25
    assert short.rows == sorted(short.rows)
    assert {tuple(made.test.correct[row].tolist()) for row in short.rows} == patterns


def test_joined_difficulties_count_the_same_examples() -> None:
    rng = np.random.default_rng(0)
    _, details = analyse_models([source("a", 0, rows=300, difficulty=rng.integers(0, 30, 300))], None, TARGETS)
    deep, coarse = details[0].deep, _coarser(details[0].deep, 7)
    assert len(coarse.levels) == len(coarse.counts) == 7
    assert coarse.levels == sorted(coarse.levels)
    assert sum(coarse.counts) == 300
    for name, line in deep.lines.items():
        for place in (0, -1):
            exits, right = np.array(coarse.lines[name].exits[place]), coarse.lines[name].right[place]
            assert exits.shape == (7, 4)
            assert exits.sum(axis=0).tolist() == np.array(line.exits[place]).sum(axis=0).tolist()
            assert sum(right) == sum(line.right[place])
            assert exits.sum(axis=1).tolist() == coarse.counts


def test_histograms_become_coarser_where_fewer_examples_do_not_help() -> None:
    """Of 32 loops and 50 difficulties histograms are what is large."""
    rng = np.random.default_rng(0)
    changes = {"rows": 400, "loops": 32, "difficulty": rng.integers(0, 50, 400)}
    results, details = analyse_models([source("a", 0, **changes)], None, TARGETS)
    (part,), note = thinned(results, details, 170_000)
    assert len(part) < 170_000
    assert "Histograms join neighbouring difficulties" in note
