"""Paired comparisons: by hand, against a bootstrap written out, in words, and what is rejected."""

from dataclasses import replace

import numpy as np
import pytest
from conftest import random_trajectory
from simulated import pair

import loopscope as ls
from loopscope.analysis.bootstrap import Estimate
from loopscope.analysis.comparison import Comparison, Paired, Side, paired
from loopscope.analysis.gaps import Subject, depth_gap
from loopscope.analysis.targets import Target


def test_by_hand() -> None:
    right = np.tile([[1, 1], [0, 1], [0, 1], [1, 0]], (10, 1))
    trajectory = ls.Trajectory(logits=None, labels=np.ones(40, int), predictions=right)
    sides = [Side(str(depth), ls.ExitPolicy("fixed", depth), trajectory) for depth in (1, 2)]
    told = paired(*sides, resamples=200)
    assert (told.accuracy.value, told.loops.value) == (-0.25, -1.0)
    assert (told.loops.low, told.loops.high) == (-1.0, -1.0)
    assert (told.only_first_right, told.only_second_right, told.examples) == (10, 20, 40)
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


def test_the_depth_gap_of_two_readouts() -> None:
    subject = Subject(random_trajectory(seed=1), random_trajectory(seed=2))
    gap = depth_gap(Target(0.6), (subject, ["margin"]), (subject, ["fixed"]))
    assert gap is not None
    assert (gap.first, gap.second) == ("margin", "fixed")
    assert gap.low <= gap.value <= gap.high
    same = depth_gap(Target(0.6), (subject, ["margin"]), (subject, ["margin"]))
    assert same is not None
    assert (same.value, same.low, same.high) == (0, 0, 0)


def test_two_readouts_compared_from_python() -> None:
    late = pair(right=0.47, late_gate=True)
    compared = ls.compare(*late, "gate", "margin")
    assert compared.depth is not None
    assert compared.depth.sign == 1
    assert compared.depth.target == pytest.approx(late[0].correct[:, -1].mean() - 0.01)
    at = f"{100 * compared.depth.accuracy:g} %"
    assert compared.sentence.startswith(f"margin takes fewer loops than gate to reach {at}. At the thresholds that ")
    assert (
        f"Compared on 1,500 test examples, of which {compared.selected.only_first_right:,} are right"
        in compared.sentence
    )
    assert max(map(len, str(compared).splitlines())) <= 80
    assert ls.compare(*late, "margin", "gate").sentence.startswith(f"margin takes fewer loops than gate to reach {at}.")
    other = ls.compare(*late, "gate", "margin", other=pair(right=0.6))
    assert (other.selected.first, other.selected.second) == ("gate on this model", "margin on the other model")


def test_a_comparison_says_what_its_intervals_tell() -> None:
    """At a threshold of its own each: less is better of loops, more of accuracy, and what holds zero is open."""
    up, down, nothing, both = (Estimate(*each) for each in ((1, 0.5, 2), (-1, -2, -0.5), (0, 0, 0), (0, -1, 1)))

    def told(accuracy: Estimate, loops: Estimate, units: int = 100) -> str:
        return Comparison(Paired("a", "b", accuracy, loops, 3, 4, 100), None, "100 test examples", units).verdict

    assert told(up, down).endswith("validation chose, a takes fewer loops; a is more accurate.")
    assert told(down, up).endswith("validation chose, b takes fewer loops; b is more accurate.")
    assert told(nothing, nothing).endswith("both take as many loops; both are equally accurate.")
    assert told(both, both).endswith(
        "which of the two takes fewer loops is open; which of the two is more accurate is open."
    )
    assert told(up, down, 29).startswith("Which of the two is better cannot be told from 100 test examples")


@pytest.mark.parametrize("copies", [1, 3])
@pytest.mark.parametrize(("differing", "tells"), [(4, False), (5, False), (6, True), (12, True)])
def test_few_differing_examples_tell_nothing(differing: int, tells: bool, copies: int) -> None:
    """If all of four examples fall on one side, which happens by chance in one of eight, no winner is named."""
    rows = 400
    labels = np.zeros(rows, dtype=int)
    answers = np.zeros((rows, 2), dtype=int)
    answers[:differing, 0] = 1  # right at loop 2 only
    recorded = ls.Trajectory(predictions=answers, labels=labels).take(np.repeat(np.arange(rows), copies))
    recorded = replace(recorded, examples=[f"input {row}" for row in np.repeat(np.arange(rows), copies)])
    late, early = (Side(str(loop), ls.ExitPolicy("fixed", loop), recorded) for loop in (2, 1))
    found = paired(late, early).accuracy
    assert (found.low > 0) == tells
    assert found.value == pytest.approx(differing / rows)


@pytest.mark.parametrize(("differing", "tells"), [(4, False), (5, False), (6, True), (12, True)])
def test_few_differing_examples_tell_nothing_of_depths(differing: int, tells: bool) -> None:
    """Two readouts that send all but a few examples to the same loop: at an accuracy that both reach, too."""

    def drawn(seed: int) -> ls.Trajectory:
        rng = np.random.default_rng(seed)
        labels, early = rng.integers(0, 2, 400), rng.random(400) < 0.5
        answers = np.stack([np.where(early, labels, 1 - labels), labels], axis=1)
        margin = np.stack([early + rng.uniform(0, 0.1, 400), np.ones(400)], axis=1)
        top1 = margin.copy()
        top1[np.flatnonzero(early)[:differing], 0] = 0.05  # right, and not sure of it
        return ls.Trajectory(predictions=answers, labels=labels, signals={"margin": margin, "top1": top1})

    subject = Subject(drawn(1), drawn(2))
    gap = depth_gap(Target(1.0), (subject, ["top1"]), (subject, ["margin"]))
    assert gap is not None
    assert gap.value == pytest.approx(differing / 400)
    assert gap.sign == tells
    compared = ls.compare(subject.validation, subject.test, "top1", "margin", target=1.0)
    assert ("fewer loops to reach 100 % is open." in compared.verdict) != tells


def test_readouts_are_not_compared_at_chance() -> None:
    guesses, knows = pair(right=0.0), pair(right=0.9)
    for name, words in (("", {"other": None}), ("the other model: ", {"other": guesses})):
        compared = ls.compare(*(knows if name else guesses), "margin", "gate", **words)
        assert compared.depth is None
        assert compared.sentence.startswith(name + ls.diagnose(*guesses).sentence)
        assert "D@" not in str(compared)
