"""Which thresholds are tried? Grids of a readout: from quantiles of its signal, from none, or in its gaps.

A signal that is a whole number (patience counts loops) has its thresholds halfway between them: many examples have the
same value, and none of them may hang on the rounding of a threshold.

Shapes: N examples, T loops.
"""

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from loopscope.errors import UserError
from loopscope.readouts.readout import Readout, find_readout, required_readout
from loopscope.readouts.replay import signal
from loopscope.readouts.signals import SIGNALS, STOPPER, is_gate
from loopscope.trajectory import Trajectory

Curve = NDArray[np.float64]

QUANTILES = np.linspace(0.005, 0.995, 51)
GATE_GRID = np.linspace(0.01, 1.0, 100)
_GAP = 3e-5
"""Signals of equal examples differ by less than this (relative), whatever batch they were computed in."""


def grid(readout: str, calibration: Trajectory) -> Curve:
    """The paper's threshold grid: quantiles of the calibration signal over all loops, or a fixed grid."""
    definition = _readout_on(readout, calibration)
    if definition.takes != "threshold":
        return _grid_without_signal(definition, calibration.num_loops)
    values = signal(readout, calibration)
    if is_gate(readout):
        return GATE_GRID.copy()
    return _quantile_grid(readout, definition, values, QUANTILES)


def fine_grid(readout: str, calibration: Trajectory, points: int = 401) -> Curve:
    """A threshold grid so fine that its steps do not matter; the gate's comes from data here, too."""
    definition = _readout_on(readout, calibration)
    if definition.takes != "threshold":
        return _grid_without_signal(definition, calibration.num_loops)
    key = (readout, definition, points)
    if key not in calibration.computed:
        calibration.computed[key] = _fine_signal_grid(readout, definition, calibration, points)
    return calibration.computed[key].copy()


def _fine_signal_grid(readout: str, definition: Readout, calibration: Trajectory, points: int) -> Curve:
    """Compute the fine grid of a readout from its signal, ending in a threshold that never exits early."""
    values = signal(readout, calibration)
    ends_alike = is_gate(readout) or readout.startswith(STOPPER)  # every example says the same at loop T
    values = values[:, :-1] if ends_alike and values.shape[1] > 1 else values
    never = np.inf if definition.exits == "above" else -np.inf
    return np.append(_quantile_grid(readout, definition, values, np.linspace(0, 1, points)), never)


def _grid_without_signal(definition: Readout, num_loops: int) -> Curve:
    """The thresholds of a readout without a signal: every depth, or the single threshold of the oracle."""
    return np.arange(1.0, num_loops + 1) if definition.takes == "depth" else np.array([np.nan])


def _quantile_grid(readout: str, definition: Readout, values: Curve, quantiles: Curve) -> Curve:
    """The quantiles of a signal [N, T]; for a signal of whole numbers, the middles beside them."""
    known = values[~np.isnan(values)]
    if not len(known):
        loops = "one loop" if values.shape[1] == 1 else f"{values.shape[1]} loops"
        raise UserError(f"The calibration recording has {loops} only, so '{readout}' has no values to calibrate on.")
    if readout not in SIGNALS and is_whole(known):
        there = np.unique(known)
        if len(there) > len(quantiles):
            there = there[np.linspace(0, len(there) - 1, len(quantiles)).round().astype(int)]
        return there - 0.5 if definition.exits == "above" else there + 0.5  # so that it still exits
    return np.quantile(np.sort(known), quantiles)  # the same as unsorted, in half the time


def gap_grid(readout: str, proposing: Trajectory, points: int = 1000) -> Curve:
    """Thresholds, laxest first, in the gaps between signal values at which an example's exit moves.

    No example lies on a threshold, so that rounding decides about none. The strictest lets one of them exit early, the
    laxest all of them at the first loop that has a signal.
    """
    definition = _readout_on(readout, proposing)
    if definition.takes == "nothing":
        raise UserError("The oracle needs the labels, so it cannot be calibrated; choose another readout.")
    if definition.takes == "depth":
        return np.arange(1.0, proposing.num_loops)
    values = eagerness(readout, proposing)
    values = np.unique(values[~np.isnan(values)])
    all_of_them = values[:1] - (0.5 if is_whole(values) else 1e-3 * _magnitudes(values[:1]))
    thresholds = np.concatenate((all_of_them, gap_middles(values)))
    if len(thresholds) > points:
        thresholds = thresholds[np.linspace(0, len(thresholds) - 1, points).round().astype(int)]
    return thresholds if definition.exits == "above" else -thresholds


def every_threshold(readout: str, trajectory: Trajectory) -> Curve:
    """All values, laxest first, at which an example's exit moves: no other threshold exits differently."""
    values = eagerness(readout, trajectory)
    values = np.unique(values[~np.isnan(values)])
    return values if required_readout(readout).exits == "above" else -values


def gap_middles(values: Curve) -> Curve:
    """The middle of every gap between sorted values that is wider than rounding."""
    wide = np.flatnonzero(np.diff(values) > _GAP * _magnitudes(values[1:]))
    return np.asarray((values[wide] + values[wide + 1]) / 2)


def _magnitudes(values: Curve) -> Curve:
    """The size of each value, for relative differences."""
    return np.maximum(np.abs(values), np.finfo(np.float64).tiny)


def in_a_gap(threshold: float, values: Curve, side: Literal["left", "right"]) -> float:
    """Move a threshold into the middle of the nearest gap between sorted signal values that exceeds rounding.

    A quantile can be the signal of many equal examples, and then rounding would decide who of them exits.
    """
    values = values[~np.isnan(values)]
    if is_whole(values):
        return float(np.ceil(threshold) - 0.5 if side == "left" else np.floor(threshold) + 0.5)
    rank = int(np.searchsorted(values, threshold, side))
    near = np.arange(max(1, rank - len(values) // 200), min(len(values), rank + len(values) // 200 + 1))
    if not len(near):
        return threshold
    widths = (values[near] - values[near - 1]) / _magnitudes(values[near])
    wide = near[widths > _GAP]
    above = wide[np.abs(wide - rank).argmin()] if len(wide) else near[widths.argmax()]
    return float(values[above - 1 : above + 1].mean())


def eagerness(readout: str, trajectory: Trajectory) -> Curve:
    """[N, T-1] the strongest call for an exit by each loop before the last: the signal's running maximum.

    Of the signal itself, or of minus the signal where a low one means exit; NaN where it has said nothing yet.
    """
    values = signal(readout, trajectory)[:, :-1]
    return np.fmax.accumulate(values if required_readout(readout).exits == "above" else -values, axis=1)


def is_whole(values: Curve) -> bool:
    """Whether a signal has whole numbers only (NaN aside)."""
    values = values[~np.isnan(values)]
    return bool(len(values) and (values == np.rint(values)).all())


def _readout_on(readout: str, trajectory: Trajectory) -> Readout:
    """The definition of a readout; reject a recorded signal that does not say when it exits."""
    if find_readout(readout) is None and readout in trajectory.signals:
        raise UserError(
            f"The signal '{readout}' of the recording has no readout: say when it exits, with "
            f"ls.register_readout(ls.Readout('{readout}', exits='below')) or 'above'."
        )
    return required_readout(readout)
