"""How many loops more does one way to exit take than another, at an accuracy that both reach?

A way to exit (`Way`) answers an accuracy X with its name and its average loops D@X, on the data and on each resample of
it. Where X is out of reach, the comparison moves down to the highest whole percent that both reach in nearly every
resample, but never to chance.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

import numpy as np
from numpy.typing import NDArray

from loopscope.analysis.bootstrap import (
    ENOUGH,
    MIN_UNITS,
    RESAMPLES,
    Curves,
    Estimate,
    Sums,
    interval,
    resampled_curves,
    resampled_label_aware,
    widened,
)
from loopscope.analysis.targets import Target, TargetLevel, chance, target_level
from loopscope.errors import UserError
from loopscope.frontier import curve, swept_exits
from loopscope.leaks import check_calibration
from loopscope.readouts.readout import needs_labels
from loopscope.readouts.replay import available_readouts, gate_readout, has_signal
from loopscope.readouts.signals import STOPPER, is_gate, own_gate
from loopscope.threshold_grids import fine_grid
from loopscope.trajectory import Trajectory

Way = Callable[[float], tuple[str, Sums]]
MIN_PRINTED = 0.005
"""Loops: less is printed as zero."""
EQUIVALENCE_MARGIN = 0.05
"""Loops: two ways to exit whose interval lies within it are as good as each other; another seed changes more."""
ACCURACY_MARGIN = 0.01
"""A model whose best loop is this much less accurate than another's cannot be its reference."""


@dataclass(frozen=True)
class Gap:
    """The difference in average loops between two ways to exit; positive if the first takes more loops."""

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
    units: int  # that were resampled: examples, or the sequences or distinct inputs that they belong to

    @property
    def alone_in_reach(self) -> int:
        """1 where the second reaches the target and the first misses it, -1 the other way round, else 0."""
        reaches_more = (self.second_reaches_target >= ENOUGH) - (self.first_reaches_target >= ENOUGH)
        missed = min(self.first_reaches_target, self.second_reaches_target) <= 1 - ENOUGH
        return int(reaches_more) if missed else 0

    @property
    def sign(self) -> int:
        """1 or -1 where the interval excludes zero, or where only one of them reaches the target; else 0."""
        if self.units < MIN_UNITS:
            return 0
        return self.alone_in_reach or (1 if self.low > 0 else -1 if self.high < 0 else 0)

    @property
    def is_nothing(self) -> bool:
        """Whether the two take as many loops: the whole interval is zero, to the hundredths that are printed."""
        return self.is_equivalent and max(abs(self.low), abs(self.high)) < MIN_PRINTED

    @property
    def is_equivalent(self) -> bool:
        """Whether the two take as many loops within the margin: the whole interval lies in it."""
        return self.is_no_more and self.low >= -EQUIVALENCE_MARGIN

    @property
    def is_no_more(self) -> bool:
        """Whether the first takes at most a margin more than the second, which an interval that ends there shows."""
        return self.units >= MIN_UNITS and not self.alone_in_reach and self.high <= EQUIVALENCE_MARGIN

    @property
    def blames(self) -> bool:
        """Whether the first is worse: by more than nothing, and not just within the margin."""
        return self.sign > 0 and not self.is_no_more


class Subject:
    """The model under diagnosis: frontiers whose thresholds validation data chose, bootstrapped on test data."""

    def __init__(self, validation: Trajectory, test: Trajectory, resamples: int = RESAMPLES) -> None:
        check_calibration(validation, test)
        self.validation, self.test = validation, test
        found = [name for name in available_readouts(validation, test) if not needs_labels(name)]
        self.readouts = [name for name in found if not name.startswith(STOPPER)]
        self.stoppers = [name for name in found if name.startswith(STOPPER)]
        self.ceiling = float(test.correct.mean(axis=0).max())
        """The accuracy of the best loop."""
        self.chance = chance(test, validation)
        self.gate = own_gate(self.readouts)
        self.has_gate = self.gate is not None
        self.ever_gated = any(has_signal(gate_readout(recording), recording) for recording in (validation, test))
        self._resamples = resamples
        self._label_aware = resampled_label_aware(test, resamples)
        self._curves: dict[str, Curves] = {}
        self._grids = {name: fine_grid(name, validation) for name in found}
        self._validation = {name: curve(name, self._grids[name], validation) for name in found}

    def level(self, target: Target) -> TargetLevel:
        return target_level(target, self.validation, self.test)

    def curves(self, readout: str) -> Curves:
        if readout not in self._grids:
            raise UserError(f"The recordings do not have the readout '{readout}'; they have {', '.join(self._grids)}.")
        if readout not in self._curves:
            self._curves[readout] = resampled_curves(readout, self._grids[readout], self.test, self._resamples)
        return self._curves[readout]

    def best(self, accuracy: float, among: Sequence[str] = ()) -> str:
        """The readout with the least D@X on validation data; where none reaches X, the most accurate one.

        Of single signals, unless others are named: learned stoppers have a gap of their own.
        """
        names = among or self.readouts
        depths = {name: _depth_on_curve(self._validation[name], accuracy) for name in names}
        if min(depths.values()) < np.inf:
            return min(depths, key=depths.__getitem__)
        return max(names, key=lambda name: float(self._validation[name][0].max()))

    def readouts_shared_with(self, other: "Subject") -> list[str]:
        """The readouts that both models have, without gates, which are fitted to one trajectory."""
        both = [name for name in self.readouts if name in other.readouts]
        return [name for name in both if not is_gate(name)]

    def is_more_accurate_than(self, other: "Subject") -> bool:
        """Whether its best loop is clearly better: by more than the margin in nearly every resample."""
        ours, theirs = (each.curves("fixed").accuracy.max(axis=1) for each in (self, other))
        size = min(len(ours), len(theirs))
        return float(np.mean(ours[1:size] - theirs[1:size] > ACCURACY_MARGIN)) >= ENOUGH

    def exit_by(self, *readouts: str) -> Way:
        """Exit by this readout; of several (without any: of all single signals) by the best at each accuracy."""

        def way(accuracy: float) -> tuple[str, Sums]:
            name = readouts[0] if len(readouts) == 1 else self.best(accuracy, readouts)
            return name, self.curves(name).depth_at(accuracy)

        return way

    def exit_loops(self, readout: str, accuracy: float) -> NDArray[np.int64]:
        """[N] where the test examples exit at the threshold of D@X."""
        curves = self.curves(readout)
        threshold = self._grids[readout][curves.cheapest(accuracy)]
        return swept_exits(readout, [threshold], self.test)[:, 0]

    def exit_by_labels(self, accuracy: float) -> tuple[str, Sums]:
        """Exit as the cheapest rule that knows the labels."""
        return "labels known", self._label_aware.depth_at(accuracy)


def depth_gap(
    target: Target, first: tuple[Subject, Sequence[str]], second: tuple[Subject, Sequence[str]]
) -> Gap | None:
    """D@X of one model by the best of its readouts (default: all single signals), minus D@X of another model.

    At the highest accuracy, from the target (the lower of both models' own) down to chance, that both reach; resampled
    together. Where few test examples exit elsewhere, the interval is widened.
    """
    (ours, readouts), (theirs, others) = first, second
    accuracy = min(subject.level(target).accuracy for subject in (ours, theirs))
    floor = max(ours.chance, theirs.chance)
    gap = gap_between(accuracy, ours.exit_by(*readouts), theirs.exit_by(*others), ours.test, floor)
    if gap is None or not np.array_equal(ours.test.required_labels, theirs.test.required_labels):
        return gap
    loops = ours.exit_loops(gap.first, gap.accuracy) - theirs.exit_loops(gap.second, gap.accuracy)
    found = widened(Estimate(gap.value, gap.low, gap.high), loops, ours.test.units, fewer_than=MIN_UNITS)
    return replace(gap, low=found.low, high=found.high)


def gap_between(target: float, first: Way, second: Way, test: Trajectory, floor: float) -> Gap | None:
    """The gap at the highest accuracy, from the target down to `floor`, that nearly every resample of both reaches."""
    at_target: tuple[float, float] | None = None
    for accuracy in _accuracies_to_compare(target, floor):
        (first_name, a), (second_name, b) = first(accuracy), second(accuracy)
        at_target = at_target or (_share_reached(a), _share_reached(b))
        size = min(len(a), len(b))
        difference = a[:size] - b[:size]
        bounds = interval(difference)
        if bounds is None or bounds.reached < ENOUGH or np.isnan(difference[0]):
            continue
        numbers = (float(a[0]), float(b[0]), float(difference[0]), bounds.low, bounds.high)
        shares = (bounds.reached, *at_target)
        return Gap(first_name, second_name, target, accuracy, *numbers, *shares, test.num_examples, test.num_units)
    return None


def _share_reached(depths: Sums) -> float:
    """The share of resamples that reach an accuracy, so that they have a depth."""
    return float(np.mean(~np.isnan(depths[1:])))


def _accuracies_to_compare(target: float, floor: float) -> Iterator[float]:
    """The accuracies at which a gap may be measured: the target, then whole percents down to the floor."""
    below = (whole / 100 for whole in range(int(np.ceil(100 * target)) - 1, 0, -1))
    yield from takewhile(lambda accuracy: accuracy > floor, (target, *below))


def _depth_on_curve(points: tuple[Sums, Sums], accuracy: float) -> float:
    """D@X on a curve: the fewest average loops at which it reaches the accuracy; infinite if it never does."""
    reached = points[1][points[0] >= accuracy - 1e-9]
    return float(reached.min()) if len(reached) else np.inf
