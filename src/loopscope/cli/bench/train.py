"""Measure a training step against the plain padded one.

loopscope bench train demo
loopscope bench train paper --set training.batch_size=64 --steps 1
"""

import argparse
from typing import Any

from loopscope.cli.devices import device_of
from loopscope.cli.options import PRESETS, add_shared, add_verb, count
from loopscope.cli.output import print_measured


def define(kinds: Any) -> None:
    parser = add_verb(kinds, "train", __doc__, execute)
    parser.add_argument(
        "settings", nargs="?", default="demo", help=f"a TOML file or a preset: {PRESETS} (default: demo)"
    )
    parser.add_argument("--steps", type=count, default=4, metavar="N", help="steps of each way per round (default: 4)")
    add_shared(parser, "--set", "--rounds", "--threads", "--json")
    parser.set_defaults(device="cpu")


def execute(options: argparse.Namespace) -> None:
    from loopscope.training.settings import read_settings

    settings = read_settings(options.settings, options.set)
    from loopscope.bench.training import bench_train
    from loopscope.progress import track

    device_of(options)
    with track("measuring training") as advance:
        result = bench_train(settings, options.settings, options.rounds, options.steps, advance)
    rows = [
        ["milliseconds per step", str(result.milliseconds)],
        ["the plain way", str(result.plain_milliseconds)],
        ["speed-up", str(result.speedup)],
        ["block size / mean length", f"{result.padding:.2f}"],
        ["states per token", f"{result.states_a_token:.2f}"],
        ["useful GFLOP/s", str(result.useful_gigaflops)],
        ["share of the matrix-product rate", str(result.share_of_machine)],
    ]
    title = f"{result.settings}: width {result.width}, batch {result.batch_size}."
    print_measured(result, title, ["", "median [quartiles]"], rows, options.json)
