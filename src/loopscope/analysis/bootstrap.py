"""How sure is a number that was measured on a sample of examples? Bootstrap resamples of whole frontiers at once.

Whatever is drawn together is resampled together: the tokens of a sequence, the copies of an input
(`Trajectory.units`). Drawn one by one they would seem to know more than they do.

Resampling is a matrix product: counts [R, U] times what each unit contributes [U, K]. Of a frontier that is sparse: an
example moves to a later loop at T - 1 of the thresholds, and a running sum gives the curve, so a fine grid costs no
more than a coarse one. The same seed and the same units give the same resamples, so two readouts, or two models on the
same examples, are compared pairwise.

Of more than `MAX_UNITS` units, groups are resampled in their place: about as many in each, drawn by lot. The sums of
such groups scatter as those of single units would, so intervals are as wide, and a resample costs the same however many
examples there are.

Shapes: R resamples, N examples, U units (or groups of them), G thresholds, T loops, K sums.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array
from scipy.stats import binomtest

from loopscope.frontier import crossings, laxest_first
from loopscope.trajectory import Trajectory

Sums = NDArray[np.float64]
Units = NDArray[np.int64] | None

LEVEL = 0.95
ENOUGH = 0.95
"""A number is compared, or given an interval, where at least this share of the resamples have it."""
RESAMPLES = 1000
MAX_UNITS = 1 << 15
"""More units than this are resampled in groups."""
_GROUPS = 1 << 14
MIN_UNITS = 30
"""With fewer test units than this (examples, sequences, distinct inputs), an interval means nothing."""
_SEED = 0
_CHUNK = 50
_MOST_KEPT = 1 << 28
"""Counts that are kept between calls, in bytes: eight times those of `MAX_UNITS` units at 1,000 resamples."""
_kept: dict[tuple[int, int], tuple[NDArray[np.uint8], ...]] = {}
_DENSE = 1 / 32
"""From this share of numbers on that are not 0, a sparse matrix multiplies more slowly than a dense one."""
_ROUNDING = 1e-10
"""Shares of examples that differ by less are equal."""


def resampled_sums(
    contributions: "NDArray[np.float32] | csr_array", resamples: int = RESAMPLES, units: Units = None
) -> Sums:
    """Bootstrap column sums: [1 + R, K] from [N, K], the sample itself first, then resamples of the units [N].

    Of many units the number of those in a resample varies a little: divide by it, as `resampled_means` does.
    """
    drawn = _bootstrap_units(contributions.shape[0], units)
    if drawn is not None:
        ones = np.ones(len(drawn), dtype=np.float32)
        contributions = cast("csr_array", csr_array((ones, (drawn, np.arange(len(drawn))))) @ contributions)
    if isinstance(contributions, csr_array) and contributions.nnz > _DENSE * np.prod(contributions.shape):
        contributions = contributions.toarray()
    rows = contributions.shape[0]
    sums = [contributions.sum(axis=0, dtype=np.float64)[None]]
    for counts in _cached_draw_counts(rows, resamples):
        sums.append((counts.astype(np.float32) @ contributions).astype(np.float64))  # exact: whole numbers below 2**24
    return np.concatenate(sums)


def _bootstrap_units(rows: int, units: Units) -> Units:
    """[N] the bootstrap unit of every row, in groups if there are many units; None if rows are drawn one by one."""
    count = rows if units is None else int(units.max()) + 1
    if count <= MAX_UNITS:
        return units
    groups = np.random.default_rng(_SEED).permutation(count) % _GROUPS
    return groups if units is None else groups[units]


def _draw_counts(rows: int, resamples: int) -> Iterator[NDArray[np.uint8]]:
    """[R, rows] how often a bootstrap resample draws each row, some resamples at a time; at most 255 times."""
    rng = np.random.default_rng(_SEED)
    for start in range(0, resamples, _CHUNK):
        size = (min(_CHUNK, resamples - start), rows)
        drawn = rng.integers(0, rows, size) + np.arange(size[0])[:, None] * rows
        yield np.bincount(drawn.ravel(), minlength=size[0] * rows).reshape(size).astype(np.uint8)


def _cached_draw_counts(rows: int, resamples: int) -> Iterable[NDArray[np.uint8]]:
    """The cached draw counts: the bootstrap resamples every readout, grid and mean of a model alike."""
    if rows * resamples > _MOST_KEPT:
        return _draw_counts(rows, resamples)
    if (rows, resamples) not in _kept:
        while sum(units * draws for units, draws in _kept) + rows * resamples > _MOST_KEPT:
            del _kept[next(iter(_kept))]
        _kept[rows, resamples] = tuple(_draw_counts(rows, resamples))
    return _kept[rows, resamples]


def resampled_means(values: NDArray[np.float32], resamples: int = RESAMPLES, units: Units = None) -> Sums:
    """Bootstrap column means: [1 + R, K] from [N, K], the sample itself first."""
    counted = np.concatenate((values, np.ones((len(values), 1), dtype=np.float32)), axis=1)
    sums = resampled_sums(counted, resamples, units=units)
    means: Sums = sums[:, :-1] / sums[:, -1:]
    return means


@dataclass(frozen=True)
class Interval:
    """A bootstrap interval: 95 % of the resamples that have a value lie in it."""

    low: float
    high: float
    reached: float  # the share of resamples that have it


def interval(values: Sums) -> Interval | None:
    """The bootstrap interval of [1 + R] values, the sample itself first; None if no resample has a value (NaN)."""
    low, high, reached = (float(bound[0]) for bound in intervals(values[:, None]))
    return Interval(low, high, reached) if reached else None


def intervals(values: Sums) -> tuple[Sums, Sums, Sums]:
    """Bootstrap intervals of many numbers [1 + R, K]: low ends, high ends (NaN: none), shares of resamples [K].

    As `np.nanpercentile` has them, and faster.
    """
    rising = np.sort(values[1:], axis=0)  # NaN last
    known = (~np.isnan(rising)).sum(axis=0)
    last = np.maximum(known - 1, 0)

    def quantile(share: float) -> Sums:
        place = share * last
        below = np.floor(place).astype(int)
        part = place - below
        low, high = (np.take_along_axis(rising, row[None], axis=0)[0] for row in (below, np.minimum(below + 1, last)))
        return np.where(part < 0.5, low + (high - low) * part, high - (high - low) * (1 - part))

    tail = 50 * (1 - LEVEL)
    return quantile(tail / 100), quantile((100 - tail) / 100), known / len(rising)


@dataclass(frozen=True)
class Estimate:
    """A mean over examples, or a difference of two, with its 95 % interval."""

    value: float
    low: float
    high: float


def estimate(values: Sums) -> Estimate:
    """The sample's mean with its bootstrap interval, from [1 + R] means."""
    bounds = interval(values)
    assert bounds is not None  # a mean exists in every resample
    return Estimate(float(values[0]), bounds.low, bounds.high)


def widened(bootstrap: Estimate, difference: NDArray[Any], units: Units, fewer_than: float = np.inf) -> Estimate:
    """Widen a bootstrap interval to at least the exact interval of a sign test on the units that differ.

    Where few differ, they can all happen to lie on one side, and resamples of them then always do. A sign test knows no
    sizes, so loops, which differ in theirs, are widened only if `fewer_than` so many differ.
    """
    nets = difference if units is None else np.bincount(units, difference)
    higher, differing = int((nets > 0).sum()), int((nets != 0).sum())
    if not 0 < differing < fewer_than:
        return bootstrap
    exact = binomtest(higher, differing).proportion_ci(LEVEL)
    scale = float(np.abs(nets).sum()) / len(difference)
    low, high = ((2 * share - 1) * scale for share in (exact.low, exact.high))
    return Estimate(bootstrap.value, min(low, bootstrap.low), max(high, bootstrap.high))


@dataclass(frozen=True)
class Curves:
    """A frontier on every bootstrap resample: accuracy and average loops at each of G thresholds."""

    accuracy: Sums  # [1 + R, G]
    average_loops: Sums  # [1 + R, G]

    def at(self, chosen: NDArray[np.bool_]) -> "Curves":
        """The same frontier at these thresholds only."""
        return Curves(self.accuracy[:, chosen], self.average_loops[:, chosen])

    def depth_at(self, accuracy: float) -> Sums:
        """[1 + R] D@X of the sample and of each resample; NaN where X is not reached."""
        depth = self._depths(accuracy).min(axis=1)
        return np.where(np.isinf(depth), np.nan, depth)

    def cheapest(self, accuracy: float) -> int:
        """The place of D@X among the thresholds, on the sample itself."""
        return int(self._depths(accuracy)[0].argmin())

    def _depths(self, accuracy: float) -> Sums:
        """[1 + R, G] average loops where X is reached, else infinity."""
        return np.where(self.accuracy >= accuracy - _ROUNDING, self.average_loops, np.inf)

    def depths_at(self, accuracies: Sequence[float]) -> Sums:
        """[1 + R, S] the same for many accuracies, in rising order."""
        rows, size = len(self.accuracy), len(accuracies)
        reached = np.searchsorted(np.asarray(accuracies) - _ROUNDING, self.accuracy, side="right")
        least = np.full((rows, size + 1), np.inf)  # of the points that reach so many of the accuracies
        np.minimum.at(least, (np.arange(rows)[:, None], reached), self.average_loops)
        depth = np.minimum.accumulate(least[:, :0:-1], axis=1)[:, ::-1]
        return np.where(np.isinf(depth), np.nan, depth)


def resampled_curves(
    readout: str, thresholds: NDArray[np.float64], trajectory: Trajectory, resamples: int = RESAMPLES
) -> Curves:
    """The frontier of a readout on a recording and on its bootstrap resamples, in the order of the thresholds."""
    points = np.asarray(thresholds, dtype=np.float64)
    order, size = laxest_first(readout, points), len(points)
    crossed = crossings(readout, points[order], trajectory)  # [N, T-1], a threshold each, or `size`: none
    right = trajectory.correct.astype(np.float32)
    rows = trajectory.num_examples
    last = np.full((rows, 1), 2 * size + 3)  # counts the examples themselves
    places = np.concatenate((np.zeros_like(last), 1 + crossed, 2 + size + crossed, last), axis=1)
    worth = np.concatenate((right[:, :1], np.diff(right, axis=1), np.ones_like(right)), axis=1)
    ends = np.arange(rows + 1) * places.shape[1]
    contributions = csr_array((worth.ravel(), places.ravel(), ends), shape=(rows, 2 * size + 4))
    sums = resampled_sums(contributions, resamples, units=trajectory.units)
    rank, drawn = np.argsort(order), sums[:, -1:]
    right_at = sums[:, :1] + sums[:, 1 : size + 1].cumsum(axis=1)
    loops_at = drawn + sums[:, size + 2 : -2].cumsum(axis=1)
    return Curves(right_at[:, rank] / drawn, loops_at[:, rank] / drawn)


@dataclass(frozen=True)
class LabelAware:
    """The cheapest rule that knows the labels: exit at the first correct loop; at loop 1 if no loop is correct."""

    first_right: Sums  # [1 + R, T] how many examples are first right at each loop
    examples: Sums  # [1 + R, 1] how many there are

    def depth_at(self, accuracy: float) -> Sums:
        """[1 + R] the least depth with which any rule could reach X: the quickest successes, all others at loop 1."""
        need = np.ceil(accuracy * self.examples - 1e-6)
        before = np.cumsum(self.first_right, axis=1) - self.first_right
        taken = np.clip(need - before, 0, self.first_right)
        depth = 1 + (taken * np.arange(self.first_right.shape[1]) / self.examples).sum(axis=1)
        return np.where(self.first_right.sum(axis=1) >= need[:, 0], depth, np.nan)


def resampled_label_aware(trajectory: Trajectory, resamples: int = RESAMPLES) -> LabelAware:
    """Count on every bootstrap resample at which loop examples become correct: the rule that knows the labels."""
    right = trajectory.correct
    first = np.zeros((len(right), right.shape[1] + 1), dtype=np.float32)
    rows = np.flatnonzero(right.any(axis=1))
    first[rows, right[rows].argmax(axis=1)] = 1.0
    first[:, -1] = 1.0  # counts the examples themselves
    sums = resampled_sums(first, resamples, units=trajectory.units)
    return LabelAware(sums[:, :-1], sums[:, -1:])
