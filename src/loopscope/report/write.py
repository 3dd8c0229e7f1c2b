"""From results to a folder that can be read: `results.json`, tables, figures, and one page that holds everything."""

from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

from jinja2 import Environment

from loopscope.artifacts import write_bytes, write_json
from loopscope.report.charts import write_figure
from loopscope.report.products import Product
from loopscope.report.results import run_of
from loopscope.report.schema import ModelResult, Results
from loopscope.report.tables import Table


def write_report(results: Results, products: Sequence[Product], folder: Path, command: str) -> Path:
    """Writes the report; returns its page, which says by what command it was made."""
    write_json(folder / "results.json", results)
    drawn = {each.name: write_figure(each.figure, folder, each.name) for each in products if each.figure is not None}
    write_bytes(folder / "tables.md", _markdown(products).encode())
    write_bytes(folder / "report.html", page(results, products, drawn, command).encode())
    return folder / "report.html"


def page(results: Results, products: Sequence[Product], drawn: dict[str, str], command: str) -> str:
    template = (files("loopscope.report") / "page.html").read_text(encoding="utf-8")
    runs = [run_of(model.provenance) for model in results.models]
    seeds = {run["training"]["seed"] for run in runs if run is not None}
    return (
        Environment(autoescape=True, trim_blocks=True)
        .from_string(template)
        .render(
            models=results.models,
            seeds=sorted(seeds),
            counts=sorted({_count(model) for model in results.models}),
            command=command,
            version=results.loopscope,
            products=products,
            figures=drawn,
        )
    )


def _markdown(products: Sequence[Product]) -> str:
    """All tables, as a repository shows them."""
    parts = []
    for each in products:
        if each.table is not None:
            paper = f", the counterpart of the paper's {each.paper}" if each.paper else ""
            parts.append(f"## {each.title}\n\n`{each.name}`{paper}. {each.note}\n\n{_markdown_table(each.table)}\n")
    return "\n".join(parts)


def _markdown_table(table: Table) -> str:
    rows = [table.columns, ["---"] * len(table.columns), *table.rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows)


def _count(model: ModelResult) -> str:
    return f"{model.test_examples:,}" + (" that training did not have" if model.unseen_only else "")
