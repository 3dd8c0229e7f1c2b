"""Compare two readouts on the same examples.

loopscope compare runs/demo/linear-gate gate margin
loopscope compare runs/demo/linear-gate gate margin --with runs/demo/fixed-geometric --unseen
loopscope compare runs/mine gate:linear gate --gate gates/linear  # recorded with --hidden

Both at the threshold that validation chooses, and (--at) at the least depth that reaches an accuracy. With --with, the
second readout runs on another model's recordings of the same examples.
"""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loopscope.cli.inputs import check_readouts, find_run
from loopscope.cli.options import AT, READOUTS, RECORDED, add_shared, add_verb, target_accuracies
from loopscope.cli.output import print_json, print_table
from loopscope.cli.policies import load_gates
from loopscope.errors import UserError
from loopscope.recording_places import ANALYSED, find_recordings, recorded_name

if TYPE_CHECKING:
    from loopscope.trajectory import Trajectory

    Pair = tuple[Trajectory, Trajectory]


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
    from loopscope.exits import attach

    validation, test = _recorded(options.run, options.unseen)
    gates = load_gates(options.gate, validation)
    validation, test = attach(validation, gates), attach(test, gates)
    other = None if second is None else _recorded(second, options.unseen)
    _check_comparable((validation, test), other or (validation, test), options)
    from loopscope.analysis import compare  # with scipy.stats, which takes a second

    names = ["" if run is None else recorded_name(find_recordings(run)) for run in (second, options.run)]
    compared = compare(validation, test, options.first, options.second, other, target, *names)
    if options.json:
        print_json(compared)
    else:
        print_table(compared.sentence, compared.columns, compared.rows)


def _recorded(run: Path, unseen: bool) -> "Pair":
    """The validation and the test recording of a run, or what of them training did not have."""
    from loopscope.trajectory import Trajectory

    found = []
    for split in ANALYSED:
        place = find_recordings(run) / split
        whole = Trajectory.load(place)
        try:
            found.append(whole.unseen() if unseen else whole)
        except UserError as error:
            raise UserError(f"{place}: {error}") from None
    return found[0], found[1]


def _check_comparable(ours: "Pair", theirs: "Pair", options: argparse.Namespace) -> None:
    """Refuses readouts that the recordings do not have, and examples that are not the same, before any sweep."""
    import numpy as np

    from loopscope.exits.readouts import find_readout
    from loopscope.exits.recorded_signals import signal

    for readout, pair in ((options.first, ours), (options.second, theirs)):
        for recording in pair if find_readout(readout) is not None else ():
            signal(readout, recording)  # computed once
    if not np.array_equal(ours[1].required_labels, theirs[1].required_labels):
        raise UserError(
            "A paired comparison needs the same examples in both recordings, in the same order, and the test "
            f"recordings of {options.run} and {options.other} have others; record both models on the same ones."
        )
