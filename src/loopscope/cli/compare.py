"""Compare two readouts on the same examples.

loopscope compare runs/demo/linear-gate gate margin
loopscope compare runs/demo/linear-gate gate margin --with runs/demo/fixed-geometric --unseen
loopscope compare runs/mine gate:linear gate --gate gates/linear     (recorded with --hidden)

Both at the threshold that validation chooses, and (--at) at the least depth that reaches an accuracy. With --with, the
second readout runs on another model's recordings of the same examples.
"""

import argparse
from pathlib import Path
from typing import Any

from loopscope.cli.options import AT, add_shared, add_verb, target_accuracies
from loopscope.cli.output import print_json, print_table
from loopscope.cli.policies import load_gates


def define(subparsers: Any) -> None:
    parser = add_verb(subparsers, "compare", __doc__, execute)
    parser.add_argument("run", type=Path, help="a run whose validation and test splits are recorded")
    parser.add_argument("first", metavar="READOUT", help="the first readout")
    parser.add_argument("second", metavar="OTHER", help="the second readout")
    parser.add_argument("--with", type=Path, metavar="RUN", dest="other", help="the run of the second (default: RUN)")
    add_shared(parser, "--gate")
    parser.add_argument("--at", type=float, metavar="X", help=AT)
    add_shared(parser, "--unseen", "--with-readout", "--json")


def execute(options: argparse.Namespace) -> None:
    target = None if options.at is None else target_accuracies([options.at])[0]
    from loopscope.analysis import compare
    from loopscope.analysis.model_analysis import read_recordings
    from loopscope.exits import attach

    recorded = read_recordings(options.run, options.unseen)
    gates = load_gates(options.gate, recorded.validation)
    other = None if options.other is None else read_recordings(options.other, options.unseen)
    compared = compare(
        attach(recorded.validation, gates),
        attach(recorded.test, gates),
        options.first,
        options.second,
        None if other is None else (other.validation, other.test),
        target,
        "" if other is None else other.name,
    )
    if options.json:
        print_json(compared)
    else:
        print_table(compared.sentence, ["", "difference", "95 % interval"], compared.rows)
