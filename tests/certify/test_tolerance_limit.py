"""The tolerance limit: the threshold that its definition gives, with ties too, and no data set aside."""

from dataclasses import replace

import hypothesis.strategies as st
import numpy as np
import pytest
from conftest import random_trajectory
from hypothesis import given, settings

import loopscope as ls
from loopscope.certify.bounds import max_losses
from loopscope.certify.losses import lost_at
from loopscope.certify.not_proven import NotProven
from loopscope.policy import Certificate


def drawn(rows: int, seed: int, levels: int | None = None, changes: float = 0.03, **more: object) -> ls.Trajectory:
    """Some answers change at any loop (no risk that is monotone); with `levels`, many signals are the same."""
    rng = np.random.default_rng(seed)
    settled = np.minimum(rng.geometric(0.6, (rows, 1)), 4)
    right = (np.arange(1, 5) >= settled) ^ (rng.random((rows, 4)) < changes)
    margin = np.arange(1, 5) - settled + rng.normal(0, 0.6, (rows, 4))
    if levels is not None:
        margin = np.round(margin * levels) / levels
    labels = np.zeros(rows, int)
    return ls.Trajectory(predictions=(~right).astype(int), labels=labels, signals={"margin": margin}, **more)


def strictest_that_loses(recording: ls.Trajectory) -> np.ndarray:
    """[N] by trying every threshold at which any exit changes; -inf where none loses."""
    found = np.full(recording.num_examples, -np.inf)
    for threshold in np.unique(recording.signals["margin"]):
        loops = ls.ExitPolicy("margin", float(threshold)).exit_loops(recording)
        found[lost_at("gap", recording, loops)] = threshold
    return found


@settings(max_examples=25)
@given(st.integers(0, 10_000), st.sampled_from([None, 1, 4]), st.sampled_from([60, 150]))
def test_it_lies_just_above_the_strictest_that_loses_one_too_many(seed: int, levels: int | None, rows: int) -> None:
    recording = drawn(rows, seed, levels)
    allowed = max_losses(rows, 0.2, 0.05)
    limit = np.sort(strictest_that_loses(recording))[::-1][allowed]
    exits = np.unique(np.maximum.accumulate(recording.signals["margin"][:, :-1], axis=1))
    above = exits[exits > limit]
    if not len(above):
        with pytest.raises(NotProven):
            ls.calibrate(recording, 0.2, readout="margin", method="tolerance")
        return
    policy = ls.calibrate(recording, 0.2, readout="margin", method="tolerance")
    assert limit < policy.threshold < above[0] + 1e-3  # a gap that is narrower than rounding is left out
    assert policy.guarantee.tested == policy.guarantee.grid
    assert policy.guarantee.tested.examples == rows
    assert policy.guarantee.evidence[0].p_value <= 0.05


def test_of_all_difficulties_the_strictest_limit_is_taken() -> None:
    difficulty = np.arange(3_000) % 3
    recording = drawn(3_000, 1, difficulty=difficulty)
    margin = recording.signals["margin"] + 0.8 * (difficulty == 2)[:, None]  # overconfident
    recording = replace(recording, signals={"margin": margin})
    options = {"readout": "margin", "method": "tolerance"}
    everywhere = ls.calibrate(recording, 0.1, per_difficulty=True, **options)
    alone = [ls.calibrate(recording.take(difficulty == each), 0.1, **options).threshold for each in range(3)]
    assert everywhere.threshold == pytest.approx(max(alone), abs=0.02)
    assert len(everywhere.guarantee.evidence) == 3


def test_it_serves_where_a_walk_does_and_saves_loops_of_few_examples() -> None:
    saved = []
    for seed in range(20):
        walk, limit = (
            ls.calibrate(drawn(500, seed, changes=0.0), 0.02, readout="margin", method=each).guarantee.average_loops
            for each in ("walk", "tolerance")
        )
        saved.append(walk - limit)
    assert np.mean(saved) > 0.02
    policy = ls.calibrate(drawn(900, 0), 0.1, readout="margin", method="tolerance")
    assert policy.guarantee.tolerance
    assert isinstance(policy.certificate, Certificate)
    assert not ls.Monitor(policy).replay(drawn(900, 1)).alarm
    fixed = ls.calibrate(drawn(900, 0), 0.3, readout="fixed", method="tolerance")
    assert fixed.threshold in (1, 2, 3)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "name the readout, such as --readout margin.$"),
        ({"readout": "margin", "grid": drawn(300, 1)}, "leave out --grid"),
        ({"readout": "margin", "max_drop": 0.001}, "takes 2,995 tested examples, and there are 300; record 2,995"),
        ({"readout": "oracle"}, "cannot be calibrated"),
    ],
)
def test_what_it_cannot_prove_is_rejected(options: dict[str, object], words: str) -> None:
    with pytest.raises(ls.UserError, match=words):
        ls.calibrate(drawn(300, 0), **{"method": "tolerance", "max_drop": 0.1, **options})  # type: ignore[arg-type]


def test_it_has_a_confidence() -> None:
    with pytest.raises(ls.UserError, match="leave out --in-expectation"):
        ls.conformal_risk_control(drawn(300, 0), 0.1, readout="margin", method="tolerance")


def test_it_is_for_single_answers() -> None:
    texts = random_trajectory(rows=300, sequences=np.arange(300) // 3)
    with pytest.raises(ls.UserError, match="this recording is of sequences"):
        ls.calibrate(texts, 0.5, readout="margin", method="tolerance")
