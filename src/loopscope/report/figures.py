"""The figures of a report that show every model, and the panels that they are made of."""

from collections.abc import Iterable, Sequence

from loopscope.analysis.schema import Binned, ModelResult, Results
from loopscope.exits.signals import CONVERGENCE, STOPPER
from loopscope.report.charts import Binning, Line, Panel, Specification, difficulty_chart, frontiers, in_rows

SIGNAL_TITLES = {
    "entropy": "entropy",
    "margin": "logit margin",
    "kl": "predictive KL",
    "hidden_change": "hidden-state displacement",
}


def every_frontier(results: Results) -> Specification | None:
    """Without learned stoppers, which mostly lie on the best single readout; tables and the page have them."""
    panels = []
    for model in results.models:
        names = [each.readout for each in model.frontiers if not each.readout.startswith(STOPPER)]
        panels.append(frontier_panel(model.label, readout_lines(model, names), model))
    return frontiers(panels)


def every_forced_exit(results: Results) -> Specification | None:
    return forced_exits(in_rows([(model.label, model) for model in results.models], 2))


def every_exit_distribution(results: Results) -> Specification | None:
    return exit_distributions(in_rows([(model.label, model) for model in results.models if model.exit_distribution], 2))


def every_signal(results: Results) -> Specification | None:
    rows = [signal_panels(model, SIGNAL_TITLES, f"{model.label}: ") for model in results.models]
    return difficulty_chart(rows, shared=False)


def frontier_panel(title: str, lines: list[Line], model: ModelResult) -> Panel:
    return Panel(title, lines, len(model.forced_accuracy), model.diagnosis.target.reached)


def readout_lines(model: ModelResult, readouts: Iterable[str]) -> list[Line]:
    return [Line.of(frontier) for name in readouts if (frontier := model.frontier(name)) is not None]


def signal_panels(
    model: ModelResult, names: Iterable[str], prefix: str, more: dict[str, Binned] | None = None
) -> list[Binning]:
    """`more` continues the difficulties of the test split."""
    panels = []
    for name in names:
        if name in model.signals:
            table = model.signals[name]
            if more is not None:
                extra = more[name]
                table = Binned(table.levels + extra.levels, table.counts + extra.counts, table.values + extra.values)
            panels.append(
                Binning(prefix + SIGNAL_TITLES[name], SIGNAL_TITLES[name], table, 2 if name in CONVERGENCE else 1)
            )
    return panels


def forced_exits(rows: Iterable[Sequence[tuple[str, ModelResult]]]) -> Specification | None:
    panels = [[Binning(title, "accuracy", model.forced_accuracy_by_difficulty) for title, model in row] for row in rows]
    return difficulty_chart(panels, percent=True)


def exit_distributions(rows: Iterable[Sequence[tuple[str, ModelResult]]]) -> Specification | None:
    panels = [
        [
            Binning(title, "exit probability", model.exit_distribution)
            for title, model in row
            if model.exit_distribution is not None
        ]
        for row in rows
    ]
    return difficulty_chart(panels, percent=True)
