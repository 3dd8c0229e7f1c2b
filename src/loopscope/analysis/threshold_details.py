"""What does the page show of a model beside `results.json`? Thresholds in detail, and single examples.

D@X is read from the whole grid; of its thresholds about fifty are shown, with those that matter among them. All numbers
are computed here; the page only looks them up. `ReadoutCurve` holds what charts of many models need, `ModelDetails`
what is looked at one model at a time: where the examples exit, by difficulty, and whether that was the right time.

Shapes: N examples and G thresholds that are shown (laxest first), T loops, L difficulties, S target accuracies.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import msgspec
import numpy as np
from numpy.typing import NDArray

from loopscope.analysis.bootstrap import Curves, intervals, resampled_curves
from loopscope.analysis.difficulty import difficulty_bins
from loopscope.analysis.schema import Certified, rounded
from loopscope.analysis.targets import Target
from loopscope.frontier import Frontier, crossings, laxest_first
from loopscope.policy import ExitPolicy
from loopscope.readouts.readout import has_threshold, needs_labels
from loopscope.readouts.replay import available_readouts, signal
from loopscope.scope import Unit, unit_of
from loopscope.trajectory import Trajectory

Counts = NDArray[np.int64]

OUTCOMES = ("just in time", "could have exited earlier", "exited too early", "exited too late", "never right")
"""Of an exit: right, and no loop before it was; right, as a loop before it was; wrong, and a later loop is right;
wrong, and only loops before it were right; and wrong, as every loop is."""
MAX_EXAMPLES = 200
MAX_DRAWN = 51
"""Thresholds of a grid that are drawn, beside the chosen one, that of D@X and the certified ones."""


class CertifiedMark(msgspec.Struct, frozen=True):
    """A certified threshold on the page: its place among the thresholds, and its guarantee."""

    place: int
    guarantee: str  # nothing where it has none
    verdict: str  # of test data; nothing where there is no guarantee
    counted: str  # how it does on the test examples that the guarantee is for


class ReadoutCurve(msgspec.Struct, frozen=True):
    """The curve of a readout for the page's slider: [G] values at the thresholds shown, and D@X at [S] targets."""

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
    """How many examples exit at each loop, by threshold, difficulty and outcome, for the page."""

    exits: list[list[list[int]]]  # [G][L][T] how many of each difficulty exit at each loop
    right: list[list[int]]  # [G][L] how many of these exits are right
    outcomes: list[list[int]]  # [G][5] how many have each of OUTCOMES


class SampledExamples(msgspec.Struct, frozen=True):
    """Single test examples that the page shows, with their answers at every loop."""

    rows: list[int]  # [N] their places among the test examples that are counted, in the order in which they were drawn
    texts: list[str] | None  # [N]
    labels: list[int]  # [N]
    difficulty: list[float] | None  # [N]
    answers: list[list[int]]  # [N][T]
    label_probability: list[list[float]] | None  # [N][T]
    signals: dict[str, list[list[float | None]]]  # readout -> [N][T]
    crossed: dict[str, list[list[int]]]  # readout -> [N][T-1] how many thresholds let it exit by each loop


class ModelDetails(msgspec.Struct, frozen=True):
    """The details of one model that the page adds to `results.json`."""

    graded: bool  # whether there are difficulties
    binned: bool  # whether a level is the median of a bin
    levels: list[float]  # [L]
    counts: list[int]  # [L]
    lines: dict[str, ExitsByThreshold]  # by readout
    examples: SampledExamples


class ThresholdDetails(msgspec.Struct, frozen=True):
    """The details of one model with its name, for the page."""

    slider_targets: list[float]  # [S] the target accuracies
    curves: list[ReadoutCurve]
    deep: ModelDetails


def slider_targets(targets: Sequence[Target]) -> list[float]:
    """The accuracies of the page's slider: every half percent, and the report's absolute targets."""
    return sorted({*(step / 200 for step in range(1, 201)), *(t.accuracy for t in targets if t.accuracy is not None)})


@dataclass(frozen=True)
class DetailedFrontier:
    """A frontier, and the thresholds of its grid that the page shows: a sample, and the certified ones."""

    frontier: Frontier
    depths: Curves  # on the whole grid, for D@X
    thresholds: NDArray[np.float64]  # [G]
    on_grid: NDArray[np.bool_]  # [G]
    resampled: Curves  # [1 + R, G]
    at_target: int | None  # the place of D@X at the first target

    def place(self, threshold: float | None) -> int:
        return 0 if threshold is None else int(np.flatnonzero(self.thresholds == threshold)[0])


def whole_frontier(frontier: Frontier, evaluation: Trajectory) -> DetailedFrontier:
    """A frontier whose thresholds the page shows all."""
    curves = resampled_curves(frontier.readout, frontier.thresholds, evaluation)
    every = np.ones(len(frontier.thresholds), dtype=bool)
    return DetailedFrontier(frontier, curves, frontier.thresholds, every, curves, None)


def detailed_frontier(
    frontier: Frontier, policies: Sequence[ExitPolicy], evaluation: Trajectory, accuracy: float
) -> DetailedFrontier:
    """Choose the thresholds that the page shows of a frontier; certified policies and the first target are kept."""
    readout, grid = frontier.readout, frontier.thresholds
    if needs_labels(readout):
        return replace(
            whole_frontier(frontier, evaluation), at_target=None if frontier.depth_at(accuracy) is None else 0
        )
    special = [frontier.select().policy.threshold, frontier.threshold_at(accuracy)]
    special += [policy.threshold for policy in policies if policy.readout == readout]
    known = [each for each in special if each is not None]
    every = np.unique(np.concatenate((grid, known)))
    every = every[laxest_first(readout, every)]
    curves, on_grid = resampled_curves(readout, every, evaluation), np.isin(every, grid)
    shown = np.isin(every, known)
    places = np.flatnonzero(on_grid)
    shown[places[np.linspace(0, len(places) - 1, min(MAX_DRAWN, len(places))).round().astype(int)]] = True
    place = None if special[1] is None else int(np.flatnonzero(every[shown] == special[1])[0])
    return DetailedFrontier(frontier, curves.at(on_grid), every[shown], on_grid[shown], curves.at(shown), place)


def threshold_details(
    details: Sequence[DetailedFrontier],
    certified: Sequence[Certified],
    evaluation: Trajectory,
    targets: Sequence[Target],
) -> ThresholdDetails:
    """The details of one model for the page, from frontiers of the same evaluation recording."""
    stops = slider_targets(targets)
    levels, bins = difficulty_bins(evaluation)
    rows = sample_by_pattern(evaluation, MAX_EXAMPLES)
    lines, crossed_rows = {}, {}
    for each in details:
        readout = each.frontier.readout
        crossed = crossings(readout, each.thresholds, evaluation)
        lines[readout] = count_exits_by_threshold(crossed, len(each.thresholds), evaluation.correct, bins)
        crossed_rows[readout] = crossed[rows].tolist()
    difficulty = evaluation.difficulty
    graded = difficulty is not None
    binned = difficulty is not None and len(levels) < len(np.unique(difficulty))
    counts = np.bincount(bins).tolist()
    deep = ModelDetails(graded, binned, rounded(levels), counts, lines, _examples_sheet(evaluation, rows, crossed_rows))
    unit = unit_of(evaluation.provenance, evaluation.sequences is not None)
    return ThresholdDetails(stops, [_readout_curve(each, certified, stops, unit) for each in details], deep)


def _readout_curve(
    detail: DetailedFrontier, certified: Sequence[Certified], stops: Sequence[float], unit: Unit
) -> ReadoutCurve:
    """One readout's curve for the page's slider, with its certified thresholds."""
    frontier, resampled = detail.frontier, detail.resampled
    accuracy, loops = resampled.accuracy, resampled.average_loops
    depths = detail.depths.depths_at(stops)
    accuracy_low, accuracy_high, _ = intervals(accuracy)
    loops_low, loops_high, _ = intervals(loops)
    depth_low, depth_high, depth_reached = intervals(depths)
    return ReadoutCurve(
        readout=frontier.readout,
        thresholds=[] if needs_labels(frontier.readout) else detail.thresholds.tolist(),
        extra=np.flatnonzero(~detail.on_grid).tolist(),
        chosen=detail.place(frontier.select().policy.threshold),
        at_target=detail.at_target,
        certified=[
            CertifiedMark(detail.place(each.threshold), *_certified_mark_texts(each, unit))
            for each in certified
            if each.readout == frontier.readout
        ],
        accuracy=rounded(accuracy[0]),
        accuracy_low=rounded(accuracy_low),
        accuracy_high=rounded(accuracy_high),
        loops=rounded(loops[0]),
        loops_low=rounded(loops_low),
        loops_high=rounded(loops_high),
        depth=rounded(depths[0]),
        depth_low=rounded(depth_low),
        depth_high=rounded(depth_high),
        depth_reached=rounded(depth_reached),
    )


def _certified_mark_texts(certified: Certified, unit: Unit) -> tuple[str, str, str]:
    """The texts of a certified threshold on the page: what it guarantees, and its result on test data."""
    guarantee, held = certified.guarantee, certified.held_out
    accuracy = "" if held.accuracy is None else f"{100 * held.accuracy.value:.1f} % accuracy, "
    mean = "" if held.sequences is None else "on average over sequences, "
    return (
        "" if guarantee is None else guarantee.sentence,
        "" if held.guarantee is None else held.guarantee.verdict,
        f"{mean}{accuracy}{held.average_loops.value:.2f} loops on {certified.counted_on(unit)}",
    )


def _examples_sheet(
    evaluation: Trajectory, rows: NDArray[np.int64], crossed: dict[str, list[list[int]]]
) -> SampledExamples:
    """The sampled examples for the page: texts, answers, and the exit loop at every threshold."""
    names = [name for name in available_readouts(evaluation) if has_threshold(name)]
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


def count_exits_by_threshold(crossed: Counts, size: int, correct: NDArray[np.bool_], bins: Counts) -> ExitsByThreshold:
    """Count exits by threshold, difficulty and outcome, from `crossed` [N, T-1] (see `frontier.crossings`).

    An example exits at a loop from the threshold on that sends it there, up to the one that sends it past.
    """
    kinds = (int(bins.max()) + 1, len(OUTCOMES))
    outcomes, come = exit_outcomes(correct), np.zeros_like(bins)
    by_loop = []
    for loop in range(correct.shape[1]):
        kind = np.ravel_multi_index((bins, outcomes[:, loop]), kinds)
        gone = crossed[:, loop] if loop < crossed.shape[1] else np.full_like(bins, size)
        moves = [np.bincount(at * np.prod(kinds) + kind, minlength=(size + 1) * np.prod(kinds)) for at in (come, gone)]
        by_loop.append((moves[0] - moves[1]).reshape(size + 1, *kinds)[:size].cumsum(axis=0))
        come = gone
    counts = np.stack(by_loop, axis=2)  # [G, L, T, outcomes]
    return ExitsByThreshold(
        exits=counts.sum(axis=3).tolist(),
        right=counts[..., :2].sum(axis=(2, 3)).tolist(),
        outcomes=counts.sum(axis=(1, 2)).tolist(),
    )


def exit_outcomes(correct: NDArray[np.bool_]) -> NDArray[np.int8]:
    """[N, T] the outcome of an exit at each loop, as a number among OUTCOMES."""
    seen = np.logical_or.accumulate(correct, axis=1)
    earlier = np.zeros_like(seen)
    earlier[:, 1:] = seen[:, :-1]
    later = np.zeros_like(seen)
    later[:, :-1] = np.logical_or.accumulate(correct[:, :0:-1], axis=1)[:, ::-1]
    wrong = np.where(later, np.int8(2), np.where(earlier, np.int8(3), np.int8(4)))
    return np.where(correct, earlier, wrong)


def sample_by_pattern(trajectory: Trajectory, size: int, seed: int = 0) -> Counts:
    """Draw at most `size` examples for the page: each pattern of right and wrong loops gets its share.

    A random order within each pattern, then the patterns in turn: rare ones are there, common ones do not crowd them
    out. The first rows of the answer are what a smaller size would give.
    """
    rows = trajectory.num_examples
    pattern = np.zeros(rows, dtype=np.int64)
    for eight_loops in np.packbits(trajectory.correct, axis=1).T:
        _, pattern = np.unique(256 * pattern + eight_loops, return_inverse=True)
    drawn = np.random.default_rng(seed).permutation(rows)
    drawn = drawn[np.argsort(pattern[drawn], kind="stable")]
    sizes = np.bincount(pattern)
    turn = np.arange(rows) - np.repeat(np.cumsum(sizes) - sizes, sizes)  # the place of each within its pattern
    return drawn[np.argsort(turn, kind="stable")[:size]]
