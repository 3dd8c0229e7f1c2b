"""What do `report` and `study` write and print? A folder with a page, or some of its products by name.

Imported late: figures take altair, and statistics SciPy.
"""

import argparse
import webbrowser
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from loopscope.analysis.schema import ModelResult, Results
from loopscope.analysis.threshold_details import ThresholdDetails
from loopscope.cli.output import print_json, print_note, print_sentences, print_table, print_text, watched
from loopscope.errors import UserError

try:
    from loopscope.paper.counterparts import PRODUCTS, markers
    from loopscope.report.charts import write_figure
    from loopscope.report.tables import of_sequences
    from loopscope.report.write import check_report_place, reported_models, write_report
except ImportError as error:
    raise UserError(f"The report needs {error.name}; install it with: pip install 'loopscope[report]'.") from None

_HEADLINES = ("headline", "certified", "ouro_summary", "ouro_thinking", "ouro_claims", "ouro_latency")


def check_report(names: Sequence[str], folder: Path) -> None:
    """Rejects names of no product, and without names a folder with the files of something else."""
    PRODUCTS.names(names)
    if not names:
        check_report_place(folder, PRODUCTS.recipes)


def show_products(results: Results, names: Sequence[str], folder: Path, as_json: bool, style: str) -> None:
    """Prints these tables and writes these figures, and leaves alone whatever else is in the folder."""
    made = {product.name: product for product in PRODUCTS.make(results, names)}
    printed: list[dict[str, object]] = []
    for name in PRODUCTS.names(names):
        if name not in made:
            print_note(f"{name} cannot be made: the models that it shows are not among these.")
            continue
        table, figure = made[name].table, made[name].figure
        if figure is not None:
            write_figure(figure, folder, name, style)
            printed.append({"name": name, "figure": f"{folder / name}.png"})
            if not as_json:
                print_text(f"{folder / name}.png, .pdf and .svg")
        elif table is not None:
            printed.append({"name": name, "title": table.title, "columns": table.columns, "rows": table.rows})
            if not as_json:
                print_table(table.title, table.columns, table.rows)
    if not made:
        raise UserError("None of these products can be made of these models.")
    if as_json:
        print_json(printed)


def _role(members: Sequence[ModelResult]) -> str:
    """What is said of a run beside its name: that it is the reference, and which verdicts its other seeds get."""
    first, *others = members
    words = ["the reference"] if first.is_reference else []
    if others:
        found = Counter(other.verdict for other in others)
        agree = set(found) == {first.verdict}
        verdicts = ", ".join(name if len(others) == 1 else f"{name} ({count})" for name, count in found.items())
        rest = "the other" if len(others) == 1 else "the others"
        words.append(f"one of {len(members)} seeds; {rest}: {'the same verdict' if agree else verdicts}")
    return f" ({', '.join(words)})" if words else ""


def _listed(names: Sequence[str], most: int = 5) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def write_and_show(
    results: Results,
    details: Iterable[ThresholdDetails],
    options: argparse.Namespace,
    folder: Path,
    products: Sequence[str],
    commands: tuple[str, str],
) -> None:
    """Writes the report, then prints its verdicts and the tables that matter most; the page has all.

    `commands` are the one that made it and the one that makes its products again.
    """
    made = PRODUCTS.make(results, products)
    earlier, names = reported_models(folder), [model.name for model in results.models]
    if earlier and set(earlier) != set(names):
        print_note(f"{folder} held a report on {_listed(earlier)}; this one, on {_listed(names)}, takes its place.")
    with watched(options, "writing") as advance:
        page = write_report(results, details, made, folder, *commands, markers(results), options.style, advance)
    if options.open and not webbrowser.open(page.resolve().as_uri()):
        print_note(f"No browser could be started here; open {page} in one.")
    if options.json:
        print_json(results)
        return
    models = {model.name: model for model in results.models}
    for members in ([models[name] for name in group.names] for group in results.groups if group.names):
        print_sentences(f"{members[0].label}{_role(members)}: {members[0].diagnosis.sentence}\n")
    for product in made:
        if product.table is not None and product.name in _HEADLINES:
            print_table(product.table.title, product.table.columns, product.table.rows)
    if note := of_sequences(results):
        print_sentences(f"{note.lstrip()}\n")
    print_text(f"All tables and figures: {page}")
