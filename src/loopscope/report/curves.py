"""What does a figure draw of a readout? A curve with its band; over several seeds their mean and their range.

Curves that lie on each other are drawn once, and a figure has no more of them than a legend can tell apart.
"""

from collections.abc import Iterable, Mapping, Sequence
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
_LINE_WIDTH = 0.015
"""Of a panel's height: lines that are closer are drawn once."""
_MAX_END_DISTANCE = 0.15
"""Loops by which the ends of two curves that are called the same may differ."""
_POINTS_OF_A_MEAN = 61
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
    """Accuracy against average loops, in rising order; the band is over seeds, or over the examples of one."""

    name: str  # a readout's, or what the legend should say
    loops: Floats
    accuracy: Floats
    low: Floats
    high: Floats
    seeds: int = 1

    @classmethod
    def of(cls, frontiers: Sequence[FrontierResult], name: str | None = None) -> "Line":
        """Of a frontier a seed; of the first alone where they have no depth in common."""
        curves = [_sorted(frontier) for frontier in frontiers]
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


def _sorted(frontier: FrontierResult) -> tuple[Floats, Floats, Floats, Floats]:
    order = np.lexsort((frontier.accuracy, frontier.average_loops))
    columns = (frontier.average_loops, frontier.accuracy, frontier.accuracy_low, frontier.accuracy_high)
    loops, accuracy, low, high = (np.asarray(each, dtype=np.float64)[order] for each in columns)
    return loops, accuracy, low, high


@dataclass(frozen=True)
class Panel:
    """`lines` come in the order of their weight: where there are too many, the last are left out."""

    title: str
    lines: list[Line]
    loops: int
    target: float | None  # the accuracy that is sought of its model; None without a verdict
    chosen: tuple[str, ...] = ()  # names of lines that are never left out
    same: tuple[tuple[str, ...], ...] = ()  # names of lines that lie on each other, of which the first is drawn

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
    panels: list[Panel]
    merged: tuple[tuple[str, ...], ...]  # lines that lie on each other in every panel
    left_out: list[str]


def chosen_lines(panels: Sequence[Panel], heights: Sequence[tuple[float, float]]) -> Drawn:
    """What is drawn of all lines: one of those that lie on each other, and no more than a legend holds.

    Chosen lines are all drawn, though the legend has more entries for it.
    """
    once = [_once(panel, high - low) for panel, (low, high) in zip(panels, heights, strict=True)]
    everywhere = set.intersection(*(set(panel.same) for panel in once)) if once else set()
    drawn = {line.name for panel in once for line in panel.lines}
    chosen = {name for panel in panels for name in panel.chosen}
    names = [name for name in dict.fromkeys(line.name for panel in panels for line in panel.lines) if name in drawn]
    names.sort(key=lambda name: 0 if name in chosen else _weight(name))
    most = max(MAX_KEY_ENTRIES, sum(name in chosen or _weight(name) == 0 for name in names))
    kept, left_out = set(names[:most]), names[most:]
    shown = []
    for panel in once:
        lines = [line for line in panel.lines if line.name in kept]
        here = [group for group in panel.same if group not in everywhere]
        same = [tuple(name for name in group if name not in left_out) for group in here]
        shown.append(replace(panel, lines=lines, same=tuple(group for group in same if len(group) > 1)))
    return Drawn(shown, tuple(sorted(group for group in everywhere if group[0] in kept)), left_out)


def _weight(name: str) -> int:
    """Points, models' own gates and what a figure is about are drawn first, others in the order of the panels."""
    return 0 if name in POINTS else 1 if name in OWN_GATES or name.startswith(("gate,", "fitted")) else 2


def _once(panel: Panel, height: float) -> Panel:
    groups: list[list[Line]] = []
    for line in panel.lines:
        for group in groups:
            if line.lies_on(group[0], _LINE_WIDTH * height):
                group.append(line)
                break
        else:
            groups.append([line])
    same = tuple(tuple(line.name for line in group) for group in groups if len(group) > 1)
    return replace(panel, lines=[group[0] for group in groups], same=same)


@dataclass(frozen=True)
class Dose:
    """What one dose did: over seeds their mean and range, of one seed its value and interval."""

    dose: float
    value: float
    low: float
    high: float
    seeds: int = 1


@dataclass(frozen=True)
class Binning:
    """A quantity by loop, one line a difficulty, of one table a seed; from its first loop on."""

    title: str
    quantity: str
    tables: Sequence[Binned]
    first: int = 1

    @property
    def levels(self) -> list[float]:
        return self.tables[0].levels

    @property
    def seeds(self) -> int:
        """As many as have the same difficulties: else the first alone is drawn."""
        return len(self.tables) if all(table.levels == self.levels for table in self.tables) else 1

    def rows(self, shades: Mapping[float, str]) -> Iterable[dict[str, Any]]:
        """A value with its band, where there is one; shades are the colours of difficulties."""
        shown = self.tables[: self.seeds]
        for place, level in enumerate(self.levels):
            for loop in range(self.first, len(shown[0].values[place]) + 1):
                values = [value for table in shown if (value := table.values[place][loop - 1]) is not None]
                if not values:
                    continue
                mean, low, high = sum(values) / len(values), min(values), max(values)
                if self.seeds == 1:
                    bounds = shown[0].low[place][loop - 1], shown[0].high[place][loop - 1]
                    low, high = (mean if bound is None else bound for bound in bounds)
                yield {"level": level, "loop": loop, "value": mean, "low": low, "high": high, "colour": shades[level]}


def every_group(results: Results) -> list[tuple[str, Seeds]]:
    return [(group.label if len(seeds) > 1 else seeds[0].label, seeds) for group, seeds in results.grouped]


def frontier_panel(title: str, lines: list[Line], seeds: Seeds) -> Panel:
    targets = [model.diagnosis.target.accuracy for model in seeds if model.diagnosis.verdict != NO_VERDICT]
    target = sum(targets) / len(targets) if targets else None
    chosen = tuple(name for model in seeds for name in model.diagnosis.compared_readouts)
    return Panel(title, lines, len(seeds[0].forced_accuracy), target, chosen)


def readout_lines(seeds: Seeds, readouts: Iterable[str], legend: Mapping[str, str] | None = None) -> list[Line]:
    """The lines of those readouts that the runs have; `legend` says what some of them are called."""
    found = {name: [frontier for model in seeds if (frontier := model.frontier(name))] for name in readouts}
    return [Line.of(frontiers, (legend or {}).get(name)) for name, frontiers in found.items() if frontiers]


def signal_panels(runs: Sequence[Mapping[str, Binned]], names: Iterable[str], prefix: str = "") -> list[Binning]:
    """A panel for each of these signals that all runs have."""
    return [
        Binning(prefix + title, title, [signals[name] for signals in runs], 2 if name in CONVERGENCE else 1)
        for name, title in SIGNAL_TITLES.items()
        if runs and name in names and all(name in signals for signals in runs)
    ]


def continued(table: Binned, more: Binned) -> Binned:
    """The difficulties of both."""
    return Binned(*(getattr(table, field) + getattr(more, field) for field in Binned.__struct_fields__))
