"""Which of two readouts is better on the same examples? At the thresholds that validation chose, and in D@X.

Resampling the examples resamples both at once, so what they have in common (which examples are hard) cancels out.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loopscope.analysis.bootstrap import MIN_UNITS, RESAMPLES, Estimate, estimate, resampled_means, widened
from loopscope.analysis.diagnosis import GIVEN, no_verdict_sentence
from loopscope.analysis.formatting import aligned, percent_text, wrapped
from loopscope.analysis.gaps import Gap, Subject, depth_gap
from loopscope.analysis.targets import Target, as_target
from loopscope.certify.tested_data import counted_in_words
from loopscope.errors import UserError
from loopscope.frontier import sweep
from loopscope.policy import ExitPolicy
from loopscope.tabular import Tabular
from loopscope.trajectory import Trajectory


@dataclass(frozen=True)
class Paired:
    """The accuracy and loops of two policies, compared on the same examples."""

    first: str
    second: str
    accuracy: Estimate  # first minus second
    loops: Estimate
    only_first_right: int
    only_second_right: int
    examples: int


@dataclass(frozen=True)
class Side:
    """One of two policies to compare: its name, its policy and the recording that it is replayed on."""

    name: str
    policy: ExitPolicy
    trajectory: Trajectory


def paired(first: Side, second: Side, resamples: int = RESAMPLES) -> Paired:
    """Compare two policies on the same examples; the recordings may come from different models."""
    if not np.array_equal(first.trajectory.required_labels, second.trajectory.required_labels):
        raise UserError("A paired comparison needs the same examples in both recordings, in the same order.")
    ours, theirs = (exits_of(side.policy, side.trajectory) for side in (first, second))
    difference, units = ours - theirs, first.trajectory.units
    means = resampled_means(difference, resamples, units)
    return Paired(
        first.name,
        second.name,
        accuracy=widened(estimate(means[:, 0]), difference[:, 0], units),
        loops=widened(estimate(means[:, 1]), difference[:, 1], units, fewer_than=MIN_UNITS),
        only_first_right=int((difference[:, 0] > 0).sum()),
        only_second_right=int((difference[:, 0] < 0).sum()),
        examples=len(ours),
    )


def exits_of(policy: ExitPolicy, trajectory: Trajectory) -> NDArray[np.float32]:
    """[N, 2] whether each example is right at the loop where the policy exits, and that loop."""
    loops = policy.exit_loops(trajectory)
    right = np.take_along_axis(trajectory.correct, loops[:, None] - 1, axis=1)[:, 0]
    return np.stack((right, loops), axis=1).astype(np.float32)


@dataclass(frozen=True, repr=False)
class Comparison(Tabular):
    """Hold the differences between two readouts, the first minus the second, with 95 % intervals.

    `compare` returns a `Comparison`. Printing the object shows the verdict and a table of the differences.

    Parameters
    ----------
    selected
        The difference at the thresholds chosen on validation data.
    depth
        The difference in D@X; None if the two readouts reach no common accuracy above chance.
    tested
        A description of the test data.
    units
        The number of units (examples or sequences) that were resampled.
    without_depth
        The reason why no depth is compared; empty if depths are compared.

    Examples
    --------
    >>> found = ls.compare(validation, test, "gate", "margin")
    >>> found.depth.value > 0
    True
    >>> found.to_dict()["difference"]
    ['accuracy', 'loops', 'depth']
    """

    selected: Paired  # at the operating points that validation chose
    depth: Gap | None  # in D@X; None where they reach nothing above chance together
    tested: str  # the examples of the comparison, in words
    units: int  # that were resampled: examples, or the sequences or distinct inputs that they belong to
    without_depth: str = ""  # why no depth is compared: a model that is not above chance, or has one loop

    @property
    def verdict(self) -> str:
        """Name the better readout, if the intervals show a difference."""
        if self.without_depth:
            return self.without_depth
        if self.units < MIN_UNITS:
            return f"Which of the two is better cannot be told from {self.tested}; it takes {MIN_UNITS} drawn apart."
        return f"{self._on_depth} {self._on_selected}"

    @property
    def sentence(self) -> str:
        """Return a sentence with the verdict and the compared data."""
        both = self.selected
        return (
            f"{self.verdict} Compared on {self.tested}, of which {both.only_first_right:,} are right with {both.first} "
            f"only and {both.only_second_right:,} with {both.second} only.{f' {GIVEN}' if self.depth else ''}"
        )

    @property
    def _on_depth(self) -> str:
        gap, first, second = self.depth, self.selected.first, self.selected.second
        if gap is None:
            return ""
        at = f"to reach {percent_text(gap.accuracy)}"
        if gap.is_nothing:
            return f"{first} and {second} take as many loops {at}."
        if gap.sign == 0:
            return f"Which of {first} and {second} takes fewer loops {at} is open."
        better, worse = (first, second) if gap.sign < 0 else (second, first)
        if gap.low <= 0 <= gap.high:
            return f"{better} reaches {percent_text(gap.target)}, and {worse} does not."
        return f"{better} takes fewer loops than {worse} {at}."

    @property
    def _on_selected(self) -> str:
        first, second = self.selected.first, self.selected.second
        loops = _comparison_words(self.selected.loops, second, first, "takes fewer loops", "take as many loops")
        accuracy = _comparison_words(self.selected.accuracy, first, second, "is more accurate", "are equally accurate")
        return f"At the thresholds that validation chose, {loops}; {accuracy}."

    def to_dict(self) -> dict[str, list[Any]]:
        """List the differences as columns: value and 95 % interval.

        Returns
        -------
        dict[str, list]
            A row for accuracy, for loops, and (if depths are compared) for D@X.
        """
        found: dict[str, Estimate | Gap | None] = {"accuracy": self.selected.accuracy, "loops": self.selected.loops}
        found["depth"] = self.depth
        known = {name: each for name, each in found.items() if each is not None}
        bounds = {name: [getattr(each, name) for each in known.values()] for name in ("value", "low", "high")}
        return {"difference": list(known), **bounds}

    @property
    def rows(self) -> list[list[str]]:
        """Return the differences as rows of text: quantity, difference, interval."""
        accuracy, loops, gap = self.selected.accuracy, self.selected.loops, self.depth
        bounds = f"[{100 * accuracy.low:+z.2f}, {100 * accuracy.high:+z.2f}]"
        rows = [
            ["accuracy, points", f"{100 * accuracy.value:+z.2f}", bounds],
            ["loops", f"{loops.value:+z.3f}", f"[{loops.low:+z.3f}, {loops.high:+z.3f}]"],
        ]
        if gap is not None:
            name = f"loops to reach {percent_text(gap.accuracy)} (D@{percent_text(gap.accuracy).removesuffix(' %')})"
            rows.append([name, f"{gap.value:+z.3f}", f"[{gap.low:+z.3f}, {gap.high:+z.3f}]"])
        return rows

    @property
    def columns(self) -> list[str]:
        """Return the names of the columns of `rows`."""
        return ["", f"{self.selected.first} - {self.selected.second}", "95 % interval"]

    def __str__(self) -> str:
        return "\n".join([wrapped(self.sentence), *aligned([self.columns, *self.rows])])

    __repr__ = __str__


def _comparison_words(difference: Estimate, if_above: str, if_below: str, better: str, equal: str) -> str:
    """Say which of two readouts is better: by an interval above or below zero, in it, or undecided."""
    if difference.low == difference.high == 0:
        return f"both {equal}"
    if difference.low <= 0 <= difference.high:
        return f"which of the two {better} is open"
    return f"{if_above if difference.low > 0 else if_below} {better}"


def compare(
    validation: Trajectory,
    test: Trajectory,
    first: str,
    second: str,
    other: tuple[Trajectory, Trajectory] | None = None,
    target: float | Target | None = None,
    other_name: str = "the other model",
    name: str = "this model",
) -> Comparison:
    """Compare two readouts on the same test examples, resampled together.

    Parameters
    ----------
    validation, test
        Recordings of a model. LoopScope chooses thresholds on the validation recording and measures the readouts on the
        test recording.
    first, second
        The names of the two readouts to compare.
    other
        Validation and test recordings of another model on the same examples, for the second readout (default: both
        readouts use the same recordings).
    target
        The accuracy X of D@X, or a `Target` (default: 1 percentage point below the full-depth accuracy of the less
        accurate model).
    other_name, name
        Names of the two models, which appear in the verdict.

    Returns
    -------
    Comparison
        The differences in accuracy, in loops and in D@X: the first readout minus the second.

    Raises
    ------
    UserError
        If you give the same readout twice, or if the examples of the two models differ.

    Examples
    --------
    >>> ls.compare(validation, test, "gate", "margin").verdict[:43]
    'margin takes fewer loops than gate to reach'
    """
    theirs = (validation, test) if other is None else other
    if first == second and (other is None or test.sha256 == theirs[1].sha256):
        raise UserError(
            f"'{first}' is the same as itself; give another readout, or another model's recordings to run it on."
        )
    names = (first, second) if other is None else (f"{first} on {name}", f"{second} on {other_name}")
    sides = (
        Side(names[0], sweep(first, validation, test).select().policy, test),
        Side(names[1], sweep(second, *theirs).select().policy, theirs[1]),
    )
    subject = Subject(validation, test)
    against = subject if other is None else Subject(*theirs)
    sentences = [
        no_verdict_sentence(each.validation, each.test, each.level(as_target(target))) for each in (subject, against)
    ]
    tested = (counted_in_words(test, "test"), test.num_units)
    if any(sentences):
        return Comparison(paired(*sides), None, *tested, sentences[0] or f"{other_name}: {sentences[1]}")
    gap = depth_gap(as_target(target), (subject, [first]), (against, [second]))
    return Comparison(paired(*sides), gap, *tested, "" if gap else "Both reach no accuracy above chance together.")
