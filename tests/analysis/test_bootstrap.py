"""The bootstrap: its sample is the frontier itself, its spread is the right one, its pairs are pairs."""

from dataclasses import replace

import numpy as np
import pytest
from conftest import random_trajectory

import loopscope as ls
from loopscope.analysis.bootstrap import (
    Curves,
    Interval,
    interval,
    intervals,
    resampled_curves,
    resampled_label_aware,
    resampled_means,
    resampled_sums,
)
from loopscope.analysis.difficulty import by_difficulty


def test_the_first_row_is_the_sample_and_the_others_scatter_as_theory_says() -> None:
    rng = np.random.default_rng(0)
    right = (rng.random((2000, 1)) < 0.8).astype(np.float32)
    sums = resampled_sums(right, 2000)
    assert sums[0, 0] == right.sum()
    p = right.mean()
    assert sums[1:].mean() / 2000 == pytest.approx(p, abs=0.001)
    assert sums[1:].std() / 2000 == pytest.approx(np.sqrt(p * (1 - p) / 2000), rel=0.06)


def test_the_same_seed_pairs_the_resamples_and_each_has_as_many_examples() -> None:
    assert (resampled_sums(np.ones((77, 1), np.float32), 120) == 77).all()
    contributions = np.random.default_rng(1).integers(0, 6, (300, 2)).astype(np.float32)
    assert np.array_equal(resampled_sums(contributions)[:, 0], resampled_sums(contributions[:, :1])[:, 0])


@pytest.mark.parametrize("name", ls.READOUTS)
def test_curves_of_the_sample_are_the_frontier(name: str) -> None:
    val, test = random_trajectory(seed=1), random_trajectory(seed=2)
    frontier = ls.sweep(name, val, test)
    curves = resampled_curves(name, frontier.thresholds, test, resamples=20)
    assert curves.accuracy[0] == pytest.approx(frontier.accuracy)
    assert curves.average_loops[0] == pytest.approx(frontier.average_loops)
    for accuracy in (0.3, 0.6, 0.8, 0.999):
        depth = frontier.depth_at(accuracy)
        assert curves.depth_at(accuracy)[0] == pytest.approx(np.nan if depth is None else depth, nan_ok=True)


def test_the_label_aware_depth_by_hand() -> None:
    """Ten examples: four right at loop 1, three first at loop 2, one at loop 3, two never."""
    first = [1] * 4 + [2] * 3 + [3] + [9] * 2
    predictions = np.array([[int(loop < at) for loop in (1, 2, 3)] for at in first])
    trajectory = ls.Trajectory(logits=None, labels=[0] * 10, predictions=predictions)
    rule = resampled_label_aware(trajectory, resamples=5)
    assert rule.depth_at(0.4)[0] == pytest.approx(1.0)
    assert rule.depth_at(0.5)[0] == pytest.approx(1.1)
    assert rule.depth_at(0.7)[0] == pytest.approx(1.3)
    assert rule.depth_at(0.8)[0] == pytest.approx(1.5)  # the two that are never right exit at once
    assert np.isnan(rule.depth_at(0.9)[0])


def test_intervals_are_numpy_s_percentiles_of_those_that_have_a_value() -> None:
    rng = np.random.default_rng(0)
    values = rng.normal(size=(200, 5))
    values[rng.random(values.shape) < [0.0, 0.3, 0.97, 1.0, 0.5]] = np.nan
    lows, highs, reached = intervals(values)
    for column in (0, 1, 2, 4):
        low, high = np.nanpercentile(values[1:, column], [2.5, 97.5])
        assert (lows[column], highs[column]) == pytest.approx((low, high), abs=1e-12)
        assert reached[column] == np.mean(~np.isnan(values[1:, column]))
        assert interval(values[:, column]) == Interval(lows[column], highs[column], reached[column])
    assert np.isnan(lows[3])
    assert interval(values[:, 3]) is None


def test_kept_counts_are_those_that_are_drawn_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.random.default_rng(3).normal(size=(500, 4)).astype(np.float32)
    kept = resampled_sums(values, 120)
    monkeypatch.setattr("loopscope.analysis.bootstrap._MOST_KEPT", 0)
    assert np.array_equal(resampled_sums(values, 120), kept)


def test_groups_of_many_units_scatter_as_single_units_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of a mean that few examples decide, of units of several examples, and of a frontier."""
    rng = np.random.default_rng(4)
    rows = 4000
    rare = (rng.random((rows, 1)) < 0.01).astype(np.float32)
    units = np.repeat(np.arange(rows // 4), 4)
    trajectory = random_trajectory(seed=6, rows=rows)
    grid = ls.sweep("margin", random_trajectory(seed=1), trajectory).thresholds[::40]

    def made() -> list[np.ndarray]:
        curves = resampled_curves("margin", grid, trajectory)
        return [resampled_means(rare), resampled_means(rare, units=units), curves.accuracy, curves.average_loops]

    single = made()
    monkeypatch.setattr("loopscope.analysis.bootstrap.MAX_UNITS", 900)
    monkeypatch.setattr("loopscope.analysis.bootstrap._GROUPS", 800)
    grouped = made()
    for ours, theirs in zip(grouped, single, strict=True):
        assert np.array_equal(ours[0], theirs[0])
        assert not np.array_equal(ours[1:], theirs[1:])
        assert ours[1:].std(axis=0) == pytest.approx(theirs[1:].std(axis=0), rel=0.15)
        assert ours[1:].mean(axis=0) == pytest.approx(theirs[1:].mean(axis=0), abs=5e-3)
    assert np.array_equal(resampled_means(rare), grouped[0])  # the same groups every time, so that pairs are pairs


def test_a_dense_product_is_the_sparse_one(monkeypatch: pytest.MonkeyPatch) -> None:
    trajectory = random_trajectory(seed=2)
    thresholds = ls.sweep("margin", random_trajectory(seed=1), trajectory).thresholds
    found = []
    for share in (0.0, 1.0):
        monkeypatch.setattr("loopscope.analysis.bootstrap._DENSE", share)
        found.append(resampled_curves("margin", thresholds, trajectory, 100))
    assert np.array_equal(found[0].accuracy, found[1].accuracy)
    assert np.array_equal(found[0].average_loops, found[1].average_loops)


def test_many_depths_are_each_what_one_is() -> None:
    rng = np.random.default_rng(1)
    curves = Curves(rng.integers(0, 50, (40, 12)) / 50, rng.integers(50, 200, (40, 12)) / 50)
    accuracies = [0.0, 0.1, 0.5, 0.9, 0.98, 1.0]
    many = curves.depths_at(accuracies)
    for place, accuracy in enumerate(accuracies):
        for row in range(40):
            met = [
                loops
                for right, loops in zip(curves.accuracy[row], curves.average_loops[row], strict=True)
                if round(50 * right) >= accuracy * 50
            ]
            expected = min(met) if met else np.nan
            assert many[row, place] == pytest.approx(expected, nan_ok=True)
    assert curves.depth_at(0.5) == pytest.approx(many[:, 2], nan_ok=True)


@pytest.mark.parametrize("kind", ["copies", "sequences"])
def test_what_was_drawn_together_is_resampled_together(kind: str) -> None:
    """Every example three times over says no more than once; drawn one by one it would seem to."""
    once = random_trajectory(seed=2, rows=100)
    rows = np.repeat(np.arange(once.num_examples), 3)
    names = [f"input {number}" for number in rows]
    thrice = once.take(rows)
    known = replace(thrice, examples=names) if kind == "copies" else replace(thrice, sequences=rows)
    assert known.num_units == once.num_examples == once.num_units
    grid = ls.sweep("margin", random_trajectory(seed=1), once).thresholds
    expected, found, naive = (resampled_curves("margin", grid, each) for each in (once, known, thrice))
    assert np.allclose(found.accuracy, expected.accuracy)
    assert np.allclose(found.average_loops, expected.average_loops)
    assert naive.accuracy.std(axis=0).mean() < 0.7 * found.accuracy.std(axis=0).mean()
    labels = [resampled_label_aware(each).depth_at(0.6) for each in (once, known)]
    assert np.allclose(*labels, atol=3 / once.num_examples, equal_nan=True)
    means = [by_difficulty(each.correct, each) for each in (once, known, thrice)]
    lows, highs = ([np.array(getattr(each, side)) for each in means] for side in ("low", "high"))
    assert lows[1] == pytest.approx(lows[0])
    assert (highs[2] - lows[2]).mean() < 0.7 * (highs[1] - lows[1]).mean()


def test_units_of_different_sizes() -> None:
    """A mean is over the examples of a resample, however many they are."""
    rng = np.random.default_rng(0)
    units = np.repeat(np.arange(40), rng.integers(1, 9, 40))
    values = (rng.normal(size=40)[units] + 0.1 * rng.normal(size=len(units)))[:, None].astype(np.float32)
    means = resampled_means(values, 500, units=units)
    assert means[0, 0] == pytest.approx(values.mean(), abs=1e-5)
    assert means[:, 0].min() > values.min()
    assert means[:, 0].max() < values.max()
    assert resampled_means(np.ones_like(values), 50, units=units) == pytest.approx(1)
    within = np.array([values[units == unit].mean() for unit in range(40)])
    assert means[1:, 0].std() == pytest.approx(within.std() / np.sqrt(40), rel=0.35)
