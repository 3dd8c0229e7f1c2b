"""From results to a folder that can be read: `results.json`, tables, figures, and one page that holds everything."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from loopscope.analysis import Target
from loopscope.analysis.model_analysis import ModelRecordings, analyse_models
from loopscope.analysis.schema import Results
from loopscope.analysis.threshold_details import ThresholdDetails
from loopscope.arguments import as_path, check_kind, check_mapping
from loopscope.errors import UserError
from loopscope.exits import ExitPolicy
from loopscope.exits.splits import is_pair
from loopscope.report.charts import write_figure
from loopscope.report.layout import figure_style
from loopscope.report.markdown import markdown
from loopscope.report.page import render
from loopscope.report.page.data import Marker
from loopscope.report.products import OVERVIEW, Product
from loopscope.trajectory import Trajectory
from loopscope.writing import only_writer, remove_scratch, write_bytes, write_json

_LIST = ("The policies of a model", "a list of exit policies")


def report(
    models: Mapping[str, tuple[Trajectory, Trajectory]],
    out: str | Path,
    reference: str | None = None,
    targets: Sequence[float | Target] | None = None,
    policies: Mapping[str, Sequence[ExitPolicy]] | None = None,
    style: str = "page",
) -> Path:
    """Writes a report on models by name, each with its validation and test recordings, and returns its page.

    `reference` names the model whose trajectory is the measure. Without targets it is made at 1 point below full
    depth. `policies` are calibrated ones, by model. `style="paper"` writes figures as wide as a column.
    """
    if not isinstance(models, Mapping) or not all(map(is_pair, models.values())):
        raise UserError('A report is of models by name, each with two recordings: {"mine": (validation, test)}.')
    own = {} if policies is None else policies
    check_mapping(models, "models")
    check_mapping(own, "policies")
    figure_style(style)
    out = as_path(out, "The folder of a report")
    if any(
        not isinstance(each, ExitPolicy) for policy in own.values() for each in check_kind(policy, Sequence, *_LIST)
    ):
        raise UserError(f"{_LIST[0]} must be {_LIST[1]}.")
    if unknown := [name for name in own if name not in models]:
        raise UserError(f"There are policies of '{unknown[0]}', which is not among the models: {', '.join(models)}.")
    sources = [ModelRecordings(name, *pair, policies=own.get(name, ())) for name, pair in models.items()]
    if not sources:
        raise UserError("A report needs at least one model: a name, and its validation and test recordings.")
    results, details = analyse_models(sources, reference, targets)
    command = f"loopscope.report(models, {str(out)!r})"
    return write_report(results, details, OVERVIEW.make(results, ["overview"]), Path(out), command, style=style)


def write_report(
    results: Results,
    details: Iterable[ThresholdDetails],
    products: Sequence[Product],
    folder: Path,
    command: str,
    again: str = "",
    markers: Sequence[Marker] = (),
    style: str = "page",
) -> Path:
    """Writes the report and returns its page; for command, again and markers see `page.render`.

    The style is that of the figures' files: the page has its own.
    """
    with only_writer(folder):
        remove_scratch(folder)
        write_json(folder / "results.json", results)
        for each in products:
            if each.figure is not None:
                write_figure(each.figure, folder, each.name, style)
        write_bytes(folder / "tables.md", markdown(products).encode())
        write_bytes(folder / "report.html", render(results, details, products, command, again, markers).encode())
    return folder / "report.html"
