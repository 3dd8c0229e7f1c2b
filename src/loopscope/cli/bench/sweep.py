"""Measure a sweep against its signal, and against a replay of every threshold.

loopscope bench sweep
loopscope bench sweep --examples 10000 --classes 4
"""

import argparse
from typing import Any

from loopscope.cli.devices import device_of
from loopscope.cli.options import add_shared, add_verb, count
from loopscope.cli.output import print_measured
from loopscope.errors import UserError


def define(kinds: Any) -> None:
    parser = add_verb(kinds, "sweep", __doc__, execute)
    for name, default in (("examples", 50_000), ("loops", 6), ("classes", 23), ("width", 64)):
        parser.add_argument(
            f"--{name}",
            type=count,
            default=default,
            metavar="N",
            help=f"{name} of the random recording (default: {default:,})",
        )
    add_shared(parser, "--rounds", "--threads", "--json")
    parser.set_defaults(device="cpu")


def execute(options: argparse.Namespace) -> None:
    if options.classes < 2 or options.loops < 2:
        raise UserError("The sweep needs at least two classes and two loops.")
    from loopscope.bench.sweep import bench_sweep
    from loopscope.progress import track

    device_of(options)
    with track("measuring sweeps") as advance:
        result = bench_sweep(options.examples, options.loops, options.classes, options.width, options.rounds, advance)
    rows = [
        [timing.readout, str(timing.signal_milliseconds), str(timing.sweep_ratio), str(timing.replay_ratio)]
        for timing in result.readouts
    ]
    columns = ["readout", "signal, ms", "sweep / signal", "one by one / sweep"]
    title = f"{result.examples:,} examples, {result.loops} loops, {result.classes} classes; calibration and evaluation."
    print_measured(result, title, columns, rows, options.json)
