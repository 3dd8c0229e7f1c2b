"""At which accuracy are depths compared? A target: absolute, or some points below the model's own full depth.

What a relative target is for a model is fixed on validation data; test data only say whether it is reached. Chance is
what an answer that knows nothing would be right in, and below it nothing is compared.

Shapes: N examples, T loops, V classes.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.stats import binom

from loopscope.analysis.formatting import percent_text
from loopscope.certify.cautions import SIGNIFICANCE, beats_guessing, guess_accuracy
from loopscope.errors import UserError
from loopscope.trajectory import Trajectory


@dataclass(frozen=True)
class Target:
    """Set the accuracy at which depths are compared.

    Parameters
    ----------
    accuracy
        An absolute accuracy above 0 and up to 1, such as 0.95.
    below_full_depth
        Instead of `accuracy`: the distance below the model's own full-depth accuracy, such as 0.01 for one percentage
        point.

    Raises
    ------
    UserError
        If you give neither or both of the parameters, or if a value is out of range.

    Examples
    --------
    >>> ls.Target(0.95).label
    'D@95'
    >>> ls.Target(below_full_depth=0.01).label
    'D@full-1'
    """

    accuracy: float | None = None
    below_full_depth: float | None = None  # so much less than the model's own accuracy at full depth, 0.01 for a point

    def __post_init__(self) -> None:
        accuracy, below = self.accuracy, self.below_full_depth
        absolute = accuracy is not None and below is None and 0 < accuracy <= 1
        relative = accuracy is None and below is not None and 0 <= below < 1
        if not absolute and not relative:
            raise UserError(
                "A target is either an accuracy between 0 and 1, such as 0.95, or so much below full depth, such as "
                f"0.01; got {accuracy} and {below}."
            )

    @property
    def key(self) -> str:
        """Return the target's name in results: `0.95` or `full-1`."""
        return f"{self.accuracy:g}" if self.accuracy is not None else f"full-{_points_text(self.below_full_depth)}"

    @property
    def label(self) -> str:
        """Return the target's name in tables: `D@95` or `D@full-1`."""
        return f"D@{100 * self.accuracy:g}" if self.accuracy is not None else f"D@{self.key}"

    @property
    def meaning(self) -> str:
        """Describe the accuracy in words."""
        if self.accuracy is not None:
            return f"{percent_text(self.accuracy)} accuracy"
        points = _points_text(self.below_full_depth)
        return (
            f"an accuracy {points} point{'s' * (points != '1')} below the model's own at full depth, which validation "
            "data fix"
        )


WITHIN_A_POINT = Target(below_full_depth=0.01)


def as_target(target: float | Target | None) -> Target:
    """The target of a diagnosis; without one, one point below full depth."""
    if target is None:
        return WITHIN_A_POINT
    return target if isinstance(target, Target) else Target(float(target))


def as_targets(targets: Sequence[float | Target] | None) -> list[Target]:
    """The targets of a report; without any, one point below full depth."""
    given = [targets] if isinstance(targets, Target | int | float) else list(() if targets is None else targets)
    return [as_target(target) for target in given] or [WITHIN_A_POINT]


@dataclass(frozen=True)
class TargetLevel:
    """The accuracy X that a target means for one model, and whether its test data reach X."""

    target: Target
    accuracy: float  # X
    loop: int | None  # whose validation accuracy it is below: the last, unless only another is above chance
    full_depth: int
    reached: float  # X; of a relative target the highest whole percent below it, if test data do not reach X

    @property
    def words(self) -> str:
        """The accuracy X and its origin in words; empty for an absolute target."""
        if self.loop is None or self.target.below_full_depth is None:
            return ""
        points = _points_text(self.target.below_full_depth)
        below = f"{points} point{'s' * (points != '1')} below"
        loop, why = "full depth", ""
        if self.loop != self.full_depth:
            loop, why = f"loop {self.loop}, its best,", "; full depth is not above chance there"
        return f"{percent_text(self.accuracy)}, {below} {loop} on validation data{why}"

    @property
    def sentence(self) -> str:
        return f"The target is {self.words}." if self.words else ""

    @property
    def depths_sentence(self) -> str:
        """Beside depths: at which accuracy they are read, where it is not the target."""
        if self.reached == self.accuracy:
            return ""
        return f"Test data do not reach it at that loop; depths are read at {percent_text(self.reached)}."


def target_level(target: Target, validation: Trajectory, test: Trajectory) -> TargetLevel:
    """Find the accuracy X that a target means for one model: by validation data, checked on test data."""
    if target.accuracy is not None:
        return TargetLevel(target, target.accuracy, None, test.num_loops, target.accuracy)
    assert target.below_full_depth is not None
    loop = reference_loop(validation)
    accuracy = max(0.0, round(float(validation.correct[:, loop - 1].mean()) - target.below_full_depth, 12))
    found = float(test.correct[:, loop - 1].mean())
    reached = accuracy if found >= accuracy - 1e-9 else math.floor(100 * found + 1e-9) / 100
    return TargetLevel(target, accuracy, loop, test.num_loops, reached)


def reference_loop(validation: Trajectory) -> int:
    """The loop that a relative target refers to: the last, unless only another loop is above chance on validation."""
    last, best = validation.num_loops, best_loop(validation)
    above_only = is_above_chance(validation, best, validation) and not is_above_chance(validation, last, validation)
    return best if above_only else last


def best_loop(validation: Trajectory) -> int:
    """The most accurate loop of a recording, ties to the deepest."""
    accuracy = validation.correct.mean(axis=0)
    return int(np.flatnonzero(accuracy == accuracy.max())[-1]) + 1


def chance(recording: Trajectory, validation: Trajectory) -> float:
    """The accuracy of guessing on a recording: by lot, or always the commonest label of validation data."""
    return guess_accuracy(recording.required_labels, validation.required_labels, recording.logits)


def is_above_chance(recording: Trajectory, loop: int, validation: Trajectory) -> bool:
    """Whether a loop is more accurate than guessing, by an exact binomial test."""
    return beats_guessing(recording.correct[:, loop - 1], chance(recording, validation))


def harm_of_depth(validation: Trajectory) -> str:
    """The sentence about a loop that is clearly more accurate than the last one; empty if there is none.

    A one-sided exact test of the examples on which only one of the two is right, at 5 % over all loops that the best
    was chosen among.
    """
    best, last = best_loop(validation), validation.num_loops
    if best == last:
        return ""
    early, late = validation.correct[:, best - 1], validation.correct[:, -1]
    gained, lost = int((early & ~late).sum()), int((late & ~early).sum())
    if binom.sf(gained - 1, gained + lost, 0.5) * (last - 1) > SIGNIFICANCE:
        return ""
    points = 100 * (early.mean() - late.mean())
    return f"Loop {best} is {points:.1f} points better than full depth on validation data: depth harms it."


def _points_text(share: float | None) -> str:
    """The points by which a relative target lies below full depth, as text."""
    return f"{100 * (share or 0):g}"
