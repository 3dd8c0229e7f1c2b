"""Is the trajectory to blame, or the readout? Four gaps in average loops at a target accuracy X, with intervals.

- readout gap: D@X of the model's own gate minus D@X of the best readout on the same trajectory;
- trajectory gap: D@X of the best readout here minus the same on a reference trajectory;
- room left: D@X of the best readout minus that of the cheapest rule that knows the labels;
- reachable room, a part of it: D@X of the best readout minus that of the better learned stopper, which chooses exits by
  all recorded signals together (`exits.stopper`). What is left after that only the labels know, as far as could be
  learned from the validation data.

X is one point below full depth on validation data, unless it is given; for the trajectory gap below the lower of both
models. Where X is out of reach, the comparison moves down to the highest whole percent that both sides reach, but never
to chance. The best readout is the one that validation data choose. A part is blamed only where its interval excludes
zero, or where it alone misses X; a model that is not above chance gets no verdict. Thresholds are swept on a grid so
fine that its steps do not matter.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import takewhile

import numpy as np

from loopscope.analysis.bootstrap import (
    ENOUGH,
    RESAMPLES,
    SEED,
    Curves,
    Sums,
    interval,
    resampled_curves,
    resampled_label_aware,
)
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
    target_level,
)
from loopscope.errors import UserError
from loopscope.exits.signals import STOPPER, own_name
from loopscope.exits.splits import check_calibration, is_pair
from loopscope.exits.sweep import curve
from loopscope.exits.thresholds import available_readouts, fine_grid
from loopscope.trajectory import Trajectory

_FEWEST = 30
"""With fewer test examples than this a bootstrap interval says nothing."""
NO_VERDICT = "no verdict"
_COLUMNS = ["gap", "between", "loops [95 % interval]", "at"]
_REACHED = ["both reach it", "each reaches the target"]
"""Shares of the resamples."""


@dataclass(frozen=True)
class Gap:
    """A difference in average loops; positive means that the first is the slower one."""

    first: str
    second: str
    target: float  # the accuracy that is sought
    accuracy: float  # at which the two are compared
    first_depth: float
    second_depth: float
    value: float
    low: float
    high: float
    reached: float  # share of resamples in which both reach that accuracy
    first_reaches_target: float  # share of resamples in which the first reaches the target
    second_reaches_target: float
    examples: int

    @property
    def sign(self) -> int:
        """1 or -1 where the interval excludes zero, or where only one of them reaches the target; else 0."""
        if self.examples < _FEWEST:
            return 0
        reaches_more = (self.second_reaches_target >= ENOUGH) - (self.first_reaches_target >= ENOUGH)
        missed = min(self.first_reaches_target, self.second_reaches_target) <= 1 - ENOUGH
        if reaches_more and missed:
            return int(reaches_more)
        return 1 if self.low > 0 else -1 if self.high < 0 else 0

    @property
    def is_nothing(self) -> bool:
        """Whether the two take as many loops: the whole interval is zero, to the hundredths that are printed."""
        return self.examples >= _FEWEST and self.sign == 0 and max(abs(self.low), abs(self.high)) < 0.005


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
    def room_sentence(self) -> str:
        """How the room that is left splits; nothing where it cannot be told."""
        room, reachable = self.room_left, self.reachable_room
        if room is None or reachable is None or self.verdict == NO_VERDICT or room.accuracy != reachable.accuracy:
            return ""
        rule = f"the rule learned on all signals ({own_name(reachable.second)})"
        size = f"{reachable.value:+z.2f} loops [{reachable.low:+z.2f}, {reachable.high:+z.2f}]"
        found = f"{rule} reaches {size} of them" if reachable.sign > 0 else f"{rule} reaches none for certain ({size})"
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
            shares = f"{gap.first_reaches_target:.1%}, {gap.second_reaches_target:.1%} ({percent_text(gap.target)})"
            rows.append([*row, *([] if always else [f"{gap.reached:.1%}", shares])])
        return rows

    def __str__(self) -> str:
        table = self.table
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in table]
        return "\n".join(
            line.rstrip() for line in (self.sentence, *filter(None, [self.target_sentence, self.room_sentence]), *lines)
        )

    __repr__ = __str__


class Subject:
    """A model as the diagnosis sees it: its frontiers, chosen on validation and resampled on test data."""

    def __init__(self, validation: Trajectory, test: Trajectory, resamples: int = RESAMPLES, seed: int = SEED) -> None:
        check_calibration(validation, test)
        self.validation, self.test = validation, test
        found = [name for name in available_readouts(validation, test) if name != "oracle"]
        self.readouts = [name for name in found if not name.startswith(STOPPER)]
        self.stoppers = [name for name in found if name.startswith(STOPPER)]
        self.ceiling = float(test.correct.mean(axis=0).max())
        self.chance = chance(test, validation)
        self.has_gate = "gate" in self.readouts
        self.label_aware = resampled_label_aware(test, resamples, seed)
        self._resamples, self._seed = resamples, seed
        self._curves: dict[str, Curves] = {}
        self._grids = {name: fine_grid(name, validation) for name in found}
        self._validation = {name: curve(name, self._grids[name], validation) for name in found}

    def curves(self, readout: str) -> Curves:
        if readout not in self._grids:
            raise UserError(f"The recordings do not have the readout '{readout}'; they have {', '.join(self._grids)}.")
        if readout not in self._curves:
            thresholds = self._grids[readout]
            self._curves[readout] = resampled_curves(readout, thresholds, self.test, self._resamples, self._seed)
        return self._curves[readout]

    def level(self, target: Target) -> TargetLevel:
        return target_level(target, self.validation, self.test)

    def best(self, accuracy: float, among: Sequence[str] | None = None) -> str:
        """The readout with the least D@X on validation data; where none reaches X, the most accurate one.

        Of single signals, unless others are named: learned stoppers have a gap of their own.
        """
        names = self.readouts if among is None else among
        depths = {name: _depth(self._validation[name], accuracy) for name in names}
        if min(depths.values()) < np.inf:
            return min(depths, key=depths.__getitem__)
        return max(names, key=lambda name: float(self._validation[name][0].max()))


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
    subject = Subject(validation, test)
    if not without_verdict(validation, test, subject.level(as_target(target))):
        subject = Subject(*with_stoppers(validation, test))
    if reference is None:
        return diagnose_subject(subject, None, target)
    if not is_pair(reference):
        raise UserError("A reference is two recordings of a model, as in reference=(validation, test).")
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
    own, best = partial(_curve_depth, subject, "gate"), partial(_best_depth, subject, "")
    readout = _gap(level.accuracy, own, best, subject, subject.chance) if subject.has_gate else None
    trajectory = None
    if reference is not None and reference is not subject:
        both = min(level.accuracy, reference.level(level.target).accuracy)
        floor = max(subject.chance, reference.chance)
        trajectory = _gap(both, best, partial(_best_depth, reference, " on the reference"), subject, floor)
    known = partial(_label_aware_depth, subject)
    room = _gap(level.accuracy, best, known, subject, subject.chance)
    reachable = None
    if subject.stoppers:
        reachable = _gap(level.accuracy, best, partial(_stopper_depth, subject), subject, subject.chance)
    parts = {"readout": readout, "trajectory": trajectory}
    blamed = tuple(name for name, gap in parts.items() if gap is not None and gap.sign > 0)
    decided = all(gap is not None and (gap.sign or gap.is_nothing or gap.first == gap.second) for gap in parts.values())
    verdict = " and ".join(blamed) or ("neither" if decided else "cannot tell")
    sentence = _sentence(subject, reference, level, readout, trajectory, verdict)
    return Diagnosis(*found, readout, trajectory, room, reachable, blamed, verdict, sentence)


def without_verdict(validation: Trajectory, test: Trajectory, level: TargetLevel) -> str:
    """The sentence on why nothing can be said of a model; nothing where it can."""
    reason = _without_verdict(validation, test, level)
    return f"No verdict: {reason}." if reason else ""


def _without_verdict(validation: Trajectory, test: Trajectory, level: TargetLevel) -> str:
    """The loop that validation prefers is tested: a model that is right early and wrong at the end has a trajectory."""
    loop, guessed = best_loop(validation), chance(test, validation)
    if not is_above_chance(test, loop, validation):
        where = "at full depth" if loop == test.num_loops else f"at loop {loop}, its best on validation data,"
        right = f"{test.correct[:, loop - 1].mean():.1%} of {test.num_examples:,} test examples"
        return (
            f"{where} it is right in {right}, and chance is {percent_text(guessed)} (it is not above chance by "
            "an exact binomial test at 5 %)"
        )
    if test.num_loops == 1:
        return "with a single loop there is no exit to choose"
    if level.accuracy <= guessed:
        return f"the target, {percent_text(level.accuracy)}, is not above chance ({percent_text(guessed)})"
    return ""


def depth_gap(target: float | Target | None, first: tuple[Subject, str], second: tuple[Subject, str]) -> Gap | None:
    """D@X of one readout minus that of another, each on its own model, resampled together.

    At the highest accuracy, from the target (the lower of both models' own) down to chance, that both reach.
    """
    accuracy = min(subject.level(as_target(target)).accuracy for subject, _ in (first, second))
    floor = max(subject.chance for subject, _ in (first, second))
    return _gap(accuracy, partial(_curve_depth, *first), partial(_curve_depth, *second), first[0], floor)


def _curve_depth(subject: Subject, readout: str, accuracy: float) -> tuple[str, Sums]:
    return readout, subject.curves(readout).depth_at(accuracy)


def _best_depth(subject: Subject, where: str, accuracy: float) -> tuple[str, Sums]:
    name = subject.best(accuracy)
    return name + where, subject.curves(name).depth_at(accuracy)


def _stopper_depth(subject: Subject, accuracy: float) -> tuple[str, Sums]:
    name = subject.best(accuracy, subject.stoppers)
    return name, subject.curves(name).depth_at(accuracy)


def _label_aware_depth(subject: Subject, accuracy: float) -> tuple[str, Sums]:
    return "labels known", subject.label_aware.depth_at(accuracy)


_Side = Callable[[float], tuple[str, Sums]]


def _gap(target: float, first: _Side, second: _Side, subject: Subject, floor: float = 0.0) -> Gap | None:
    """The gap at the highest accuracy, from the target down to `floor`, that both reach in nearly every resample."""
    at_target: tuple[float, float] | None = None
    for accuracy in _accuracies(target, floor):
        (first_name, a), (second_name, b) = first(accuracy), second(accuracy)
        at_target = at_target or (_share(a), _share(b))
        size = min(len(a), len(b))
        difference = a[:size] - b[:size]
        if _share(difference) < ENOUGH or np.isnan(difference[0]):
            continue
        bounds = interval(difference)
        assert bounds is not None
        numbers = (float(a[0]), float(b[0]), float(difference[0]), bounds.low, bounds.high)
        shares = (bounds.reached, *at_target)
        return Gap(first_name, second_name, target, accuracy, *numbers, *shares, subject.test.num_examples)
    return None


def _share(depths: Sums) -> float:
    """The share of resamples that have a depth."""
    return float(np.mean(~np.isnan(depths[1:])))


def _accuracies(target: float, floor: float) -> Iterator[float]:
    below = (whole / 100 for whole in range(int(np.ceil(100 * target)) - 1, 0, -1))
    yield from takewhile(lambda accuracy: accuracy > floor, (target, *below))


def _depth(points: tuple[Sums, Sums], accuracy: float) -> float:
    reached = points[1][points[0] >= accuracy - 1e-9]
    return float(reached.min()) if len(reached) else np.inf


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
        ceiling = f" No loop of it reaches {percent_text(level.accuracy)} (at best {subject.ceiling:.1%})."
    if harm := harm_of_depth(subject.validation):
        ceiling += f" {harm}"
    if reference is subject and not subject.has_gate:
        best = subject.best(level.accuracy)
        depth = subject.curves(best).depth_at(level.reached)[0]
        reached = f" With {best} it reaches {percent_text(level.reached)} in {depth:.2f} loops on average."
        return f"It is the reference, and has no gate of its own.{'' if np.isnan(depth) else reached}{ceiling}"
    findings = "; ".join(_findings(subject, reference, readout, trajectory, verdict))
    if subject.test.num_examples < _FEWEST:
        head = f"Nothing can be told from {subject.test.num_examples} test examples"
    else:
        head = _HEADS[verdict]
    return f"{head}: {findings}.{ceiling}"


def _findings(
    subject: Subject, reference: Subject | None, readout: Gap | None, trajectory: Gap | None, verdict: str
) -> tuple[str, str]:
    """What is said of both parts, that first which is the reason for the verdict."""
    on_readout, on_trajectory = _on_readout(subject, readout), _on_trajectory(subject, reference, trajectory)
    open_trajectory = trajectory is None or not (trajectory.sign or trajectory.is_nothing)
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
        return "it has no gate of its own to compare with"
    if gap is None:
        return "its gate and the best readout reach no accuracy above chance together"
    if gap.first == gap.second:
        return f"validation data choose its own gate as the best readout at {percent_text(gap.accuracy)}"
    return _compared("its own gate", gap.second, gap, "whether its own gate is worse")


def _on_trajectory(subject: Subject, reference: Subject | None, gap: Gap | None) -> str:
    if reference is None:
        return "without a reference the trajectory gap cannot be identified"
    if reference is subject:
        return "its trajectory is the reference itself"
    if gap is None:
        return "it reaches no accuracy above chance together with the reference"
    return _compared("with its best readout it", "the reference", gap, "whether its trajectory is worse")


def _compared(name: str, other: str, gap: Gap, question: str) -> str:
    at = percent_text(gap.accuracy)
    size = f"{gap.value:+z.2f} loops [{gap.low:+z.2f}, {gap.high:+z.2f}]"
    if gap.is_nothing:
        return f"{name} takes as many loops as {other} to reach {at}"
    if gap.sign == 0:
        return f"{question} than {other} is open ({size} at {at})"
    if gap.low > 0 or gap.high < 0:
        low, high = sorted((abs(gap.low), abs(gap.high)))
        more = "more" if gap.low > 0 else "fewer"
        return f"{name} takes {abs(gap.value):.2f} loops [{low:.2f}, {high:.2f}] {more} than {other} to reach {at}"
    misses, reaches = (name, other) if gap.sign > 0 else (other, name)
    return f"{misses} misses the target that {reaches} reaches (at {at}, which both reach: {size})"
