"""Is the trajectory to blame, or the readout? Four gaps in average loops at a target accuracy X, with intervals.

- readout gap: D@X of the model's own gate minus D@X of the best readout on the same trajectory;
- trajectory gap: D@X of the best readout here minus the same on a reference trajectory, both chosen among the readouts
  that read the two alike; gates are left out, because what a gate adds is the readout's;
- room left: D@X of the best readout minus that of the cheapest rule that knows the labels;
- reachable room, a part of it: D@X of the best readout minus that of the better learned stopper, which chooses exits by
  all recorded signals together (`exits.stopper`). It is a lower bound: what could be learned from the validation data.

X is one point below full depth on validation data, unless it is given; for the trajectory gap below the lower of both
models. Where X is out of reach, the comparison is made lower down (`gaps`). The best readout is the one that validation
data choose. A part is blamed only where its interval excludes zero and goes beyond a margin of equivalence, or where it
alone misses X. A trajectory is also blamed if its best loop is clearly less accurate than the reference's; a reference
that is clearly less accurate than the model cannot judge it. A model that is not above chance gets no verdict.
Thresholds are swept on a grid so fine that its steps do not matter.
"""

from dataclasses import dataclass, replace
from typing import Any

from loopscope.analysis.formatting import aligned, percent_text, rounded_percent, wrapped
from loopscope.analysis.gaps import ACCURACY_MARGIN, Gap, Subject, depth_gap, gap_between
from loopscope.analysis.targets import Target, TargetLevel, as_target, best_loop, chance, is_above_chance, target_level
from loopscope.analysis.verdict_text import UNDECIDED, Finding, GapWords, gap_words, verdict_sentence, with_bounds
from loopscope.certify.tested_data import counted_in_words
from loopscope.errors import UserError
from loopscope.leaks import check_calibration
from loopscope.learned.stopper_fitting import with_stoppers
from loopscope.readouts.signals import own_name
from loopscope.tabular import Tabular
from loopscope.trajectory import Trajectory

NO_VERDICT = "no verdict"
GIVEN = "Intervals resample the test data; the target and the readouts chosen on validation data are taken as given."
_COLUMNS = ["gap", "between", "loops [95 % interval]", "at"]
_SHARE_COLUMNS = ["both reach it", "each reaches the target"]
"""Shares of the resamples."""


@dataclass(frozen=True, repr=False)
class Diagnosis(Tabular):
    """Hold the verdict on a model, and the gaps from which it follows.

    `diagnose` returns a `Diagnosis`. Printing the object shows the verdict and a table of the gaps.

    Parameters
    ----------
    target
        The accuracy at which depths are compared.
    chance
        The accuracy of guessing: at random, or always the most common label.
    best_readout
        The best readout on validation data.
    readout_gap, trajectory_gap, room_left, reachable_room
        Differences in average loops with 95 % intervals; None for a difference that cannot be measured.
    blamed
        The blamed parts: "readout", "trajectory".
    verdict
        The blamed parts in words, "neither", "cannot tell" or "no verdict".
    sentence
        The verdict in a sentence.
    weak_reference
        Whether the reference is clearly less accurate than the model, so that the reference cannot serve as a measure.

    Examples
    --------
    >>> found = ls.diagnose(validation, test)
    >>> found.verdict
    'readout'
    >>> found.to_dict()["gap"]
    ['readout gap', 'room left', 'reachable room']
    """

    target: TargetLevel
    chance: float
    best_readout: str
    readout_gap: Gap | None  # None without a gate, or without a verdict
    trajectory_gap: Gap | None  # None without a reference that can judge
    room_left: Gap | None  # None only where nothing above chance is ever reached together
    reachable_room: Gap | None  # None where no stopper could be learned
    blamed: tuple[str, ...]  # of 'readout' and 'trajectory'
    verdict: str  # the blamed parts, 'neither', 'cannot tell', or 'no verdict'
    sentence: str
    weak_reference: bool = False  # whether the reference is clearly less accurate, so that it cannot judge

    @property
    def gaps(self) -> dict[str, Gap | None]:
        """Return all gaps by name; None for a gap that cannot be measured."""
        return {
            "readout gap": self.readout_gap,
            "trajectory gap": self.trajectory_gap,
            "room left": self.room_left,
            "reachable room": self.reachable_room,
        }

    def to_dict(self) -> dict[str, list[Any]]:
        """List the gaps as columns: loops with a 95 % interval, and the accuracy of the comparison.

        Returns
        -------
        dict[str, list]
            A row for every gap that can be measured.
        """
        known = {name: gap for name, gap in self.gaps.items() if gap is not None}
        columns = ("first", "second", "first_depth", "second_depth", "value", "low", "high", "accuracy", "target")
        return {"gap": list(known), **{name: [getattr(gap, name) for gap in known.values()] for name in columns}}

    @property
    def compared_readouts(self) -> tuple[str, ...]:
        """Return the best readouts that the gaps compare."""
        ours = [self.readout_gap and self.readout_gap.second, self.trajectory_gap and self.trajectory_gap.first]
        ours += [self.room_left and self.room_left.first]
        return tuple(dict.fromkeys(name for name in ours if name)) or (self.best_readout,)

    @property
    def own_gate(self) -> GapWords | None:
        """Compare the model's own gate with the best readout on the same trajectory, in words; None without a gate."""
        gap = self.readout_gap
        return None if gap is None else gap_words(gap, "the best readout", self.room_left)

    @property
    def against_reference(self) -> GapWords | None:
        """Compare the trajectories of the model and of the reference in words; None if no comparison is possible."""
        gap = self.trajectory_gap
        if self.weak_reference:
            return GapWords(UNDECIDED, "(the reference is the less accurate one)")
        if "trajectory" in self.blamed and (gap is None or not gap.blames):
            return GapWords("less accurate than the reference", "at the best loop of each")
        return None if gap is None else gap_words(gap, "the reference", self.room_left)

    @property
    def room_sentence(self) -> str:
        """Describe how many loops a better rule could still save; empty if this saving cannot be measured."""
        room, reachable = self.room_left, self.reachable_room
        if room is None or reachable is None or self.verdict == NO_VERDICT or room.accuracy != reachable.accuracy:
            return ""
        rule = f"a rule learned from all signals ({own_name(reachable.second)})"
        size = with_bounds(reachable, unit=" loops")
        if reachable.sign > 0:
            saved = f"{reachable.value:z.2f} loops [{reachable.low:z.2f}, {reachable.high:z.2f}]"
            found = f"{rule} saves {saved} of them"
        elif reachable.sign < 0:
            found = f"{rule} saves nothing: it takes more ({size})"
        else:
            found = f"{rule} saves nothing measurable ({size})"
        return (
            f"Room left: a rule that knows the labels would save {room.value:.2f} loops at "
            f"{percent_text(room.accuracy)}; {found}."
        )

    @property
    def target_sentence(self) -> str:
        """Describe the target, and the accuracy at which gaps are read if it is lower; empty without a verdict."""
        if self.verdict == NO_VERDICT:
            return ""
        lower = any(gap is not None and gap.accuracy < gap.target for gap in self.gaps.values())
        text = "Gaps are at the highest whole percent that both sides reach in 95 % of the resamples, below the target."
        given = GIVEN if any(self.gaps.values()) else ""
        return " ".join(filter(None, (self.target.sentence, text if lower else "", given)))

    @property
    def table(self) -> list[list[str]]:
        """Return the gaps as rows of text; the first row has the names of the columns."""
        found = {name: gap for name, gap in self.gaps.items() if gap is not None}
        always = all(
            min(gap.reached, gap.first_reaches_target, gap.second_reaches_target) == 1 for gap in found.values()
        )
        rows = [[*_COLUMNS, *([] if always else _SHARE_COLUMNS)]] if found else []
        for name, gap in found.items():
            row = [
                name.removesuffix(" gap"),
                f"{gap.first} ({gap.first_depth:.2f}) - {gap.second} ({gap.second_depth:.2f})",
                with_bounds(gap),
                percent_text(gap.accuracy),
            ]
            first, second = rounded_percent(gap.first_reaches_target), rounded_percent(gap.second_reaches_target)
            shares = f"{first}, {second} ({percent_text(gap.target)})"
            rows.append([*row, *([] if always else [rounded_percent(gap.reached), shares])])
        return rows

    def __str__(self) -> str:
        sentences = filter(None, (self.sentence, self.target_sentence, self.room_sentence))
        return "\n".join((*map(wrapped, sentences), *aligned(self.table)))

    __repr__ = __str__


def diagnose(
    validation: Trajectory,
    test: Trajectory,
    reference: tuple[Trajectory, Trajectory] | None = None,
    target: float | Target | None = None,
) -> Diagnosis:
    """Find which part of a model is to blame: its trajectory or its readout.

    Parameters
    ----------
    validation
        The recording on which thresholds, the best readout and the target are chosen.
    test
        The recording on which depths are measured.
    reference
        Validation and test recordings of the model whose trajectory you compare with (default: none).
    target
        The accuracy to reach, or a `Target` (default: 1 percentage point below the full-depth accuracy).

    Returns
    -------
    Diagnosis
        The verdict, and the gaps with their intervals.

    Raises
    ------
    UserError
        If recordings share examples, are of different models, or have no labels.

    Examples
    --------
    >>> ls.diagnose(validation, test).blamed
    ('readout',)
    """
    subject = subject_with_stoppers(validation, test, target)
    if reference is None:
        return diagnose_subject(subject, None, target)
    same = reference[0] is validation and reference[1] is test
    return diagnose_subject(subject, subject if same else Subject(*reference), target)


def subject_with_stoppers(validation: Trajectory, test: Trajectory, target: float | Target | None) -> Subject:
    """The model to diagnose, with learned stoppers unless no verdict is possible: learning them takes longest."""
    check_calibration(validation, test)
    silent = no_verdict_sentence(validation, test, target_level(as_target(target), validation, test))
    return Subject(validation, test) if silent else Subject(*with_stoppers(validation, test))


def diagnose_subject(
    subject: Subject, reference: Subject | None = None, target: float | Target | None = None
) -> Diagnosis:
    """Measure the gaps of a model and find the part to blame; the reference may be the model itself."""
    if reference is not None and len({subject.test.num_classes, reference.test.num_classes} - {None}) > 1:
        raise UserError("The model and its reference answer with different numbers of classes; compare like with like.")
    level = subject.level(as_target(target))
    best = subject.best(level.accuracy)
    if sentence := no_verdict_sentence(subject.validation, subject.test, level):
        return Diagnosis(level, subject.chance, best, None, None, None, None, (), NO_VERDICT, sentence)
    readout, room = _readout_gap(subject, level), rooms(subject, level)
    against = None if reference is subject else reference
    weak = against is not None and subject.is_more_accurate_than(against)
    target_matters = level.loop is not None or level.accuracy > subject.ceiling - ACCURACY_MARGIN
    behind = against is not None and target_matters and against.is_more_accurate_than(subject)
    trajectory = None if against is None or weak else _trajectory_gap(subject, against, level)
    parts = {"readout": readout, "trajectory": trajectory}
    blamed = tuple(name for name, gap in parts.items() if gap is not None and gap.blames)
    if behind and "trajectory" not in blamed:
        blamed = (*blamed, "trajectory")
    judged = [gap for name, gap in parts.items() if name == "trajectory" or subject.ever_gated]
    decided = all(gap is not None and (gap.sign or gap.is_no_more or gap.first == gap.second) for gap in judged)
    verdict = " and ".join(blamed) or ("neither" if decided else "cannot tell")
    finding = Finding(level, readout, trajectory, room.room_left, verdict, behind, weak)
    return Diagnosis(
        target=level,
        chance=subject.chance,
        best_readout=best,
        readout_gap=readout,
        trajectory_gap=trajectory,
        room_left=room.room_left,
        reachable_room=room.reachable_room,
        blamed=blamed,
        verdict=verdict,
        sentence=verdict_sentence(subject, reference, finding),
        weak_reference=weak,
    )


def _readout_gap(subject: Subject, level: TargetLevel) -> Gap | None:
    """The readout gap: the model's own gate against the best readout on the same trajectory."""
    return None if subject.gate is None else depth_gap(level.target, (subject, [subject.gate]), (subject, []))


def _trajectory_gap(subject: Subject, reference: Subject, level: TargetLevel) -> Gap | None:
    """The trajectory gap: the same readouts on both trajectories, at the lower of both targets."""
    readouts = subject.readouts_shared_with(reference)
    gap = depth_gap(level.target, (subject, readouts), (reference, readouts))
    return None if gap is None else replace(gap, second=f"{gap.second} on the reference")


@dataclass(frozen=True)
class Rooms:
    """The room of a diagnosis: loops that other exit rules could save over a model's best readout."""

    room_left: Gap | None  # None only where nothing above chance is ever reached together
    reachable_room: Gap | None  # None where no stopper could be learned


def rooms(subject: Subject, level: TargetLevel) -> Rooms:
    """Measure the room left (by a rule that knows the labels) and the reachable room (by learned stoppers)."""
    left = gap_between(level.accuracy, subject.exit_by(), subject.exit_by_labels, subject.test, subject.chance)
    learned = depth_gap(level.target, (subject, []), (subject, subject.stoppers)) if subject.stoppers else None
    return Rooms(left, learned)


def no_verdict_sentence(validation: Trajectory, test: Trajectory, level: TargetLevel) -> str:
    """The sentence that explains why a diagnosis has no verdict; empty if a verdict is possible.

    The loop that validation prefers is tested: a model that is right early and wrong at the end has a trajectory.
    """
    loop, guessed = best_loop(validation), chance(test, validation)
    if not is_above_chance(test, loop, validation):
        where = "at full depth" if loop == test.num_loops else f"at loop {loop}, its best on validation data,"
        right = f"{rounded_percent(test.correct[:, loop - 1].mean())} of {counted_in_words(test, 'test')}"
        return (
            f"No verdict: {where} it is right in {right}, and chance, or always the commonest answer, in "
            f"{percent_text(guessed)} (it is not above chance by an exact binomial test at 5 %)."
        )
    if test.num_loops == 1:
        return "No verdict: with a single loop there is no exit to choose."
    if level.accuracy <= guessed:
        return f"No verdict: the target, {percent_text(level.accuracy)}, is not above chance ({percent_text(guessed)})."
    return ""
