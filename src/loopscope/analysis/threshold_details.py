"""What does the page know of a model beside its results? Thresholds in detail, and single examples.

D@X is read from the whole grid; of its thresholds about fifty are shown, with those that matter among them. All numbers
are computed here; the page only looks them up. `ReadoutCurve` holds what charts of many models need, `ModelDetails`
what is looked at one model at a time.

Shapes: N examples and G thresholds that are shown (laxest first), T loops, L difficulties, S target accuracies.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from loopscope.analysis import resampled_curves
from loopscope.analysis.bootstrap import Curves, intervals
from loopscope.analysis.difficulty import difficulty_bins
from loopscope.analysis.outcomes import count_exits, sample_by_pattern
from loopscope.analysis.schema import Certified
from loopscope.analysis.targets import Target
from loopscope.exits import ExitPolicy, Frontier, signal
from loopscope.exits.readouts import readout_kind
from loopscope.exits.scope import Unit, counted, unit_of
from loopscope.exits.sweep import crossings, laxest_first
from loopscope.exits.thresholds import available_readouts
from loopscope.trajectory import Trajectory

MOST_EXAMPLES = 200
SHOWN = 51
"""Thresholds of a grid that are drawn, beside the chosen one, that of D@X and the certified ones."""
_DIGITS = 5


class CertifiedMark(msgspec.Struct, frozen=True):
    """A certified threshold: its place among the thresholds, and what it promises."""

    place: int
    guarantee: str  # nothing where it has none
    verdict: str  # of test data; nothing where there is no promise
    counted: str  # how it does on the test examples that the promise is for


class ReadoutCurve(msgspec.Struct, frozen=True):
    """A readout at the thresholds that are shown, [G] each, and its D@X, [S] each, on all of its grid."""

    readout: str
    thresholds: list[float]  # none of the oracle
    extra: list[int]  # the places of certified thresholds that are not on the grid: no part of the curve and of D@X
    chosen: int  # the place that validation chose
    at_target: int | None  # the place of D@X at the first target; null where it is not reached
    certified: list[CertifiedMark]
    accuracy: list[float]  # with its 95 % interval, as the others
    accuracy_low: list[float]
    accuracy_high: list[float]
    loops: list[float]
    loops_low: list[float]
    loops_high: list[float]
    depth: list[float | None]  # null where the accuracy is not reached
    depth_low: list[float | None]
    depth_high: list[float | None]
    depth_reached: list[float]  # the share of resamples that reach it


class ExitsByThreshold(msgspec.Struct, frozen=True):
    exits: list[list[list[int]]]  # [G][L][T] how many of each difficulty exit at each loop
    right: list[list[int]]  # [G][L] how many of those are right
    outcomes: list[list[int]]  # [G][5] how many have each outcome


class SampledExamples(msgspec.Struct, frozen=True):
    """Some of the test examples."""

    rows: list[int]  # [N] their places among the test examples that are counted, in the order in which they were drawn
    texts: list[str] | None  # [N]
    labels: list[int]  # [N]
    difficulty: list[float] | None  # [N]
    answers: list[list[int]]  # [N][T]
    label_probability: list[list[float]] | None  # [N][T]
    signals: dict[str, list[list[float | None]]]  # readout -> [N][T]
    crossed: dict[str, list[list[int]]]  # readout -> [N][T-1] how many thresholds let it exit by each loop


class ModelDetails(msgspec.Struct, frozen=True):
    graded: bool  # whether there are difficulties
    binned: bool  # whether a level is the median of a bin
    levels: list[float]  # [L]
    counts: list[int]  # [L]
    lines: dict[str, ExitsByThreshold]  # by readout
    examples: SampledExamples


class ThresholdDetails(msgspec.Struct, frozen=True):
    slider_targets: list[float]  # [S] the target accuracies
    curves: list[ReadoutCurve]
    deep: ModelDetails


def slider_targets(targets: Sequence[Target]) -> list[float]:
    """Every half percent, and the targets of the report that are the same for every model."""
    return sorted({*(step / 200 for step in range(1, 201)), *(t.accuracy for t in targets if t.accuracy is not None)})


@dataclass(frozen=True)
class DetailedFrontier:
    """A frontier and what the page shows of it: some thresholds of its grid, and the certified ones, laxest first."""

    frontier: Frontier
    depths: Curves  # on the whole grid: what D@X is read from
    thresholds: NDArray[np.float64]  # [G]
    on_grid: NDArray[np.bool_]  # [G]
    resampled: Curves  # [1 + R, G]
    at_target: int | None  # the place of D@X at the first target

    def place(self, threshold: float | None) -> int:
        return 0 if threshold is None else int(np.flatnonzero(self.thresholds == threshold)[0])


def detailed_frontier(
    frontier: Frontier, policies: Sequence[ExitPolicy], evaluation: Trajectory, accuracy: float
) -> DetailedFrontier:
    """`policies` are the certified ones, of this readout and of others; `accuracy` is the first target's."""
    readout, grid = frontier.readout, frontier.thresholds
    if readout_kind(readout) == "oracle":
        curves = resampled_curves(readout, grid, evaluation)
        reached = 0 if frontier.depth_at(accuracy) is not None else None
        return DetailedFrontier(frontier, curves, grid, np.array([True]), curves, reached)
    special = [frontier.select().policy.threshold, frontier.threshold_at(accuracy)]
    special += [policy.threshold for policy in policies if policy.readout == readout]
    known = [each for each in special if each is not None]
    every = np.unique(np.concatenate((grid, known)))
    every = every[laxest_first(readout, every)]
    curves, on_grid = resampled_curves(readout, every, evaluation), np.isin(every, grid)
    shown = np.isin(every, known)
    places = np.flatnonzero(on_grid)
    shown[places[np.linspace(0, len(places) - 1, min(SHOWN, len(places))).round().astype(int)]] = True
    place = None if special[1] is None else int(np.flatnonzero(every[shown] == special[1])[0])
    return DetailedFrontier(frontier, curves.at(on_grid), every[shown], on_grid[shown], curves.at(shown), place)


def threshold_details(
    details: Sequence[DetailedFrontier],
    certified: Sequence[Certified],
    evaluation: Trajectory,
    targets: Sequence[Target],
) -> ThresholdDetails:
    """Everything that the page shows of one model; all frontiers are of the same evaluation recording."""
    stops = slider_targets(targets)
    levels, bins = difficulty_bins(evaluation)
    rows = sample_by_pattern(evaluation, MOST_EXAMPLES)
    lines, crossed_rows = {}, {}
    for each in details:
        readout = each.frontier.readout
        crossed = crossings(readout, each.thresholds, evaluation)
        exits = count_exits(crossed, len(each.thresholds), evaluation.correct, bins)
        lines[readout] = ExitsByThreshold(exits.loops.tolist(), exits.right.tolist(), exits.outcomes.tolist())
        crossed_rows[readout] = crossed[rows].tolist()
    difficulty = evaluation.difficulty
    graded = difficulty is not None
    binned = difficulty is not None and len(levels) < len(np.unique(difficulty))
    counts = np.bincount(bins).tolist()
    deep = ModelDetails(graded, binned, rounded(levels), counts, lines, _sheet(evaluation, rows, crossed_rows))
    unit = unit_of(evaluation.provenance, evaluation.sequences is not None)
    return ThresholdDetails(stops, [_curve(each, certified, stops, unit) for each in details], deep)


def _curve(
    detail: DetailedFrontier, certified: Sequence[Certified], stops: Sequence[float], unit: Unit
) -> ReadoutCurve:
    frontier, resampled = detail.frontier, detail.resampled
    accuracy, loops = resampled.accuracy, resampled.average_loops
    depths = detail.depths.depths_at(stops)
    of_accuracy, of_loops, of_depths = (intervals(values) for values in (accuracy, loops, depths))
    oracle = readout_kind(frontier.readout) == "oracle"
    return ReadoutCurve(
        readout=frontier.readout,
        thresholds=[] if oracle else detail.thresholds.tolist(),
        extra=np.flatnonzero(~detail.on_grid).tolist(),
        chosen=detail.place(frontier.select().policy.threshold),
        at_target=detail.at_target,
        certified=[
            CertifiedMark(detail.place(each.threshold), *_mark_texts(each, unit))
            for each in certified
            if each.readout == frontier.readout
        ],
        accuracy=rounded(accuracy[0]),
        accuracy_low=rounded(of_accuracy.low),
        accuracy_high=rounded(of_accuracy.high),
        loops=rounded(loops[0]),
        loops_low=rounded(of_loops.low),
        loops_high=rounded(of_loops.high),
        depth=rounded(depths[0]),
        depth_low=rounded(of_depths.low),
        depth_high=rounded(of_depths.high),
        depth_reached=rounded(of_depths.reached),
    )


def _mark_texts(certified: Certified, unit: Unit) -> tuple[str, str, str]:
    guarantee, held = certified.guarantee, certified.held_out
    tested = counted("test", held.examples, held.sequences, unit)
    accuracy = "" if held.accuracy is None else f"{100 * held.accuracy.value:.1f} % accuracy, "
    once = ", every input once" if guarantee is not None and guarantee.distinct else ""
    mean = "" if held.sequences is None else "on average over sequences, "
    return (
        "" if guarantee is None else guarantee.sentence,
        "" if held.guarantee is None else held.guarantee.verdict,
        f"{mean}{accuracy}{held.average_loops.value:.2f} loops on {tested}{once}",
    )


def _sheet(evaluation: Trajectory, rows: NDArray[np.int64], crossed: dict[str, list[list[int]]]) -> SampledExamples:
    names = [name for name in available_readouts(evaluation) if readout_kind(name) in ("above", "below")]
    signals = {name: signal(name, evaluation)[rows] for name in names}
    has_log_probs = evaluation.logits is not None or evaluation.label_log_probs is not None
    texts, difficulty = evaluation.examples, evaluation.difficulty
    return SampledExamples(
        rows=rows.tolist(),
        texts=None if texts is None else [texts[row] for row in rows],
        labels=evaluation.required_labels[rows].tolist(),
        difficulty=None if difficulty is None else difficulty[rows].tolist(),
        answers=evaluation.predicted[rows].tolist(),
        label_probability=rounded(np.exp(-evaluation.take(rows).cross_entropy)) if has_log_probs else None,
        signals={name: rounded(values) for name, values in signals.items()},
        crossed=crossed,
    )


def rounded(values: Any) -> Any:
    """To five significant digits, whatever the shape; null where there is no number. Whole numbers stay."""
    if isinstance(values, int):
        return values
    if isinstance(values, float | None):
        return None if values is None or np.isnan(values) else float(f"{values:.{_DIGITS}g}")
    return [rounded(value) for value in values]
