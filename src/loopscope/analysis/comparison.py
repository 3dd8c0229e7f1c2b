"""Which of two readouts is better on the same examples? At the thresholds that validation chose, and in D@X."""

from dataclasses import dataclass

from loopscope.analysis.diagnosis import without_verdict
from loopscope.analysis.gaps import Gap, Subject, depth_gap
from loopscope.analysis.paired import Paired, Side, paired
from loopscope.analysis.targets import Target, as_target, percent_text
from loopscope.errors import UserError
from loopscope.exits import sweep
from loopscope.exits.splits import is_pair
from loopscope.trajectory import Trajectory


@dataclass(frozen=True, repr=False)
class Comparison:
    """The first readout minus the second, with 95 % intervals."""

    selected: Paired  # at the operating points that validation chose
    depth: Gap | None  # in D@X; None where they reach nothing above chance together
    without_depth: str = ""  # why no depth is compared: a model that is not above chance, or has one loop

    @property
    def sentence(self) -> str:
        both = self.selected
        return (
            f"{both.first} minus {both.second} on {both.examples:,} test examples. Accuracy and loops at the "
            f"thresholds that validation chose; only {both.first} is right on {both.only_first_right:,}, only "
            f"{both.second} on {both.only_second_right:,}." + (f" {self.without_depth}" if self.without_depth else "")
        )

    @property
    def rows(self) -> list[list[str]]:
        """What is compared, the difference, and its interval."""
        accuracy, loops, gap = self.selected.accuracy, self.selected.loops, self.depth
        bounds = f"[{100 * accuracy.low:+z.2f}, {100 * accuracy.high:+z.2f}]"
        rows = [
            ["accuracy", f"{100 * accuracy.value:+z.2f} %", bounds],
            ["loops", f"{loops.value:+z.3f}", f"[{loops.low:+z.3f}, {loops.high:+z.3f}]"],
        ]
        if gap is not None:
            name = f"D@{percent_text(gap.accuracy).removesuffix('%')}"
            rows.append([name, f"{gap.value:+z.3f}", f"[{gap.low:+z.3f}, {gap.high:+z.3f}]"])
        return rows

    def __str__(self) -> str:
        return "\n".join([self.sentence, *(f"{name:<10}{value:>10}  {bounds}" for name, value, bounds in self.rows)])

    __repr__ = __str__


def compare_readouts(
    validation: Trajectory,
    test: Trajectory,
    first: str,
    second: str,
    other: tuple[Trajectory, Trajectory] | None = None,
    target: float | Target | None = None,
    other_name: str = "the other model",
) -> Comparison:
    """Compares two readouts on the same test examples, resampled together.

    With `other` (validation, test) the second runs on another model's recordings of the same examples. Without a target
    D@X is 1 point below full depth, of the two models the lower one.
    """
    if other is not None and not is_pair(other):
        raise UserError("The other model is two recordings, as in other=(validation, test).")
    theirs = (validation, test) if other is None else other
    sides = (
        Side(first, sweep(first, validation, test).select().policy, test),
        Side(
            second if other is None else f"{second} on {other_name}", sweep(second, *theirs).select().policy, theirs[1]
        ),
    )
    subject = Subject(validation, test)
    against = subject if other is None else Subject(*theirs)
    sentences = [
        without_verdict(each.validation, each.test, each.level(as_target(target))) for each in (subject, against)
    ]
    if any(sentences):
        return Comparison(paired(*sides), None, sentences[0] or f"{other_name}: {sentences[1]}")
    gap = depth_gap(target, (subject, first), (against, second))
    return Comparison(paired(*sides), gap, "" if gap else "Both reach no accuracy above chance together.")
