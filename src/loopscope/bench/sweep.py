"""What does a sweep cost beside its signal, and beside a replay of every threshold?"""

from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
import numpy as np

from loopscope.analysis.timings import Machine, Spread
from loopscope.bench.measure import interleaved, spread
from loopscope.exits import READOUTS, SIGNALS, ExitPolicy, sweep
from loopscope.exits.policy import accuracy_and_loops
from loopscope.exits.recorded_signals import signal
from loopscope.exits.thresholds import grid
from loopscope.progress import ProgressCallback
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
                trajectory.computed.pop(name, None)
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
