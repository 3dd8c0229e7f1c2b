"""From results to a folder that can be read: `results.json`, figures, and one page that holds everything."""

from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment

from loopscope.artifacts import write_bytes, write_json
from loopscope.report.figures import figures, write_figures
from loopscope.report.results import Results
from loopscope.report.tables import tables

_CAPTIONS = {
    "frontiers": (
        "Frontiers",
        "Test accuracy against average loops as each readout's threshold is swept; the upper left is better. Dashed: "
        "the target accuracy. The oracle exits at the first correct loop.",
    ),
    "forced_exits": (
        "Forced exits by difficulty",
        "Accuracy of every loop, without any exit rule: the trajectory itself.",
    ),
    "exit_distributions": (
        "Learned exit distributions",
        "How the model's own gate spreads its exits over the loops, on average, by difficulty.",
    ),
    "signals": (
        "Signals by difficulty",
        "Bin means of four signals at every loop. Convergence signals compare a loop with the one before: no loop 1.",
    ),
}


def write_report(results: Results, folder: Path) -> Path:
    """Writes the report; returns its page."""
    write_json(folder / "results.json", results)
    drawn = write_figures(figures(results), folder)
    write_bytes(folder / "report.html", page(results, drawn).encode())
    return folder / "report.html"


def page(results: Results, drawn: dict[str, str]) -> str:
    template = (files("loopscope.report") / "page.html").read_text(encoding="utf-8")
    runs = [model.provenance.get("run") for model in results.models]
    seeds = {run["training"]["seed"] for run in runs if isinstance(run, dict) and "training" in run}
    captions: dict[str, Any] = {name: {"title": title, "text": text} for name, (title, text) in _CAPTIONS.items()}
    return (
        Environment(autoescape=True, trim_blocks=True)
        .from_string(template)
        .render(
            models=results.models,
            seeds=sorted(seeds),
            counts=sorted({f"{model.test_examples:,}" for model in results.models}),
            command=_command(results),
            unseen_only=results.unseen_only,
            version=results.loopscope,
            tables=tables(results),
            figures=drawn,
            captions=captions,
        )
    )


def _command(results: Results) -> str:
    """How to make this report again from its runs."""
    words = ["loopscope report", *(model.name for model in results.models)]
    words += [f"--reference {model.name}" for model in results.models if model.is_reference]
    words += [f"--at {target:g}" for target in results.targets]
    return " ".join([*words, *(["--unseen"] if results.unseen_only else []), "--out DIR"])
