"""Paired comparisons: by hand, against a bootstrap written out, and what is refused."""

import numpy as np
import pytest
from conftest import random_trajectory

import loopscope as ls
from loopscope.analysis import Side, depth_gap, interval, paired
from loopscope.analysis.diagnosis import Subject


def test_by_hand() -> None:
    right = np.array([[1, 1], [0, 1], [0, 1], [1, 0]])
    trajectory = ls.Trajectory(logits=None, labels=np.ones(4, int), predictions=right)
    sides = [Side(str(depth), ls.ExitPolicy("fixed", depth), trajectory) for depth in (1, 2)]
    told = paired(*sides, resamples=200)
    assert (told.accuracy.value, told.loops.value) == (-0.25, -1.0)
    assert (told.loops.low, told.loops.high) == (-1.0, -1.0)
    assert (told.only_first_right, told.only_second_right, told.examples) == (1, 2, 4)
    assert told.accuracy.low < -0.25 < told.accuracy.high


def test_the_interval_against_a_bootstrap_written_out() -> None:
    trajectory = random_trajectory(rows=300)
    first, second = ls.ExitPolicy("margin", 1.0), ls.ExitPolicy("entropy", 0.9)
    told = paired(Side("a", first, trajectory), Side("b", second, trajectory), resamples=2000)
    rows = np.arange(300)
    ours, theirs = (trajectory.correct[rows, policy.exit_loops(trajectory) - 1] for policy in (first, second))
    difference = ours.astype(int) - theirs
    rng = np.random.default_rng(5)
    means = [difference[rng.integers(0, 300, 300)].mean() for _ in range(2000)]
    assert told.accuracy.value == difference.mean()
    assert [told.accuracy.low, told.accuracy.high] == pytest.approx(np.percentile(means, [2.5, 97.5]), abs=0.012)
    apart = (ours.var() + theirs.var()) / 300
    assert told.accuracy.high - told.accuracy.low < 2 * 1.96 * apart**0.5  # pairing narrows it


def test_two_models_on_the_same_examples() -> None:
    first, second = random_trajectory(seed=1), random_trajectory(seed=2)
    second = ls.Trajectory(logits=second.logits, labels=first.labels)
    told = paired(*(Side("m", ls.ExitPolicy("margin", 1.0), each) for each in (first, second)))
    assert told.accuracy.value > 0
    with pytest.raises(ls.UserError, match="same examples"):
        paired(*(Side("m", ls.ExitPolicy("margin", 1.0), random_trajectory(seed=seed)) for seed in (1, 2)))


def test_the_depth_gap_of_two_readouts() -> None:
    subject = Subject(random_trajectory(seed=1), random_trajectory(seed=2))
    gap = depth_gap(0.6, (subject, "margin"), (subject, "fixed"))
    assert gap is not None
    assert (gap.first, gap.second) == ("margin", "fixed")
    assert gap.low <= gap.value <= gap.high
    same = depth_gap(0.6, (subject, "margin"), (subject, "margin"))
    assert same is not None
    assert (same.value, same.low, same.high) == (0, 0, 0)
    with pytest.raises(ls.UserError, match="do not have the readout 'gate:x'"):
        depth_gap(0.6, (subject, "gate:x"), (subject, "margin"))


def test_an_interval_counts_who_has_the_number() -> None:
    bounds = interval(np.array([1.0, 1.0, 3.0, np.nan, np.nan]))
    assert bounds is not None
    assert bounds.reached == 0.5
    assert 1.0 <= bounds.low <= bounds.high <= 3.0
    assert interval(np.array([1.0, np.nan])) is None
