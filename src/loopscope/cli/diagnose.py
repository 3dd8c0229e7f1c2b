"""Say which part is to blame, the trajectory or the readout.

loopscope diagnose runs/demo/linear-gate --reference runs/demo/fixed-geometric --unseen
loopscope diagnose runs/demo/linear-gate --at 0.9 --json

A run needs its validation and test splits recorded; a folder that holds two recordings named so will do.
"""

import argparse
from pathlib import Path
from typing import Any

from loopscope.cli.options import add_shared, add_verb, target_accuracies
from loopscope.cli.output import print_json, print_table


def define(subparsers: Any) -> None:
    parser = add_verb(subparsers, "diagnose", __doc__, execute)
    parser.add_argument("run", type=Path, help="the run to be diagnosed")
    parser.add_argument("--reference", type=Path, metavar="RUN", help="the run whose trajectory is the measure")
    parser.add_argument("--at", type=float, default=0.95, metavar="X", help="the target accuracy (default: 0.95)")
    add_shared(parser, "--unseen", "--with-readout", "--json")


def execute(options: argparse.Namespace) -> None:
    (target,) = target_accuracies([options.at])
    from loopscope.analysis import diagnose
    from loopscope.analysis.model_analysis import read_recordings
    from loopscope.report.tables import gap_rows

    subject = read_recordings(options.run, options.unseen).subject
    reference = None
    if options.reference is not None:
        same = options.reference.resolve() == options.run.resolve()
        reference = subject if same else read_recordings(options.reference, options.unseen).subject
    diagnosis = diagnose(subject, reference, target)
    if options.json:
        print_json(diagnosis)
        return
    print(diagnosis.sentence)
    columns = ["gap", "between", "at", "loops", "95 % interval", "both reach it", f"each reaches {100 * target:g}%"]
    print_table("", columns, gap_rows(diagnosis))
