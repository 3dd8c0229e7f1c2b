"""What can a report show? Tables and figures by name; a report has the products whose models it contains."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from loopscope.analysis.schema import Results
from loopscope.errors import visible
from loopscope.readouts.signals import OWN_GATES, STOPPER
from loopscope.report import tables
from loopscope.report.channels import channel_doses, channel_table
from loopscope.report.charts import Drawing, difficulty_chart, exit_distributions, forced_exits, frontiers
from loopscope.report.curves import SIGNAL_TITLES, every_group, frontier_panel, readout_lines, signal_panels
from loopscope.report.tables import Table, transfer_table

_BREAKS = re.compile("[\t-\r\x1c-\x1f\x85\u2028\u2029]+")
_MARKUP = re.compile(r"[\\|`*<~$&]|(?<![^\W_])_|_(?![^\W_])|(?<=\])[(\[]")
"""Characters that Markdown reads as markup: `_` at the edge of a word, brackets of a link."""


@dataclass(frozen=True)
class Product:
    """A product of a report: a table, or a figure with its caption."""

    name: str
    title: str
    note: str
    paper: str  # the figure or table of the paper that it stands for, or empty
    table: Table | None = None
    figure: Drawing | None = None


@dataclass(frozen=True)
class Figure:
    """The recipe of a figure in a report, and its caption."""

    make: Callable[[Results], Drawing | None]
    title: str
    note: str


Recipe = Figure | Callable[[Results], Table]


@dataclass(frozen=True)
class Catalogue:
    """The products that a report can have, by name and in groups; `counterparts` names their origin in the paper."""

    recipes: Mapping[str, Recipe]
    groups: Mapping[str, tuple[str, ...]]
    counterparts: Callable[[], Mapping[str, str]] = dict

    def names(self, names: Sequence[str]) -> list[str]:
        """The products of these names or groups, each once."""
        return list(dict.fromkeys(each for name in names for each in self.groups.get(name, (name,))))

    def make(self, results: Results, names: Sequence[str]) -> list[Product]:
        """Make the products of these names or groups, if the results have the models that they need."""
        made = (self._make(name, results) for name in self.names(names))
        return [product for product in made if product is not None]

    def _make(self, name: str, results: Results) -> Product | None:
        recipe, paper = self.recipes[name], self.counterparts().get(name, "")
        if not isinstance(recipe, Figure):
            table = recipe(results)
            return Product(name, table.title, table.note, paper, table=table) if table.rows else None
        figure, title, note = recipe.make(results), recipe.title, recipe.note
        if figure is None:
            return None
        if all(len(model.forced_accuracy_by_difficulty.levels) == 1 for model in results.models):
            title, note = (re.sub(",? by difficulty", "", text) for text in (title, note))
        return Product(name, title, note + tables.of_sequences(results), paper, figure=figure)


def markdown(products: Iterable[Product]) -> str:
    """The tables of a report as Markdown, with names from files escaped."""
    parts = []
    for product in products:
        if product.table is not None:
            paper = f", the counterpart of the paper's {product.paper}" if product.paper else ""
            title, note = markdown_text(product.title), markdown_text(product.note)
            rows = [product.table.columns, ["---"] * len(product.table.columns), *product.table.rows]
            lines = ["| " + " | ".join(map(markdown_text, row)) + " |" for row in rows]
            parts.append(f"## {title}\n\n`{product.name}`{paper}. {note}\n\n" + "\n".join(lines) + "\n")
    return "\n".join(parts)


def markdown_text(text: str) -> str:
    """Escape a text to one line of Markdown; tables.js does the same when a reader copies a table."""
    return _MARKUP.sub(r"\\\g<0>", visible(_BREAKS.sub(" ", text), keep=""))


def _every_frontier(results: Results) -> Drawing | None:
    """The figure of every frontier; stoppers are left out, because they mostly lie on the best single readout."""
    groups = every_group(results)
    best = [name for _, seeds in groups for model in seeds for name in model.diagnosis.compared_readouts]
    known = [each.readout for _, seeds in groups for each in seeds[0].frontiers]
    names = dict.fromkeys(["fixed", *OWN_GATES, "oracle", *sorted(best, key=best.count, reverse=True), *known])
    shown = [name for name in names if not name.startswith(STOPPER)]
    return frontiers([frontier_panel(label, readout_lines(seeds, shown), seeds) for label, seeds in groups])


def _every_signal(results: Results) -> Drawing | None:
    """The figure of every signal by loop and difficulty."""
    groups = every_group(results)
    rows = [signal_panels([run.signals for run in seeds], SIGNAL_TITLES, f"{label}: ") for label, seeds in groups]
    per_row = len(rows[0]) if len({len(row) for row in rows}) == 1 and len(rows[0]) > 1 else None
    return difficulty_chart([panel for row in rows for panel in row], per_row=per_row)


CURVES = (
    "Test accuracy against average loops as each readout's threshold is swept; the upper left is better. Dashed: the "
    "target accuracy. The oracle exits at the first correct loop. A legend has at most eight entries, unless more "
    "lines must be drawn (gates, and readouts that validation data choose): tables and the page have the others."
)
SIGNALS = "Bin means of the signals at every loop. Convergence signals compare a loop with the one before: no loop 1."
_FORCED = "Accuracy of every loop, without any exit rule: the trajectory itself."
_SPREAD = "How the model's own gate spreads its exits over the loops, on average, by difficulty."
_DOSES = (
    "Average loops that the trajectory costs against the reference's, as a gate weighs more of the trunk's losses: one "
    "line where no gradient of the gate reaches the trunk, one where all of it does, and any between. Seeds whose "
    "reference cannot judge them are left out."
)
_OVERVIEW: dict[str, Recipe] = {
    "headline": tables.headline,
    "diagnosis": tables.gaps,
    "stoppers": tables.learned_stoppers,
    "certified": tables.certified,
    "transfer": transfer_table,
    "frontiers": Figure(_every_frontier, "Frontiers", CURVES),
    "forced_exits": Figure(lambda found: forced_exits(every_group(found)), "Forced exits by difficulty", _FORCED),
    "exit_distributions": Figure(
        lambda found: exit_distributions(every_group(found)), "Learned exit distributions", _SPREAD
    ),
    "signals": Figure(_every_signal, "Signals by difficulty", SIGNALS),
    "depths": tables.depths,
    "forced": tables.forced,
    "forced_by_difficulty": tables.forced_by_difficulty,
    "ordering": tables.ordering,
    "paired": tables.paired_table,
    "channels": channel_table,
    "channel_doses": Figure(channel_doses, "The trajectory gap by dose", _DOSES),
}
OVERVIEW = Catalogue(_OVERVIEW, {"overview": tuple(_OVERVIEW)})
