"""The diagnosis: on recordings built to have a known culprit, it names that one and no other."""

import re
from dataclasses import replace

import numpy as np
import pytest

import loopscope as ls
from loopscope.analysis.diagnosis import diagnose_subject
from loopscope.analysis.gaps import Gap, Subject
from loopscope.analysis.verdict_text import Finding, verdict_sentence
from loopscope.frontier import curve
from loopscope.learned.stopper_fitting import with_stoppers
from loopscope.threshold_grids import fine_grid

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
        logits=logits, labels=labels, difficulty=first, gate_logits=gates[gate] if gated else None, split=split
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
    diagnosis = diagnose_subject(subject(first_right, gate), REFERENCE, 0.95)
    assert diagnosis.blamed == blamed
    assert diagnosis.verdict in ([" and ".join(blamed)] if blamed else ["neither", "cannot tell"])
    for part in ("readout", "trajectory"):
        head = diagnosis.sentence.split(":")[0]
        assert ((part in head or "Both" in head) and head.endswith("to blame")) == (part in blamed)
    assert diagnosis.sentence.endswith(".")
    gap = diagnosis.trajectory_gap
    if first_right == SLOW:  # right after 4 loops on average, the reference after 1.25
        assert 2.2 < gap.value < 3.2


def test_room_left_is_what_knowing_the_labels_would_save() -> None:
    late = Subject(*(strip(recording(seed, split, QUICK, "late")) for seed, split in ((1, "validation"), (2, "test"))))
    diagnosis = diagnose_subject(late)
    assert diagnosis.best_readout == "fixed"
    assert diagnosis.room_left is not None
    # fixed depth 2 reaches 95 %; the labels allow 1 + (0.95 - 0.75) on average
    assert diagnosis.room_left.value == pytest.approx(2 - 1.2, abs=0.05)


def strip(trajectory: ls.Trajectory) -> ls.Trajectory:
    """Predictions alone: only the fixed depth is left as a readout."""
    return ls.Trajectory(
        logits=None, labels=trajectory.labels, predictions=trajectory.predicted, split=trajectory.split
    )


def test_what_cannot_be_judged_is_said() -> None:
    blind, knowing = diagnose_subject(subject(SLOW, "blind")), diagnose_subject(subject(QUICK, "knowing"))
    assert (blind.trajectory_gap, blind.blamed) == (None, ("readout",))
    assert "without a reference the trajectory cannot be judged" in blind.sentence
    assert knowing.verdict == "cannot tell"
    assert knowing.sentence.startswith("The readout is not found to be at fault: ")
    assert knowing.sentence.index("gate") < knowing.sentence.index("without a reference")
    ungated = diagnose_subject(subject(SLOW, "blind", gated=False), REFERENCE)
    assert (ungated.readout_gap, ungated.blamed) == (None, ("trajectory",))
    assert "no gate of its own" in ungated.sentence
    gated = subject(SLOW, "blind")
    half = Subject(replace(gated.validation, gate_logits=None), gated.test, resamples=20)
    assert "the validation recording alone has no gate logits" in diagnose_subject(half).sentence


def test_a_gate_with_its_sign_flipped_is_suspected() -> None:
    hint = "was the sign of gate_logits flipped?"
    for gate in ("knowing", "late", "blind"):
        assert hint not in diagnose_subject(subject(QUICK, gate)).sentence
    knowing = subject(QUICK, "knowing")
    flipped = (replace(each, gate_logits=-each.gate_logits) for each in (knowing.validation, knowing.test))
    assert hint in diagnose_subject(Subject(*flipped, resamples=50)).sentence


def test_the_reference_is_not_compared_with_itself() -> None:
    diagnosis = diagnose_subject(REFERENCE, REFERENCE, 0.95)
    assert diagnosis.trajectory_gap is None
    assert diagnosis.blamed == ()
    depth = REFERENCE.curves(diagnosis.best_readout).depth_at(0.95)[0]
    assert diagnosis.sentence.startswith("It is the reference")
    assert f"reaches 95 % in {depth:.2f} loops" in diagnosis.sentence


def test_a_target_out_of_reach_is_said_and_compared_lower_down() -> None:
    """A fifth of the examples is never right: 95 % is out of reach, about 80 % is not."""
    poor = subject((1, 2, 3, 4, 9), "blind")
    diagnosis = diagnose_subject(poor, REFERENCE, 0.95)
    assert "No loop of it reaches 95 %" in diagnosis.sentence
    assert re.search("misses the target that the reference reaches|worse than the reference by", diagnosis.sentence)
    gap = diagnosis.trajectory_gap
    assert gap is not None
    assert 0.7 < gap.accuracy < 0.8
    assert gap.reached >= 0.95
    assert (gap.first_reaches_target, gap.second_reaches_target) == (0.0, 1.0)
    assert "trajectory" in diagnosis.blamed


def test_missing_the_target_is_blamed_even_where_the_depths_agree_below_it() -> None:
    """Half of the examples are right at once, the others never: below 50 % nothing is slower, above it is hopeless."""
    half = subject((1, 9), "knowing", gated=False)
    diagnosis = diagnose_subject(half, REFERENCE, 0.95)
    assert diagnosis.blamed == ("trajectory",)
    assert "misses the target that the reference reaches" in diagnosis.sentence
    judged = diagnose_subject(REFERENCE, half, 0.95)
    assert (judged.blamed, judged.trajectory_gap, judged.weak_reference) == ((), None, True)


def test_the_interval_is_a_95_percent_interval_of_the_paired_difference() -> None:
    """Against a bootstrap written out: resample examples, sweep both readouts again, take the difference."""
    gap = diagnose_subject(subject(QUICK, "blind"), None, 0.95).readout_gap
    assert gap is not None
    pair = [recording(seed, split, QUICK, "blind") for seed, split in ((1, "validation"), (2, "test"))]
    grids = {name: fine_grid(name, pair[0]) for name in ("gate", gap.second)}
    rng = np.random.default_rng(5)
    differences = []
    for _ in range(300):
        sample = pair[1].take(rng.integers(0, pair[1].num_examples, pair[1].num_examples))
        depths = []
        for name, thresholds in grids.items():
            accuracy, loops = curve(name, thresholds, sample)
            depths.append(loops[accuracy >= 0.95].min())
        differences.append(depths[0] - depths[1])
    low, high = np.percentile(differences, [2.5, 97.5])
    assert (gap.low, gap.high) == pytest.approx((low, high), abs=0.03)
    assert high - low > 0.04  # half as wide would be another interval
    assert gap.value == pytest.approx(gap.first_depth - gap.second_depth)
    assert gap.low < gap.value < gap.high


def test_too_few_examples_blame_nobody() -> None:
    """The same gate on the same trajectory: 1,500 examples show that it is worse, 12 do not."""
    pairs = [recording(seed, split, QUICK, "lazy") for seed, split in ((1, "validation"), (2, "test"))]
    assert diagnose_subject(Subject(*pairs)).blamed == ("readout",)
    few = diagnose_subject(Subject(*(pair.take(np.arange(12)) for pair in pairs)))
    assert few.blamed == ()
    assert few.sentence.startswith("Nothing can be told from 12 test examples")


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


def test_the_room_that_is_left_splits() -> None:
    """Two signals that are worth nothing alone, and everything together: the learned rule finds it, and says so."""

    def pair(seed: int, split: str) -> ls.Trajectory:
        rng = np.random.default_rng(seed)
        rows = 3000
        early = rng.random(rows) < 0.5  # right at loop 1, else at loop 3
        coin = rng.random(rows) < 0.5
        right = np.stack([early, early, np.ones(rows, dtype=bool)], axis=1)
        labels = rng.integers(0, 4, rows)
        answers = np.where(right, labels[:, None], (labels[:, None] + 1) % 4)
        first = {"top1": coin, "margin": coin == early}  # both are coins: only together do they know
        signals = {name: np.stack([0.3 + 0.4 * value, *rng.random((2, rows))], axis=1) for name, value in first.items()}
        return ls.Trajectory(logits=None, predictions=answers, labels=labels, signals=signals, split=split)

    diagnosis = ls.diagnose(pair(1, "validation"), pair(2, "test"), target=0.98)
    room, reachable = diagnosis.room_left, diagnosis.reachable_room
    assert room is not None
    assert reachable is not None
    assert reachable.second.startswith("stopper:")
    assert room.value == pytest.approx(3 - 1.96, abs=0.1)
    assert reachable.value == pytest.approx(3 - 2, abs=0.1)
    assert "Room left: a rule that knows the labels would save" in " ".join(str(diagnosis).split())
    assert re.search(r"saves (0\.9|1\.0)\d loops \[[01]\.", " ".join(str(diagnosis).split()))


@pytest.mark.parametrize(("low", "high"), [(-0.41, 0.0), (-0.41, 0.002), (-0.3, 0.05)])
def test_an_interval_that_ends_within_the_margin_is_no_more_loops(
    low: float, high: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not "0.00 loops fewer", and not open: that it takes more than the margin is excluded."""
    names = ("gate", "margin", 0.95, 0.63, 1.5, 1.5, 0.0, low, high, 1.0, 0.0, 0.0, 1500, 1500)
    gap = Gap(*names)
    assert (gap.is_no_more, gap.is_nothing) == (True, False)
    monkeypatch.setattr("loopscope.analysis.gaps.gap_between", lambda *_: gap)
    diagnosis = diagnose_subject(subject(QUICK, "knowing"), REFERENCE, 0.9)
    assert diagnosis.verdict == "neither"
    said = f"no worse than the reference at 63 % (+0.00 loops [{low:.2f}, {high:+.2f}])"
    assert f"with the readouts that both have, it is {said}" in diagnosis.sentence
    assert f"the model's own gate is {said.replace('the reference', 'margin')}" in diagnosis.sentence
    assert str(diagnosis.against_reference) == said
    assert not replace(gap, high=0.06).is_no_more
    assert not replace(gap, units=20).is_no_more
    assert not replace(gap, second_reaches_target=1.0).is_no_more  # it alone misses the target


def test_of_a_target_out_of_reach_the_readouts_are_those_of_the_gaps() -> None:
    diagnosis = diagnose_subject(subject(QUICK, "knowing"), REFERENCE, 0.9)
    assert diagnosis.compared_readouts == ("gate", "entropy")  # the gate has no part in the trajectory gap
    assert diagnosis.readout_gap is not None
    lower = replace(diagnosis.readout_gap, second="entropy", accuracy=0.6)
    assert replace(diagnosis, readout_gap=lower).compared_readouts == ("entropy", "gate")
    silent = replace(diagnosis, readout_gap=None, trajectory_gap=None, room_left=None)
    assert silent.compared_readouts == (diagnosis.best_readout,)


def test_printed_from_python_it_fits_eighty_columns() -> None:
    first = (1, 1, 1, 2, 9)  # some are never right
    both = [
        recording(seed, split, first, "late").take(np.arange(400)) for seed, split in ((1, "validation"), (2, "test"))
    ]
    model, reference = Subject(*with_stoppers(*both)), Subject(*map(strip, both))
    for target in (0.9, 0.9999):
        diagnosis = diagnose_subject(model, reference, target)
        lines = str(diagnosis).splitlines()
        assert max(map(len, lines)) <= 80
        words = " ".join(str(diagnosis).split())
        assert diagnosis.sentence in words
        assert diagnosis.room_sentence in words
        for gap in (diagnosis.readout_gap, diagnosis.room_left, diagnosis.reachable_room):
            assert gap is not None
            size = f"{gap.value:+z.2f} [{gap.low:+z.2f}, {gap.high:+z.2f}]"
            assert sum(size in line for line in lines) >= 1  # in one piece


@pytest.mark.parametrize("gated", [("knowing", False), (False, "knowing"), ("knowing", "late")])
def test_a_gate_has_no_part_in_the_trajectory_gap(gated: tuple[str | bool, str | bool]) -> None:
    """The same trajectory on both sides, bit for bit: whatever gates they have, nothing lies between them."""
    ours, theirs = (subject(QUICK, gate or "knowing", gated=bool(gate)) for gate in gated)
    diagnosis = diagnose_subject(ours, theirs, 0.95)
    gap = diagnosis.trajectory_gap
    assert (gap.value, gap.low, gap.high) == (0, 0, 0)
    assert "it is as good as the reference at 95 % (as many loops)" in diagnosis.sentence


def signalled(first_right: tuple[int, ...], noise: float, gate: bool) -> Subject:
    """Confidence that tells little (the more noise, the less), beside a gate that knows when the answer is right."""

    def split(seed: int, name: str) -> ls.Trajectory:
        rng = np.random.default_rng(seed)
        rows = 1500
        labels, first = rng.integers(0, 4, rows), rng.choice(first_right, rows)
        right = np.arange(1, LOOPS + 1) >= first[:, None]
        logits = np.zeros((rows, LOOPS, 4))
        answers = np.where(right, labels[:, None], (labels[:, None] + 1) % 4)
        confidence = 3 + right + rng.normal(0, noise, right.shape)
        np.put_along_axis(logits, answers[..., None], np.maximum(confidence, 0.1)[..., None], axis=2)
        return ls.Trajectory(
            logits=logits, labels=labels, gate_logits=np.where(right, 8.0, -8.0) if gate else None, split=name
        )

    return Subject(split(1, "validation"), split(2, "test"), resamples=400)


def test_a_good_gate_does_not_hide_a_bad_trajectory() -> None:
    slower, reference = signalled((1, 1, 2, 3), 1.0, gate=True), signalled((1, 1, 1, 2), 1.0, gate=False)
    diagnosis = diagnose_subject(slower, reference, 0.95)
    assert diagnosis.best_readout == "gate"
    assert slower.curves("gate").depth_at(0.95)[0] < reference.curves(reference.best(0.95)).depth_at(0.95)[0]
    assert diagnosis.blamed == ("trajectory",)
    assert "gate" not in (diagnosis.trajectory_gap.first, diagnosis.trajectory_gap.second)


@pytest.mark.parametrize("target", [0.75, 0.95, None])
def test_a_reference_that_is_clearly_less_accurate_judges_nothing(target: float | None) -> None:
    """At low accuracies it would be the quicker one, at high ones it never arrives: the target would decide."""
    weak = subject((1, 1, 1, 1, 9), "knowing", gated=False)
    diagnosis = diagnose_subject(subject((1, 2, 2, 2), "late"), weak, target)
    assert (diagnosis.blamed, diagnosis.trajectory_gap, diagnosis.weak_reference) == (("readout",), None, True)
    said = "the reference is not good enough to judge its trajectory by: at its best loop it is right in 8"
    assert said in diagnosis.sentence
    other_way = diagnose_subject(weak, REFERENCE, target)
    assert ("trajectory" in other_way.blamed) == (target != 0.75)  # an accuracy that both reach was asked for


def test_a_gap_is_told_beside_the_room_that_is_left() -> None:
    names = ("gate", "margin", 0.9, 0.9, 2.6, 2.5, 0.10, 0.07, 0.13, 1.0, 1.0, 1.0, 1500, 1500)
    gap = Gap(*names)
    room = replace(gap, first="margin", second="labels known", value=1.31)
    level = REFERENCE.level(ls.Target(0.9))
    found = Finding(level, gap, None, room, "readout", behind=False, weak_reference=False)
    sentence = verdict_sentence(subject(QUICK, "lazy"), None, found)
    assert sentence.startswith("The readout is to blame, but only a little: the model's own gate is slightly worse ")
    assert "than margin by 0.10 loops [0.07, 0.13] at 90 %, where a rule that knows the labels would save " in sentence
    assert "little" not in verdict_sentence(subject(QUICK, "lazy"), None, replace(found, room=replace(room, value=0.9)))


def test_without_a_gate_only_the_trajectory_is_judged() -> None:
    alike = diagnose_subject(subject(QUICK, "knowing", gated=False), REFERENCE, 0.95)
    assert alike.verdict == "neither"
    assert alike.sentence.startswith("The trajectory is not to blame: with the readouts that both have, it is as good")


@pytest.mark.parametrize(
    ("low", "high", "first_reaches", "expected"),
    [
        (0.01, 0.04, 1.0, (True, False)),
        (-0.04, 0.05, 1.0, (True, False)),
        (0.01, 0.06, 1.0, (False, True)),
        (-0.20, 0.06, 1.0, (False, False)),
        (0.01, 0.04, 0.0, (False, True)),
    ],
)
def test_within_the_margin_two_are_equivalent(
    low: float, high: float, first_reaches: float, expected: tuple[bool, bool]
) -> None:
    gap = Gap("gate", "margin", 0.9, 0.9, 1.5, 1.5, 0.02, low, high, 1.0, first_reaches, 1.0, 1500, 1500)
    assert (gap.is_equivalent, gap.blames) == expected
