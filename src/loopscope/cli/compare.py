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

import numpy as np

import loopscope as ls
from loopscope.cli.inputs import add_custom_readouts, check_readouts, find_run, load_gates, readout_name
from loopscope.cli.options import AT, READOUT_NAMES, RECORDED, add_shared, option, share
from loopscope.cli.output import print_json, print_table
from loopscope.cli.parser import add_verb
from loopscope.errors import UserError
from loopscope.exits.fitted import attach
from loopscope.exits.readouts import find_readout
from loopscope.exits.recorded_signals import signal
from loopscope.recording_places import ANALYSED, find_recordings, recorded_name
from loopscope.trajectory import Trajectory

Pair = tuple[Trajectory, Trajectory]


def define(subparsers: Any) -> None:
    parser = add_verb(subparsers, "compare", __doc__, execute)
    parser.takes = "it takes one run and two readouts; another model's run comes with --with"
    option(parser, "run", RECORDED, type=Path)
    option(parser, "first", f"the first readout: {READOUT_NAMES}", type=readout_name, metavar="READOUT")
    option(parser, "second", "the second readout", type=readout_name, metavar="OTHER")
    other = "run the second readout on this run, by path or name (default: RUN)"
    option(parser, "--with RUN", other, dest="other")
    add_shared(parser, "--gate DIR")
    option(parser, "--at X", AT, type=share)
    add_shared(parser, "--unseen", "--json")
    add_custom_readouts(parser)


def execute(options: argparse.Namespace) -> None:
    name = recorded_name(find_recordings(options.run))
    second = None if options.other is None else find_run(options.other, [options.run])
    other_name = "" if second is None else recorded_name(find_recordings(second))
    check_readouts(options.first, options.second)
    if options.first == options.second and second is None:
        raise UserError(f"'{options.first}' is the same as itself; give another readout, or --with another run.")
    validation, test = _recorded(options.run, options.unseen)
    gates = load_gates(options.gate, validation)
    validation, test = attach(validation, gates), attach(test, gates)
    other = None if second is None else _recorded(second, options.unseen)
    _check_comparable((validation, test), other or (validation, test), options)
    compared = ls.compare(validation, test, options.first, options.second, other, options.at, other_name, name)
    if options.json:
        print_json(compared)
    else:
        print_table(compared.sentence, compared.columns, compared.rows)


def _recorded(run: Path, unseen: bool) -> Pair:
    """The validation and the test recording of a run, or what of them training did not have."""
    found = []
    for split in ANALYSED:
        place = find_recordings(run) / split
        whole = Trajectory.load(place)
        try:
            found.append(whole.unseen() if unseen else whole)
        except UserError as error:
            raise UserError(f"{place}: {error}") from None
    return found[0], found[1]


def _check_comparable(ours: Pair, theirs: Pair, options: argparse.Namespace) -> None:
    """Rejects readouts that the recordings do not have, and examples that are not the same, before any sweep."""
    for readout, pair in ((options.first, ours), (options.second, theirs)):
        for recording in pair if find_readout(readout) is not None else ():
            signal(readout, recording)  # computed once
    if not np.array_equal(ours[1].required_labels, theirs[1].required_labels):
        raise UserError(
            "A paired comparison needs the same examples in both recordings, in the same order, and the test "
            f"recordings of {options.run} and {options.other} have others; record both models on the same ones."
        )
