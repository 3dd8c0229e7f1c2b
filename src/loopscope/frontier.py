"""What does a readout trade? Its threshold swept over a grid: accuracy against average loops, the frontier.

The grid is fixed on calibration data and applied to evaluation data: a fine one, whose steps do not matter, or the
paper's, for whoever compares with its numbers. A sweep is one pass: under a threshold rule the
exit of an example moves to a later loop only where the threshold passes the running maximum (or minimum) of its signal,
so counting those crossings gives every point of the curve exactly.

Shapes: N examples, T loops, G thresholds.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from loopscope.errors import UserError, check_known, missing_extra
from loopscope.files import write_bytes
from loopscope.leaks import check_calibration
from loopscope.policy import NEVER, ORACLE_THRESHOLD, ExitPolicy, chosen_scope
from loopscope.readouts.readout import has_threshold, required_readout
from loopscope.readouts.replay import signal
from loopscope.readouts.signals import is_gate
from loopscope.scope import ANYTHING, Scope
from loopscope.tabular import Tabular
from loopscope.threshold_grids import eagerness, fine_grid, grid as paper_grid, in_a_gap
from loopscope.trajectory import Trajectory

Curve = NDArray[np.float64]
Grid = Literal["fine", "paper"]
_ROUNDING = 1e-9
"""An accuracy is a ratio of whole numbers, and so is a target that comes from another recording."""
_MIME = "application/vnd.vegalite.v5+json"
_SCHEMA = "https://vega.github.io/schema/vega-lite/v5.json"
_PIXELS_PER_POINT = 2
_WITHOUT_LINE = ("fixed", "oracle")
"""Between two fixed depths there is no fixed depth, and the oracle is one point: marks without a line."""


@dataclass(frozen=True, repr=False)
class OperatingPoint:
    """Describe one threshold of a frontier on evaluation data and on calibration data.

    Parameters
    ----------
    policy
        The policy that consists of the readout and the threshold.
    accuracy, average_loops
        The results of the policy on evaluation data.
    calibration_accuracy, calibration_average_loops
        The results of the policy on calibration data.

    Examples
    --------
    >>> point = ls.sweep("margin", validation, test).select()
    >>> point.policy.readout
    'margin'
    >>> bool(point.average_loops <= test.num_loops)
    True
    """

    policy: ExitPolicy
    accuracy: float
    average_loops: float
    calibration_accuracy: float
    calibration_average_loops: float

    def __repr__(self) -> str:
        there = f"{100 * self.calibration_accuracy:.1f} % in {self.calibration_average_loops:.2f} on calibration data"
        return f"OperatingPoint({self.policy}: {100 * self.accuracy:.1f} % in {self.average_loops:.2f} loops; {there})"

    @property
    def rank(self) -> tuple[float, float]:
        """Order points by calibration accuracy (highest first), then by loops (fewest first)."""
        return -self.calibration_accuracy, self.calibration_average_loops


@dataclass(frozen=True, eq=False, repr=False)
class Frontier(Tabular):
    """Hold the curve of a readout: accuracy against average loops, at each of G thresholds.

    `sweep` returns a `Frontier`.

    Parameters
    ----------
    readout
        The readout's name.
    thresholds
        [G] thresholds in the order of the grid; NaN for a readout without thresholds.
    accuracy, average_loops
        [G] results on evaluation data, one for each threshold.
    calibration_accuracy, calibration_average_loops
        [G] results on calibration data, one for each threshold; you may use these results to choose a threshold.
    scope
        The recorded model and the kind of its decisions.

    Examples
    --------
    >>> frontier = ls.sweep("entropy", validation, test)
    >>> frontier.depth_at(0.9) < test.num_loops
    True
    >>> list(frontier.to_dict())[:3]
    ['threshold', 'accuracy', 'average_loops']
    """

    readout: str
    thresholds: Curve
    accuracy: Curve
    average_loops: Curve
    calibration_accuracy: Curve
    calibration_average_loops: Curve
    scope: Scope = ANYTHING  # the model and kind of decisions that were recorded: for the policies chosen here

    def __repr__(self) -> str:
        loops, accuracy = self.average_loops, self.accuracy
        return (
            f"Frontier({self.readout}, {len(loops)} thresholds: {100 * accuracy.min():.1f} to "
            f"{100 * accuracy.max():.1f} % in {loops.min():.2f} to {loops.max():.2f} loops)"
        )

    def plot(self, *others: "Frontier") -> "FrontierPlot":
        """Draw accuracy against average loops. A notebook shows the chart.

        Parameters
        ----------
        *others
            Other frontiers to draw in the same chart.

        Returns
        -------
        FrontierPlot
            The chart; `save` writes the chart to a file.
        """
        return FrontierPlot({each.readout: (each.average_loops, each.accuracy) for each in (self, *others)})

    def to_dict(self) -> dict[str, list[Any]]:
        """List the columns by name: threshold, accuracy and average loops on evaluation data and on calibration data.

        Returns
        -------
        dict[str, list]
            [G] values of every column, for `pandas.DataFrame` or `polars.DataFrame`.
        """
        names = ("accuracy", "average_loops", "calibration_accuracy", "calibration_average_loops")
        return {"threshold": self.thresholds.tolist(), **{name: getattr(self, name).tolist() for name in names}}

    def depth_at(self, accuracy: float) -> float | None:
        """Read D@X: the smallest average number of loops at which the evaluation curve reaches an accuracy.

        Parameters
        ----------
        accuracy
            The accuracy X, from 0 to 1.

        Returns
        -------
        float or None
            The average number of loops; None if the curve never reaches X.

        Raises
        ------
        UserError
            If the accuracy does not lie between 0 and 1.
        """
        return _depth_at(self.average_loops, self.accuracy, accuracy)

    def threshold_at(self, accuracy: float) -> float | None:
        """Find the threshold at which the evaluation curve reaches D@X.

        Parameters
        ----------
        accuracy
            The accuracy X, from 0 to 1.

        Returns
        -------
        float or None
            The threshold; None if the curve never reaches X, or if the readout has no thresholds.

        Raises
        ------
        UserError
            If the accuracy does not lie between 0 and 1.
        """
        reached = np.flatnonzero(self.accuracy >= _checked_accuracy(accuracy) - _ROUNDING)
        if not len(reached) or np.isnan(self.thresholds).any():
            return None
        return float(self.thresholds[reached[self.average_loops[reached].argmin()]])

    def calibration_depth_at(self, accuracy: float) -> float | None:
        """Read D@X on the calibration curve, which you may use to choose a threshold.

        Parameters
        ----------
        accuracy
            The accuracy X, from 0 to 1.

        Returns
        -------
        float or None
            The average number of loops; None if the curve never reaches X.

        Raises
        ------
        UserError
            If the accuracy does not lie between 0 and 1.
        """
        return _depth_at(self.calibration_average_loops, self.calibration_accuracy, accuracy)

    def select(self) -> OperatingPoint:
        """Choose the most accurate point on calibration data; if several are equal, the point with the fewest loops.

        Returns
        -------
        OperatingPoint
            The policy of the point, and its results on evaluation data and on calibration data.
        """
        best = _most_accurate(self.calibration_accuracy, self.calibration_average_loops)
        return OperatingPoint(
            _policy_at(self.readout, self.thresholds[best], self.scope),
            float(self.accuracy[best]),
            float(self.average_loops[best]),
            float(self.calibration_accuracy[best]),
            float(self.calibration_average_loops[best]),
        )


@dataclass(frozen=True, repr=False, eq=False)
class FrontierPlot:
    """Draw curves of accuracy against average loops.

    `Frontier.plot` makes the chart. A notebook shows the chart; `save` writes the chart to a file.

    Parameters
    ----------
    curves
        Average loops [G] and accuracy [G] of every readout, by name.

    Examples
    --------
    >>> chart = ls.sweep("margin", validation, test).plot(ls.sweep("fixed", validation, test))
    >>> chart.save(folder / "frontiers.svg")
    >>> (folder / "frontiers.svg").is_file()
    True
    """

    curves: Mapping[str, tuple[NDArray[Any], NDArray[Any]]]  # readout -> average loops, accuracy

    @property
    def specification(self) -> dict[str, Any]:
        """Describe the chart in Vega-Lite."""
        rows = [
            {"readout": name, "average loops": float(loops), "accuracy": float(accuracy)}
            for name, points in self.curves.items()
            for loops, accuracy in sorted(set(zip(*points, strict=True)))
        ]
        x = {"field": "average loops", "type": "quantitative", "scale": {"zero": False}}
        y = {"field": "accuracy", "type": "quantitative", "scale": {"zero": False}, "axis": {"format": "%"}}
        colour = {"field": "readout", "type": "nominal", "sort": None}
        alone = {"field": "readout", "oneOf": [name for name in self.curves if name in _WITHOUT_LINE]}
        return {
            "$schema": _SCHEMA,
            "data": {"values": rows},
            "width": 420,
            "height": 280,
            "encoding": {"x": x, "y": y, "color": colour, "shape": {"field": "readout", "type": "nominal"}},
            "layer": [
                {"mark": "line", "transform": [{"filter": {"not": alone}}]},
                {"mark": {"type": "point", "filled": True, "tooltip": True}},
            ],
        }

    def __repr__(self) -> str:
        return f"FrontierPlot({', '.join(self.curves)}: accuracy against average loops; a notebook draws it)"

    def save(self, path: str | Path) -> None:
        """Write the chart to a file; `save` needs the extra `report`.

        Parameters
        ----------
        path
            A file whose name ends in .png, .svg or .pdf.

        Raises
        ------
        UserError
            If the name has a different ending, or if the extra `report` is not installed.
        """
        place = Path(path)
        kind = place.suffix.removeprefix(".")
        check_known(kind, ("png", "svg", "pdf"), "kind of picture")
        try:
            import vl_convert
        except ModuleNotFoundError as error:
            raise missing_extra(error, "A picture of a frontier") from None
        options = {"scale": _PIXELS_PER_POINT} if kind == "png" else {}
        drawn = getattr(vl_convert, f"vegalite_to_{kind}")(self.specification, **options)
        write_bytes(place, drawn.encode() if isinstance(drawn, str) else drawn)

    def _repr_mimebundle_(self, **_: Any) -> dict[str, Any]:
        return {_MIME: self.specification, "text/plain": repr(self)}


def _depth_at(average_loops: Curve, accuracy: Curve, target: float) -> float | None:
    """D@X on one curve: the fewest average loops at which it reaches the accuracy; None if it never does."""
    reached = average_loops[accuracy >= _checked_accuracy(target) - _ROUNDING]
    return float(reached.min()) if len(reached) else None


def _checked_accuracy(value: float) -> float:
    """Check that a target accuracy is a share: 95 is out of reach, and easily taken for a result."""
    if not 0 <= value <= 1:
        raise UserError(f"An accuracy lies between 0 and 1, such as 0.95; got {value:g}.")
    return value


def sweep(readout: str, calibration: Trajectory, evaluation: Trajectory, *, grid: Grid = "fine") -> Frontier:
    """Sweep the thresholds of a readout, and measure the accuracy and the average loops at each threshold.

    Parameters
    ----------
    readout
        A name in `READOUTS`; for an attached gate or stopper, `gate:NAME` or `stopper:NAME`.
    calibration
        The recording from which the thresholds are taken.
    evaluation
        Another recording of the same model, on which the thresholds are measured.
    grid
        The grid of thresholds: "fine" (the default) has negligible distances between thresholds, "paper" has the
        thresholds of the paper.

    Returns
    -------
    Frontier
        Accuracy and average loops at every threshold, on both recordings.

    Raises
    ------
    UserError
        If the two recordings share examples, are of different models, or lack the arrays that the readout reads.

    Examples
    --------
    >>> frontier = ls.sweep("margin", validation, test)
    >>> round(frontier.depth_at(0.9), 1)
    1.8
    """
    check_calibration(calibration, evaluation, readout)
    thresholds = swept_thresholds(readout, calibration, grid)
    accuracy, loops = curve(readout, thresholds, evaluation)
    calibration_accuracy, calibration_loops = curve(readout, thresholds, calibration)
    curves = (accuracy, loops, calibration_accuracy, calibration_loops)
    return Frontier(readout, thresholds, *curves, chosen_scope(readout, calibration))


def swept_thresholds(readout: str, calibration: Trajectory, which: Grid = "fine") -> Curve:
    """The thresholds of a sweep: the fine grid, whose steps do not matter, or the paper's grid."""
    check_known(which, get_args(Grid), "grid")
    if which == "paper":
        return paper_grid(readout, calibration)
    return np.clip(fine_grid(readout, calibration), -NEVER, NEVER)


def choose(readout: str, calibration: Trajectory) -> ExitPolicy:
    """The policy at the most accurate threshold on calibration data, ties to fewer loops."""
    thresholds = swept_thresholds(readout, calibration)
    threshold = float(thresholds[_most_accurate(*curve(readout, thresholds, calibration))])
    if has_threshold(readout) and not is_gate(readout) and abs(threshold) < NEVER:
        side: Literal["left", "right"] = "left" if required_readout(readout).exits == "above" else "right"
        threshold = in_a_gap(threshold, np.sort(signal(readout, calibration), axis=None), side)
    return _policy_at(readout, threshold, chosen_scope(readout, calibration))


def _most_accurate(accuracy: Curve, average_loops: Curve) -> int:
    """The place of the most accurate threshold, ties to fewer loops."""
    return int(np.lexsort((average_loops, -accuracy))[0])


def _policy_at(readout: str, threshold: float, scope: Scope) -> ExitPolicy:
    """The exit policy of a readout at one threshold of a sweep."""
    return ExitPolicy(readout, None if np.isnan(threshold) else float(threshold), scope=scope)


def curve(readout: str, thresholds: ArrayLike, trajectory: Trajectory) -> tuple[Curve, Curve]:
    """The curve of a readout: accuracy [G] and average loops [G] at every threshold, exactly as a policy exits."""
    points = np.asarray(thresholds, dtype=np.float64)
    order = laxest_first(readout, points)
    crossed, rows = crossings(readout, points[order], trajectory), trajectory.num_examples
    accuracy, loops = np.empty_like(points), np.empty_like(points)
    accuracy[order] = totals_at_exit(crossed, trajectory.correct, len(points)) / rows
    loops[order] = (rows + _steps_to_later_loops(crossed, None, len(points))) / rows
    return accuracy, loops


def accuracy_and_loops(policy: ExitPolicy, trajectory: Trajectory) -> tuple[float, float]:
    """The accuracy and average loops of a policy that is replayed on a recording."""
    loops = policy.exit_loops(trajectory)
    right = trajectory.correct[np.arange(len(loops)), loops - 1]
    return float(right.mean()), float(loops.mean())


def swept_exits(readout: str, thresholds: ArrayLike, trajectory: Trajectory) -> NDArray[np.int64]:
    """[N, G] the exit loop of every example at every threshold of a readout."""
    points = np.asarray(thresholds, dtype=np.float64)
    order = laxest_first(readout, points)
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order))
    return exit_loops(crossings(readout, points[order], trajectory), rank)


def laxest_first(readout: str, thresholds: Curve) -> NDArray[np.int64]:
    """[G] the order of thresholds from the earliest exits to the latest."""
    return np.argsort(-thresholds if required_readout(readout).exits == "below" else thresholds)


def crossings(readout: str, thresholds: Curve, trajectory: Trajectory) -> NDArray[np.int64]:
    """[N, T-1] how many thresholds (laxest first) let an example exit by each loop before the last.

    Threshold g sends it past loop t exactly if this number is at most g. The oracle's threshold, which has no value
    (NaN), lies between wrong and right.
    """
    points = thresholds if required_readout(readout).exits == "above" else -thresholds
    points = np.where(np.isnan(points), ORACLE_THRESHOLD, points)
    reached = eagerness(readout, trajectory)
    return np.searchsorted(points, np.where(np.isnan(reached), -np.inf, reached), side="right")


def exit_loops(crossed: NDArray[np.int64], places: NDArray[np.int64]) -> NDArray[np.int64]:
    """[N, G] the exit loop of every example at these places among the thresholds, from all `crossings`."""
    return 1 + (crossed[:, :, None] <= places).sum(axis=1)


def totals_at_exit(crossed: NDArray[np.int64], values: NDArray[Any], size: int) -> Curve:
    """[G] the sum over examples of a value [N, T], taken at the loop where each of `size` thresholds exits.

    `crossed` [N, T-1] is of these thresholds, laxest first.
    """
    values = values.astype(np.int8) if values.dtype == np.bool_ else values
    first = values[:, 0].sum(dtype=np.int64 if values.dtype.kind == "i" else np.float64)
    return first + _steps_to_later_loops(crossed, np.diff(values, axis=1), size)


def _steps_to_later_loops(crossed: NDArray[np.int64], steps: NDArray[Any] | None, size: int) -> Curve:
    """[G] how many steps to a later loop each threshold needs, or the sum of the values of these steps."""
    weights = None if steps is None else steps.ravel()
    return np.bincount(crossed.ravel(), weights, minlength=size + 1)[:-1].cumsum()
