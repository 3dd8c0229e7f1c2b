"""What happens to the examples at every threshold? Where they exit, by difficulty, and whether that was the right time.

Shapes: N examples, T loops, G thresholds (laxest first), L difficulties.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loopscope.exits.sweep import exit_loops
from loopscope.trajectory import Trajectory

Counts = NDArray[np.int64]

OUTCOMES = ("just in time", "could have exited earlier", "exited too early", "exited too late", "never right")
"""Of an exit: right, and no loop before it was; right, as a loop before it was; wrong, and a later loop is right;
wrong, and only loops before it were right; and wrong, as every loop is."""


@dataclass(frozen=True)
class ExitCounts:
    """The exits of all examples at every threshold of a readout."""

    loops: Counts  # [G, L, T] how many of each difficulty exit at each loop
    right: Counts  # [G, L] how many of those are right
    outcomes: Counts  # [G, 5] how many have each of OUTCOMES


def count_exits(crossed: Counts, size: int, correct: NDArray[np.bool_], bins: Counts) -> ExitCounts:
    """`crossed` [N, T-1] is of `size` thresholds (see `sweep.crossings`), `bins` [N] are of the difficulties."""
    levels = int(bins.max()) + 1
    loops = exit_loops(crossed, np.arange(size))
    place = np.arange(size) * levels + bins[:, None]
    right = np.take_along_axis(correct, loops - 1, axis=1)
    codes = outcomes(correct, loops) + len(OUTCOMES) * np.arange(size)

    def counted(where: NDArray[Any], *shape: int) -> Counts:
        return np.bincount(where.ravel(), minlength=int(np.prod(shape))).reshape(shape)

    return ExitCounts(
        loops=counted(place * correct.shape[1] + loops - 1, size, levels, correct.shape[1]),
        right=counted(place[right], size, levels),
        outcomes=counted(codes, size, len(OUTCOMES)),
    )


def outcomes(correct: NDArray[np.bool_], loops: Counts) -> Counts:
    """[N, G] which of OUTCOMES an exit is."""
    before: Counts = np.cumsum(correct, axis=1) - correct  # [N, T] right loops before each one
    earlier = np.take_along_axis(before, loops - 1, axis=1) > 0
    right = np.take_along_axis(correct, loops - 1, axis=1)
    later = correct.sum(axis=1, keepdims=True) > np.take_along_axis(before, loops - 1, axis=1) + right
    return np.where(right, np.where(earlier, 1, 0), np.where(later, 2, np.where(earlier, 3, 4)))


def sample_by_pattern(trajectory: Trajectory, size: int, seed: int = 0) -> Counts:
    """The rows of at most `size` examples, drawn so that every pattern of right and wrong loops has its share.

    A random order within each pattern, then the patterns in turn: rare ones are there, common ones do not crowd them
    out. The first rows of the answer are what a smaller size would give.
    """
    rows = trajectory.num_examples
    _, pattern = np.unique(trajectory.correct, axis=0, return_inverse=True)
    drawn = np.random.default_rng(seed).permutation(rows)
    drawn = drawn[np.argsort(pattern[drawn], kind="stable")]
    sizes = np.bincount(pattern)
    turn = np.arange(rows) - np.repeat(np.cumsum(sizes) - sizes, sizes)  # the place of each within its pattern
    return drawn[np.argsort(turn, kind="stable")[:size]]
