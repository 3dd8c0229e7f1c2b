"""What do the thresholds of a readout lose, in the order in which they are tested, and how many of them are proven?

A walk is of a recording, on which every threshold is replayed, or of a live run of some thresholds; it is tested alike.

Shapes: N examples, T loops, G thresholds, U units.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from loopscope.certify.bounds import betting_p_values, conformal, count_leading, fixed_sequence, p_values
from loopscope.certify.live_runs import LiveRuns, Recorded
from loopscope.certify.losses import RiskGroup, losses, risk_groups
from loopscope.certify.risk_target import RiskTarget
from loopscope.certify.tested_data import outcome_of
from loopscope.config import Settings, Tally
from loopscope.frontier import Curve, crossings
from loopscope.policy import Bound
from loopscope.threshold_grids import every_threshold
from loopscope.trajectory import Trajectory

UnitLosses = Callable[[RiskGroup, slice, NDArray[np.int64]], Iterator[Curve]]


class Proof(Settings, frozen=True, kw_only=True):
    """How to test losses of sequences; losses of single examples always have the exact binomial test."""

    bound: Bound
    seed: Tally  # of the order in which sequences are bet on

    def order(self, units: int) -> NDArray[np.int64]:
        """Drawn by lot: recordings may be sorted, and then their units are not alike from first to last."""
        return np.random.default_rng([self.seed, 1]).permutation(units)


@dataclass(frozen=True)
class Walk:
    """The loss and loops of a readout at each threshold, in the order of the tests."""

    readout: str
    data: Recorded
    num_loops: int
    risk_groups: list[RiskGroup]
    thresholds: Curve  # [G]
    loss: Curve  # [groups, G] summed over units
    loops: Curve  # [G] averaged over units
    unit_losses: UnitLosses  # [b, G] of some units after the other, in an order, at these places of the walk

    @property
    def units(self) -> Curve:
        """[groups, 1]"""
        return np.array([[group.units] for group in self.risk_groups], dtype=np.float64)

    def fewest_loops(self, passed: int) -> float:
        """The fewest average loops among the first `passed` thresholds."""
        return float(self.loops[:passed].min(initial=self.num_loops))

    def proven(self, alpha: float, level: float | None, proof: Proof) -> int:
        """How many thresholds, from the first on, keep the guarantee in every group; without a level, on average."""
        if level is None:
            pairs = zip(self.risk_groups, self.loss, strict=True)
            return min(conformal(loss, group.units, alpha) for group, loss in pairs)
        tried = slice(None)
        if any(_tests_by_betting(group, proof) for group in self.risk_groups):
            tried = slice(count_leading(self.worst(alpha) < 1))  # more is lost than is allowed: no bets on that
        return fixed_sequence(self.p_values(alpha, level, proof, tried).max(axis=0), level)

    def p_values(self, alpha: float, level: float, proof: Proof, places: slice = slice(None)) -> Curve:
        """[groups, G] the p-values of all thresholds, or of some places in the walk."""
        found = []
        for group, loss in zip(self.risk_groups, self.loss, strict=True):
            if _tests_by_betting(group, proof):
                blocks = self.unit_losses(group, places, proof.order(group.units))
                found.append(betting_p_values(blocks, group.units, alpha, level))
            else:
                found.append(p_values(loss[places], group.units, alpha, group.binary))
        return np.stack(found)

    def variance(self, number: int, place: int) -> float:
        """The variance of the losses of a group's units at one place in the walk."""
        group = self.risk_groups[number]
        blocks = self.unit_losses(group, slice(place, place + 1), np.arange(group.units))
        return float(np.concatenate(list(blocks)).var())

    def worst(self, allowed: float | Curve) -> Curve:
        """[G] the loss of the worst group at each threshold, relative to the loss that is allowed to it."""
        return np.asarray((self.loss / self.units / allowed).max(axis=0))


def _tests_by_betting(group: RiskGroup, proof: Proof) -> bool:
    """Whether the betting bound tests a group: its losses are between 0 and 1."""
    return proof.bound == "betting" and not group.binary


def walk_thresholds(
    readout: str, thresholds: Curve, trajectory: Trajectory, target: RiskTarget, order: NDArray[np.int64] | None = None
) -> Walk:
    """Replay thresholds (laxest first) on a recording, to test them in `order`, or from the strictest on."""
    crossed, size = crossings(readout, thresholds, trajectory), len(thresholds)
    places = np.arange(size)[::-1] if order is None else order
    lost = losses(target.loss, trajectory)
    if target.in_expectation:
        lost = monotone_losses(lost, crossed, size)
    elif target.method == "tolerance":
        every = every_threshold(readout, trajectory)
        lost = monotone_losses(lost, crossings(readout, every, trajectory), len(every))
    depth = np.broadcast_to(np.arange(1.0, trajectory.num_loops + 1), lost.shape)
    parts = risk_groups(trajectory, target.per_difficulty)
    (all_units,) = risk_groups(trajectory, per_difficulty=False)
    loss = np.stack([group.totals(crossed, lost, size)[places] for group in parts])
    loops = all_units.totals(crossed, depth, size)[places] / all_units.units

    def unit_losses(group: RiskGroup, among: slice, units: NDArray[np.int64]) -> Iterator[Curve]:
        return group.unit_losses(crossed, lost, size, places[among], units)

    return Walk(readout, trajectory, trajectory.num_loops, parts, thresholds[places], loss, loops, unit_losses)


def walk_live_runs(runs: LiveRuns, target: RiskTarget) -> Walk:
    """Walk the candidates of a live run, the most cautious first."""
    (documents,) = risk_groups(runs, per_difficulty=False)
    outcomes = [outcome_of(runs.policy(place), runs) for place in range(len(runs.thresholds))]
    columns = [documents.means(each.lost(target.loss)) for each in outcomes]
    lost = np.clip(np.stack(columns, axis=1), 0.0, 1.0)
    loops = np.stack([documents.means(each) for each in runs.loops], axis=1).mean(axis=0)

    def unit_losses(group: RiskGroup, among: slice, units: NDArray[np.int64]) -> Iterator[Curve]:
        yield lost[units][:, among]

    loss = lost.sum(axis=0)[None]
    num_loops, readout = runs.contents.num_loops, runs.rule.readout
    return Walk(readout, runs, num_loops, [documents], np.asarray(runs.thresholds), loss, loops, unit_losses)


def monotone_losses(lost: NDArray[np.bool_], crossed: NDArray[np.int64], size: int) -> NDArray[np.bool_]:
    """[N, T] monotone losses: an example that a stricter threshold loses stays lost.

    Towards laxer thresholds an example exits at ever earlier loops, and only at those where some threshold stops it.
    """
    edges = np.zeros((len(lost), 1), dtype=np.int64)
    stopped = np.diff(np.concatenate((edges, crossed, edges + size), axis=1), axis=1) > 0
    return np.logical_or.accumulate((lost & stopped)[:, ::-1], axis=1)[:, ::-1]
