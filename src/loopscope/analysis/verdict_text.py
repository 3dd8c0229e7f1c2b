"""How does a report word what a diagnosis found? The sentence of a verdict, and a gap in words."""

from dataclasses import dataclass

import numpy as np
from scipy.stats import rankdata

from loopscope.analysis.bootstrap import Estimate
from loopscope.analysis.formatting import percent_text, rounded_percent
from loopscope.analysis.gaps import MIN_UNITS, Gap, Subject
from loopscope.analysis.targets import TargetLevel, harm_of_depth
from loopscope.readouts.replay import gate_readout, has_signal
from loopscope.trajectory import Trajectory

_HEADS = {
    "readout": "The readout is to blame",
    "trajectory": "The trajectory is to blame",
    "readout and trajectory": "Both parts are to blame",
    "neither": "Neither part is to blame",
    "cannot tell": "Whether a part is to blame is open",
}
UNDECIDED = "cannot be told with these data"
_MAX_INVERTED = 0.35
"""A gate that knows nothing has 0.5; a good gate with a flipped sign has 1 minus its value."""
_SMALL_SHARE = 0.1
"""The share of the room left below which a gap is to blame for little."""


@dataclass(frozen=True)
class GapWords:
    """A gap in words: plain words without terms of the glossary, and its figures."""

    words: str
    figures: str

    def __str__(self) -> str:
        return f"{self.words} {self.figures}"


def gap_words(gap: Gap, other: str, room: Gap | None) -> GapWords:
    """Say in words what a gap means, for terminal and page; `other` names the compared readout or model.

    Worse by little beside the `room` that is left is slightly worse.
    """
    at, size = percent_text(gap.accuracy), with_bounds(gap, unit=" loops")
    if gap.first == gap.second:
        return GapWords("the best readout", f"at {at} (by validation data)")
    if gap.is_nothing:
        return GapWords(f"as good as {other}", f"at {at} (as many loops)")
    if gap.is_equivalent or (gap.is_no_more and gap.sign == 0):
        return GapWords(f"{'as good as' if gap.is_equivalent else 'no worse than'} {other}", f"at {at} ({size})")
    if gap.sign == 0:
        return GapWords(UNDECIDED, f"({size} against {other} at {at})")
    words = f"{'worse' if gap.sign > 0 else 'better'} than {other}"
    if gap.low > 0 or gap.high < 0:
        low, high = sorted((abs(gap.low), abs(gap.high)))
        slightly = "slightly " * is_small_gap(gap, room)
        return GapWords(slightly + words, f"by {abs(gap.value):.2f} loops [{low:.2f}, {high:.2f}] at {at}")
    misses, reaches = ("it", other) if gap.sign > 0 else (other, "it")
    return GapWords(words, f"({misses} misses the target that {reaches} reaches; at {at}, which both reach: {size})")


def is_small_gap(gap: Gap, room: Gap | None) -> bool:
    """Whether a gap is to blame for only a small part of the room left."""
    return room is not None and gap.blames and gap.low > 0 and gap.value < _SMALL_SHARE * room.value


@dataclass(frozen=True)
class Finding:
    """What a diagnosis found, as data for the sentence of its verdict."""

    level: TargetLevel
    readout: Gap | None
    trajectory: Gap | None
    room: Gap | None
    verdict: str
    behind: bool  # whether the best loop is clearly less accurate than the reference's
    weak_reference: bool  # whether it is clearly more accurate

    def against_room(self, gap: Gap) -> str:
        """How large a gap is beside the room that is left at the same accuracy."""
        room = self.room
        if room is None or not gap.blames or room.accuracy != gap.accuracy or room.first not in (gap.first, gap.second):
            return ""
        return f", where a rule that knows the labels would save {room.value:.2f} more than {room.first}"

    @property
    def is_small(self) -> bool:
        """Whether all that is to blame is little beside the room that is left."""
        blamed = [gap for gap in (self.readout, self.trajectory) if gap is not None and gap.blames]
        return bool(blamed) and not self.behind and all(is_small_gap(gap, self.room) for gap in blamed)

    def clause(self, name: str, other: str, gap: Gap, question: str) -> str:
        """A gap as a clause of the verdict's sentence; an undecided gap is a question."""
        found = gap_words(gap, other, self.room)
        return f"{question} {found}" if found.words == UNDECIDED else f"{name} is {found}{self.against_room(gap)}"


def verdict_sentence(subject: Subject, reference: Subject | None, finding: Finding) -> str:
    """The sentence of a verdict: the part to blame, the reason, and other remarks about the model."""
    level, readout, verdict = finding.level, finding.readout, finding.verdict
    remarks = [harm_of_depth(subject.validation)]
    if subject.ceiling < level.accuracy - 1e-9:
        at_best = rounded_percent(subject.ceiling)
        remarks.insert(0, f"No loop of it reaches {percent_text(level.accuracy)} (at best {at_best}).")
    if reference is subject and not subject.has_gate:
        best = subject.best(level.accuracy)
        depth = subject.curves(best).depth_at(level.reached)[0]
        if not np.isnan(depth):
            reached = f"With {best} it reaches {percent_text(level.reached)} in {depth:.2f} loops on average."
            remarks.insert(0, reached)
        return " ".join(filter(None, ("It is the reference, and has no gate of its own.", *remarks)))
    if readout is not None and readout.sign > 0 and gate_is_inverted(subject.test):
        remarks.append(
            "Its halt probability is higher where loop 1 is wrong than where it is right: was the sign of gate_logits "
            "flipped?"
        )
    findings = [_readout_sentence(subject, finding), _trajectory_sentence(subject, reference, finding)]
    trajectory = finding.trajectory
    open_trajectory = reference is not None and (trajectory is None or not (trajectory.sign or trajectory.is_no_more))
    if verdict == "trajectory" or not subject.has_gate or (verdict == "cannot tell" and open_trajectory):
        findings.reverse()  # the reason for the verdict comes first
    head = _HEADS[verdict] + ", but only a little" * finding.is_small
    if subject.test.num_units < MIN_UNITS:
        what = "test example" if subject.test.sequences is None else "test sequence"
        head = f"Nothing can be told from {subject.test.num_units} {what}{'s' * (subject.test.num_units != 1)}"
    elif reference is None and verdict == "cannot tell" and readout is not None:
        head = "The readout is not found to be at fault"
    elif verdict == "neither" and not subject.has_gate:
        head = "The trajectory is not to blame"
    return " ".join(filter(None, (f"{head}: {'; '.join(findings)}.", *remarks)))


def gate_is_inverted(test: Trajectory) -> bool:
    """Whether the gate halts more often if loop 1 is wrong, as with a flipped sign of its logits."""
    if test.gate_logits is None:
        return False
    right = test.correct[:, 0]
    if min(right.sum(), (~right).sum()) < MIN_UNITS:
        return False
    ranks = rankdata(test.gate_logits[:, 0])
    above = (ranks[right].mean() - (right.sum() + 1) / 2) / (~right).sum()  # the chance that a right one is above
    return bool(above < _MAX_INVERTED)


def _readout_sentence(subject: Subject, finding: Finding) -> str:
    """The part of a verdict's sentence about the readout."""
    gap = finding.readout
    if not subject.has_gate:
        recordings = {"validation": subject.validation, "test": subject.test}
        lacking = [
            split for split, recording in recordings.items() if not has_signal(gate_readout(recording), recording)
        ]
        if len(lacking) == 1:
            return f"the {lacking[0]} recording alone has no gate logits, and to judge the gate takes both"
        return "the model has no gate of its own to compare with"
    if gap is None:
        return "the model's gate and the best readout reach no accuracy above chance together"
    return finding.clause("the model's own gate", gap.second, gap, "whether the model's own gate is worse")


def _trajectory_sentence(subject: Subject, reference: Subject | None, finding: Finding) -> str:
    """The part of a verdict's sentence about the trajectory."""
    if reference is None:
        return "without a reference the trajectory cannot be judged"
    if reference is subject:
        return "its trajectory is the reference itself"
    gap = finding.trajectory
    ours, theirs = rounded_percent(subject.ceiling), rounded_percent(reference.ceiling)
    if finding.weak_reference:
        return (
            f"the reference is not good enough to judge its trajectory by: at its best loop it is right in {theirs}, "
            f"this model in {ours}"
        )
    behind = f"at its best loop it is right in {ours}, the reference in {theirs}" if finding.behind else ""
    if gap is None:
        return behind or "it reaches no accuracy above chance together with the reference"
    question = "whether it is slower" if finding.behind else "whether its trajectory is worse"
    compared = finding.clause("with the readouts that both have, it", "the reference", gap, question)
    return "; ".join(filter(None, (behind, compared)))


def with_bounds(found: Gap | Estimate, scale: float = 1.0, unit: str = "") -> str:
    """A gap or an estimate with its 95 % interval, as text."""
    return f"{scale * found.value:+z.2f}{unit} [{scale * found.low:+z.2f}, {scale * found.high:+z.2f}]"
