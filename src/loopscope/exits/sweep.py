"""What does a readout trade? Its threshold swept over a grid: accuracy against average loops, the frontier.

The grid is fixed on calibration data and applied to evaluation data. A sweep is one pass: under a threshold rule the
exit of an example moves to a later loop only where the threshold passes the running maximum (or minimum) of its signal,
so counting those crossings gives every point of the curve exactly.

Shapes: N examples, T loops, G thresholds.
"""

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from loopscope.errors import UserError
from loopscope.exits.readouts import READOUTS, ExitPolicy, accuracy_and_loops, readout_kind
from loopscope.exits.signals import CONVERGENCE, FITTED, SIGNALS, is_gate, signal
from loopscope.trajectory import Trajectory

Curve = NDArray[np.float64]

QUANTILES = np.linspace(0.005, 0.995, 51)
GATE_GRID = np.linspace(0.01, 1.0, 100)
_GAP = 3e-5
"""Signals of equal examples differ by less than this (relative), whatever batch they were computed in."""
EVALUATION_SPLITS = ("test", "extrapolation")


@dataclass(frozen=True)
class OperatingPoint:
    """One threshold of a frontier, on both data sets."""

    policy: ExitPolicy
    accuracy: float
    average_loops: float
    calibration_accuracy: float
    calibration_average_loops: float

    @property
    def rank(self) -> tuple[float, float]:
        """By which calibration data prefer one point to another: the most accurate first, ties to fewer loops."""
        return -self.calibration_accuracy, self.calibration_average_loops


@dataclass(frozen=True, eq=False)
class Frontier:
    """A readout's curve, [G] each, in the order of its threshold grid."""

    readout: str
    thresholds: Curve
    accuracy: Curve
    average_loops: Curve
    calibration_accuracy: Curve
    calibration_average_loops: Curve

    def depth_at(self, accuracy: float) -> float | None:
        """D@X: the least average depth on the evaluation curve that reaches this accuracy, or None."""
        return _depth_at(self.average_loops, self.accuracy, accuracy)

    def calibration_depth_at(self, accuracy: float) -> float | None:
        """The same on the calibration curve: what a choice may be based on."""
        return _depth_at(self.calibration_average_loops, self.calibration_accuracy, accuracy)

    def select(self) -> OperatingPoint:
        """The point chosen on calibration data: the highest accuracy, ties to fewer loops."""
        best = _best(self.calibration_accuracy, self.calibration_average_loops)
        return OperatingPoint(
            _policy(self.readout, self.thresholds[best]),
            float(self.accuracy[best]),
            float(self.average_loops[best]),
            float(self.calibration_accuracy[best]),
            float(self.calibration_average_loops[best]),
        )


def _depth_at(average_loops: Curve, accuracy: Curve, wanted: float) -> float | None:
    reached = average_loops[accuracy >= wanted]
    return float(reached.min()) if len(reached) else None


def sweep(readout: str, calibration: Trajectory, evaluation: Trajectory) -> Frontier:
    """The frontier of a readout whose thresholds come from `calibration`, on `evaluation`."""
    check_calibration(calibration, evaluation)
    thresholds = grid(readout, calibration)
    accuracy, loops = curve(readout, thresholds, evaluation)
    calibration_accuracy, calibration_loops = curve(readout, thresholds, calibration)
    return Frontier(readout, thresholds, accuracy, loops, calibration_accuracy, calibration_loops)


def choose(readout: str, calibration: Trajectory) -> ExitPolicy:
    """The policy that calibration data chooses: the highest accuracy, ties to fewer loops."""
    thresholds = grid(readout, calibration)
    threshold = float(thresholds[_best(*curve(readout, thresholds, calibration))])
    if readout in SIGNALS and not is_gate(readout):
        side: Literal["left", "right"] = "left" if readout_kind(readout) == "above" else "right"
        threshold = _in_a_gap(threshold, np.sort(signal(readout, calibration), axis=None), side)
    return _policy(readout, threshold)


def _in_a_gap(threshold: float, values: Curve, side: Literal["left", "right"]) -> float:
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


def _best(accuracy: Curve, average_loops: Curve) -> int:
    return int(np.lexsort((average_loops, -accuracy))[0])


def _policy(readout: str, threshold: float) -> ExitPolicy:
    return ExitPolicy(readout, None if np.isnan(threshold) else float(threshold))


def check_calibration(calibration: Trajectory, evaluation: Trajectory) -> None:
    """Refuses what would make a result look better than it is."""
    check_split(calibration, "calibration")
    if calibration.same_data(evaluation):
        raise UserError("Calibration and evaluation are the same data; calibrate on another split.")
    check_same_model(calibration, evaluation, "The calibration and the evaluation recording")


def check_split(recording: Trajectory, role: str) -> None:
    """Refuses to choose anything on data that is for evaluation."""
    if (recording.split or "").strip().lower().startswith(EVALUATION_SPLITS):
        raise UserError(
            f"The {role} recording is of the {recording.split} split; thresholds must not be chosen on data "
            "that is for evaluation: record the validation split and calibrate on that."
        )


def check_same_model(first: Trajectory, second: Trajectory, both: str) -> None:
    for what, ours, theirs in (
        ("loops", first.num_loops, second.num_loops),
        ("classes", first.num_classes, second.num_classes),
        ("weights", first.provenance.get("weights_sha256"), second.provenance.get("weights_sha256")),
    ):
        if ours is not None and theirs is not None and ours != theirs:
            raise UserError(f"{both} differ in their {what} ({ours} and {theirs}); both must come from the same model.")


def grid(readout: str, calibration: Trajectory) -> Curve:
    """The thresholds of a readout: quantiles of its calibration signal over all loops, or a grid that needs no data."""
    kind = readout_kind(readout)
    if kind == "oracle":
        return np.array([np.nan])
    if kind == "depth":
        return np.arange(1.0, calibration.num_loops + 1)
    values = signal(readout, calibration)
    if is_gate(readout):
        return GATE_GRID.copy()
    values = values[~np.isnan(values)]
    if not len(values):
        raise UserError(f"The calibration recording has one loop only, so '{readout}' has no values to calibrate on.")
    return np.quantile(np.sort(values), QUANTILES)  # the same as unsorted, in half the time


def fine_grid(readout: str, calibration: Trajectory, points: int = 401) -> Curve:
    """Thresholds so close together that steps between them do not matter; the gate's come from data here, too."""
    if readout_kind(readout) in ("oracle", "depth"):
        return grid(readout, calibration)
    values = signal(readout, calibration)
    values = values[:, :-1] if is_gate(readout) and values.shape[1] > 1 else values
    values = values[~np.isnan(values)]
    never = np.inf if readout_kind(readout) == "above" else -np.inf
    return np.append(np.quantile(np.sort(values), np.linspace(0, 1, points)), never)


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


def curve(readout: str, thresholds: ArrayLike, trajectory: Trajectory) -> tuple[Curve, Curve]:
    """Accuracy [G] and average loops [G] of a readout at every threshold, exactly as the policy would exit."""
    points = np.asarray(thresholds, dtype=np.float64)
    if readout_kind(readout) == "oracle":
        point = accuracy_and_loops(ExitPolicy("oracle"), trajectory)
        return np.array(point[:1]), np.array(point[1:])
    order = laxest_first(readout, points)
    crossed, rows = crossings(readout, points[order], trajectory), trajectory.num_examples
    accuracy, loops = np.empty_like(points), np.empty_like(points)
    accuracy[order] = totals(crossed, trajectory.correct, len(points)) / rows
    loops[order] = (rows + _crossed_by(crossed, None, len(points))) / rows
    return accuracy, loops


def replay(readout: str, thresholds: ArrayLike, trajectory: Trajectory) -> NDArray[np.int64]:
    """[N, G] the exit loop of every example at every threshold."""
    points = np.asarray(thresholds, dtype=np.float64)
    if readout_kind(readout) == "oracle":
        return ExitPolicy("oracle").exit_loops(trajectory)[:, None]
    order = laxest_first(readout, points)
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order))
    crossed = crossings(readout, points[order], trajectory)
    return 1 + (crossed[:, :, None] <= rank).sum(axis=1)


def laxest_first(readout: str, thresholds: Curve) -> NDArray[np.int64]:
    """[G] the order in which thresholds let ever fewer examples exit."""
    return np.argsort(-thresholds if readout_kind(readout) == "below" else thresholds)


def crossings(readout: str, thresholds: Curve, trajectory: Trajectory) -> NDArray[np.int64]:
    """[N, T-1] how many of the thresholds (laxest first) have let an example exit by each loop before the last.

    Threshold g sends it past loop t exactly if this number is at most g.
    """
    if readout_kind(readout) == "depth":
        by_loop = np.searchsorted(thresholds, np.arange(1, trajectory.num_loops), side="right")
        return np.broadcast_to(by_loop, (trajectory.num_examples, trajectory.num_loops - 1))
    points = thresholds if readout_kind(readout) == "above" else -thresholds
    reached = eagerness(readout, trajectory)
    return np.searchsorted(points, np.where(np.isnan(reached), -np.inf, reached), side="right")


def eagerness(readout: str, trajectory: Trajectory) -> Curve:
    """[N, T-1] the most that the signal has said for an exit by each loop before the last: its running maximum.

    Of the signal itself, or of minus the signal where a low one means exit; NaN where it has said nothing yet.
    """
    values = signal(readout, trajectory)[:, :-1]
    return np.fmax.accumulate(values if readout_kind(readout) == "above" else -values, axis=1)


def totals(crossed: NDArray[np.int64], values: NDArray[Any], size: int) -> Curve:
    """[G] the sum over examples of what they are worth [N, T] at the loop where each of `size` thresholds stops them.

    `crossed` [N, T-1] is of these thresholds, laxest first.
    """
    values = values.astype(np.int8) if values.dtype == np.bool_ else values
    first = values[:, 0].sum(dtype=np.int64 if values.dtype.kind == "i" else np.float64)
    return first + _crossed_by(crossed, np.diff(values, axis=1), size)


def _crossed_by(crossed: NDArray[np.int64], steps: NDArray[Any] | None, size: int) -> Curve:
    """[G] how many steps to a later loop (or the sum of their worth) each threshold asks for."""
    weights = None if steps is None else steps.ravel()
    return np.bincount(crossed.ravel(), weights, minlength=size + 1)[:-1].cumsum()
