"""Held-out checks: a guarantee that is kept, one that is broken, and data that cannot tell."""

from dataclasses import replace

import numpy as np
import pytest

import loopscope as ls
from loopscope.analysis.held_out import check_policy
from loopscope.certify.bounds import risk_interval


def recording(lost: float, rows: int = 4_000, seed: int = 0, **more: object) -> ls.Trajectory:
    """Two loops; so large a share of the answers is wrong at the first only."""
    rng = np.random.default_rng(seed)
    right = np.ones((rows, 2), bool)
    right[rng.permutation(rows)[: round(lost * rows)], 0] = False
    return ls.Trajectory(
        predictions=(~right).astype(int), labels=np.zeros(rows, int), signals={"margin": rng.random((rows, 2))}, **more
    )


@pytest.fixture(scope="module")
def policy() -> ls.ExitPolicy:
    """Guarantees 1 %, 95 % sure, of exits at loop 1."""
    made = ls.calibrate(recording(0.002, difficulty=np.arange(4_000) % 4, split="validation"), readout="fixed")
    assert made.threshold == 1
    return made


@pytest.mark.parametrize(
    ("lost", "verdict"), [(0.004, "kept"), (0.01, "kept"), (0.0125, "not refuted"), (0.02, "broken")]
)
def test_the_verdict(policy: ls.ExitPolicy, lost: float, verdict: str) -> None:
    held = check_policy(policy, recording(lost, seed=1))
    assert held.guarantee.verdict == verdict
    assert held.guarantee.sentence.startswith(verdict.capitalize())
    assert f"{100 * lost:.2f} % of 4,000 held-out examples" in held.guarantee.sentence
    (risk,) = held.guarantee.risks
    assert risk.loss == pytest.approx(lost)
    assert risk.low < lost < risk.high
    assert held.average_loops.value == 1.0
    assert held.drop.value == pytest.approx(lost)
    assert held.drop.low < lost < held.drop.high
    assert held.accuracy.value == pytest.approx(1 - lost)
    assert held.full_depth_accuracy == 1.0


def test_a_guarantee_for_every_difficulty_is_checked_at_every_one() -> None:
    levels = np.arange(8_000) % 4
    policy = ls.calibrate(recording(0.001, 8_000, difficulty=levels), readout="fixed", per_difficulty=True)
    held_out = recording(0.0, 8_000, seed=1, difficulty=levels)
    predictions = held_out.predictions.copy()
    predictions[np.arange(8_000) % 200 == 2, 0] = 1  # 2 % of difficulty 2, and no others
    bad = replace(held_out, predictions=predictions)
    check = check_policy(policy, bad).guarantee
    assert [risk.verdict for risk in check.risks] == ["kept", "kept", "broken", "kept"]
    assert check.verdict == "broken"
    assert "of difficulty 2, the worst," in check.sentence
    in_all = ls.calibrate(recording(0.001, 8_000, difficulty=levels), readout="fixed")
    assert check_policy(in_all, bad).guarantee.verdict == "kept"
    new = check_policy(policy, replace(held_out, difficulty=levels + 1)).guarantee
    assert [risk.difficulty for risk in new.risks] == [1, 2, 3]
    assert "not counted: 4" in new.warnings[0]


def test_another_mix_of_difficulties_is_said(policy: ls.ExitPolicy) -> None:
    same = check_policy(policy, recording(0.004, seed=1, difficulty=np.arange(4_000) % 4))
    other = check_policy(policy, recording(0.004, seed=1, difficulty=np.arange(4_000) % 2))
    assert same.guarantee.warnings == []
    assert "mix of difficulties" in other.guarantee.warnings[0]


def test_it_counts_whom_the_guarantee_counts() -> None:
    texts = [str(row // 2) for row in range(4_000)]
    seen = np.arange(4_000) < 1_000
    policy = ls.calibrate(recording(0.002, examples=texts, seen=seen), readout="fixed", unseen=True, distinct=True)
    others = [f"other {text}" for text in texts]
    held = check_policy(policy, recording(0.004, seed=1, examples=others, seen=seen))
    assert held.examples == 1_500


def test_of_many_difficulties_one_may_look_bad_by_chance() -> None:
    """Ten difficulties of 400; at one 10 are lost, which would refute 1 % if it were the only one."""
    levels = np.arange(4_000) % 10
    policy = ls.calibrate(recording(0.0, difficulty=levels), readout="fixed", per_difficulty=True)
    held_out = recording(0.0, seed=1, difficulty=levels)
    predictions = held_out.predictions.copy()
    predictions[np.flatnonzero(levels == 3)[:10], 0] = 1
    check = check_policy(policy, replace(held_out, predictions=predictions)).guarantee
    assert risk_interval(10, 400, True, 0.95)[0] > 0.01
    assert check.verdict == "not refuted"
    assert check.worst.difficulty == 3


def test_the_sentence_is_about_what_decides_the_verdict() -> None:
    levels = np.r_[np.zeros(4_000), np.ones(400)]
    policy = ls.calibrate(recording(0.0, 4_400, difficulty=levels), readout="fixed", per_difficulty=True)
    few = recording(0.0, 4_002, seed=1, difficulty=levels[:4_002])
    predictions = few.predictions.copy()
    predictions[:120, 0] = predictions[4_000, 0] = 1  # 3 % of 4,000, and one of two
    check = check_policy(policy, replace(few, predictions=predictions)).guarantee
    assert check.sentence.startswith("Broken: 3.00 % of 4,000 held-out examples of difficulty 0")
    gone = check_policy(policy, few.take(np.arange(4_000))).guarantee
    assert "covers are not here: 1" in gone.warnings[0]


def test_one_draw_does_not_break_a_guarantee_on_average_nor_one_that_was_not_made(policy: ls.ExitPolicy) -> None:
    check = check_policy(
        ls.conformal_risk_control(recording(0.002), readout="fixed"), recording(0.02, seed=1)
    ).guarantee
    assert check.verdict == "not refuted"
    assert "cannot break a guarantee on average" in check.sentence
    held = check_policy(policy.for_any_model(), recording(0.02, seed=1))
    assert held.guarantee is None
    assert held.drop.value == pytest.approx(0.02)


def test_sequences_and_missing_labels() -> None:
    numbers = np.repeat(np.arange(400), 10)
    policy = ls.calibrate(recording(0.0, sequences=numbers), readout="fixed", loss="disagreement")
    held = check_policy(policy, replace(recording(0.005, seed=1, sequences=numbers), labels=None))
    assert (held.examples, held.sequences) == (4_000, 400)
    assert held.accuracy is held.drop is held.full_depth_accuracy is None
    assert held.guarantee.verdict == "kept"
    assert held.guarantee.risks[0].units == 400
    assert held.guarantee.risks[0].high > 0.01  # 20 of 4,000 decisions would say less than 0.8 %
