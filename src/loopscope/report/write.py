"""From results to a folder that can be read: `results.json`, tables, figures, and one page that holds everything."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from loopscope.analysis.model_analysis import ModelRecordings, analyse_models
from loopscope.analysis.schema import Results
from loopscope.analysis.targets import Target
from loopscope.analysis.threshold_details import ThresholdDetails
from loopscope.artifacts import MANIFEST
from loopscope.config import read_json, write_json
from loopscope.errors import UserError
from loopscope.files import is_file, is_folder, is_scratch, only_writer, remove_scratch, write_bytes
from loopscope.policy import ExitPolicy
from loopscope.progress import ProgressCallback, silent
from loopscope.recording_paths import RECORDINGS
from loopscope.report.charts import write_figure
from loopscope.report.figure_style import STYLES
from loopscope.report.page import Marker, render
from loopscope.report.products import OVERVIEW, Product, markdown
from loopscope.trajectory import Trajectory

RESULTS, TABLES, PAGE = ("results.json", "tables.md", "report.html")


def report(
    models: Mapping[str, tuple[Trajectory, Trajectory]],
    out: str | Path,
    reference: str | None = None,
    targets: Sequence[float | Target] | None = None,
    policies: Mapping[str, Sequence[ExitPolicy]] | None = None,
    style: str = "page",
    transfer: bool = False,
) -> Path:
    """Write a report: a page, figures, tables and `results.json`.

    Parameters
    ----------
    models
        Validation and test recordings of every model, by name.
    out
        The folder of the report.
    reference
        The name of the model whose trajectory you compare with (default: none).
    targets
        The target accuracies at which the report compares depths (default: 1 percentage point below the full-depth
        accuracy).
    policies
        Calibrated policies to show, by the name of the model.
    style
        "page" (the default), or "paper" for figures as wide as a column of a paper.
    transfer
        Whether to replay the exit rules of every model on the other models.

    Returns
    -------
    Path
        The page, `report.html`.

    Raises
    ------
    UserError
        If the folder holds anything but a report, or if a name is unknown.

    Examples
    --------
    >>> ls.report({"mine": (validation, test)}, folder / "report").name
    'report.html'
    """
    own = policies or {}
    if style not in STYLES:
        raise UserError(f"There is no style '{style}'; choose one of {', '.join(STYLES)}.")
    check_report_place(Path(out))
    if unknown := [name for name in own if name not in models]:
        raise UserError(f"There are policies of '{unknown[0]}', which is not among the models: {', '.join(models)}.")
    sources = [
        ModelRecordings(name, validation, test, policies=own.get(name, ()))
        for name, (validation, test) in models.items()
    ]
    results, details = analyse_models(sources, reference, targets, transferred=transfer)
    command = f"loopscope.report(models, {str(out)!r})"
    return write_report(results, details, OVERVIEW.make(results, ["overview"]), Path(out), command, style=style)


def check_report_place(folder: Path, products: Collection[str] = tuple(OVERVIEW.recipes)) -> None:
    """Reject a folder that holds anything but a report; `products` are the products a report may hold."""
    if not is_folder(folder):
        return
    found = sorted(each.name for each in folder.iterdir() if not is_scratch(each))
    ours = {RESULTS, TABLES, PAGE, *(f"{name}.{kind}" for name in products for kind in ("svg", "png", "pdf"))}
    others = [name for name in found if name not in ours]
    if RESULTS in found:  # beside a report notes may lie, but no recordings, and no run
        others = [name for name in others if name in (MANIFEST, RECORDINGS) or is_file(folder / name / MANIFEST)]
    if others:
        raise UserError(f"{folder} is not only a report's: it holds {others[0]}; choose another folder for the report.")


class _ReportedModels(msgspec.Struct):
    """The names of the models in `results.json`, in any version of its schema."""

    models: list[dict[str, Any]]


def reported_models(folder: Path) -> list[str]:
    """The names of the models in an existing report; none if there is no report."""
    try:
        return [str(model.get("name")) for model in read_json(_ReportedModels, folder / RESULTS, "results").models]
    except UserError:
        return []


def write_report(
    results: Results,
    details: Iterable[ThresholdDetails],
    products: Sequence[Product],
    folder: Path,
    command: str,
    again: str = "",
    markers: Sequence[Marker] = (),
    style: str = "page",
    progress: ProgressCallback = silent,
) -> Path:
    """Write a report's folder and return its page; for command, again and markers see `page.render`.

    The style is that of the figures' files: the page has its own.
    """
    with only_writer(folder):
        remove_scratch(folder)
        write_json(folder / RESULTS, results)
        figures = {each.name: each.figure for each in products if each.figure is not None}
        for done, (name, figure) in enumerate(figures.items()):
            progress(done, len(figures) + 1, name)
            write_figure(figure, folder, name, style)
        progress(len(figures), len(figures) + 1, PAGE)
        write_bytes(folder / TABLES, markdown(products).encode())
        write_bytes(folder / PAGE, render(results, details, products, command, again, markers).encode())
        progress(len(figures) + 1, len(figures) + 1, "")
    return folder / PAGE
