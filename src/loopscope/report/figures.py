"""The figures of a report that show every model, and the panels that they are made of.

Runs that differ in their seed only share a panel.
"""

from collections.abc import Iterable, Sequence

from loopscope.analysis.diagnosis import NO_VERDICT
from loopscope.analysis.schema import Binned, ModelResult, Results
from loopscope.exits.signals import CONVERGENCE, STOPPER
from loopscope.report.charts import Drawing, difficulty_chart, frontiers
from loopscope.report.curves import Binning, Line, Panel

SIGNAL_TITLES = {
    "entropy": "entropy",
    "margin": "logit margin",
    "kl": "predictive KL",
    "hidden_change": "hidden-state displacement",
}
Seeds = Sequence[ModelResult]
"""Runs that differ in their seed only."""


def every_group(results: Results) -> list[tuple[str, Seeds]]:
    models = {model.name: model for model in results.models}
    groups = [(group, [models[name] for name in group.names]) for group in results.groups]
    return [(group.label if len(seeds) > 1 else seeds[0].label, seeds) for group, seeds in groups]


def every_frontier(results: Results) -> Drawing | None:
    """Those that validation chooses first; without learned stoppers, which mostly lie on the best single readout."""
    groups = every_group(results)
    best = [name for _, seeds in groups for model in seeds for name in model.diagnosis.compared_readouts]
    known = [each.readout for _, seeds in groups for each in seeds[0].frontiers]
    names = dict.fromkeys(["fixed", "gate", "oracle", *sorted(best, key=best.count, reverse=True), *known])
    shown = [name for name in names if not name.startswith(STOPPER)]
    return frontiers([frontier_panel(label, readout_lines(seeds, shown), seeds) for label, seeds in groups])


def every_forced_exit(results: Results) -> Drawing | None:
    return forced_exits(every_group(results))


def every_exit_distribution(results: Results) -> Drawing | None:
    return exit_distributions(every_group(results))


def every_signal(results: Results) -> Drawing | None:
    rows = [signal_panels(seeds, SIGNAL_TITLES, f"{label}: ") for label, seeds in every_group(results)]
    per_row = len(rows[0]) if len({len(row) for row in rows}) == 1 and len(rows[0]) > 1 else None
    return difficulty_chart([panel for row in rows for panel in row], shared=False, per_row=per_row)


def frontier_panel(title: str, lines: list[Line], seeds: Seeds) -> Panel:
    targets = [model.diagnosis.target.accuracy for model in seeds if model.diagnosis.verdict != NO_VERDICT]
    target = sum(targets) / len(targets) if targets else None
    chosen = tuple(name for model in seeds for name in model.diagnosis.compared_readouts)
    return Panel(title, lines, len(seeds[0].forced_accuracy), target, chosen)


def readout_lines(seeds: Seeds, readouts: Iterable[str]) -> list[Line]:
    return [line for name in readouts if (line := readout_line(seeds, name)) is not None]


def readout_line(seeds: Seeds, readout: str, name: str | None = None) -> Line | None:
    found = [frontier for model in seeds if (frontier := model.frontier(readout)) is not None]
    return Line.of(found, name) if found else None


def signal_panels(seeds: Seeds, names: Iterable[str], prefix: str, harder: bool = False) -> list[Binning]:
    """`harder` continues the difficulties of the test split with those beyond training's."""
    panels = []
    for name in names:
        if all(name in model.signals for model in seeds):
            tables = [_continued(model, name) if harder else model.signals[name] for model in seeds]
            title = SIGNAL_TITLES[name]
            panels.append(Binning(prefix + title, title, tables, 2 if name in CONVERGENCE else 1))
    return panels


def _continued(model: ModelResult, name: str) -> Binned:
    table = model.signals[name]
    if model.extrapolation is None:
        return table
    more = model.extrapolation.signals[name]
    values, low, high = table.values + more.values, table.low + more.low, table.high + more.high
    return Binned(table.levels + more.levels, table.counts + more.counts, values, low, high)


def forced_exits(groups: Iterable[tuple[str, Seeds]]) -> Drawing | None:
    panels = [
        Binning(title, "accuracy", [model.forced_accuracy_by_difficulty for model in seeds]) for title, seeds in groups
    ]
    return difficulty_chart(panels, percent=True)


def exit_distributions(groups: Iterable[tuple[str, Seeds]]) -> Drawing | None:
    named = [
        (title, [model.exit_distribution for model in seeds if model.exit_distribution]) for title, seeds in groups
    ]
    return difficulty_chart([Binning(title, "exit probability", each) for title, each in named if each], percent=True)
