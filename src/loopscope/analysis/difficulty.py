"""How does a trajectory treat easy and hard examples? Forced exits, exit distributions and signals, by difficulty.

Shapes: L difficulties (bins), T loops.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import rankdata

from loopscope.analysis.bootstrap import intervals, resampled_means
from loopscope.analysis.schema import Binned, Ordering, rounded
from loopscope.readouts.replay import gate_readout, signal
from loopscope.trajectory import Trajectory

_HARDER_IS_LOWER = ("margin", "top1")
ORDERED_SIGNALS = ("entropy", "top1", "margin", "kl", "logit_change", "hidden_change", "hidden_cosine")
"""The signals that difficulty should order; the gate has its exit distribution instead."""
_MAX_LEVELS = 50
"""A difficulty with more values than this is taken as continuous and cut into ten bins of equal size."""


def difficulty_bins(trajectory: Trajectory) -> tuple[list[float], NDArray[np.int64]]:
    """The difficulties [L] and the bin of every example [N]; one bin for a recording without difficulties."""
    difficulty = trajectory.difficulty
    if difficulty is None:
        difficulty = np.zeros(trajectory.num_examples, dtype=np.int64)
    levels, bins = np.unique(difficulty, return_inverse=True)
    if len(levels) > _MAX_LEVELS:
        bins = np.searchsorted(np.quantile(difficulty, np.linspace(0, 1, 11)[1:-1]), difficulty)
        _, bins = np.unique(bins, return_inverse=True)
        levels = np.array([np.median(difficulty[bins == index]) for index in range(bins.max() + 1)])
    return levels.tolist(), bins


def by_difficulty(values: NDArray[Any], trajectory: Trajectory) -> Binned:
    """The means of [N, T] values within each difficulty, with 95 % bootstrap intervals over its examples."""
    levels, bins = difficulty_bins(trajectory)
    low, high = [], []
    for level in range(len(levels)):
        inside = bins == level
        with np.errstate(invalid="ignore"):  # an infinite signal has no interval
            units = None if trajectory.units is None else np.unique(trajectory.units[inside], return_inverse=True)[1]
            lowest, highest, _ = intervals(resampled_means(values[inside].astype(np.float32), units=units))
        low.append(rounded(lowest))
        high.append(rounded(highest))
    means = [[None if np.isnan(mean) else mean for mean in row] for row in _means_by_difficulty(values, bins).tolist()]
    return Binned([float(level) for level in levels], np.bincount(bins).tolist(), means, low, high)


def _means_by_difficulty(values: NDArray[Any], bins: NDArray[np.int64]) -> NDArray[np.float64]:
    """The means [L, T] of values [N, T] within each difficulty."""
    sums = np.stack([np.bincount(bins, weights=column) for column in values.T], axis=1)
    return sums / np.bincount(bins)[:, None]


def exit_distribution(trajectory: Trajectory) -> Binned:
    """The probability that the model's own gate exits at each loop, by difficulty; loop T takes the rest."""
    cdf = signal(gate_readout(trajectory), trajectory)[:, :-1]
    return by_difficulty(np.diff(cdf, axis=1, prepend=0.0, append=1.0), trajectory)


def difficulty_ordering(name: str, trajectory: Trajectory) -> Ordering:
    """Correlate a signal with difficulty; None for a constant signal, or for a single difficulty."""
    assert trajectory.difficulty is not None
    sign = -1.0 if name in _HARDER_IS_LOWER else 1.0
    values = signal(name, trajectory)
    levels, bins = difficulty_bins(trajectory)
    means = _means_by_difficulty(values, bins)
    loops = [loop for loop in range(trajectory.num_loops) if not np.isnan(values[:, loop]).any()]
    if any(np.ptp(values[:, loop]) == 0 for loop in loops):
        return Ordering(None, None)
    harder = rankdata(trajectory.difficulty)
    return Ordering(
        _difficulty_correlation([(rankdata(levels), rankdata(means[:, loop])) for loop in loops], sign),
        _difficulty_correlation([(harder, rankdata(values[:, loop])) for loop in loops], sign),
    )


def _difficulty_correlation(ranks: list[tuple[NDArray[Any], NDArray[Any]]], sign: float) -> float | None:
    """The rank correlation of signal and difficulty, averaged over loops; None if either is constant."""
    if not ranks or any(np.ptp(a) == 0 or np.ptp(b) == 0 for a, b in ranks):
        return None
    return float(np.mean([sign * np.corrcoef(np.column_stack(pair), rowvar=False)[1, 0] for pair in ranks]))
