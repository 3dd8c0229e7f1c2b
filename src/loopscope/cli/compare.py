"""Compare two readouts on the same examples.

loopscope compare example:demo gate margin
loopscope compare runs/demo/linear-gate gate margin \\
    --with runs/demo/fixed-geometric --unseen
# recorded with --hidden
loopscope compare runs/mine gate:linear margin --fitted gates/linear

LoopScope compares the two readouts at the thresholds chosen on validation data. LoopScope also compares the smallest
depth at which each readout reaches the target accuracy (--at). With --with, the second readout runs on another model's
recordings of the same examples.
"""

import argparse
from typing import Any

import loopscope as ls
from loopscope.cli import inputs
from loopscope.cli.options import add_shared, add_verb, option
from loopscope.cli.output import print_table, show
from loopscope.learned.attach import attach
from loopscope.recording_paths import find_recordings


def define(subparsers: Any) -> None:
    """Add the arguments of `loopscope compare` to the parser."""
    parser = add_verb(subparsers, "compare", __doc__, execute)
    parser.takes = "it takes one run and two readouts; another model's run comes with --with"
    option(parser, "run", inputs.RECORDED, type=inputs.recording_argument)
    names = f"the first readout: {inputs.READOUT_NAMES}"
    option(parser, "first", names, type=inputs.readout_name, metavar="READOUT")
    option(parser, "second", "the second readout", type=inputs.readout_name, metavar="OTHER")
    other = "run on which to replay the second readout, given by path or name (default: the first run)"
    option(parser, "--with RUN", other, dest="other")
    add_shared(parser, "--fitted DIR", "--at X", "--unseen", "--json")
    inputs.add_custom_readouts(parser)


def execute(options: argparse.Namespace) -> None:
    """Execute `loopscope compare` with its parsed arguments."""
    own = find_recordings(options.run)
    second = None if options.other is None else find_recordings(inputs.find_run(options.other, [options.run]))
    inputs.check_readouts(options.first, options.second)
    from loopscope.analysis.model_analysis import read_recordings  # with scipy.stats, which takes a second

    ours = read_recordings(own, options.unseen)
    theirs = None if second is None else read_recordings(second, options.unseen)
    gates = inputs.load_gates(options.fitted, ours.validation)
    pair = (attach(ours.validation, gates), attach(ours.test, gates))
    other = None if theirs is None else (theirs.validation, theirs.test)
    names = ("" if theirs is None else theirs.name, ours.name)
    compared = ls.compare(*pair, options.first, options.second, other, options.at, *names)
    show(compared, options.json, lambda: print_table(compared.sentence, compared.columns, compared.rows))
