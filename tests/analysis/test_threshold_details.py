"""What the page looks up: is it what the policies do?"""

import tracemalloc

import numpy as np
import pytest
from conftest import outcome_of, random_trajectory
from pages import TARGETS, two

import loopscope as ls
from loopscope.analysis.bootstrap import interval, resampled_curves
from loopscope.analysis.difficulty import difficulty_bins
from loopscope.analysis.gaps import Subject
from loopscope.analysis.model_analysis import analyse_models
from loopscope.analysis.schema import Results
from loopscope.analysis.targets import WITHIN_A_POINT, Target
from loopscope.analysis.threshold_details import (
    OUTCOMES,
    ThresholdDetails,
    count_exits_by_threshold,
    exit_outcomes,
    sample_by_pattern,
    slider_targets,
)
from loopscope.frontier import accuracy_and_loops, crossings, exit_loops, laxest_first
from loopscope.threshold_grids import grid

Made = tuple[Results, list[ThresholdDetails]]


@pytest.fixture(scope="module")
def made() -> Made:
    return analyse_models(two(), "a", TARGETS)


@pytest.fixture(scope="module")
def subjects() -> list[Subject]:
    """With learned stoppers."""
    return [model.subject_at(TARGETS[0]) for model in two()]


def test_every_threshold_says_what_the_policy_does(made: Made, subjects: list[Subject]) -> None:
    for subject, details in zip(subjects, made[1], strict=True):
        for curve in details.curves:
            for place in range(0, len(curve.accuracy), 9):
                threshold = curve.thresholds[place] if curve.thresholds else None
                accuracy, loops = accuracy_and_loops(ls.ExitPolicy(curve.readout, threshold), subject.test)
                assert curve.accuracy[place] == pytest.approx(accuracy, rel=1e-4)
                assert curve.loops[place] == pytest.approx(loops, rel=1e-4)
                assert curve.accuracy_low[place] <= curve.accuracy[place] <= curve.accuracy_high[place]
            assert curve.loops == sorted(curve.loops)  # laxest first


def test_depths_are_those_of_the_frontier(made: Made, subjects: list[Subject]) -> None:
    subject, details = subjects[1], made[1][1]
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


def test_a_certified_threshold_is_marked_and_no_part_of_the_curve(made: Made) -> None:
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


def test_examples_exit_where_the_policy_says(made: Made, subjects: list[Subject]) -> None:
    model, details = two()[1], made[1][1]
    sheet = details.deep.examples
    assert sheet.texts is not None
    assert model.test.examples is not None
    assert sheet.texts == [model.test.examples[row] for row in sheet.rows]
    assert sheet.answers == model.test.predicted[sheet.rows].tolist()
    for curve in details.curves:
        for place in range(0, len(curve.accuracy), 13):
            policy = ls.ExitPolicy(curve.readout, curve.thresholds[place] if curve.thresholds else None)
            exits = policy.exit_loops(subjects[1].test)[sheet.rows].tolist()
            assert [1 + sum(count <= place for count in row) for row in sheet.crossed[curve.readout]] == exits


@pytest.mark.parametrize("readout", ls.READOUTS)
def test_exits_are_those_of_the_policy(readout: str) -> None:
    trajectory = random_trajectory(seed=3, rows=150)
    thresholds = np.array([np.nan]) if readout == "oracle" else grid(readout, trajectory)
    thresholds = thresholds[laxest_first(readout, thresholds)]
    crossed = crossings(readout, thresholds, trajectory)
    levels, bins = difficulty_bins(trajectory)
    table = count_exits_by_threshold(crossed, len(thresholds), trajectory.correct, bins)
    for place in range(0, len(thresholds), 13):
        policy = ls.ExitPolicy(readout, None if readout == "oracle" else float(thresholds[place]))
        loops = policy.exit_loops(trajectory)
        assert (exit_loops(crossed, np.array([place]))[:, 0] == loops).all()
        right = trajectory.correct[np.arange(len(loops)), loops - 1]
        for level in range(len(levels)):
            counts = [int(((bins == level) & (loops == loop)).sum()) for loop in (1, 2, 3, 4)]
            assert table.exits[place][level] == counts
            assert table.right[place][level] == (right & (bins == level)).sum()
        said = [outcome_of(*each) for each in zip(trajectory.correct.tolist(), loops.tolist(), strict=True)]
        assert dict(zip(OUTCOMES, table.outcomes[place], strict=True)) == {name: said.count(name) for name in OUTCOMES}


def test_exits_are_counted_without_a_list_for_every_threshold() -> None:
    rows, thresholds = 20_000, 400
    rng = np.random.default_rng(0)
    crossed = np.sort(rng.integers(0, thresholds + 1, (rows, 3)), axis=1)
    correct, bins = rng.random((rows, 4)) < 0.5, rng.integers(0, 3, rows)
    tracemalloc.start()
    table = count_exits_by_threshold(crossed, thresholds, correct, bins)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < rows * thresholds
    assert np.array(table.exits).sum(axis=(1, 2)).tolist() == [rows] * thresholds


def test_every_outcome_of_every_pattern() -> None:
    correct = np.array([[row >> loop & 1 for loop in range(4)] for row in range(16)], dtype=bool)
    codes = exit_outcomes(correct)
    for row in range(16):
        for loop in range(4):
            assert OUTCOMES[codes[row, loop]] == outcome_of(correct[row].tolist(), loop + 1)


def test_rare_patterns_are_among_the_examples() -> None:
    trajectory = random_trajectory(seed=5, rows=2000)
    rows = sample_by_pattern(trajectory, 60)
    assert len(rows) == len(set(rows.tolist())) == 60
    patterns, sizes = np.unique(trajectory.correct, axis=0, return_counts=True)
    shown, shares = np.unique(trajectory.correct[rows], axis=0, return_counts=True)
    assert len(shown) == len(patterns)
    assert all(share >= min(size, 60 // len(patterns)) for share, size in zip(shares, sizes, strict=True))
    assert (sample_by_pattern(trajectory, 60) == rows).all()
    assert (sample_by_pattern(trajectory, 30) == rows[:30]).all()
    assert sorted(sample_by_pattern(trajectory, 5000).tolist()) == list(range(2000))
