"""Targets: what "within a point of full depth" is for a model, and below what nothing is said. Truths are simulated."""

import math
import re

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings
from simulated import pair, simulated

import loopscope as ls
from loopscope.analysis.targets import (
    WITHIN_A_POINT,
    as_targets,
    best_loop,
    chance,
    harm_of_depth,
    is_above_chance,
    reference_loop,
    target_level,
)


@pytest.fixture(autouse=True)
def unlearned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without learned stoppers, which take longest."""
    monkeypatch.setattr("loopscope.analysis.diagnosis.with_stoppers", lambda *recordings: recordings)


def bare(labels: list[int], answers: list[list[int]]) -> ls.Trajectory:
    return ls.Trajectory(labels=np.array(labels), predictions=np.array(answers))


@settings(max_examples=50)
@given(st.integers(20, 400), st.integers(20, 400), st.floats(0.3, 1), st.floats(0.3, 1))
def test_a_relative_target_is_a_point_below_full_depth_on_validation_data(
    rows: int, tested: int, share: float, other: float
) -> None:
    """Whatever test data say: they only lower the accuracy at which a depth is read, to one that they have."""
    validation, test = (
        bare([k % 5 for k in range(n)], [[(k + 1) % 5, k % 5 if k < part * n else (k + 1) % 5] for k in range(n)])
        for n, part in ((rows, share), (tested, other))
    )
    level = target_level(WITHIN_A_POINT, validation, test)
    full, found = validation.correct[:, -1].mean(), test.correct[:, -1].mean()
    assert level.accuracy == pytest.approx(full - 0.01)
    assert level.reached <= found + 1e-9
    assert level.reached == (level.accuracy if found >= level.accuracy - 1e-9 else math.floor(100 * found + 1e-9) / 100)
    assert level.loop == 2


def test_names_of_targets() -> None:
    absolute, relative = as_targets([0.95])[0], as_targets(None)[0]
    assert (absolute.key, absolute.label, absolute.meaning) == ("0.95", "D@95", "95 % accuracy")
    assert (relative.key, relative.label) == ("full-1", "D@full-1")
    assert ls.Target(below_full_depth=0.005).label == "D@full-0.5"
    for wrong in ({}, {"accuracy": 0.9, "below_full_depth": 0.1}, {"accuracy": 95}, {"below_full_depth": 1.0}):
        with pytest.raises(ls.UserError, match="target"):
            ls.Target(**wrong)


def test_chance_is_a_lot_among_the_choices_or_the_commonest_label() -> None:
    logits = np.zeros((6, 1, 4))
    made = [ls.Trajectory(logits=logits.copy(), labels=np.arange(6) % 4)]
    made.append(ls.Trajectory(logits=np.zeros((8, 1, 4)), labels=np.arange(8) % 4))
    logits[:3, :, 2:] = -np.inf  # three questions have two choices, three have four
    made.append(ls.Trajectory(logits=logits, labels=[0, 1, 0, 1, 2, 3]))
    made.append(bare([1, 1, 1, 0], [[0]] * 4))
    assert [chance(each, each) for each in made] == pytest.approx([2 / 6, 0.25, (3 / 2 + 3 / 4) / 6, 0.75])
    assert chance(bare([0, 1, 1, 1], [[0]] * 4), bare([0, 0, 1], [[0]] * 3)) == 0.25  # validation names it, test counts


def test_a_shift_of_the_labels_is_nobodys_knowledge() -> None:
    """Validation has 80 % zeros, test data 90 %: always to say zero is to guess, and to be right in 94 % is not."""
    validation, test = ([0] * round(1000 * share) + [1] * round(1000 - 1000 * share) for share in (0.8, 0.9))
    calibration = bare(validation, [[0, label] for label in validation])
    says_zero = bare(test, [[0, 0]] * 1000)
    assert not is_above_chance(says_zero, 2, calibration)
    assert ls.diagnose(calibration, says_zero).verdict == "no verdict"
    said = ls.diagnose(calibration, says_zero).sentence
    assert re.search(
        "right in 90.0 ?% of 1,000 test examples, and chance, or always the commonest answer, in 90 %", said
    )
    knows = bare(test, [[0, 1 if k >= 960 else 0] for k in range(1000)])
    assert is_above_chance(knows, 2, calibration)


def test_above_chance_is_an_exact_one_sided_test() -> None:
    """Of 20 coins 15 heads are above chance at 5 % (p 0.021), 14 are not (p 0.058)."""
    for right, above in ((15, True), (14, False), (2, False)):
        labels = [0, 1] * 10
        made = bare(labels, [[label if k < right else 1 - label] for k, label in enumerate(labels)])
        assert is_above_chance(made, 1, made) == above


def test_at_chance_there_is_no_verdict_and_nine_of_ten_models_that_guess_get_none() -> None:
    diagnosis = ls.diagnose(*pair(right=0.0))
    test = simulated("test", right=0.0)
    loop = best_loop(simulated("validation", right=0.0))
    assert (diagnosis.verdict, diagnosis.blamed, diagnosis.table) == ("no verdict", (), [])
    right = f"{100 * test.correct[:, loop - 1].mean():.1f} ?%"
    said = f"right in {right} of 1,500 test examples, and chance, or always the commonest answer, in 25 %"
    assert diagnosis.sentence.startswith("No verdict: at loop 3")
    assert re.search(said, diagnosis.sentence)
    commonest = np.bincount(simulated("validation", right=0.0).labels).argmax()
    assert diagnosis.chance == max(0.25, (test.labels == commonest).mean())
    verdicts = [ls.diagnose(*pair(right=0.0, seed=seed, rows=200)).verdict for seed in range(40)]
    assert verdicts.count("no verdict") >= 36


def test_a_model_at_60_percent_is_diagnosed_where_it_is() -> None:
    """Absolutely nothing could be said of it: 95 % is out of reach. Its gate is late, and that is found."""
    validation, test = pair(right=0.47, late_gate=True)
    diagnosis = ls.diagnose(validation, test)
    assert diagnosis.target.accuracy == pytest.approx(validation.correct[:, -1].mean() - 0.01)
    assert 0.55 < diagnosis.target.accuracy < 0.65
    assert diagnosis.blamed == ("readout",)
    for gap in filter(None, diagnosis.gaps.values()):
        assert diagnosis.chance < gap.accuracy <= gap.target == diagnosis.target.accuracy
    text = " ".join(str(diagnosis).split())
    assert text.startswith("The readout is to blame: the model's own gate is worse than ")
    assert (
        f"The target is {100 * diagnosis.target.accuracy:.2f} %, 1 point below full depth on validation data." in text
    )
    assert "Gaps are at the highest whole percent that both sides reach" in text
    assert [line for line in str(diagnosis).splitlines() if line.startswith("gap  ")]
    assert repr(diagnosis) == str(diagnosis)
    assert ls.diagnose(*pair(right=0.47)).blamed == ()  # the same with a good gate


def test_a_model_that_forgets_is_not_silenced() -> None:
    """Right at loop 2, at chance at full depth: the target is a point below loop 2, and it says so."""
    validation, test = pair(right=0.9, forgets=True)
    assert not is_above_chance(validation, 4, validation)
    assert reference_loop(validation) == 2
    diagnosis = ls.diagnose(validation, test)
    assert diagnosis.verdict != "no verdict"
    assert diagnosis.target.accuracy == pytest.approx(validation.correct[:, 1].mean() - 0.01)
    assert "1 point below loop 2, its best, on validation data; full depth is not above chance" in " ".join(
        str(diagnosis).split()
    )


def test_gaps_are_those_of_the_frontiers_at_an_absolute_target() -> None:
    gap = ls.diagnose(*pair(right=0.99, late_gate=True), target=0.95).readout_gap
    assert gap is not None
    assert gap.target == 0.95
    depth = ls.sweep("gate", *pair(right=0.99, late_gate=True)).depth_at(gap.accuracy)
    assert gap.first_depth == pytest.approx(depth)  # one grid for one quantity


def test_trajectories_are_compared_a_point_below_the_worse_model() -> None:
    worse, better = pair(right=0.47), pair(right=0.9, seed=3)
    expected = worse[0].correct[:, -1].mean() - 0.01
    diagnosis = ls.diagnose(*worse, reference=better)
    assert diagnosis.trajectory_gap.target == pytest.approx(expected)
    assert diagnosis.blamed == ("trajectory",)
    assert ls.diagnose(*better, reference=worse).weak_reference
    own = ls.diagnose(*worse, reference=worse)
    assert own.trajectory_gap is None
    assert "its trajectory is the reference itself" in own.sentence


def test_nothing_is_compared_at_chance() -> None:
    """The reference guesses: it is not good enough to judge by."""
    diagnosis = ls.diagnose(*pair(right=0.9), reference=pair(right=0.0, seed=1))
    assert diagnosis.trajectory_gap is None
    assert "the reference is not good enough to judge its trajectory by" in diagnosis.sentence
    single = ls.diagnose(*pair(right=0.8, loops=1)).sentence
    assert single == "No verdict: with a single loop there is no exit to choose."


def test_an_interval_of_zero_is_not_open() -> None:
    """All readouts exit at loop 1, where everything is right: the gate takes as many loops as any."""
    logits = np.zeros((200, 3, 2))
    logits[..., 0] = 3.0
    labels = np.arange(200) % 5 == 0
    logits[labels] = logits[labels][..., ::-1]
    logits[1, 2, 0] = 4.0
    made = [
        ls.Trajectory(
            logits=logits[:rows], labels=labels[:rows].astype(int), gate_logits=np.full((rows, 3), 5.0), split=split
        )
        for split, rows in (("validation", 200), ("test", 150))
    ]
    diagnosis = ls.diagnose(*made)
    gap = diagnosis.readout_gap
    assert gap is not None
    assert (gap.low, gap.high, gap.first, gap.second) == (0, 0, "gate", "fixed")
    assert "the model's own gate is as good as fixed at 99 % (as many loops)" in diagnosis.sentence
    assert "open" not in diagnosis.sentence


def test_depth_that_harms_is_said_and_noise_is_not() -> None:
    """Right in 90 % at loop 1 and in 50 % at loop 4; beside it models whose loops differ by luck alone."""
    rng = np.random.default_rng(0)

    def falling(shares: list[float], rows: int = 1000) -> ls.Trajectory:
        labels = np.arange(rows) % 4
        return bare(
            labels.tolist(), np.where(rng.random((rows, 1)) < shares, labels[:, None], (labels[:, None] + 1) % 4)
        )

    validation, test = falling([0.9, 0.7, 0.6, 0.5]), falling([0.9, 0.7, 0.6, 0.5])
    points = 100 * (validation.correct[:, 0].mean() - validation.correct[:, 3].mean())
    said = f"Loop 1 is {points:.1f} points better than full depth on validation data: depth harms it."
    assert said in " ".join(str(ls.diagnose(validation, test)).split())
    lucky = [np.where(rng.random((300, 6)) < 0.6, 0, 1).tolist() for _ in range(200)]
    assert sum(bool(harm_of_depth(bare([0] * 300, each))) for each in lucky) <= 15
    assert not harm_of_depth(falling([0.5, 0.7, 0.9]))
