"""The diagnosis: on recordings built to have a known culprit, it names that one and no other."""

import numpy as np
import pytest

import loopscope as ls
from loopscope.analysis import Subject, diagnose

LOOPS = 5


def recording(seed: int, split: str, first_right: tuple[int, ...], gate: str, gated: bool = True) -> ls.Trajectory:
    """Examples become right at one of the `first_right` loops, confident once they are, and stay so.

    A 'knowing' gate halts as the confidence grows, a 'late' one waits for the end, a 'lazy' one for a tenth of the
    examples, a 'blind' one halts at random.
    """
    rng = np.random.default_rng(seed)
    rows = 1500
    labels = rng.integers(0, 4, rows)
    first = rng.choice(first_right, rows)
    right = np.arange(1, LOOPS + 1) >= first[:, None]
    answers = np.where(right, labels[:, None], (labels[:, None] + 1) % 4)
    logits = rng.normal(0, 0.1, (rows, LOOPS, 4))
    confidence = np.where(right, 6.0, 1.0) + rng.normal(0, 0.8, (rows, LOOPS))
    np.put_along_axis(logits, answers[..., None], confidence[..., None], axis=2)
    lazy = rng.random((rows, 1)) < 0.1
    gates = {
        "knowing": 1.2 * (confidence - 3.5),
        "late": np.tile(np.where(np.arange(LOOPS) == LOOPS - 1, 8.0, -8.0), (rows, 1)),
        "lazy": np.where(lazy, -8.0, 1.2 * (confidence - 3.5)),
        "blind": np.where(rng.random((rows, LOOPS)) < 0.3, 8.0, -8.0),
    }
    return ls.Trajectory(
        logits=logits,
        labels=labels,
        difficulty=first,
        gate_logits=gates[gate] if gated else None,
        split=split,
    )


def subject(first_right: tuple[int, ...], gate: str, gated: bool = True) -> Subject:
    pair = (recording(seed, split, first_right, gate, gated) for seed, split in ((1, "validation"), (2, "test")))
    return Subject(*pair, resamples=400)


QUICK, SLOW = (1, 1, 1, 2), (3, 4, 4, 5)
REFERENCE = subject(QUICK, "knowing", gated=False)


@pytest.mark.parametrize(
    ("first_right", "gate", "blamed"),
    [
        (QUICK, "late", ("readout",)),
        (QUICK, "blind", ("readout",)),
        (SLOW, "knowing", ("trajectory",)),
        (QUICK, "knowing", ()),
        (SLOW, "blind", ("readout", "trajectory")),
    ],
)
def test_the_culprit_is_named(first_right: tuple[int, ...], gate: str, blamed: tuple[str, ...]) -> None:
    diagnosis = diagnose(subject(first_right, gate), REFERENCE, 0.95)
    assert diagnosis.blamed == blamed
    for part in ("readout", "trajectory"):
        head = diagnosis.sentence.split(":")[0]
        assert (part in head and "to blame" in head) == (part in blamed)
    assert diagnosis.sentence.endswith(".")


def test_gaps_are_differences_of_depths_with_intervals_around_them() -> None:
    gap = diagnose(subject(SLOW, "knowing"), REFERENCE).trajectory_gap
    assert gap is not None
    assert gap.value == pytest.approx(gap.first_depth - gap.second_depth)
    assert gap.low < gap.value < gap.high
    assert gap.high - gap.low < 0.3
    assert gap.reached == 1.0
    # the slow one is first right after 4 loops on average, the quick one after 1.25
    assert 2.2 < gap.value < 3.2


def test_room_left_is_what_knowing_the_labels_would_save() -> None:
    late = Subject(*(strip(recording(seed, split, QUICK, "late")) for seed, split in ((1, "validation"), (2, "test"))))
    diagnosis = diagnose(late)
    assert diagnosis.best_readout == "fixed"
    assert diagnosis.room_left is not None
    # fixed depth 2 reaches 95 %; the labels allow 1 + (0.95 - 0.75) on average
    assert diagnosis.room_left.value == pytest.approx(2 - 1.2, abs=0.05)


def strip(trajectory: ls.Trajectory) -> ls.Trajectory:
    """Predictions alone: only the fixed depth is left as a readout."""
    return ls.Trajectory(
        logits=None, labels=trajectory.labels, predictions=trajectory.predicted, split=trajectory.split
    )


def test_without_a_reference_the_trajectory_gap_cannot_be_identified() -> None:
    diagnosis = diagnose(subject(SLOW, "blind"))
    assert diagnosis.trajectory_gap is None
    assert "cannot be identified" in diagnosis.sentence
    assert diagnosis.blamed == ("readout",)


def test_without_a_gate_there_is_no_readout_gap() -> None:
    diagnosis = diagnose(subject(SLOW, "blind", gated=False), REFERENCE)
    assert diagnosis.readout_gap is None
    assert diagnosis.blamed == ("trajectory",)
    assert "no gate of its own" in diagnosis.sentence


def test_the_reference_is_not_compared_with_itself() -> None:
    diagnosis = diagnose(REFERENCE, REFERENCE)
    assert diagnosis.trajectory_gap is None
    assert diagnosis.blamed == ()
    depth = REFERENCE.frontiers[diagnosis.best_readout].depth_at(0.95)
    assert diagnosis.sentence.startswith("It is the reference")
    assert f"reaches 95% in {depth:.2f} loops" in diagnosis.sentence


def test_a_target_out_of_reach_is_said_and_compared_lower_down() -> None:
    """A fifth of the examples is never right: 95 % is out of reach, about 80 % is not."""
    poor = subject((1, 2, 3, 4, 9), "blind")
    diagnosis = diagnose(poor, REFERENCE, 0.95)
    assert "never reaches 95%" in diagnosis.sentence
    gap = diagnosis.trajectory_gap
    assert gap is not None
    assert 0.7 < gap.accuracy < 0.8
    assert gap.reached >= 0.95
    assert gap.reached_target == 0.0
    assert "trajectory" in diagnosis.blamed


def test_too_few_examples_blame_nobody() -> None:
    """The same gate on the same trajectory: 1,500 examples show that it is worse, 12 do not."""
    pairs = [recording(seed, split, QUICK, "lazy") for seed, split in ((1, "validation"), (2, "test"))]
    assert diagnose(Subject(*pairs)).blamed == ("readout",)
    few = diagnose(Subject(*(pair.take(np.arange(12)) for pair in pairs)))
    assert few.blamed == ()
    assert few.sentence.startswith("Neither part can be blamed")


def test_the_best_readout_is_chosen_on_validation_data_alone() -> None:
    """Entropy is made useless on test data only: validation still chooses it."""
    validation, test = recording(1, "validation", QUICK, "blind"), recording(2, "test", QUICK, "blind")
    signals = {"entropy": np.random.default_rng(0).random((1500, LOOPS))}
    good = {"entropy": 1.0 - validation.correct}
    made = [
        ls.Trajectory(logits=None, labels=t.labels, predictions=t.predicted, split=t.split, signals=s)
        for t, s in ((validation, good), (test, signals))
    ]
    assert Subject(*made).best(0.95) == "entropy"
