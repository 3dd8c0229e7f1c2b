"""Write a report with tables and figures on runs or folders of recordings.

loopscope report example:demo --out report
loopscope report runs/demo/fixed-geometric runs/demo/linear-gate \\
    --reference fixed-geometric --out report
loopscope report runs/seed-* --out report --at 0.95 --at 0.99 --unseen
loopscope report runs/mine --policy policy.json --out report --open
loopscope report runs/mine runs/demo/linear-gate --transfer \\
    --fitted gates/linear --out report
"""

import argparse
import shlex
import webbrowser
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loopscope.cli import inputs
from loopscope.cli.options import Parser, add_shared, add_verb, option, target_accuracies
from loopscope.cli.output import print_json, print_note, print_sentences, print_table, print_text, watched
from loopscope.errors import UserError, brief, check_known
from loopscope.example_recordings import as_typed
from loopscope.files import out_folder
from loopscope.recording_paths import find_recordings, recorded_name

if TYPE_CHECKING:
    from loopscope.analysis.schema import ModelResult, Results
    from loopscope.analysis.threshold_details import ThresholdDetails
    from loopscope.report.products import Product

_HEADLINES = ("headline", "certified", "ouro_summary", "ouro_thinking", "ouro_claims", "ouro_latency", "mano_latency")
"""Products that are printed; the page has all."""
_MAX_NAMES = 200
"""Letters of the names of runs in a note."""


def define(subparsers: Any) -> None:
    """Add the arguments of `loopscope report` to the parser."""
    parser = add_verb(subparsers, "report", __doc__, execute)
    several = f"{inputs.RECORDED} (several runs are allowed)"
    option(parser, "runs", several, type=inputs.run_or_example, nargs="+", metavar="RUN")
    add_shared(parser, "--reference RUN")
    option(parser, "--policy FILE", inputs.POLICIES, action="append")
    inputs.add_policy_options(parser)
    option(parser, "--fitted DIR", inputs.GATES, action="append")
    crossed = "also replay the exit rules of every run on the other runs"
    option(parser, "--transfer", crossed)
    option(parser, "--out DIR", "folder of the report", type=out_folder, required=True)
    add_shared(parser, "--at X", action="append")
    add_shared(parser, "--unseen", "--json")
    add_report_options(parser)


def execute(options: argparse.Namespace) -> None:
    """Execute `loopscope report` with its parsed arguments."""
    targets = target_accuracies(options.at)
    runs, reference = _reported_runs(options)
    if options.transfer and len(runs) < 2:
        raise UserError("--transfer replays the rules of one run on another; give two runs or more.")
    for path in options.policy:
        inputs.load_policy(path, options.any_model)  # rejects a bad policy before recordings are read
    from loopscope.analysis.model_analysis import analyse_models, read_recordings
    from loopscope.paper.counterparts import PRODUCTS
    from loopscope.report.write import check_report_place

    check_products(options.product)
    if not options.product:
        check_report_place(options.out, PRODUCTS.recipes)
    sources = [read_recordings(run, options.unseen) for run in runs]
    models = [source.test.provenance.get("weights_sha256") for source in sources]
    policies = inputs.policies_by_model(options.policy, models, options.any_model)
    gates = inputs.gates_by_model(options.fitted, [source.validation for source in sources])
    given = zip(sources, policies, gates, strict=True)
    sources = [replace(source, policies=own, gates=fitted) for source, own, fitted in given]
    with watched(options, "analysing") as advance:
        results, details = analyse_models(sources, reference, targets, advance, options.transfer)
    words = {"reference": options.reference, "policy": options.policy, "any-model": options.any_model}
    words |= {"fitted": options.fitted, "transfer": options.transfer}
    words |= {"at": targets, "unseen": options.unseen, "with-readout": options.with_readout}
    words |= {"out": options.out, "style": None if options.style == "page" else options.style}
    command = shown_command(["report", *map(as_typed, options.runs)], words)
    show_report(results, details, options, options.out, ("overview",), (command, command))


def add_report_options(parser: Parser) -> None:
    """Add the options that `report` and `study` share."""
    shown = parser.add_mutually_exclusive_group()  # --open opens the page, which --product does not write
    add_shared(shown, "--product NAME", "--open")
    add_shared(parser, "--style")


def shown_command(verb: Sequence[object], options: dict[str, Any]) -> str:
    """The command line that makes the same report: a verb, its arguments, and its options that have a value."""
    words = ["loopscope", *map(str, verb)]
    for name, value in options.items():
        for each in value if isinstance(value, list) else [value]:
            if each is not None and each is not False:
                words.append(f"--{name}")
                words += [] if each is True else [f"{each:g}" if isinstance(each, float) else str(each)]
    return shlex.join(words)


def _reported_runs(options: argparse.Namespace) -> tuple[list[Path], str | None]:
    """The runs of a report, and the name of the reference among them."""
    runs = [find_recordings(model) for run in options.runs for model in inputs.models_of(run)]
    reference = inputs.reference_of(options.reference, runs)
    if reference is None:
        return runs, None
    measure = find_recordings(reference)
    if (recorded_name(measure), measure.resolve()) not in [(recorded_name(run), run.resolve()) for run in runs]:
        runs.insert(0, measure)
    return runs, recorded_name(measure)


def check_products(names: Sequence[str]) -> None:
    """Reject names of no product and no group of products."""
    from loopscope.paper.counterparts import PRODUCTS

    known = [*PRODUCTS.groups, *PRODUCTS.recipes]
    for name in names:
        check_known(name, known, "product")


def show_report(
    results: "Results",
    details: "Iterable[ThresholdDetails]",
    options: argparse.Namespace,
    folder: Path,
    products: Sequence[str],
    commands: tuple[str, str],
) -> None:
    """Write a report, then print its verdicts and main tables; or make only the products of --product.

    `commands` are the one that made it and the one that makes its products again.
    """
    from loopscope.paper.counterparts import PRODUCTS, markers
    from loopscope.report.tables import of_sequences
    from loopscope.report.write import reported_models, write_report

    made = PRODUCTS.make(results, options.product or products)
    if options.product:
        _show_products(PRODUCTS.names(options.product), made, folder, options)
        return
    earlier, names = reported_models(folder), [model.name for model in results.models]
    if earlier and set(earlier) != set(names):
        before, now = (brief(", ".join(each), _MAX_NAMES) for each in (earlier, names))
        print_note(f"{folder} held a report on {before}; this one, on {now}, takes its place.")
    with watched(options, "writing") as advance:
        page = write_report(results, details, made, folder, *commands, markers(results), options.style, advance)
    if options.open and not webbrowser.open(page.resolve().as_uri()):
        print_note(f"No browser could be started here; open {page} in one.")
    if options.json:
        print_json(results)
        return
    for members in (members for _, members in results.grouped if members):
        print_sentences(f"{members[0].label}{_run_remark(members)}: {members[0].diagnosis.sentence}\n")
    for product in made:
        if product.table is not None and product.name in _HEADLINES:
            print_table(product.table.title, product.table.columns, product.table.rows)
    if note := of_sequences(results):
        print_sentences(f"{note.lstrip()}\n")
    print_text(f"All tables and figures: {page}")


def _show_products(names: list[str], made: "list[Product]", folder: Path, options: argparse.Namespace) -> None:
    """Print these tables and write these figures, without a change to other files of the folder."""
    from loopscope.report.charts import write_figure

    for name in names:
        if name not in {product.name for product in made}:
            print_note(f"{name} cannot be made: the models that it shows are not among these.")
    if not made:
        raise UserError("None of these products can be made of these models.")
    printed: list[dict[str, object]] = []
    for product in made:
        name, table = product.name, product.table
        if product.figure is not None:
            write_figure(product.figure, folder, name, options.style)
            printed.append({"name": name, "figure": f"{folder / name}.png"})
            if not options.json:
                print_text(f"{folder / name}.png, .pdf and .svg")
        elif table is not None:
            printed.append({"name": name, "title": table.title, "columns": table.columns, "rows": table.rows})
            if not options.json:
                print_table(table.title, table.columns, table.rows)
    if options.json:
        print_json(printed)


def _run_remark(members: "Sequence[ModelResult]") -> str:
    """The words beside a run's name: the reference, or the verdicts of its other seeds."""
    first, *others = members
    words = ["the reference"] if first.is_reference else []
    if others:
        counts = Counter(other.verdict for other in others)
        verdicts = ", ".join(f"{name} ({count})" for name, count in counts.items())
        agreed = "the same verdict" if set(counts) == {first.verdict} else verdicts
        words.append(f"one of {len(members)} seeds; the other{'s' * (len(others) > 1)}: {agreed}")
    return f" ({', '.join(words)})" if words else ""
