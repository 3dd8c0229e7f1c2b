"""Calibration: what is tested had no part in proposing, a guarantee says what it rests on, too little is refused."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import msgspec
import numpy as np
import pytest
from conftest import random_trajectory
from hypothesis import given, settings

import loopscope as ls
from loopscope.certify import calibration
from loopscope.certify.calibration import certify
from loopscope.certify.losses import losses, risk_groups
from loopscope.certify.not_proven import NotProven
from loopscope.certify.risk_target import RiskTarget
from loopscope.certify.tested_data import guaranteed_part
from loopscope.certify.threshold_walk import monotone_losses
from loopscope.frontier import crossings, laxest_first, totals_at_exit
from loopscope.threshold_grids import gap_grid
from loopscope.trajectory import concatenate


def made(right: np.ndarray, margin: np.ndarray, **more: object) -> ls.Trajectory:
    return ls.Trajectory(
        predictions=(~right).astype(int), labels=np.zeros(len(right), int), signals={"margin": margin}, **more
    )


def settling(rows: int = 3_000, seed: int = 0, **more: object) -> ls.Trajectory:
    """Right from a random loop on; the margin grows from about there."""
    rng = np.random.default_rng(seed)
    settled = np.minimum(rng.geometric(0.5, (rows, 1)), 4)
    margin = np.arange(1, 5) - settled + rng.normal(0, 0.5, (rows, 4))
    return made(np.arange(1, 5) >= settled, margin, **more)


def lost_by(policy: ls.ExitPolicy, trajectory: ls.Trajectory, loss: str = "gap") -> np.ndarray:
    loops = policy.exit_loops(trajectory)
    return losses(loss, trajectory)[np.arange(len(loops)), loops - 1]


def test_the_losses() -> None:
    right = np.array([[1, 0, 1], [0, 1, 0], [0, 0, 1], [1, 1, 1]], bool)
    trajectory = made(right, np.zeros((4, 3)))
    assert losses("gap", trajectory).tolist() == [[0, 1, 0], [0, 0, 0], [1, 1, 0], [0, 0, 0]]
    assert losses("disagreement", trajectory).tolist() == [[0, 1, 0], [0, 1, 0], [1, 1, 0], [0, 0, 0]]


@settings(max_examples=30)
@given(
    st.sampled_from(["margin", "entropy", "fixed"]),
    st.lists(st.lists(st.integers(0, 4), min_size=4, max_size=4), min_size=1, max_size=12),
    st.integers(0, 100),
)
def test_totals_and_what_stays_lost_are_those_of_every_threshold_by_itself(
    name: str, values: list[list[int]], seed: int
) -> None:
    rng = np.random.default_rng(seed)
    recorded = {} if name == "fixed" else {name: np.array(values, float)}
    trajectory = replace(made(rng.random((len(values), 4)) < 0.5, np.zeros((len(values), 4))), signals=recorded)
    thresholds = np.array([1.0, 2, 3]) if name == "fixed" else np.array([0.5, 1.0, 2.5, 3.5, 9.0])
    thresholds = thresholds[laxest_first(name, thresholds)]
    crossed, lost = crossings(name, thresholds, trajectory), losses("gap", trajectory)
    at_exit = np.stack([lost_by(ls.ExitPolicy(name, float(each)), trajectory) for each in thresholds], axis=1)
    assert totals_at_exit(crossed, lost, len(thresholds)).tolist() == at_exit.sum(axis=0).tolist()
    kept = monotone_losses(lost, crossed, len(thresholds))
    running = np.maximum.accumulate(at_exit[:, ::-1], axis=1)[:, ::-1]  # over stricter thresholds, which come later
    assert totals_at_exit(crossed, kept, len(thresholds)).tolist() == running.sum(axis=0).tolist()


def test_the_grid_lies_between_the_examples_and_reaches_from_one_exit_to_all() -> None:
    trajectory = random_trajectory(rows=500)
    for name in ("margin", "entropy", "gate", "kl"):
        thresholds = gap_grid(name, trajectory)
        values = ls.signal(name, trajectory)
        assert not np.isin(thresholds, values).any()
        strictest, laxest = (ls.ExitPolicy(name, float(thresholds[place])) for place in (-1, 0))
        assert (strictest.exit_loops(trajectory) < 4).sum() >= 1
        assert (laxest.exit_loops(trajectory) == (2 if name == "kl" else 1)).all()
    assert gap_grid("fixed", trajectory).tolist() == [1, 2, 3]
    equal = made(np.ones((9, 3), bool), np.full((9, 3), 2.0))
    assert len(gap_grid("margin", equal)) == 1
    assert (ls.ExitPolicy("margin", float(gap_grid("margin", equal)[0])).exit_loops(equal) == 1).all()


def test_the_guarantee_says_what_was_guaranteed_and_on_what_it_rests() -> None:
    recording = settling(difficulty=np.arange(3_000) % 3, split="validation", provenance={"weights_sha256": "abc"})
    policy = ls.calibrate(recording, max_drop=0.02, confidence=0.9, readout="margin")
    guarantee = policy.guarantee
    assert guarantee is not None
    assert (policy.readout, policy.model) == ("margin", "abc")
    assert "With probability 90 %" in guarantee.sentence
    assert "at most 2 % accuracy" in guarantee.sentence
    assert (guarantee.tested.examples, guarantee.grid.examples) == (2_400, 600)
    assert guarantee.recording == recording.sha256
    assert sum(guarantee.tested.difficulty.values()) == 2_400
    (evidence,) = guarantee.evidence
    assert 0 < evidence.loss < 0.02
    assert evidence.p_value <= guarantee.level == 0.1
    low, high = guarantee.average_loops_interval
    assert low < guarantee.average_loops < high
    assert high - low < 0.2
    assert guarantee.average_loops_at_limit <= guarantee.average_loops
    everywhere = policy.exit_loops(recording).mean()
    assert guarantee.average_loops == pytest.approx(everywhere, abs=0.05)


def test_the_same_recording_and_seed_give_the_same_policy(tmp_path: Path) -> None:
    first, again, other = (ls.calibrate(settling(), seed=seed) for seed in (0, 0, 1))
    assert first == again
    assert first.guarantee != other.guarantee
    first.save(tmp_path / "policy.json")
    assert ls.ExitPolicy.load(tmp_path / "policy.json") == first
    asked = msgspec.json.decode(msgspec.json.encode(RiskTarget()), type=RiskTarget)  # as a worker of a study reads it
    certify(settling(), asked).save(tmp_path / "asked.json")
    assert ls.ExitPolicy.load(tmp_path / "asked.json") == first


def test_the_last_threshold_that_is_proven_is_taken_and_the_next_one_is_not() -> None:
    """And what is tested changes which one it is, not the grid."""
    recording, grid = settling(seed=1), settling(seed=2)
    policy = ls.calibrate(recording, readout="margin", grid=grid)
    thresholds = gap_grid("margin", grid)
    place = int(np.flatnonzero(thresholds == policy.threshold)[0])
    assert lost_by(policy, recording).sum() <= 20  # of 3,000 at 1 %: 20 prove, 21 do not
    assert policy.guarantee.thresholds < policy.guarantee.grid_size
    laxer = [lost_by(ls.ExitPolicy("margin", float(each)), recording).sum() for each in thresholds[:place]]
    assert min(laxer) >= 20
    some_worse = np.where(np.arange(3_000)[:, None] % 5, recording.predictions, [[1, 1, 1, 0]])
    policies = [
        ls.calibrate(replace(recording, predictions=each), 0.3, readout="margin", grid=grid)
        for each in (recording.predictions, some_worse)
    ]
    assert np.isin([policy.threshold for policy in policies], thresholds).all()
    assert policies[0].threshold < policies[1].threshold


def test_the_order_of_the_walk_is_not_that_of_the_tested_losses() -> None:
    grid, wanted = settling(seed=2), RiskTarget(readout="margin")
    walks = [calibration._finalists(["margin"], grid, settling(seed=seed), wanted)[0] for seed in (1, 9)]
    assert np.array_equal(walks[0].thresholds, walks[1].thresholds)
    assert not np.array_equal(walks[0].loss, walks[1].loss)


def test_of_all_that_are_proven_the_one_with_the_fewest_loops_is_taken() -> None:
    """To the proposing data loop 1 looks the safest and loop 3 the worst; the test proves them all."""
    right = np.ones((2_000, 4), bool)
    doubtful = right.copy()
    doubtful[:1, 1] = False
    doubtful[1:900, 2] = False
    policy = ls.calibrate(made(right, np.zeros((2_000, 4))), readout="fixed", grid=made(doubtful, np.zeros((2_000, 4))))
    assert policy.guarantee.thresholds == 3
    assert policy.threshold == 1


def test_in_expectation_what_a_stricter_threshold_lost_stays_lost_and_every_difficulty_counts() -> None:
    right, nothing = np.ones((1_000, 3), bool), np.zeros((1_000, 3))
    right[:8, 1] = False
    right[8:16, 0] = False
    grid = made(np.ones((300, 3), bool), nothing[:300], difficulty=np.arange(300) % 2)
    depth_2 = ls.conformal_risk_control(made(right, nothing), readout="fixed", grid=grid)
    assert depth_2.threshold == 2  # at loop 1 only 8 are lost, but 16 of 1,000 are by then
    right[:] = True
    right[1:41:2, 0] = False  # 20 of the 500 of difficulty 1
    recording = made(right, nothing, difficulty=np.arange(1_000) % 2)
    depths = [
        ls.conformal_risk_control(recording, 0.03, readout="fixed", grid=grid, per_difficulty=each).threshold
        for each in (False, True)
    ]
    assert depths == [1, 2]


def test_where_the_risk_falls_again_the_walk_goes_past_the_bump() -> None:
    """A tenth is wrong at loop 2, where it is most confident, and right at loop 1 with a confidence in the middle."""
    rng = np.random.default_rng(3)
    margin = np.sort(rng.normal(2, 1, (6_000, 3)), axis=1)
    right = np.ones((6_000, 3), bool)
    fooled = np.arange(6_000) % 10 == 0
    margin[fooled] = np.stack([np.full(600, 1.0), np.full(600, 9.0), np.full(600, 9.0)], axis=1)
    right[fooled, 1] = False
    policy = ls.calibrate(made(right, margin), readout="margin")
    assert policy.threshold < 1.0
    assert not lost_by(policy, made(right, margin)).any()


def test_auto_halves_delta_and_takes_the_better_of_two() -> None:
    base = settling(6_000)
    rng = np.random.default_rng(0)
    signals = {"margin": base.signals["margin"], "top1": base.signals["margin"] + rng.normal(0, 2, (6_000, 4))}
    signals["entropy"] = rng.normal(size=(6_000, 4))
    policy = ls.calibrate(replace(base, signals=signals))
    assert policy.readout == "margin"
    assert set(policy.guarantee.candidates) == {"fixed", "margin", "top1", "entropy", "patience"}
    assert len(policy.guarantee.finalists) == 2
    assert policy.guarantee.level == 0.025
    few = replace(settling(400), signals={"margin": settling(400).signals["margin"]})
    assert ls.calibrate(few).guarantee.level == 0.05  # 320 tested are enough for one readout, not for two
    assert len(ls.conformal_risk_control(replace(base, signals=signals)).guarantee.finalists) == 1


def test_labels_are_not_needed_for_disagreement() -> None:
    labelled = settling()
    bare = replace(labelled, labels=None)
    policy = ls.calibrate(bare, loss="disagreement")
    assert policy.threshold == ls.calibrate(labelled, loss="disagreement").threshold
    assert policy.guarantee.full_depth_accuracy is None
    assert "changes at most 1 % of the answers" in policy.guarantee.sentence


def test_sequences_are_counted_not_their_decisions() -> None:
    """Twenty decisions each, all of a sequence lost or none: as much evidence as one decision each."""
    rng = np.random.default_rng(0)
    sequences = np.repeat(np.arange(600), 20)
    settled = np.repeat(np.minimum(rng.geometric(0.5, 600), 4), 20)[:, None]
    margin = np.repeat(np.arange(1, 5) - settled[::20] + rng.normal(0, 0.5, (600, 4)), 20, axis=0)
    right = np.arange(1, 5) >= settled
    tokens = made(right, margin, sequences=sequences)
    singles = made(right[::20], margin[::20], sequences=np.arange(600))
    policy = ls.calibrate(tokens, readout="margin")
    guarantee = policy.guarantee
    assert (guarantee.tested.sequences, guarantee.tested.examples) == (480, 9_600)
    assert guarantee.evidence[0].units == 480
    assert (
        "1 % of a sequence's answers wrong where full depth is right, on average over sequences" in guarantee.sentence
    )
    alone = ls.calibrate(singles, readout="margin").guarantee
    assert alone.evidence[0].units == 480
    counted = ls.calibrate(replace(tokens, sequences=None), readout="margin").guarantee
    assert counted.evidence[0].units == 9_600
    assert guarantee.average_loops > counted.average_loops
    assert guarantee.average_loops == pytest.approx(alone.average_loops, abs=0.2)


def test_the_loss_of_a_sequence_is_the_share_of_its_decisions() -> None:
    trajectory = made(np.ones((5, 2), bool), np.zeros((5, 2)), sequences=[7, 7, 7, 3, 3])
    (all_units,) = risk_groups(trajectory, per_difficulty=False)
    assert not all_units.binary
    assert all_units.means(np.array([1, 0, 0, 1, 0])).tolist() == pytest.approx([0.5, 1 / 3])
    assert all_units.mean(np.array([1, 0, 0, 1, 0])) == pytest.approx(5 / 12)


def test_every_difficulty_gets_its_guarantee() -> None:
    rows = 8_000
    difficulty = np.arange(rows) % 4
    base = settling(rows)
    right, margin = base.correct.copy(), base.signals["margin"] + 0.7 * (difficulty == 3)[:, None]  # overconfident
    recording = made(right, margin, difficulty=difficulty)
    on_average, everywhere = (ls.calibrate(recording, readout="margin", per_difficulty=each) for each in (False, True))
    assert [each.difficulty for each in everywhere.guarantee.evidence] == [0, 1, 2, 3]
    assert all(each.loss <= 0.01 and each.p_value <= 0.05 for each in everywhere.guarantee.evidence)
    hard = recording.take(difficulty == 3)
    assert lost_by(on_average, hard).mean() > 0.01 > lost_by(everywhere, hard).mean()
    assert "at every difficulty" in everywhere.guarantee.sentence
    with pytest.raises(NotProven, match="difficulty 0") as few:
        ls.calibrate(recording.take((difficulty > 0) | (np.arange(rows) < 800)), per_difficulty=True)
    assert few.value.needed > 6_200


@pytest.mark.parametrize("size", [1, 2, 373])
def test_too_few_examples_are_refused_with_the_number_needed(size: int) -> None:
    with pytest.raises(NotProven, match="takes 299 tested examples, .*; record 374 in all") as few:
        ls.calibrate(settling(size), readout="margin")
    assert few.value.needed == 374
    assert few.value.args[0].count(".") == 1  # one sentence
    assert ls.calibrate(settling(374), readout="margin").guarantee.tested.examples == 299


@pytest.mark.parametrize("kind", ["fixed", "auto", "sequences"])
def test_a_rate_too_close_to_the_limit_is_refused_with_the_number_needed(kind: str) -> None:
    """At the only earlier exit 0.7 % are lost: too many for 1,000, few enough for the number that is named."""
    right = np.ones((30_000, 2), bool)
    right[::143, 0] = False
    numbers = {"sequences": np.arange(30_000) // 2} if kind == "sequences" else {}
    recording = made(right, np.zeros(right.shape), **numbers)
    grid = made(np.ones((300, 2), bool), np.zeros((300, 2)), **{name: each[:300] for name, each in numbers.items()})
    rows, wanted = (2 if numbers else 1), {"readout": "auto" if kind == "auto" else "fixed", "grid": grid}
    with pytest.raises(NotProven, match="0.70 % of the .* other (examples|sequences)") as near:
        ls.calibrate(recording.take(np.arange(1_000 * rows)), **wanted)
    assert 1_000 < near.value.needed < 15_000
    assert ls.calibrate(recording.take(np.arange(near.value.needed * rows)), **wanted).threshold == 1
    with pytest.raises(NotProven, match="no number of them") as never:
        ls.calibrate(recording.take(np.arange(12_000)), 0.001, **{**wanted, "readout": "fixed"})
    assert never.value.needed is None


def test_for_any_model_a_policy_keeps_its_exits_and_no_guarantee() -> None:
    ours, theirs = (settling(seed=1, provenance={"weights_sha256": name}) for name in ("ours", "theirs"))
    policy = ls.calibrate(ours)
    policy.exit_loops(settling(seed=2))  # who knows
    freed = policy.for_any_model()
    assert freed.guarantee is None
    assert freed.exit_loops(theirs).tolist() == policy.exit_loops(ours).tolist()
    gate = ls.FittedGate(np.ones(6), np.zeros(()), provenance={"weights_sha256": "ours"})
    fitted = ls.ExitPolicy("gate:mine", 0.5, gate).for_any_model()
    fitted.exit_loops(random_trajectory(provenance={"weights_sha256": "theirs"}))


@pytest.mark.filterwarnings("ignore:This guarantee says nothing")
@pytest.mark.parametrize("right", [False, True])
def test_all_wrong_and_all_right_recordings_exit_at_once(right: bool) -> None:
    policy = ls.calibrate(made(np.full((1_000, 4), right), settling(1_000).signals["margin"]))
    assert policy.guarantee.average_loops == pytest.approx(1.0, abs=0.01)
    assert policy.guarantee.full_depth_accuracy == right


def test_new_inputs_are_counted_once_and_without_those_of_training() -> None:
    base = settling()
    texts, seen = [str(row // 2) for row in range(3_000)], np.arange(3_000) < 1_000
    recording = replace(base, examples=texts, seen=seen)
    guarantee = ls.calibrate(recording, 0.02, unseen=True, distinct=True).guarantee
    assert guarantee.tested.examples + guarantee.grid.examples == 1_000
    assert guarantee.tested.seen == 0
    assert (guarantee.unseen, guarantee.distinct) == (True, True)
    assert "inputs that training did not have, every input counted once" in guarantee.sentence
    with pytest.raises(
        NotProven, match="there are 800; record 3,744 in all that training did not have, each input once"
    ):
        ls.calibrate(recording, 0.001, unseen=True, distinct=True)
    with pytest.raises(ls.UserError, match="leave out one of them"):
        ls.calibrate(recording, distinct=True, new_inputs=True)


def test_inputs_that_are_new_are_those_that_occur_once() -> None:
    """Of 3,000 draws; on more, as many are drawn again, and of fewer other inputs occur once."""
    inputs = [*range(2_000), *range(500), *range(500)]
    recording = replace(settling(), examples=[str(each) for each in inputs], seen=np.zeros(3_000, bool))
    policy = ls.calibrate(recording, 0.05, new_inputs=True, unseen=True, readout="margin")
    guarantee = policy.guarantee
    assert guarantee.tested.examples + guarantee.grid.examples == 1_500
    assert (guarantee.new_inputs, guarantee.distinct, guarantee.drawn) == (True, False, 3_000)
    assert guarantee.sentence.endswith(", for inputs that neither training nor calibration had.")
    other = replace(recording, signals={"margin": settling(seed=1).signals["margin"]})
    assert guaranteed_part(guarantee, other).num_examples == 1_500
    longer = concatenate([other, replace(other, examples=[f"other {each}" for each in inputs])])
    assert 1_500 < guaranteed_part(guarantee, longer).num_examples < 3_000  # twice as many, half of which are taken
    with pytest.raises(ls.UserError, match="other inputs occur once: give a recording with as many examples"):
        guaranteed_part(guarantee, other.take(np.arange(2_600)))


def test_inputs_that_count_once_are_those_of_as_many_draws() -> None:
    inputs = np.random.default_rng(0).zipf(1.5, 3_000)
    recording = replace(settling(), examples=[str(each) for each in inputs])
    guarantee = ls.calibrate(recording, 0.05, distinct=True, readout="margin").guarantee
    assert guarantee.drawn == 3_000
    counted = guaranteed_part(guarantee, recording).num_examples
    assert counted == len(set(inputs))
    twice = concatenate([recording, replace(recording, examples=[f"other {each}" for each in inputs])])
    assert guaranteed_part(guarantee, twice).num_examples < 1.7 * counted  # not twice as many
    with pytest.raises(ls.UserError, match="of the 2,600 examples here rare inputs are a smaller share: give"):
        guaranteed_part(guarantee, recording.take(np.arange(2_600)))


def by_chance(rows: int, **more: object) -> ls.Trajectory:
    """A model of four classes that guesses."""
    rng = np.random.default_rng(0)
    return ls.Trajectory(logits=rng.normal(size=(rows, 3, 4)), labels=rng.integers(0, 4, rows), **more)


def rounded_otherwise(recording: ls.Trajectory) -> ls.Trajectory:
    """Every example three times, as batches of other sizes would have computed it."""
    logits = np.asarray(recording.logits)
    return concatenate([replace(recording, logits=logits * np.float32(1 + change)) for change in (0, 1e-6, -1e-6)])


def with_log_probs(recording: ls.Trajectory) -> ls.Trajectory:
    return replace(recording, label_log_probs=-np.exp(-recording.signals["margin"]))


@pytest.mark.parametrize(
    ("recording", "options", "words"),
    [
        (
            settling(4_000, examples=[str(row % 2_000) for row in range(4_000)]),
            {},
            "2,000 examples are copies of others",
        ),
        (settling(4_000, examples=[str(row % 2_000) for row in range(4_000)]), {"distinct": True}, None),
        (random_trajectory(rows=30).take(np.arange(3_000) % 30), {}, "Only 30 of the 3,000 examples differ"),
        (rounded_otherwise(random_trajectory(rows=1_000)), {}, r"Only 1,0\d\d of the 3,000 examples differ"),
        (with_log_probs(settling(2_000)).take(np.arange(4_000) % 2_000), {}, "Only 2,000 of the 4,000 examples"),
        (made(np.zeros((900, 2), bool), np.zeros((900, 2))), {}, "says nothing: full depth is right in 0.0 %"),
        (by_chance(3_000), {}, "not above chance: full depth is right in 2[456].. % .* in 2[56].. %"),
        (by_chance(3_000, sequences=np.arange(3_000) // 10), {}, "not above chance"),
        (settling(4_000), {}, None),
    ],
)
@pytest.mark.parametrize("guarantee", [ls.calibrate, ls.conformal_risk_control])
def test_what_weakens_a_guarantee_is_said(
    guarantee: Callable[..., ls.ExitPolicy],
    recording: ls.Trajectory,
    options: dict[str, Any],
    words: str | None,
    recwarn: pytest.WarningsRecorder,
) -> None:
    guarantee(recording, 0.23, readout="fixed", **options)
    said = [str(each.message) for each in recwarn]
    assert len(said) == (words is not None)
    assert words is None or re.search(words, said[0])


def test_a_fitted_gate_is_calibrated_and_carried(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    base = settling()
    hidden = np.concatenate((base.signals["margin"][:, :, None], rng.normal(size=(3_000, 4, 2))), axis=2)
    gate = ls.FittedGate(np.array([2.0, 0.0, 0.0]), np.array(0.0), provenance={"split": "train"})
    recording = replace(base, hidden=hidden, signals={}, split="validation")
    policy = ls.calibrate(recording, readout="gate:mine", gates={"mine": gate})
    assert policy.gate is gate
    policy.save(tmp_path / "policy.json")
    again = ls.ExitPolicy.load(tmp_path / "policy.json")
    assert again.guarantee == policy.guarantee
    assert again.exit_loops(recording).tolist() == policy.exit_loops(recording).tolist()
    policy.save(tmp_path / "policy-0.01.v2.json")  # its gate has a name of its own
    assert ls.ExitPolicy.load(tmp_path / "policy.json").guarantee == policy.guarantee
    assert len(list(tmp_path.glob("policy-0.01.v2.gate-*.safetensors"))) == 1


def test_numbers_of_numpy_are_numbers() -> None:
    recording = random_trajectory(rows=900, split="validation")
    policies = [ls.calibrate(recording, number(0.5), number(0.8)) for number in (float, np.float64, np.float32)]
    assert {policy.threshold for policy in policies} == {policies[0].threshold}
