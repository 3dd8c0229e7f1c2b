"""Compare two readouts on the same examples.

loopscope compare runs/demo/linear-gate gate margin
loopscope compare runs/demo/linear-gate gate margin --with runs/demo/fixed-geometric --unseen
loopscope compare runs/mine gate:linear gate --gate gates/linear  # recorded with --hidden

Both at the threshold that validation chooses, and (--at) at the least depth that reaches an accuracy. With --with, the
second readout runs on another model's recordings of the same examples.
"""

import argparse
from pathlib import Path
from typing import Any

from loopscope.cli.inputs import check_readouts, find_run
from loopscope.cli.options import AT, READOUTS, RECORDED, add_shared, add_verb, target_accuracies
from loopscope.cli.output import print_json, print_table
from loopscope.cli.policies import load_gates
from loopscope.errors import UserError
from loopscope.recording_places import find_recordings


def define(subparsers: Any) -> None:
    parser = add_verb(subparsers, "compare", __doc__, execute)
    parser.takes = "it takes one run and two readouts; another model's run comes with --with"
    parser.add_argument("run", type=Path, help=RECORDED)
    parser.add_argument("first", metavar="READOUT", help=f"the first readout: {READOUTS}")
    parser.add_argument("second", metavar="OTHER", help="the second readout")
    parser.add_argument(
        "--with", metavar="RUN", dest="other", help="run the second readout on this run, by path or name (default: RUN)"
    )
    add_shared(parser, "--gate")
    parser.add_argument("--at", type=float, metavar="X", help=AT)
    add_shared(parser, "--unseen", "--with-readout", "--json")


def execute(options: argparse.Namespace) -> None:
    target = None if options.at is None else target_accuracies([options.at])[0]
    find_recordings(options.run)
    second = None if options.other is None else find_run(options.other, [options.run])
    if second is not None:
        find_recordings(second)
    check_readouts(options, options.first, options.second)
    if options.first == options.second and second is None:
        raise UserError(f"'{options.first}' is the same as itself; give another readout, or --with another run.")
    from loopscope.analysis import compare
    from loopscope.analysis.model_analysis import read_recordings
    from loopscope.exits import attach

    recorded = read_recordings(options.run, options.unseen)
    gates = load_gates(options.gate, recorded.validation)
    other = None if second is None else read_recordings(second, options.unseen)
    compared = compare(
        attach(recorded.validation, gates),
        attach(recorded.test, gates),
        options.first,
        options.second,
        None if other is None else (other.validation, other.test),
        target,
        "" if other is None else other.name,
        recorded.name,
    )
    if options.json:
        print_json(compared)
    else:
        print_table(compared.sentence, compared.columns, compared.rows)
