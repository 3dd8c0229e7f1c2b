"""Measure a sweep against its signal, and against a replay of every threshold.

python -m benchmarks.sweep
python -m benchmarks.sweep --examples 10000 --classes 4
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import msgspec
import numpy as np

from benchmarks.command import print_measured, run_benchmark
from loopscope.analysis.schema import Machine, Spread
from loopscope.bench.measure import interleaved, spread
from loopscope.cli.inputs import device_of
from loopscope.cli.options import Parser, add_shared, option
from loopscope.errors import UserError
from loopscope.frontier import accuracy_and_loops, sweep
from loopscope.policy import ExitPolicy
from loopscope.progress import ProgressCallback, track
from loopscope.readouts.readout import READOUTS
from loopscope.readouts.replay import signal
from loopscope.readouts.signals import SIGNALS
from loopscope.threshold_grids import grid
from loopscope.trajectory import Trajectory


class SweepTiming(msgspec.Struct, frozen=True):
    readout: str
    signal_milliseconds: Spread
    sweep_ratio: Spread  # the sweep of all thresholds against computing the signal once
    replay_ratio: Spread  # replaying the thresholds one by one against the sweep


class SweepBench(msgspec.Struct, frozen=True):
    examples: int
    loops: int
    classes: int
    width: int
    machine: Machine
    readouts: list[SweepTiming]


def bench_sweep(
    examples: int, loops: int, classes: int, width: int, rounds: int, progress: ProgressCallback
) -> SweepBench:
    """Two random recordings of this size, for calibration and for evaluation."""
    pair = [_random(seed, examples, loops, classes, width) for seed in (0, 1)]
    names = [name for name in READOUTS if name in SIGNALS]
    ways: dict[str, Callable[[], Any]] = {}
    for name in names:

        def compute(name: str = name) -> None:
            for trajectory in pair:
                trajectory.computed.clear()
                signal(name, trajectory)

        def replays(name: str = name) -> None:
            for threshold in grid(name, pair[0]):
                for trajectory in pair:
                    accuracy_and_loops(ExitPolicy(name, float(threshold)), trajectory)

        ways[f"{name}: signal"] = compute
        ways[f"{name}: sweep"] = partial(sweep, name, *pair, grid="paper")
        ways[f"{name}: replays"] = replays
    seconds, machine = interleaved(ways, rounds, width, progress)
    timings = []
    for name in names:
        computing, sweeping, replaying = (seconds[f"{name}: {what}"] for what in ("signal", "sweep", "replays"))
        timings.append(
            SweepTiming(name, spread(1000 * computing), spread(sweeping / computing), spread(replaying / sweeping))
        )
    return SweepBench(examples, loops, classes, width, machine, timings)


def _random(seed: int, examples: int, loops: int, classes: int, width: int) -> Trajectory:
    rng = np.random.default_rng(seed)
    return Trajectory(
        logits=rng.normal(size=(examples, loops, classes)).astype(np.float32),
        labels=rng.integers(0, classes, examples),
        hidden=rng.normal(size=(examples, loops, width)).astype(np.float32),
        gate_logits=rng.normal(size=(examples, loops)).astype(np.float32),
    )


def define(parser: Parser) -> None:
    for name, default in (("examples", 50_000), ("loops", 6), ("classes", 23), ("width", 64)):
        option(parser, f"--{name} N", f"{name} of the random recording", default=default)
    add_shared(parser, "--rounds N", "--threads N", "--json")


def execute(options: argparse.Namespace) -> None:
    if options.classes < 2 or options.loops < 2:
        raise UserError("The sweep needs at least two classes and two loops.")
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


def main(words: Sequence[str] | None = None) -> int:
    return run_benchmark("sweep", __doc__, define, execute, words)


if __name__ == "__main__":
    sys.exit(main())
