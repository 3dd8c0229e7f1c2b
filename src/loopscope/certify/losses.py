"""What does an early exit lose, and which units count? Losses against full depth, of examples or sequences.

Shapes: N examples, T loops, n examples of a group.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from loopscope.errors import UserError
from loopscope.frontier import totals_at_exit
from loopscope.policy import DataSummary, Loss
from loopscope.trajectory import Trajectory

Values = NDArray[np.float64]

_UNITS_AT_ONCE = 1 << 12
"""The number of units whose losses at every threshold are computed together."""
_MAX_LEVELS = 50
"""Difficulties of more levels than this have no mix that could be listed."""


class Counted(Protocol):
    """Examples or sequences that a guarantee counts, with their difficulties."""

    @property
    def num_examples(self) -> int: ...
    @property
    def sequences(self) -> NDArray[Any] | None: ...
    @property
    def difficulty(self) -> NDArray[Any] | None: ...


@dataclass(frozen=True)
class RiskGroup:
    """The examples that a guarantee limits the risk of: all of them, or those of one difficulty."""

    difficulty: float | None
    rows: NDArray[np.int64]  # [n]
    unit: NDArray[np.int64]  # [n] the number of the unit that each of these rows belongs to
    units: int

    @cached_property
    def weights(self) -> Values:
        """[n] 1, or 1 / the decisions of their sequence."""
        return 1 / np.bincount(self.unit)[self.unit]

    @property
    def binary(self) -> bool:
        return self.units == len(self.rows)

    def means(self, values: NDArray[Any]) -> Values:
        """[units] the mean over each unit's examples of values [N]."""
        return np.bincount(self.unit, values[self.rows] * self.weights, self.units).astype(np.float64)

    def totals(self, crossed: NDArray[np.int64], values: NDArray[Any], size: int) -> Values:
        """[G] the sum over units of values [N, T], taken at the loop where each threshold exits."""
        return totals_at_exit(crossed[self.rows], values[self.rows] * self.weights[:, None], size)

    def unit_losses(
        self,
        crossed: NDArray[np.int64],
        lost: NDArray[np.bool_],
        size: int,
        columns: NDArray[np.int64],
        order: NDArray[np.int64],
    ) -> Iterator[Values]:
        """[b, G] the losses of units, in this order and some at a time, at each threshold."""
        place = np.empty_like(order)
        place[order] = np.arange(self.units)
        place = place[self.unit]
        rows = np.argsort(place, kind="stable")
        ends = np.searchsorted(place[rows], np.arange(0, self.units + _UNITS_AT_ONCE, _UNITS_AT_ONCE))
        for number, (first, last) in enumerate(pairwise(ends.tolist())):
            chosen, begin = rows[first:last], number * _UNITS_AT_ONCE
            count = min(_UNITS_AT_ONCE, self.units - begin)
            worth = lost[self.rows[chosen]] * self.weights[chosen, None]
            unit, crossing = place[chosen] - begin, crossed[self.rows[chosen]]
            steps = np.bincount(
                (unit[:, None] * (size + 1) + crossing).ravel(), np.diff(worth, axis=1).ravel(), count * (size + 1)
            ).reshape(count, size + 1)
            at_first = np.bincount(unit, worth[:, 0], count)
            yield np.clip(at_first[:, None] + steps.cumsum(axis=1)[:, columns], 0.0, 1.0)

    def mean(self, values: NDArray[Any]) -> float:
        """The average of that over units."""
        return float(self.means(values).mean())


def risk_groups(trajectory: Counted, per_difficulty: bool) -> list[RiskGroup]:
    """The groups whose risk a guarantee limits: all examples together, or one group per difficulty."""
    if not per_difficulty:
        return [_risk_group(trajectory, None, np.arange(trajectory.num_examples))]
    if trajectory.difficulty is None:
        raise UserError(
            "The recording has no difficulties, so nothing can be guaranteed or checked for each of them; ask for all "
            "together (leave out --per-difficulty), or give them: Trajectory(difficulty=...)."
        )
    levels = np.unique(trajectory.difficulty)
    return [_risk_group(trajectory, float(level), np.flatnonzero(trajectory.difficulty == level)) for level in levels]


def _risk_group(trajectory: Counted, difficulty: float | None, rows: NDArray[np.int64]) -> RiskGroup:
    """One risk group: its rows, and the unit (example or sequence) of each."""
    if trajectory.sequences is None:
        return RiskGroup(difficulty, rows, np.arange(len(rows)), len(rows))
    numbers, unit = np.unique(trajectory.sequences[rows], return_inverse=True)
    return RiskGroup(difficulty, rows, unit, len(numbers))


def losses(loss: Loss, trajectory: Trajectory) -> NDArray[np.bool_]:
    """[N, T] whether an exit at each loop loses against full depth."""
    if loss == "gap":
        return trajectory.correct[:, -1:] & ~trajectory.correct
    return np.asarray(trajectory.predicted != trajectory.predicted[:, -1:])


def lost_at(loss: Loss, trajectory: Trajectory, loops: NDArray[np.int64]) -> NDArray[np.bool_]:
    """[N] whether the exit of each example at its loop [N] loses against full depth."""
    return losses(loss, trajectory)[np.arange(len(loops)), loops - 1]


class Population(Protocol):
    """The options of a guarantee that choose its examples: unseen, distinct or new inputs."""

    @property
    def unseen(self) -> bool: ...
    @property
    def distinct(self) -> bool: ...
    @property
    def new_inputs(self) -> bool: ...


def population(
    trajectory: Trajectory, which: Population, drawn: int | None = None, *, ordered: bool = False
) -> Trajectory:
    """The examples that a guarantee is for: all of a recording, or only unseen, distinct or new inputs.

    New inputs are estimated by those that occur once, after Good and Turing: of N draws, the share of inputs with a
    loss among those that occur once is on average that among the inputs which N - 1 draws do not hold. So it depends on
    how many were `drawn`: of more, as many are taken at random. So it is where every input counts once: of more draws,
    rare inputs are a larger share. With `ordered` examples stay in the order of the recording.
    """
    if which.unseen:
        trajectory = trajectory.unseen()
    if not (which.distinct or which.new_inputs):
        return trajectory
    if drawn is not None and drawn < trajectory.num_examples:
        rows = np.random.default_rng(0).permutation(trajectory.num_examples)[:drawn]
        trajectory = trajectory.take(np.sort(rows) if ordered else rows)
    return trajectory.distinct(alone=which.new_inputs, ordered=ordered)


def drawn_for(trajectory: Trajectory, which: Population) -> int | None:
    """The number of drawn examples if only distinct or new inputs count; None if all examples count."""
    if not (which.distinct or which.new_inputs):
        return None
    return trajectory.unseen().num_examples if which.unseen else trajectory.num_examples


def difficulty_counts(trajectory: Counted) -> dict[str, int] | None:
    """The number of examples of each difficulty; None without difficulties, or with very many."""
    if trajectory.difficulty is None:
        return None
    found = zip(*np.unique(trajectory.difficulty, return_counts=True), strict=True)
    levels = {repr(float(level)).removesuffix(".0"): int(count) for level, count in found}
    return levels if len(levels) <= _MAX_LEVELS else None


def summarise_data(trajectory: Trajectory) -> DataSummary:
    """Summarise the data that a certificate rests on: tested data, or the data that proposed its thresholds."""
    return DataSummary(
        sha256=trajectory.sha256,
        split=trajectory.split,
        examples=trajectory.num_examples,
        sequences=None if trajectory.sequences is None else unit_count(trajectory),
        seen=None if trajectory.seen is None else int(trajectory.seen.sum()),
        difficulty=difficulty_counts(trajectory),
    )


def unit_count(trajectory: Counted) -> int:
    """The number of independent units of a recording: examples or sequences."""
    return risk_groups(trajectory, per_difficulty=False)[0].units
