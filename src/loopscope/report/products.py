"""Everything that a report can show, each under a name; a product is made where the models that it needs are there."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from loopscope.analysis.schema import Results
from loopscope.errors import UserError
from loopscope.report import figures, tables
from loopscope.report.charts import Drawing
from loopscope.report.tables import Table


@dataclass(frozen=True)
class Product:
    """A table, or a figure with its caption."""

    name: str
    title: str
    note: str
    paper: str  # what it is the counterpart of, or nothing
    table: Table | None = None
    figure: Drawing | None = None


@dataclass(frozen=True)
class Figure:
    make: Callable[[Results], Drawing | None]
    title: str
    note: str
    label: str = ""  # of what it is the counterpart of


@dataclass(frozen=True)
class TableOf:
    make: Callable[[Results], Table | None]
    label: str = ""


Recipe = Figure | TableOf


@dataclass(frozen=True)
class Catalogue:
    """Recipes by name, and groups of them; `counterpart` says what a recipe's label is called."""

    recipes: Mapping[str, Recipe]
    groups: Mapping[str, tuple[str, ...]]
    counterpart: Callable[[str], str] = str

    def names(self, names: Sequence[str]) -> list[str]:
        """The products of these names or groups, each once; one that does not exist is refused."""
        found = list(dict.fromkeys(each for name in names for each in self.groups.get(name, (name,))))
        if unknown := [name for name in found if name not in self.recipes]:
            known = ", ".join((*self.groups, *self.recipes))
            raise UserError(f"There is no product '{unknown[0]}'; choose one of {known}.")
        return found

    def make(self, results: Results, names: Sequence[str]) -> list[Product]:
        """The products of these names (or groups of products), as far as the results have what they need."""
        made = (self._make(name, self.recipes[name], results) for name in self.names(names))
        return [product for product in made if product is not None]

    def _make(self, name: str, recipe: Recipe, results: Results) -> Product | None:
        paper = self.counterpart(recipe.label)
        if isinstance(recipe, Figure):
            figure, title, note = recipe.make(results), recipe.title, recipe.note
            if all(len(model.forced_accuracy_by_difficulty.levels) == 1 for model in results.models):
                title, note = (re.sub(",? by difficulty", "", text) for text in (title, note))
            note = note.rstrip() + tables.of_sequences(results)
            return None if figure is None else Product(name, title, note, paper, figure=figure)
        table = recipe.make(results)
        if table is None or not table.rows:
            return None
        return Product(name, table.title, table.note, paper, table=table)


CURVES = (
    "Test accuracy against average loops as each readout's threshold is swept; the upper left is better. Dashed: the "
    "target accuracy. The oracle exits at the first correct loop. A legend has at most eight entries, unless "
    "validation data choose more readouts: tables and the page have the others. "
)
SIGNALS = "Bin means of the signals at every loop. Convergence signals compare a loop with the one before: no loop 1. "

_OVERVIEW: dict[str, Recipe] = {
    "headline": TableOf(tables.headline),
    "diagnosis": TableOf(tables.gaps),
    "stoppers": TableOf(tables.learned_stoppers),
    "certified": TableOf(tables.certified),
    "frontiers": Figure(figures.every_frontier, "Frontiers", CURVES),
    "forced_exits": Figure(
        figures.every_forced_exit,
        "Forced exits by difficulty",
        "Accuracy of every loop, without any exit rule: the trajectory itself.",
    ),
    "exit_distributions": Figure(
        figures.every_exit_distribution,
        "Learned exit distributions",
        "How the model's own gate spreads its exits over the loops, on average, by difficulty.",
    ),
    "signals": Figure(figures.every_signal, "Signals by difficulty", SIGNALS),
    "depths": TableOf(tables.depths),
    "forced": TableOf(tables.forced),
    "ordering": TableOf(tables.ordering),
    "paired": TableOf(tables.paired_table),
}
OVERVIEW = Catalogue(_OVERVIEW, {"overview": tuple(_OVERVIEW)})
