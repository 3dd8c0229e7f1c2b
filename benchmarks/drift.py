"""How often does a monitor give a false alarm, and how soon does it find a change?

python -m benchmarks.drift
python -m benchmarks.drift runs/demo/fixed-geometric/recordings/test
python -m benchmarks.drift --streams 100 --examples 1000 --length 3000 --json

Every stream has its own calibration: a threshold is guaranteed on data drawn from a population whose truth is known
(`benchmarks.guarantees`), then the stream goes by, drawn from the same population: without a change, and with several
kinds of it after 1,000 examples. Recordings serve as populations, too. What changes, from one example on:

- harder inputs: difficult examples become frequent, at once or slowly;
- another model: its margins are scaled, as by other weights or another precision;
- other answers: exits stay as they are, and early answers are wrong more often.

One population has a guarantee on average over calibrations, which many a policy breaks from the start: there exits
alone are watched.
"""

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np

from benchmarks.command import run_benchmark
from benchmarks.guarantees import (
    CONFIDENCE,
    MAX_DROP,
    Array,
    Population,
    draw,
    load_populations,
    populations,
    recorded,
    truth,
)
from loopscope.certify.calibration import certify
from loopscope.certify.monitor import Monitor
from loopscope.certify.not_proven import NotProven
from loopscope.certify.risk_target import RiskTarget
from loopscope.cli.options import Parser, add_shared, option, share
from loopscope.cli.output import percent, print_json, print_table
from loopscope.errors import UserError
from loopscope.policy import ExitPolicy
from loopscope.progress import ProgressCallback, track
from loopscope.trajectory import Trajectory, concatenate

CHANGE = 1_000
AUDIT = 0.1
_MAX_REFUSED = 20
"""Calibrations in a row."""
_HARDEST_TO_EASIEST = 20.0
"""How many times as frequent as the easiest the hardest examples become."""
_CHUNK = 500
"""Examples that are watched at a time; after an alarm nobody watches on."""
_MARGIN_SCALE = 1.25
_WRONG_SHARE = 0.05


class FalseAlarms(msgspec.Struct, frozen=True):
    """Streams without a change."""

    population: str
    streams: int
    refused: int  # calibrations that proved nothing and were drawn again
    broken: float  # share of streams whose guarantee is not true from the start
    alarms: float  # share of streams
    by_exits: float
    by_risk: float
    limit: float  # alpha and two standard errors


class Detections(msgspec.Struct, frozen=True):
    """Streams that change."""

    population: str
    change: str
    streams: int
    before: float  # share of streams with an alarm before the change
    detected: float  # of the others, share with one after it
    by_exits: float  # of these, share whose exits spoke first
    delays: list[float | None]  # examples from the change to the alarm: quartiles; None if it comes too late
    loops: list[float]  # on average, before and at the end of it, over policies
    risk: list[float]


class DriftBench(msgspec.Struct, frozen=True):
    alpha: float
    audit: float
    change: int  # comes after so many examples
    examples: int  # of a calibration
    length: int  # of a stream
    without: list[FalseAlarms]
    changed: list[Detections]


def bench_drift(
    recordings: Mapping[str, Trajectory], alpha: float, streams: int, size: int, length: int, progress: ProgressCallback
) -> DriftBench:
    """All populations, and recordings, without a change; and changes of those that have difficulties."""
    if length <= CHANGE:
        raise UserError(f"The change comes after {CHANGE:,} examples; give streams that are longer.")
    given = [recorded(name, each) for name, each in recordings.items()]
    synthetic = populations()
    known = [*synthetic, on_average(synthetic[0]), *given]
    changing = [_by_margin(each) for each in known if each.trajectory.difficulty is not None]
    jobs = [(each, None) for each in known] + [(each, change) for each in changing for change in CHANGES]
    total = len(jobs) * streams
    without, changed = [], []
    for number, (population, change) in enumerate(jobs):

        def advance(done: int, before: int = number * streams, note: str = population.name) -> None:
            progress(before + done, total, note)

        if change is None:
            without.append(false_alarms(population, alpha, streams, size, length, advance))
        else:
            changed.append(detections(population, change, alpha, streams, size, length, advance))
    return DriftBench(alpha, AUDIT, CHANGE, size, length, without, changed)


def on_average(population: Population) -> Population:
    """Guaranteed on average over calibrations."""
    options = {**population.risk_options, "in_expectation": True}
    return replace(population, name=f"{population.name}, on average", risk_options=options)


def _by_margin(population: Population) -> Population:
    """Guaranteed over all difficulties, for a signal that can be scaled."""
    return replace(population, risk_options={"readout": "margin"})


def _silent(done: int) -> None:
    pass


def false_alarms(
    population: Population,
    alpha: float,
    streams: int,
    size: int,
    length: int,
    advance: Callable[[int], None] = _silent,
    seed: int = 7,  # other streams than those that change
) -> FalseAlarms:
    found, broken, refused = [], 0, 0
    for number in range(streams):
        rng = np.random.default_rng([seed, number])
        policy, more = _calibrated(population, size, rng)
        monitor = Monitor(policy, alpha, number)
        found.append(monitor.replay(draw(population, length, rng), AUDIT if monitor.watches_risk else 0, stream=True))
        broken += truth(population, policy)[0] > MAX_DROP
        refused += more
        advance(number + 1)
    tests = [{alarm.test for alarm in each.alarms} for each in found]
    return FalseAlarms(
        population=population.name,
        streams=streams,
        refused=refused,
        broken=broken / streams,
        alarms=sum(map(bool, tests)) / streams,
        by_exits=sum("exits" in each for each in tests) / streams,
        by_risk=sum("risk" in each for each in tests) / streams,
        limit=alpha + 2 * float(np.sqrt(alpha * (1 - alpha) / streams)),
    )


def _calibrated(population: Population, size: int, rng: np.random.Generator) -> tuple[ExitPolicy, int]:
    """A policy, and how many calibrations were refused before it."""
    target = RiskTarget(max_drop=MAX_DROP, confidence=CONFIDENCE, **population.risk_options)
    for refused in range(_MAX_REFUSED):
        try:
            return certify(draw(population, size, rng), target), refused
        except NotProven:
            continue
    raise UserError(f"Of {population.name}, {size:,} examples prove nothing; give more.")


def detections(
    population: Population,
    change: str,
    alpha: float,
    streams: int,
    size: int,
    length: int,
    advance: Callable[[int], None] = _silent,
    seed: int = 0,
) -> Detections:
    changed = CHANGES[change](population, np.random.default_rng(seed))
    results, truths = [], []
    for number in range(streams):
        rng = np.random.default_rng([seed, number])
        policy, _ = _calibrated(population, size, rng)
        monitor = Monitor(policy, alpha, number)
        result = monitor.replay(draw(population, CHANGE, rng), AUDIT, stream=True)
        if not result.alarm:
            rest = _rest(population, changed, change == SLOWLY, length - CHANGE, rng)
            for rows in np.split(np.arange(length - CHANGE), np.arange(_CHUNK, length - CHANGE, _CHUNK)):
                if not result.alarm:
                    result = monitor.replay(rest.take(rows), AUDIT, stream=True)
        results.append(result)
        truths.append((truth(population, policy), truth(changed, policy)))
        advance(number + 1)
    first = [min(each.alarms, key=lambda alarm: alarm.example) for each in results if each.alarms]
    after = [alarm for alarm in first if alarm.example > CHANGE]
    before = len(first) - len(after)
    delays = [float(alarm.example - CHANGE) for alarm in after] + [np.inf] * (streams - len(first))
    quartiles = np.quantile(delays, [0.25, 0.5, 0.75], method="higher").tolist() if delays else [np.inf] * 3
    risk, loops = np.mean(truths, axis=0).T.tolist()
    return Detections(
        population=population.name,
        change=change,
        streams=streams,
        before=before / streams,
        detected=len(after) / max(1, streams - before),
        by_exits=sum(alarm.test == "exits" for alarm in after) / max(1, len(after)),
        delays=[each if np.isfinite(each) else None for each in quartiles],
        loops=loops,
        risk=risk,
    )


def _rest(
    population: Population, changed: Population, slowly: bool, length: int, rng: np.random.Generator
) -> Trajectory:
    """What follows the change: drawn from the changed population; slowly, a share that grows over half of it."""
    new = draw(changed, length, rng)
    if not slowly:
        return new
    rows = np.arange(length)
    taken = rng.random(length) < 2 * rows / length
    return concatenate([draw(population, length, rng), new]).take(rows + length * taken)


def _harder(population: Population, rng: np.random.Generator) -> Population:
    trajectory = population.trajectory
    assert trajectory.difficulty is not None
    levels, level = np.unique(trajectory.difficulty, return_inverse=True)
    weights = np.linspace(1, _HARDEST_TO_EASIEST, len(levels))[level]
    return replace(
        population, trajectory=trajectory.take(rng.choice(len(level), len(level), p=weights / weights.sum()))
    )


def _rescaled(population: Population, _: np.random.Generator) -> Population:
    trajectory = population.trajectory
    scaled = replace(trajectory, signals={**trajectory.signals, "margin": trajectory.signals["margin"] * _MARGIN_SCALE})
    return replace(population, trajectory=scaled)


def _wrong(population: Population, rng: np.random.Generator) -> Population:
    """Some answers are wrong up to the last loop, which is right."""
    trajectory = population.trajectory
    assert trajectory.predictions is not None
    assert trajectory.labels is not None
    predictions: Array = trajectory.predictions.copy()
    other = rng.random(len(predictions)) < _WRONG_SHARE
    predictions[other] = trajectory.labels[other, None] + 1
    predictions[other, -1] = trajectory.labels[other]
    return replace(population, trajectory=replace(trajectory, predictions=predictions))


SLOWLY = "harder inputs, slowly"
CHANGES = {"harder inputs": _harder, "another model": _rescaled, "other answers": _wrong, SLOWLY: _harder}


def define(parser: Parser) -> None:
    serve = "runs or recordings that serve as populations, too"
    option(parser, "recordings", serve, type=Path, nargs="*", metavar="RUN|RECORDING")
    option(parser, "--streams N", "streams of each kind", default=1000)
    option(parser, "--examples N", "examples to calibrate on", default=2000)
    option(parser, "--length N", "examples of a stream", default=5000)
    option(parser, "--alpha A", "share of streams that may give a false alarm", type=share, default=0.01)
    add_shared(parser, "--json")


def execute(options: argparse.Namespace) -> None:
    recordings = load_populations(options.recordings)
    with track("watching streams") as advance:
        result = bench_drift(
            recordings, options.alpha, options.streams, options.examples, options.length, progress=advance
        )
    if options.json:
        print_json(result)
    else:
        _print(result, options.streams)


def _print(result: DriftBench, streams: int) -> None:
    title = (
        f"{streams:,} streams of {result.length:,} without a change, each with its own calibration on "
        f"{result.examples:,}; {percent(result.audit, 0)} audited; at most {100 * result.alpha:g} % may give an alarm "
        f"({percent(result.without[0].limit, 2)} with two standard errors)"
    )
    rows = [
        [
            each.population,
            *(percent(share, 2) for share in (each.alarms, each.by_exits, each.by_risk)),
            percent(each.broken),
            f"{each.refused:,}",
        ]
        for each in result.without
    ]
    columns = ["population", "alarms", "by exits", "by risk", "guarantee broken", "refused, drawn again"]
    print_table(title, columns, rows)
    title = f"The same with a change after {result.change:,}; delay: median and quartiles, in examples"
    columns = ["population", "change", "loops", "risk, %", "before it", "detected", "by exits", "delay"]
    print_table(title, columns, [_row(each) for each in result.changed], keys=2)


def _row(each: Detections) -> list[str]:
    low, middle, high = ("later" if delay is None else f"{delay:,.0f}" for delay in each.delays)
    return [
        each.population,
        each.change,
        "{:.2f}, {:.2f}".format(*each.loops),
        "{:.2f}, {:.2f}".format(*(100 * risk for risk in each.risk)),
        percent(each.before),
        percent(each.detected),
        percent(each.by_exits, 0),
        f"{middle} [{low}, {high}]",
    ]


def main(words: Sequence[str] | None = None) -> int:
    return run_benchmark("drift", __doc__, define, execute, words)


if __name__ == "__main__":
    sys.exit(main())
