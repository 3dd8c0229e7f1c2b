"""Compare two readouts on the same examples.

loopscope compare runs/demo/linear-gate gate margin
loopscope compare runs/demo/linear-gate gate margin --with runs/demo/fixed-geometric --unseen
loopscope compare runs/mine gate:linear gate --gate gates/linear     (recorded with --hidden)

Both at the threshold that validation chooses, and (--at) at the least depth that reaches an accuracy. With --with, the
second readout runs on another model's recordings of the same examples.
"""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loopscope.cli.options import add_shared, add_verb, target_accuracies
from loopscope.cli.output import print_json, print_table
from loopscope.cli.policies import load_gates

if TYPE_CHECKING:
    from loopscope.analysis import Gap, Paired


def define(subparsers: Any) -> None:
    parser = add_verb(subparsers, "compare", __doc__, execute)
    parser.add_argument("run", type=Path, help="a run whose validation and test splits are recorded")
    parser.add_argument("first", metavar="READOUT", help="the first readout")
    parser.add_argument("second", metavar="OTHER", help="the second readout")
    parser.add_argument("--with", type=Path, metavar="RUN", dest="other", help="the run of the second (default: RUN)")
    add_shared(parser, "--gate")
    parser.add_argument("--at", type=float, default=0.95, metavar="X", help="the accuracy of D@X (default: 0.95)")
    add_shared(parser, "--unseen", "--json")


def execute(options: argparse.Namespace) -> None:
    (target,) = target_accuracies([options.at])
    from loopscope.analysis import Side, depth_gap, paired
    from loopscope.analysis.model_analysis import ModelRecordings, read_recordings
    from loopscope.exits import attach, sweep

    recorded = read_recordings(options.run, options.unseen)
    gates = load_gates(options.gate, recorded.validation)
    source = ModelRecordings(recorded.name, attach(recorded.validation, gates), attach(recorded.test, gates))
    other = source if options.other is None else read_recordings(options.other, options.unseen)

    def side(readout: str, where: ModelRecordings) -> Side:
        name = readout if where is source else f"{readout} on {where.name}"
        return Side(name, sweep(readout, where.validation, where.test).select().policy, where.test)

    compared = paired(side(options.first, source), side(options.second, other))
    gap = depth_gap(target, (source.subject, options.first), (other.subject, options.second))
    if options.json:
        print_json({"selected": compared, "depth": gap})
    else:
        _print(compared, gap)


def _print(compared: "Paired", gap: "Gap | None") -> None:
    accuracy, loops = compared.accuracy, compared.loops
    bounds = f"[{100 * accuracy.low:+.2f}, {100 * accuracy.high:+.2f}]"
    rows = [
        ["accuracy", f"{100 * accuracy.value:+.2f} %", bounds],
        ["loops", f"{loops.value:+.3f}", f"[{loops.low:+.3f}, {loops.high:+.3f}]"],
    ]
    if gap is not None:
        rows.append([f"D@{100 * gap.accuracy:g}", f"{gap.value:+.3f}", f"[{gap.low:+.3f}, {gap.high:+.3f}]"])
    title = (
        f"{compared.first} minus {compared.second} on {compared.examples:,} test examples. Accuracy and loops at the "
        f"thresholds that validation chose; only {compared.first} is right on {compared.only_first_right:,}, only "
        f"{compared.second} on {compared.only_second_right:,}."
    )
    print_table(title, ["", "difference", "95 % interval"], rows)
