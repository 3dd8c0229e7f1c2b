"""What does a figure draw of a readout? A curve with its band; over several seeds their mean and their range.

Curves that lie on each other are drawn once, and a figure has no more of them than a legend can tell apart.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loopscope.analysis.diagnosis import NO_VERDICT
from loopscope.analysis.schema import Binned, FrontierResult, ModelResult, Results
from loopscope.readouts.signals import CONVERGENCE, OWN_GATES

POINTS = ("fixed", "oracle")
"""Between two fixed depths there is no fixed depth, and the oracle is one point: marks without a line."""
MAX_KEY_ENTRIES = 8
_MAX_DIFFICULTIES = 16
"""Lines of one panel that can still be told apart by their shade; more are joined to as many as a key names."""
_LINE_WIDTH = 0.015
"""The share of a panel's height within which two lines are drawn as one."""
_MAX_END_DISTANCE = 0.15
"""Loops by which the ends of two curves that are called the same may differ."""
_POINTS_OF_A_MEAN = 61
_OTHERS = 2
"""The weight of lines that are left out where a legend is full."""
SIGNAL_TITLES = {
    "entropy": "entropy",
    "margin": "logit margin",
    "kl": "predictive KL",
    "hidden_change": "hidden-state displacement",
}

Seeds = Sequence[ModelResult]
"""Runs that differ in their seed only."""
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Line:
    """A line of a frontier figure: accuracy against average loops, with a band over seeds or test examples."""

    name: str  # a readout's name, or words of the legend
    loops: Floats
    accuracy: Floats
    low: Floats
    high: Floats
    seeds: int = 1

    @classmethod
    def of(cls, frontiers: Sequence[FrontierResult], name: str | None = None) -> "Line":
        """The line of a readout over seeds; of the first seed only if their frontiers have no loops in common."""
        curves = [_points_by_loops(frontier) for frontier in frontiers]
        name, points = name or frontiers[0].readout, frontiers[0].readout in POINTS
        start, end = max(curve[0][0] for curve in curves), min(curve[0][-1] for curve in curves)
        apart = len({len(curve[0]) for curve in curves}) > 1 if points else start >= end
        if len(curves) == 1 or apart:
            return cls(name, *curves[0])
        if points:
            loops = np.mean([curve[0] for curve in curves], axis=0)
            heights = np.array([curve[1] for curve in curves])
        else:
            loops = np.linspace(start, end, _POINTS_OF_A_MEAN)
            heights = np.array([np.interp(loops, curve[0], curve[1]) for curve in curves])
        return cls(name, loops, heights.mean(axis=0), heights.min(axis=0), heights.max(axis=0), len(curves))

    def lies_on(self, other: "Line", closer_than: float) -> bool:
        """Whether both would look like one line."""
        if self.name in POINTS or other.name in POINTS:
            return False
        ends = (abs(self.loops[0] - other.loops[0]), abs(self.loops[-1] - other.loops[-1]))
        if max(ends) > _MAX_END_DISTANCE:
            return False
        theirs = np.interp(self.loops, other.loops, other.accuracy)
        ours = np.interp(other.loops, self.loops, self.accuracy)
        apart = max(np.abs(theirs - self.accuracy).max(), np.abs(ours - other.accuracy).max())
        return bool(apart <= closer_than)


def _points_by_loops(frontier: FrontierResult) -> tuple[Floats, Floats, Floats, Floats]:
    """The points of a frontier by average loops, with the bounds of their accuracy."""
    order = np.lexsort((frontier.accuracy, frontier.average_loops))
    columns = (frontier.average_loops, frontier.accuracy, frontier.accuracy_low, frontier.accuracy_high)
    loops, accuracy, low, high = (np.asarray(each, dtype=np.float64)[order] for each in columns)
    return loops, accuracy, low, high


@dataclass(frozen=True)
class Panel:
    """A panel of a frontier figure; if it has too many lines, the figure leaves out the last ones."""

    title: str
    lines: list[Line]
    loops: int
    target: float | None  # the accuracy that is sought of its model; None without a verdict
    chosen: tuple[str, ...] = ()  # names of lines that are never left out
    same: tuple[tuple[str, ...], ...] = ()  # names of lines that lie on each other, of which the first is drawn
    note: str = ""  # the panel's note on its lines

    @property
    def heights(self) -> tuple[float, float]:
        """From the least to the greatest accuracy, with a little room."""
        low, high = (float(pick(pick(line.accuracy) for line in self.lines)) for pick in (min, max))
        if self.wide:  # the bars of the fixed depths are all that is drawn of intervals
            fixed = [line for line in self.lines if line.name == "fixed"]
            low = min([low, *(float(line.low.min()) for line in fixed)])
            high = max([high, *(float(line.high.max()) for line in fixed)])
        margin = 0.05 * (high - low) + 1e-3
        return max(0.0, low - margin), min(1.0, high + margin)

    @property
    def wide(self) -> bool:
        """Whether the bands are wider than all that the lines do: they would cover each other, and the lines."""
        lines = [line for line in self.lines if line.name not in POINTS]
        if not lines:
            return False
        heights = np.concatenate([line.accuracy for line in lines])
        return bool(np.median(np.concatenate([line.high - line.low for line in lines])) > np.ptp(heights))


@dataclass(frozen=True)
class Drawn:
    """The panels that a figure draws, and the lines that it merged or left out."""

    panels: list[Panel]
    merged: tuple[tuple[str, ...], ...]  # lines that lie on each other in every panel
    left_out: list[str]


def chosen_lines(panels: Sequence[Panel], heights: Sequence[tuple[float, float]]) -> Drawn:
    """Choose the lines to draw: merge overlapping lines, and keep no more than a key holds.

    Chosen lines, points, and what a figure is about are all drawn, though the legend has more entries for it. Of lines
    that lie on each other one is drawn and names the others; it is never one that is left out for one that is not.
    """
    chosen = {name for panel in panels for name in panel.chosen}

    def weight(name: str) -> int:
        return 0 if name in chosen else _drawing_rank(name)

    once = [_merge_overlapping(panel, high - low, weight) for panel, (low, high) in zip(panels, heights, strict=True)]
    everywhere = set.intersection(*(set(panel.same) for panel in once)) if once else set()
    drawn = {line.name for panel in once for line in panel.lines}
    names = [name for name in dict.fromkeys(line.name for panel in panels for line in panel.lines) if name in drawn]
    names.sort(key=weight)
    most = max(MAX_KEY_ENTRIES, sum(weight(name) < _OTHERS for name in names))
    kept, left_out = set(names[:most]), names[most:]
    shown = []
    for panel in once:
        lines = [line for line in panel.lines if line.name in kept]
        here = [group for group in panel.same if group not in everywhere]
        same = [tuple(name for name in group if name not in left_out) for group in here]
        shown.append(replace(panel, lines=lines, same=tuple(group for group in same if len(group) > 1)))
    return Drawn(shown, tuple(sorted(group for group in everywhere if group[0] in kept)), left_out)


def _drawing_rank(name: str) -> int:
    """The rank of a line: points, own gates and fitted gates come before other readouts."""
    return 0 if name in POINTS else 1 if name in OWN_GATES or name.startswith(("gate,", "fitted")) else _OTHERS


def _merge_overlapping(panel: Panel, height: float, weight: Callable[[str], int]) -> Panel:
    """Merge the lines of a panel that overlap; a line that is never left out stays, if there is one."""
    groups: list[list[Line]] = []
    for line in sorted(panel.lines, key=lambda line: weight(line.name) == _OTHERS):
        for group in groups:
            if line.lies_on(group[0], _LINE_WIDTH * height):
                group.append(line)
                break
        else:
            groups.append([line])
    same = tuple(tuple(line.name for line in group) for group in groups if len(group) > 1)
    drawn = {group[0].name for group in groups}
    return replace(panel, lines=[line for line in panel.lines if line.name in drawn], same=same)


@dataclass(frozen=True)
class Difficulty:
    """A line of a panel: one difficulty, or neighbouring ones joined."""

    level: float  # their mean, by which it has its shade
    name: str
    places: tuple[int, ...]  # among the levels of a table
    ends_training: bool  # whether training had none beyond it


@dataclass(frozen=True)
class Dose:
    """The effect of one dose: mean and range over seeds, or the value and interval of one seed."""

    dose: float
    value: float
    low: float
    high: float
    seeds: int = 1


@dataclass(frozen=True)
class Binning:
    """A quantity by loop with one line per difficulty, from one table per seed.

    Where there are more difficulties than shades can tell apart, neighbours are joined.
    """

    title: str
    quantity: str
    tables: Sequence[Binned]
    first: int = 1
    trained: float | None = None  # the last difficulty of training, where the table goes on beyond it

    @property
    def seeds(self) -> int:
        """The number of seeds whose tables have the same difficulties; else 1, because only the first is drawn."""
        return len(self.tables) if all(table.levels == self.tables[0].levels for table in self.tables) else 1

    @property
    def difficulties(self) -> list[Difficulty]:
        """The lines of the panel, the easiest first; none joins difficulties of training with others."""
        levels = self.tables[0].levels
        known = len(levels) if self.trained is None else sum(level <= self.trained for level in levels)
        made = []
        for part in (np.arange(known), np.arange(known, len(levels))):
            lines = len(part) if len(part) <= _MAX_DIFFICULTIES else MAX_KEY_ENTRIES
            for places in np.array_split(part, max(lines, 1)):
                if len(places):
                    made.append(self._joined(levels, places.tolist()))
        return made

    def _joined(self, levels: Sequence[float], places: Sequence[int]) -> Difficulty:
        low, high = levels[places[0]], levels[places[-1]]
        name = f"{low:g}" if low == high else f"{low:g} to {high:g}"
        ends_training = high == self.trained
        name += " (last of training)" if ends_training else ""
        return Difficulty(sum(levels[place] for place in places) / len(places), name, tuple(places), ends_training)

    def rows(self, shades: Mapping[float, str]) -> Iterable[dict[str, Any]]:
        """The values of a panel with their bands, as rows of a chart; shades are the colours of difficulties."""
        shown = self.tables[: self.seeds]
        for line in self.difficulties:
            for loop in range(self.first, len(shown[0].values[0]) + 1):
                means = [mean for table in shown if (mean := joined_mean(table, line.places, loop)) is not None]
                if not means:
                    continue
                values, lows, highs = zip(*means, strict=True)
                value = sum(values) / len(values)
                low, high = (lows[0], highs[0]) if self.seeds == 1 else (min(values), max(values))
                band = {"value": value, "low": low, "high": high}
                yield {"level": line.level, "loop": loop, **band, "colour": shades[line.level]}


def joined_mean(table: Binned, places: Sequence[int], loop: int) -> tuple[float, float, float] | None:
    """The mean over the examples of some difficulties at a loop, with its interval; None without a value.

    Examples of different difficulties were drawn apart, so the ends add up as independent errors do.
    """
    tables = (table.values, table.low, table.high)
    cells = [[table.counts[place], *(rows[place][loop - 1] for rows in tables)] for place in places]
    known = np.array([row for row in cells if row[1] is not None], dtype=np.float64)  # a bound that is not there: NaN
    counts, values, low, high = known.reshape(-1, 4).T
    if not len(values):
        return None
    shares = counts / counts.sum()
    mean = float(shares @ values)
    below, above = (float(np.sqrt(np.nansum((shares * (values - end)) ** 2))) for end in (low, high))
    return mean, mean - below, mean + above


def every_group(results: Results) -> list[tuple[str, Seeds]]:
    """The groups of a report with their members, for figures of all models."""
    return [(group.label if len(seeds) > 1 else seeds[0].label, seeds) for group, seeds in results.grouped]


def frontier_panel(title: str, lines: list[Line], seeds: Seeds) -> Panel:
    """A panel of frontiers, with the targets of its runs."""
    targets = [model.diagnosis.target.accuracy for model in seeds if model.diagnosis.verdict != NO_VERDICT]
    target = sum(targets) / len(targets) if targets else None
    chosen = tuple(name for model in seeds for name in model.diagnosis.compared_readouts)
    return Panel(title, lines, len(seeds[0].forced_accuracy), target, chosen)


def readout_lines(seeds: Seeds, readouts: Iterable[str], legend: Mapping[str, str] | None = None) -> list[Line]:
    """The lines of some readouts that the runs have; `legend` renames some of them."""
    found = {name: [frontier for model in seeds if (frontier := model.frontier(name))] for name in readouts}
    return [Line.of(frontiers, (legend or {}).get(name)) for name, frontiers in found.items() if frontiers]


def signal_panels(
    runs: Sequence[Mapping[str, Binned]], names: Iterable[str], prefix: str = "", trained: float | None = None
) -> list[Binning]:
    """One panel for each signal that all runs have; `trained` is the hardest difficulty of training."""
    return [
        Binning(prefix + title, title, [signals[name] for signals in runs], 2 if name in CONVERGENCE else 1, trained)
        for name, title in SIGNAL_TITLES.items()
        if runs and name in names and all(name in signals for signals in runs)
    ]


def continued(table: Binned, more: Binned) -> Binned:
    """Join two tables by difficulty, such as training's difficulties and harder ones."""
    return Binned(*(getattr(table, field) + getattr(more, field) for field in Binned.__struct_fields__))
