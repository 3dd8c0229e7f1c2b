"""Which thresholds are tried? Grids of a readout: from quantiles of its signal, from none, or in its gaps.

Shapes: N examples, T loops.
"""

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from loopscope.errors import UserError
from loopscope.exits.readouts import READOUTS, readout_kind
from loopscope.exits.signals import CONVERGENCE, FITTED, SIGNALS, is_gate, signal
from loopscope.trajectory import Trajectory

Curve = NDArray[np.float64]

QUANTILES = np.linspace(0.005, 0.995, 51)
GATE_GRID = np.linspace(0.01, 1.0, 100)
_GAP = 3e-5
"""Signals of equal examples differ by less than this (relative), whatever batch they were computed in."""


def grid(readout: str, calibration: Trajectory) -> Curve:
    """The paper's thresholds: quantiles of the calibration signal over all loops, or a grid that needs no data."""
    kind = readout_kind(readout)
    if kind == "oracle":
        return np.array([np.nan])
    if kind == "depth":
        return np.arange(1.0, calibration.num_loops + 1)
    values = signal(readout, calibration)
    if is_gate(readout):
        return GATE_GRID.copy()
    return np.quantile(np.sort(_known(readout, values)), QUANTILES)  # the same as unsorted, in half the time


def fine_grid(readout: str, calibration: Trajectory, points: int = 401) -> Curve:
    """Thresholds so close together that steps between them do not matter; the gate's come from data here, too."""
    if readout_kind(readout) in ("oracle", "depth"):
        return grid(readout, calibration)
    values = signal(readout, calibration)
    values = values[:, :-1] if is_gate(readout) and values.shape[1] > 1 else values
    values = _known(readout, values)
    never = np.inf if readout_kind(readout) == "above" else -np.inf
    return np.append(np.quantile(np.sort(values), np.linspace(0, 1, points)), never)


def _known(readout: str, values: Curve) -> Curve:
    values = values[~np.isnan(values)]
    if not len(values):
        raise UserError(f"The calibration recording has one loop only, so '{readout}' has no values to calibrate on.")
    return values


def gap_grid(readout: str, proposing: Trajectory, points: int = 1000) -> Curve:
    """Thresholds, laxest first, in the gaps between the values at which an example's exit moves to another loop.

    No example lies on a threshold, so that rounding decides about none. The strictest lets one of them exit early, the
    laxest all of them at the first loop that has a signal.
    """
    kind = readout_kind(readout)
    if kind == "oracle":
        raise UserError("The oracle needs the labels, so it cannot be calibrated; choose another readout.")
    if kind == "depth":
        return np.arange(1.0, proposing.num_loops)
    values = eagerness(readout, proposing)
    values = np.unique(values[~np.isnan(values)])
    scale = np.maximum(np.abs(values), np.finfo(np.float64).tiny)
    wide = np.flatnonzero(np.diff(values) > _GAP * scale[1:])
    middles = (values[wide] + values[wide + 1]) / 2
    all_of_them = values[:1] - 1e-3 * scale[:1]
    thresholds = np.concatenate((all_of_them, middles))
    if len(thresholds) > points:
        thresholds = thresholds[np.linspace(0, len(thresholds) - 1, points).round().astype(int)]
    return thresholds if kind == "above" else -thresholds


def in_a_gap(threshold: float, values: Curve, side: Literal["left", "right"]) -> float:
    """The middle of the nearest gap between the sorted signals that is wider than rounding, or of the widest near by.

    A quantile can be the signal of many equal examples, and then rounding would decide who of them exits.
    """
    values = values[~np.isnan(values)]
    rank = int(np.searchsorted(values, threshold, side))
    near = np.arange(max(1, rank - len(values) // 200), min(len(values), rank + len(values) // 200 + 1))
    if not len(near):
        return threshold
    widths = (values[near] - values[near - 1]) / np.maximum(np.abs(values[near]), np.finfo(np.float64).tiny)
    wide = near[widths > _GAP]
    above = wide[np.abs(wide - rank).argmin()] if len(wide) else near[widths.argmax()]
    return float(values[above - 1 : above + 1].mean())


def eagerness(readout: str, trajectory: Trajectory) -> Curve:
    """[N, T-1] the most that the signal has said for an exit by each loop before the last: its running maximum.

    Of the signal itself, or of minus the signal where a low one means exit; NaN where it has said nothing yet.
    """
    values = signal(readout, trajectory)[:, :-1]
    return np.fmax.accumulate(values if readout_kind(readout) == "above" else -values, axis=1)


def available_readouts(*trajectories: Trajectory) -> list[str]:
    """The readouts for which every one of these recordings holds what is needed."""
    fitted = sorted({name for trajectory in trajectories for name in trajectory.signals if name.startswith(FITTED)})
    return [name for name in (*READOUTS, *fitted) if all(_available(name, trajectory) for trajectory in trajectories)]


def _available(readout: str, trajectory: Trajectory) -> bool:
    if readout in CONVERGENCE and trajectory.num_loops == 1:
        return False
    if readout in ("fixed", "oracle") or readout in trajectory.signals:
        return True
    if readout.startswith(FITTED):
        return False
    return getattr(trajectory, SIGNALS[readout][0]) is not None
