"""How often does a monitor give a false alarm, and how soon does it find a change?

loopscope bench drift
loopscope bench drift runs/demo/fixed-geometric/recordings/test
loopscope bench drift --streams 100 --examples 1000 --length 3000 --json

Every stream has its own calibration, on data drawn from the same population: without a change, and with several kinds
of it after 1,000 examples. Recordings serve as populations, too.
"""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loopscope.cli.bench.guarantees import load_populations
from loopscope.cli.options import add_shared, add_verb, count
from loopscope.cli.output import percent, print_json, print_table

if TYPE_CHECKING:
    from loopscope.bench.drift import Detections, DriftBench


def define(kinds: Any) -> None:
    parser = add_verb(kinds, "drift", __doc__, execute)
    parser.add_argument(
        "recordings",
        type=Path,
        nargs="*",
        metavar="RUN|RECORDING",
        help="runs or recordings that serve as populations, too",
    )
    parser.add_argument(
        "--streams", type=count, default=1000, metavar="N", help="streams of each kind (default: 1,000)"
    )
    parser.add_argument(
        "--examples", type=count, default=2000, metavar="N", help="examples to calibrate on (default: 2,000)"
    )
    parser.add_argument("--length", type=count, default=5000, metavar="N", help="examples of a stream (default: 5,000)")
    parser.add_argument(
        "--alpha",
        type=float,
        default=0.01,
        metavar="A",
        help="share of streams that may give a false alarm (default: 0.01)",
    )
    add_shared(parser, "--json")


def execute(options: argparse.Namespace) -> None:
    recordings = load_populations(options.recordings)
    from loopscope.bench.drift import bench_drift
    from loopscope.progress import track

    with track("watching streams") as advance:
        result = bench_drift(
            recordings, options.alpha, options.streams, options.examples, options.length, progress=advance
        )
    if options.json:
        print_json(result)
    else:
        _print(result, options.streams)


def _print(result: "DriftBench", streams: int) -> None:
    title = (
        f"{streams:,} streams of {result.length:,} without a change, each with its own calibration on "
        f"{result.examples:,}; {percent(result.audit, 0)} audited; at most {100 * result.alpha:g} % may give an alarm "
        f"({percent(result.without[0].limit, 2)} with two standard errors)"
    )
    rows = [
        [
            each.population,
            *(percent(share, 2) for share in (each.alarms, each.by_exits, each.by_risk)),
            percent(each.broken),
            f"{each.refused:,}",
        ]
        for each in result.without
    ]
    columns = ["population", "alarms", "by exits", "by risk", "promise broken", "refused, drawn again"]
    print_table(title, columns, rows)
    title = f"The same with a change after {result.change:,}; delay: median and quartiles, in examples"
    columns = ["population", "change", "loops", "risk, %", "before it", "detected", "by exits", "delay"]
    print_table(title, columns, [_row(each) for each in result.changed], keys=2)


def _row(each: "Detections") -> list[str]:
    low, middle, high = ("later" if delay is None else f"{delay:,.0f}" for delay in each.delays)
    return [
        each.population,
        each.change,
        "{:.2f}, {:.2f}".format(*each.loops),
        "{:.2f}, {:.2f}".format(*(100 * risk for risk in each.risk)),
        percent(each.before),
        percent(each.detected),
        percent(each.by_exits, 0),
        f"{middle} [{low}, {high}]",
    ]
