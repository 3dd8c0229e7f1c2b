"""How does a trajectory treat easy and hard examples? Forced exits, exit distributions and signals, by difficulty.

Shapes: L difficulties (bins), T loops.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import spearmanr

from loopscope.analysis.bootstrap import intervals, resampled_means
from loopscope.errors import UserError
from loopscope.exits import signal
from loopscope.trajectory import Trajectory

Means = NDArray[np.float64]

_HARDER_IS_LOWER = ("margin", "top1")
ORDERED_SIGNALS = ("entropy", "top1", "margin", "kl", "logit_change", "hidden_change", "hidden_cosine")
"""The signals that difficulty should order; the gate has its exit distribution instead."""
_MOST_BINS = 50
"""A difficulty with more values than this is taken as continuous and cut into ten bins of equal size."""


@dataclass(frozen=True)
class ByDifficulty:
    """A quantity of every loop, averaged within each bin, with 95 % bootstrap intervals over the bin's examples."""

    levels: list[float]  # [L]; the median of each bin where difficulty is continuous
    counts: list[int]  # [L] examples of each bin
    values: Means  # [L, T]
    low: Means  # [L, T]
    high: Means  # [L, T]


def difficulty_bins(trajectory: Trajectory) -> tuple[list[float], NDArray[np.int64]]:
    """The levels [L] and the bin of every example [N]; a trajectory without difficulties is one bin."""
    difficulty = trajectory.difficulty
    if difficulty is None:
        difficulty = np.zeros(trajectory.num_examples, dtype=np.int64)
    levels, bins = np.unique(difficulty, return_inverse=True)
    if len(levels) > _MOST_BINS:
        bins = np.searchsorted(np.quantile(difficulty, np.linspace(0, 1, 11)[1:-1]), difficulty)
        _, bins = np.unique(bins, return_inverse=True)
        levels = np.array([np.median(difficulty[bins == index]) for index in range(bins.max() + 1)])
    return levels.tolist(), bins


def by_difficulty(values: NDArray[Any], trajectory: Trajectory) -> ByDifficulty:
    """The bin means of [N, T] values."""
    levels, bins = difficulty_bins(trajectory)
    counts = np.bincount(bins)
    inside = [bins == level for level in range(len(levels))]
    with np.errstate(invalid="ignore"):  # an infinite signal has no interval
        bounds = [
            intervals(resampled_means(values[each].astype(np.float32), units=_units_inside(trajectory, each)))
            for each in inside
        ]
    low, high = np.stack([each.low for each in bounds]), np.stack([each.high for each in bounds])
    return ByDifficulty(levels, counts.tolist(), _bin_means(values, bins), low, high)


def _units_inside(trajectory: Trajectory, inside: NDArray[np.bool_]) -> NDArray[np.int64] | None:
    if trajectory.units is None:
        return None
    return np.unique(trajectory.units[inside], return_inverse=True)[1].astype(np.int64)


def _bin_means(values: NDArray[Any], bins: NDArray[np.int64]) -> Means:
    """[L, T] of [N, T] values."""
    sums = np.stack([np.bincount(bins, weights=column) for column in values.T], axis=1)
    return sums / np.bincount(bins)[:, None]


def forced_accuracy(trajectory: Trajectory) -> ByDifficulty:
    """The accuracy of every loop, without any exit rule."""
    return by_difficulty(trajectory.correct, trajectory)


def forced_cross_entropy(trajectory: Trajectory) -> ByDifficulty:
    return by_difficulty(trajectory.cross_entropy, trajectory)


def exit_distribution(trajectory: Trajectory) -> ByDifficulty:
    """The probability with which the model's own gate exits at each loop."""
    return by_difficulty(np.diff(signal("gate", trajectory), axis=1, prepend=0.0), trajectory)


def signal_by_difficulty(name: str, trajectory: Trajectory) -> ByDifficulty:
    """NaN at loop 1 for the convergence signals."""
    return by_difficulty(signal(name, trajectory), trajectory)


@dataclass(frozen=True)
class Ordering:
    """Signed rank correlation with difficulty, averaged over loops: 1 means that harder always looks harder."""

    bin_mean: float | None  # between difficulty and the bin means, as in the paper
    per_example: float | None  # between difficulty and the signal of single examples


def difficulty_ordering(name: str, trajectory: Trajectory) -> Ordering:
    """Does the signal order the examples by difficulty? None where it is constant, or with one bin only."""
    if trajectory.difficulty is None:
        raise UserError("The recording has no difficulties, so nothing can be ordered by them.")
    sign = -1.0 if name in _HARDER_IS_LOWER else 1.0
    values = signal(name, trajectory)
    levels, bins = difficulty_bins(trajectory)
    means = _bin_means(values, bins)
    loops = [loop for loop in range(trajectory.num_loops) if not np.isnan(values[:, loop]).any()]
    if any(np.ptp(values[:, loop]) == 0 for loop in loops):
        return Ordering(None, None)
    return Ordering(
        _mean_correlation([(np.array(levels), means[:, loop]) for loop in loops], sign),
        _mean_correlation([(trajectory.difficulty, values[:, loop]) for loop in loops], sign),
    )


def _mean_correlation(pairs: list[tuple[NDArray[Any], Means]], sign: float) -> float | None:
    if not pairs or any(np.ptp(a) == 0 or np.ptp(b) == 0 for a, b in pairs):
        return None
    return float(np.mean([sign * spearmanr(a, b).statistic for a, b in pairs]))
