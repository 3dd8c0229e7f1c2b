"""Are promises kept, and what do they cost, where the truth is known?

loopscope bench guarantees
loopscope bench guarantees runs/demo/fixed-geometric/recordings/test --figure promises.png
loopscope bench guarantees --calibrations 100 --examples 500 --json
loopscope bench guarantees --population sequences --population "sequences, all or nothing"

Calibrations on data drawn from populations whose risk is known, beside the usual way: the least strict threshold whose
loss on the same data is within the limit. Recordings serve as populations for the price.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loopscope.cli.options import add_shared, add_verb, count
from loopscope.cli.output import percent, print_json, print_table
from loopscope.cli.report_output import check_products
from loopscope.errors import UserError
from loopscope.recording_places import find_recording, recorded_name

if TYPE_CHECKING:
    from loopscope.bench.guarantees import GuaranteeBench
    from loopscope.trajectory import Trajectory


def define(kinds: Any) -> None:
    parser = add_verb(kinds, "guarantees", __doc__, execute)
    parser.add_argument(
        "recordings",
        type=Path,
        nargs="*",
        metavar="RUN|RECORDING",
        help="runs or recordings that serve as populations for the price",
    )
    parser.add_argument(
        "--calibrations", type=count, default=1000, metavar="N", help="calibrations of each population (default: 1,000)"
    )
    parser.add_argument(
        "--examples", type=count, default=2000, metavar="N", help="examples of each calibration (default: 2,000)"
    )
    parser.add_argument(
        "--population", action="append", default=[], metavar="NAME", help="simulate only this population (repeatable)"
    )
    parser.add_argument("--figure", type=Path, metavar="FILE", help="draw the result to this file, as PNG and PDF")
    add_shared(parser, "--json")


def execute(options: argparse.Namespace) -> None:
    if options.figure is not None and options.figure.suffix != ".png":
        raise UserError("The figure is written as PNG, with PDF and SVG beside it; give a file that ends in .png.")
    if options.figure is not None:
        check_products(())
    from loopscope.bench.guarantees import bench_guarantees, check_populations
    from loopscope.progress import track

    check_populations(options.population)
    recordings = load_populations(options.recordings)
    with track("calibrating") as advance:
        result = bench_guarantees(recordings, options.examples, options.calibrations, advance, options.population)
    if options.json:
        print_json(result)
    else:
        _print(result, options)
    if options.figure is not None:
        from functools import partial

        from loopscope.report.charts import write_figure
        from loopscope.report.guarantee_figure import guarantee_panels

        write_figure(partial(guarantee_panels, result), options.figure.parent, options.figure.stem)


def load_populations(paths: Sequence[Path]) -> dict[str, "Trajectory"]:
    """Recordings by the names of their runs."""
    from loopscope.trajectory import Trajectory

    found = [find_recording(path, "test") for path in paths]
    names = [recorded_name(path.parent) if path.parent.name == "recordings" else path.absolute().name for path in found]
    if len(set(names)) < len(names):
        raise UserError("Two of the recordings are of one run; give one of each.")
    return {name: Trajectory.load(path) for name, path in zip(names, found, strict=True)}


def _print(result: "GuaranteeBench", options: argparse.Namespace) -> None:
    title = (
        f"{options.calibrations:,} calibrations each, on {options.examples:,} examples: a risk of at most "
        f"{percent(result.max_drop)}, with probability {percent(result.confidence)}"
    )
    columns = ["population", "method", "broken, %", "risk, %", "loops", "hindsight", "ratio", "refused"]
    rows = [
        [
            each.population,
            each.method,
            f"{100 * each.broken:.1f} ± {100 * each.broken_error:.1f}",
            f"{100 * each.risk:.3f} ± {100 * each.risk_error:.3f}",
            f"{each.loops:.2f}",
            f"{each.hindsight_loops:.2f}",
            f"{each.loops / each.hindsight_loops:.3f}",
            f"{each.refused:,}",
        ]
        for each in result.coverage
    ]
    print_table(title, columns, rows, keys=2)
    if not result.price:
        return
    sizes = sorted({each.examples for each in result.price})
    priced: dict[str, list[str]] = {}
    for each in result.price:
        priced.setdefault(each.population, [f"{each.hindsight_loops:.2f}"]).append(f"{each.loops:.2f}")
    title = (
        f"The price: loops of the promise, by the number of examples ({result.price[0].calibrations:,} calibrations)"
    )
    columns = ["population", "hindsight", *(f"{size:,}" for size in sizes)]
    print_table(title, columns, [[name, *cells] for name, cells in priced.items()])
