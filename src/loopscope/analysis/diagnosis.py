"""Is the trajectory to blame, or the readout? Four gaps in average loops at a target accuracy X, with intervals.

- readout gap: D@X of the model's own gate minus D@X of the best readout on the same trajectory;
- trajectory gap: D@X of the best readout here minus the same on a reference trajectory;
- room left: D@X of the best readout minus that of the cheapest rule that knows the labels;
- reachable room, a part of it: D@X of the best readout minus that of the better learned stopper, which chooses exits by
  all recorded signals together (`exits.stopper`). It is a lower bound: what could be learned from the validation data.

X is one point below full depth on validation data, unless it is given; for the trajectory gap below the lower of both
models. Where X is out of reach, the comparison is made lower down (`gaps`). The best readout is the one that validation
data choose. A part is blamed only where its interval excludes zero, or where it alone misses X; a model that is not
above chance gets no verdict. Thresholds are swept on a grid so fine that its steps do not matter.
"""

from dataclasses import dataclass
from functools import partial

import numpy as np
from scipy.stats import rankdata

from loopscope.analysis.gaps import (
    FEWEST,
    Gap,
    Subject,
    best_way,
    gap_between,
    label_aware_way,
    readout_way,
    stopper_way,
)
from loopscope.analysis.plain_text import aligned, broken
from loopscope.analysis.stoppers import with_stoppers
from loopscope.analysis.targets import (
    Target,
    TargetLevel,
    as_target,
    best_loop,
    chance,
    harm_of_depth,
    is_above_chance,
    percent_text,
)
from loopscope.errors import UserError
from loopscope.exits.recorded import counted_in
from loopscope.exits.recorded_signals import has_signal
from loopscope.exits.signals import own_name
from loopscope.exits.splits import is_pair
from loopscope.trajectory import Trajectory

NO_VERDICT = "no verdict"
_COLUMNS = ["gap", "between", "loops [95 % interval]", "at"]
_REACHED = ["both reach it", "each reaches the target"]
"""Shares of the resamples."""
_INVERTED = 0.35
"""A gate that knows nothing has 0.5; one with its sign flipped has what is missing to 1 from a good one's."""
_ALIKE = 0.05
"""Loops: less than what the training of another seed changes."""


@dataclass(frozen=True, repr=False)
class Diagnosis:
    target: TargetLevel
    chance: float
    best_readout: str
    readout_gap: Gap | None  # None without a gate, or without a verdict
    trajectory_gap: Gap | None  # None without a reference
    room_left: Gap | None  # None only where nothing above chance is ever reached together
    reachable_room: Gap | None  # None where no stopper could be learned
    blamed: tuple[str, ...]  # of 'readout' and 'trajectory'
    verdict: str  # the blamed parts, 'neither', 'cannot tell', or 'no verdict'
    sentence: str

    @property
    def gaps(self) -> dict[str, Gap | None]:
        return {
            "readout gap": self.readout_gap,
            "trajectory gap": self.trajectory_gap,
            "room left": self.room_left,
            "reachable room": self.reachable_room,
        }

    @property
    def compared_readouts(self) -> tuple[str, ...]:
        """The best readouts that the gaps are of: that at the target, or where it is out of reach those lower down."""
        ours = [self.readout_gap and self.readout_gap.second, self.trajectory_gap and self.trajectory_gap.first]
        ours += [self.room_left and self.room_left.first]
        return tuple(dict.fromkeys(name for name in ours if name)) or (self.best_readout,)

    @property
    def room_sentence(self) -> str:
        """How the room that is left splits; nothing where it cannot be told."""
        room, reachable = self.room_left, self.reachable_room
        if room is None or reachable is None or self.verdict == NO_VERDICT or room.accuracy != reachable.accuracy:
            return ""
        rule = f"a rule learned from all signals ({own_name(reachable.second)})"
        if reachable.sign > 0:
            saved = f"{reachable.value:z.2f} loops [{reachable.low:z.2f}, {reachable.high:z.2f}]"
            found = f"{rule} saves {saved} of them"
        elif reachable.sign < 0:
            found = f"{rule} saves nothing: it takes more ({_size(reachable)})"
        else:
            found = f"{rule} saves nothing measurable ({_size(reachable)})"
        return (
            f"Room left: a rule that knows the labels would save {room.value:.2f} loops at "
            f"{percent_text(room.accuracy)}; {found}."
        )

    @property
    def target_sentence(self) -> str:
        """What the target is, and whether the gaps are at a lower accuracy; nothing without a verdict."""
        if self.verdict == NO_VERDICT:
            return ""
        lower = any(gap is not None and gap.accuracy < gap.target for gap in self.gaps.values())
        text = "Gaps are at the highest whole percent that both sides reach in 95 % of the resamples, below the target."
        return " ".join(filter(None, (self.target.sentence, text if lower else "")))

    @property
    def table(self) -> list[list[str]]:
        """The gaps, a row each, below the names of the columns; which resamples reach what, where not all do."""
        found = {name: gap for name, gap in self.gaps.items() if gap is not None}
        always = all(
            min(gap.reached, gap.first_reaches_target, gap.second_reaches_target) == 1 for gap in found.values()
        )
        rows = [[*_COLUMNS, *([] if always else _REACHED)]] if found else []
        for name, gap in found.items():
            row = [
                name.removesuffix(" gap"),
                f"{gap.first} ({gap.first_depth:.2f}) - {gap.second} ({gap.second_depth:.2f})",
                f"{gap.value:+z.2f} [{gap.low:+z.2f}, {gap.high:+z.2f}]",
                percent_text(gap.accuracy),
            ]
            first, second = _percent(gap.first_reaches_target), _percent(gap.second_reaches_target)
            shares = f"{first}, {second} ({percent_text(gap.target)})"
            rows.append([*row, *([] if always else [_percent(gap.reached), shares])])
        return rows

    def __str__(self) -> str:
        sentences = filter(None, (self.sentence, self.target_sentence, self.room_sentence))
        return "\n".join((*map(broken, sentences), *aligned(self.table)))

    __repr__ = __str__


def diagnose(
    validation: Trajectory,
    test: Trajectory,
    reference: tuple[Trajectory, Trajectory] | None = None,
    target: float | Target | None = None,
) -> Diagnosis:
    """Which part of a model is to blame, its trajectory or its readout?

    Thresholds, the best readout and the target (without one: 1 point below full depth) come from `validation`, depths
    from `test`. `reference`: the same two recordings of the model whose trajectory is the measure.
    """
    if reference is not None and not is_pair(reference):
        raise UserError("A reference is two recordings of a model, as in reference=(validation, test).")
    subject = Subject(validation, test)
    if not without_verdict(validation, test, subject.level(as_target(target))):
        subject = Subject(*with_stoppers(validation, test))
    if reference is None:
        return diagnose_subject(subject, None, target)
    same = reference[0] is validation and reference[1] is test
    return diagnose_subject(subject, subject if same else Subject(*reference), target)


def diagnose_subject(
    subject: Subject, reference: Subject | None = None, target: float | Target | None = None
) -> Diagnosis:
    """The gaps of a model, and which part they blame."""
    if reference is not None:
        classes = {subject.test.num_classes, reference.test.num_classes} - {None}
        if len(classes) > 1:
            raise UserError(
                "The model and its reference answer with different numbers of classes; compare like with like."
            )
    level = subject.level(as_target(target))
    found = (level, subject.chance, subject.best(level.accuracy))
    if sentence := without_verdict(subject.validation, subject.test, level):
        return Diagnosis(*found, None, None, None, None, (), NO_VERDICT, sentence)
    own, best = partial(readout_way, subject, "gate"), partial(best_way, subject, "")
    readout = gap_between(level.accuracy, own, best, subject, subject.chance) if subject.has_gate else None
    trajectory = None
    if reference is not None and reference is not subject:
        both = min(level.accuracy, reference.level(level.target).accuracy)
        floor = max(subject.chance, reference.chance)
        trajectory = gap_between(both, best, partial(best_way, reference, " on the reference"), subject, floor)
    parts = {"readout": readout, "trajectory": trajectory}
    blamed = tuple(name for name, gap in parts.items() if gap is not None and gap.sign > 0)
    decided = all(gap is not None and (gap.sign or gap.is_no_more or gap.first == gap.second) for gap in parts.values())
    verdict = " and ".join(blamed) or ("neither" if decided else "cannot tell")
    sentence = _sentence(subject, reference, level, readout, trajectory, verdict)
    room = rooms(subject, level)
    return Diagnosis(*found, readout, trajectory, room.room_left, room.reachable_room, blamed, verdict, sentence)


@dataclass(frozen=True)
class Rooms:
    """What other rules could save of a model's best readout."""

    room_left: Gap | None  # None only where nothing above chance is ever reached together
    reachable_room: Gap | None  # None where no stopper could be learned


def rooms(subject: Subject, level: TargetLevel) -> Rooms:
    best = partial(best_way, subject, "")
    room = gap_between(level.accuracy, best, partial(label_aware_way, subject), subject, subject.chance)
    if not subject.stoppers:
        return Rooms(room, None)
    return Rooms(room, gap_between(level.accuracy, best, partial(stopper_way, subject), subject, subject.chance))


def without_verdict(validation: Trajectory, test: Trajectory, level: TargetLevel) -> str:
    """The sentence on why nothing can be said of a model; nothing where it can."""
    reason = _without_verdict(validation, test, level)
    return f"No verdict: {reason}." if reason else ""


def _without_verdict(validation: Trajectory, test: Trajectory, level: TargetLevel) -> str:
    """The loop that validation prefers is tested: a model that is right early and wrong at the end has a trajectory."""
    loop, guessed = best_loop(validation), chance(test, validation)
    if not is_above_chance(test, loop, validation):
        where = "at full depth" if loop == test.num_loops else f"at loop {loop}, its best on validation data,"
        right = f"{_percent(test.correct[:, loop - 1].mean())} of {counted_in(test, 'test')}"
        return (
            f"{where} it is right in {right}, and chance, or always the commonest answer, in "
            f"{percent_text(guessed)} (it is not above chance by "
            "an exact binomial test at 5 %)"
        )
    if test.num_loops == 1:
        return "with a single loop there is no exit to choose"
    if level.accuracy <= guessed:
        return f"the target, {percent_text(level.accuracy)}, is not above chance ({percent_text(guessed)})"
    return ""


def _sentence(
    subject: Subject,
    reference: Subject | None,
    level: TargetLevel,
    readout: Gap | None,
    trajectory: Gap | None,
    verdict: str,
) -> str:
    ceiling = ""
    if subject.ceiling < level.accuracy - 1e-9:
        ceiling = f" No loop of it reaches {percent_text(level.accuracy)} (at best {_percent(subject.ceiling)})."
    if harm := harm_of_depth(subject.validation):
        ceiling += f" {harm}"
    if reference is subject and not subject.has_gate:
        best = subject.best(level.accuracy)
        depth = subject.curves(best).depth_at(level.reached)[0]
        reached = f" With {best} it reaches {percent_text(level.reached)} in {depth:.2f} loops on average."
        return f"It is the reference, and has no gate of its own.{'' if np.isnan(depth) else reached}{ceiling}"
    if readout is not None and readout.sign > 0 and gate_is_inverted(subject.test):
        ceiling += (
            " Its halt probability is higher where loop 1 is wrong than where it is right: was the sign of gate_logits "
            "flipped?"
        )
    findings = "; ".join(_findings(subject, reference, readout, trajectory, verdict))
    if subject.test.num_units < FEWEST:
        what = "test example" if subject.test.sequences is None else "test sequence"
        head = f"Nothing can be told from {subject.test.num_units} {what}{'s' * (subject.test.num_units != 1)}"
    elif reference is None and verdict == "cannot tell" and readout is not None:
        head = "The readout is not found to be at fault"
    else:
        head = _HEADS[verdict]
    return f"{head}: {findings}.{ceiling}"


def gate_is_inverted(test: Trajectory) -> bool:
    """Whether halting is clearly likelier where loop 1 is wrong, as it is if the signs of the gate's logits are."""
    if test.gate_logits is None:
        return False
    halts, right = test.gate_logits[:, 0], test.correct[:, 0]
    if min(right.sum(), (~right).sum()) < FEWEST:
        return False
    ranks = rankdata(halts)
    above = (ranks[right].mean() - (right.sum() + 1) / 2) / (~right).sum()  # the chance that a right one is above
    return bool(above < _INVERTED)


def _size(gap: Gap) -> str:
    return f"{gap.value:+z.2f} loops [{gap.low:+z.2f}, {gap.high:+z.2f}]"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _findings(
    subject: Subject, reference: Subject | None, readout: Gap | None, trajectory: Gap | None, verdict: str
) -> tuple[str, str]:
    """What is said of both parts, that first which is the reason for the verdict."""
    on_readout, on_trajectory = _on_readout(subject, readout), _on_trajectory(subject, reference, trajectory)
    open_trajectory = reference is not None and (trajectory is None or not (trajectory.sign or trajectory.is_no_more))
    if verdict == "trajectory" or (verdict == "cannot tell" and open_trajectory):
        return on_trajectory, on_readout
    return on_readout, on_trajectory


_HEADS = {
    "readout": "The readout is to blame",
    "trajectory": "The trajectory is to blame",
    "readout and trajectory": "Both parts are to blame",
    "neither": "Neither part is to blame",
    "cannot tell": "Whether a part is to blame cannot be told",
}


def _on_readout(subject: Subject, gap: Gap | None) -> str:
    if not subject.has_gate:
        recordings = {"validation": subject.validation, "test": subject.test}
        lacking = [split for split, each in recordings.items() if not has_signal("gate", each)]
        if len(lacking) == 1:
            return f"the {lacking[0]} recording alone has no gate logits, and to judge the gate takes both"
        return "the model has no gate of its own to compare with"
    if gap is None:
        return "the model's gate and the best readout reach no accuracy above chance together"
    if gap.first == gap.second:
        return f"validation data choose the model's own gate as the best readout at {percent_text(gap.accuracy)}"
    return _compared("the model's own gate", gap.second, gap, "whether the model's own gate is worse")


def _on_trajectory(subject: Subject, reference: Subject | None, gap: Gap | None) -> str:
    if reference is None:
        return "without a reference the trajectory cannot be judged"
    if reference is subject:
        return "its trajectory is the reference itself"
    if gap is None:
        return "it reaches no accuracy above chance together with the reference"
    return _compared("with its best readout it", "the reference", gap, "whether its trajectory is worse")


def _compared(name: str, other: str, gap: Gap, question: str) -> str:
    at = percent_text(gap.accuracy)
    size = _size(gap)
    if gap.is_nothing:
        return f"{name} takes as many loops as {other} to reach {at}"
    if gap.sign == 0 and gap.units >= FEWEST and max(abs(gap.low), abs(gap.high)) <= _ALIKE:
        return f"{name} takes about as many loops as {other} to reach {at} ({size})"
    if gap.is_no_more and (gap.sign == 0 or gap.high < 0):  # else one of them misses the target
        return f"{name} takes no more loops than {other} to reach {at} ({size})"
    if gap.sign == 0:
        return f"{question} than {other} is open ({size} at {at})"
    if gap.low > 0 or gap.high < 0:
        low, high = sorted((abs(gap.low), abs(gap.high)))
        more = "more" if gap.low > 0 else "fewer"
        return f"{name} takes {abs(gap.value):.2f} loops [{low:.2f}, {high:.2f}] {more} than {other} to reach {at}"
    misses, reaches = (name, other) if gap.sign > 0 else (other, name)
    return f"{misses} misses the target that {reaches} reaches (at {at}, which both reach: {size})"
