"""Measure a recording against the bare forward pass.

loopscope bench record runs/demo/fixed-geometric
loopscope bench record runs/demo/mlp-gate --split validation --examples 5000
"""

import argparse
from pathlib import Path
from typing import Any

from loopscope.cli.devices import device_of
from loopscope.cli.inputs import check_run
from loopscope.cli.options import add_shared, add_verb, count
from loopscope.cli.output import print_measured


def define(kinds: Any) -> None:
    parser = add_verb(kinds, "record", __doc__, execute)
    parser.add_argument("run", type=Path, help="the folder of a finished run")
    parser.add_argument("--split", default="test", metavar="NAME", help="split to record (default: test)")
    parser.add_argument(
        "--examples", type=count, metavar="N", help="number of examples to record (default: the task's)"
    )
    add_shared(parser, "--rounds", "--threads", "--json")
    parser.set_defaults(device="cpu")


def execute(options: argparse.Namespace) -> None:
    from loopscope.arguments import check_split_name

    check_run(options.run)
    check_split_name(options.split)
    from loopscope.bench.recording import bench_record
    from loopscope.progress import track

    device_of(options)
    with track("measuring recording") as advance:
        result = bench_record(options.run, options.split, options.examples, options.rounds, advance)
    rows = [
        ["bare forward pass, ms per example", str(result.forward_milliseconds)],
        ["all signals, against it", str(result.signals_ratio)],
        ["logits and signals of the states, against it", str(result.logits_ratio)],
    ]
    title = f"{result.model}: {result.examples:,} examples."
    print_measured(result, title, ["", "median [quartiles]"], rows, options.json)
