"""From results to a folder that can be read: `results.json`, tables, figures, and one page that holds everything."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from loopscope.analysis.schema import Results
from loopscope.analysis.threshold_details import ThresholdDetails
from loopscope.artifacts import write_bytes, write_json
from loopscope.report.charts import write_figure
from loopscope.report.page import render
from loopscope.report.page.data import Marker
from loopscope.report.products import Product
from loopscope.report.tables import Table


def write_report(
    results: Results,
    details: Iterable[ThresholdDetails],
    products: Sequence[Product],
    folder: Path,
    command: str,
    again: str,
    markers: Sequence[Marker] = (),
) -> Path:
    """Writes the report and returns its page; for command, again and markers see `page.render`."""
    write_json(folder / "results.json", results)
    for each in products:
        if each.figure is not None:
            write_figure(each.figure, folder, each.name)
    write_bytes(folder / "tables.md", _markdown(products).encode())
    write_bytes(folder / "report.html", render(results, details, products, command, again, markers).encode())
    return folder / "report.html"


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
