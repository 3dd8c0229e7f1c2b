"""Does every kind of guarantee hold on populations that were made to break it?

python -m benchmarks.audit
python -m benchmarks.audit --calibrations 1000 --setting "signals that mislead" --setting "new inputs"
python -m benchmarks.audit --json

Other generators than those of `benchmarks.guarantees`. Of each population, many calibrations on 500 and on 2,000
examples, at most 1 and 5 %, at 95 % confidence: how many policies truly lose more than that? At most 5 % may, within
the noise; what was not proven is not broken. Then monitors: recordings of the same population, in whatever order their
rows stand, and how many give an alarm (at most 1 %).

A population is finite and drawn from with replacement, so the risk of a threshold is known. New inputs are judged by
what they are: draws that the N - 1 others do not hold, whose risk is a sum over all inputs.
"""

import argparse
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from benchmarks.command import run_benchmark
from loopscope.certify.calibration import calibrate
from loopscope.certify.losses import lost_at, risk_groups
from loopscope.certify.monitor import Monitor
from loopscope.certify.not_proven import NotProven
from loopscope.cli.options import Parser, add_shared, option
from loopscope.cli.output import percent, print_json, print_table
from loopscope.policy import ExitPolicy
from loopscope.progress import ProgressCallback, silent, track
from loopscope.trajectory import Trajectory

SIZES, LIMITS, CONFIDENCE, ALPHA = (500, 2_000), (0.01, 0.05), 0.95, 0.01
LOOPS = 5
_UNIVERSE = 30_000
_SEQUENCES = 5_000

Array = NDArray[Any]


@dataclass(frozen=True)
class Setting:
    """A population, what is asked for, and how often each of its units is drawn."""

    trajectory: Trajectory
    options: Mapping[str, Any] = field(default_factory=dict)
    weights: Array | None = None  # [units] that sum to 1; None: all alike

    @property
    def units(self) -> Array:
        """[N] to which unit each row belongs."""
        found = self.trajectory.sequences
        return np.arange(self.trajectory.num_examples) if found is None else found

    def draw(self, size: int, rng: np.random.Generator) -> Trajectory:
        """So many units, with replacement."""
        count = int(self.units.max()) + 1
        drawn = rng.choice(count, size, p=self.weights)
        if self.trajectory.sequences is None:
            return self.trajectory.take(drawn)
        starts, lengths = np.searchsorted(self.units, np.arange(count)), np.bincount(self.units)
        rows = np.concatenate([starts[unit] + np.arange(lengths[unit]) for unit in drawn])
        taken = self.trajectory.take(rows)
        return recorded(taken.signals, taken.correct, sequences=np.repeat(np.arange(size), lengths[drawn]))

    def risk(self, policy: ExitPolicy, size: int) -> float:
        """What a policy truly loses, for what was asked: at the worst difficulty, on average over sequences, of new."""
        trajectory = self.trajectory
        loops = ExitPolicy(policy.readout, policy.threshold).exit_loops(trajectory)
        lost = lost_at("gap", trajectory, loops)
        if self.weights is not None:
            weights = self.weights
            if self.options.get("new_inputs"):
                weights = weights * (1 - weights) ** (size - 1)
            return float(np.average(lost, weights=weights))
        parts = risk_groups(trajectory, self.options.get("per_difficulty", False))
        return max(part.mean(lost) for part in parts)


def recorded(signals: Mapping[str, Array], right: Array, **more: Any) -> Trajectory:
    labels = np.zeros(len(right), dtype=np.int64)
    return Trajectory(predictions=(~right).astype(np.int64), labels=labels, signals=signals, **more)


def answers(
    rng: np.random.Generator, size: int = _UNIVERSE, later: Array | float = 0.0, noise: float = 0.6
) -> tuple[Array, Array]:
    """[N, T] the confidence and whether it is right: from a loop on that is drawn, with a slope that varies, too."""
    loop = np.arange(1, LOOPS + 1)
    settled = np.minimum(1 + rng.poisson(0.9, size) + later, LOOPS)[:, None]
    slope = rng.uniform(0.6, 1.8, (size, 1))
    confidence = slope * (loop - settled + 0.5) + rng.normal(0, noise, (size, LOOPS))
    return confidence, (loop >= settled) | (rng.random((size, LOOPS)) < 0.1)


def _ties(rng: np.random.Generator) -> Setting:
    """A signal of nine values: most examples share theirs with thousands."""
    confidence, right = answers(rng)
    return Setting(recorded({"margin": np.clip(np.round(2 * confidence), -4, 4)}, right), {"readout": "margin"})


def _misleading(rng: np.random.Generator) -> Setting:
    """One in thirty is the surest of all where it is wrong."""
    confidence, right = answers(rng)
    fooled = rng.random(_UNIVERSE) < 1 / 30
    right[fooled, :-1], right[fooled, -1] = False, True
    confidence[fooled] = rng.uniform(2, 6, (int(fooled.sum()), 1)) + rng.normal(0, 0.3, (int(fooled.sum()), LOOPS))
    return Setting(recorded({"margin": confidence}, right), {"readout": "margin"})


def _not_monotone(rng: np.random.Generator) -> Setting:
    """Answers come and go: some are lost at loop 2, some at loop 3, and both are right again later."""
    confidence, right = answers(rng)
    kind = rng.random(_UNIVERSE)
    for loop, share in ((2, 0.03), (3, 0.06)):
        wrong = kind < share
        right[wrong] = np.arange(1, LOOPS + 1) != loop
        confidence[wrong, loop - 1] += 2.5
        kind[wrong] = 1
    return Setting(recorded({"margin": confidence}, right), {"readout": "margin"})


def _unequal_sequences(rng: np.random.Generator) -> Setting:
    """Of 1 to some 200 decisions; long ones are overconfident throughout and lose more."""
    lengths = np.minimum(rng.geometric(1 / 15, _SEQUENCES), 200)
    number = np.repeat(np.arange(_SEQUENCES), lengths)
    confidence, right = answers(rng, len(number))
    confidence += (0.02 * np.minimum(lengths, 60))[number, None]
    return Setting(recorded({"margin": confidence}, right, sequences=number), {"readout": "margin"})


def _many_readouts(rng: np.random.Generator) -> Setting:
    """Seven readouts, each with its own noise, two of them without any knowledge."""
    confidence, right = answers(rng)
    names = ("margin", "top1", "entropy", "kl", "logit_change", "hidden_change", "hidden_cosine")
    signals = {}
    for place, name in enumerate(names):
        seen = rng.normal(size=confidence.shape) if place > 4 else confidence + rng.normal(0, 0.4, confidence.shape)
        signals[name] = seen if name in ("margin", "top1") else -seen
    signals["patience"] = np.full(confidence.shape, np.nan)  # whether they are right is not what they answer
    return Setting(recorded(signals, right), {"readout": "auto"})


def _mixed(rng: np.random.Generator, **options: Any) -> Setting:
    """Three difficulties of unequal shares; the rarest is the hardest, and overconfident."""
    difficulty = rng.choice(3, _UNIVERSE, p=[0.5, 0.3, 0.2])
    confidence, right = answers(rng, later=difficulty)
    confidence += 0.8 * (difficulty == 2)[:, None]
    return Setting(recorded({"margin": confidence}, right, difficulty=difficulty), {"readout": "margin", **options})


def _frequent(rng: np.random.Generator, inputs: int, mass: float, **options: Any) -> Setting:
    """Some inputs, easy ones, make up so much of all draws; the others are rare."""
    easy = np.arange(_UNIVERSE) < inputs
    confidence, right = answers(rng, later=np.where(easy, 0, 1))
    right[easy] = True
    weights = np.where(easy, mass / inputs, (1 - mass) / (_UNIVERSE - inputs))
    examples = [str(row) for row in range(_UNIVERSE)]
    return Setting(
        recorded({"margin": confidence}, right, examples=examples), {"readout": "margin", **options}, weights
    )


NEW = {"new_inputs": True}
TOLERANCE = {"method": "tolerance"}
SETTINGS: dict[str, Callable[[np.random.Generator], Setting]] = {
    "ties": _ties,
    "signals that mislead": _misleading,
    "risk that is not monotone": _not_monotone,
    "sequences of unequal lengths": _unequal_sequences,
    "many readouts": _many_readouts,
    "mixed difficulties": _mixed,
    "mixed difficulties, each": lambda rng: _mixed(rng, per_difficulty=True),
    "new inputs, 300 with half of the mass": lambda rng: _frequent(rng, 300, 0.5, **NEW),
    "new inputs, 600 with 80 %": lambda rng: _frequent(rng, 600, 0.8, **NEW),
    "new inputs, 3,000 with 60 %": lambda rng: _frequent(rng, 3_000, 0.6, **NEW),
    "tolerance: ties": lambda rng: _with(_ties(rng), TOLERANCE),
    "tolerance: signals that mislead": lambda rng: _with(_misleading(rng), TOLERANCE),
    "tolerance: risk that is not monotone": lambda rng: _with(_not_monotone(rng), TOLERANCE),
    "tolerance: mixed difficulties": lambda rng: _with(_mixed(rng), TOLERANCE),
    "tolerance: mixed difficulties, each": lambda rng: _with(_mixed(rng), {**TOLERANCE, "per_difficulty": True}),
    "tolerance: new inputs, 600 with 80 %": lambda rng: _with(_frequent(rng, 600, 0.8), {**TOLERANCE, **NEW}),
}


def _with(setting: Setting, options: Mapping[str, Any]) -> Setting:
    return Setting(setting.trajectory, {**setting.options, **options}, setting.weights)


@cache
def setting(name: str) -> Setting:
    return SETTINGS[name](np.random.default_rng([len(name), *name.encode()[:4]]))


class Audited(msgspec.Struct, frozen=True):
    """One setting at one size and limit."""

    setting: str
    examples: int  # or sequences
    max_drop: float
    calibrations: int
    refused: int
    broken: float  # share of the calibrations, refused ones included
    error: float  # a standard error at the allowed rate
    loops: float  # on average; refused ones have full depth


class Watched(msgspec.Struct, frozen=True):
    """Monitors of recordings from the population that the policy was calibrated on, sorted by their exits."""

    setting: str
    monitors: int
    alarms: float
    error: float


class Audit(msgspec.Struct, frozen=True):
    coverage: list[Audited]
    monitors: list[Watched]


def audit(name: str, size: int, max_drop: float, calibrations: int, seed: int = 0) -> Audited:
    """How many calibrations break their guarantee."""
    of, rng = setting(name), np.random.default_rng([seed, size])
    risks, loops, refused = [], [], 0
    for _ in range(calibrations):
        try:
            policy = calibrated(of, size, max_drop, rng)
        except NotProven:
            refused += 1
            risks.append(0.0)
            loops.append(float(LOOPS))
        else:
            assert policy.guarantee is not None
            risks.append(of.risk(policy, size))
            loops.append(policy.guarantee.average_loops)
    return Audited(
        setting=name,
        examples=size,
        max_drop=max_drop,
        calibrations=calibrations,
        refused=refused,
        broken=float((np.array(risks) > max_drop + 1e-12).mean()),
        error=_error(1 - CONFIDENCE, calibrations),
        loops=float(np.mean(loops)),
    )


def calibrated(of: Setting, size: int, max_drop: float, rng: np.random.Generator) -> ExitPolicy:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that inputs have copies
        return calibrate(of.draw(size, rng), max_drop, CONFIDENCE, **of.options)


def watch(name: str, monitors: int, size: int = 2_000, max_drop: float = 0.05, seed: int = 1) -> Watched:
    """How many recordings without a change give an alarm, with their rows from the earliest exit to the latest."""
    of, rng, alarms = setting(name), np.random.default_rng([seed, size]), 0
    for number in range(monitors):
        policy = calibrated(of, size, max_drop, rng)
        recording = of.draw(size, rng)
        rows = np.argsort(policy.exit_loops(recording), kind="stable")
        alarms += Monitor(policy, ALPHA, number).replay(recording.take(rows)).alarm
    return Watched(setting=name, monitors=monitors, alarms=alarms / monitors, error=_error(ALPHA, monitors))


def _error(rate: float, count: int) -> float:
    return float(np.sqrt(rate * (1 - rate) / count))


def bench_audit(names: Sequence[str], calibrations: int, progress: ProgressCallback = silent) -> Audit:
    coverage: list[Audited] = []
    watched: list[Watched] = []
    jobs = [(name, size, limit) for name in names for size in SIZES for limit in LIMITS]
    total = len(jobs) + len(names)
    for done, (name, size, limit) in enumerate(jobs):
        progress(done, total, name)
        coverage.append(audit(name, size, limit, calibrations))
    for done, name in enumerate(names):
        progress(len(jobs) + done, total, f"monitors: {name}")
        watched.append(watch(name, calibrations))
    progress(total, total, "")
    return Audit(coverage, watched)


def define(parser: Parser) -> None:
    option(parser, "--calibrations N", "calibrations of each setting, and monitors", default=400)
    option(parser, "--setting NAME", "only this setting (repeatable)", action="append", choices=list(SETTINGS))
    add_shared(parser, "--json")


def execute(options: argparse.Namespace) -> None:
    with track("calibrating") as advance:
        result = bench_audit(options.setting or list(SETTINGS), options.calibrations, advance)
    if options.json:
        print_json(result)
        return
    title = (
        f"{options.calibrations:,} calibrations each: share whose guarantee is broken, at most 5 % (± "
        f"{percent(result.coverage[0].error)} is one standard error)"
    )
    columns = ["setting", "examples", "limit", "broken", "refused", "loops"]
    rows = [
        [
            each.setting,
            f"{each.examples:,}",
            percent(each.max_drop, 0),
            percent(each.broken),
            f"{each.refused:,}",
            f"{each.loops:.2f}",
        ]
        for each in result.coverage
    ]
    print_table(title, columns, rows, keys=3)
    title = f"Monitors of recordings that are sorted by their exits: share with an alarm, at most {percent(ALPHA, 0)}"
    print_table(title, ["setting", "alarms"], [[each.setting, percent(each.alarms, 2)] for each in result.monitors])


def main(words: Sequence[str] | None = None) -> int:
    return run_benchmark("audit", __doc__, define, execute, words)


if __name__ == "__main__":
    sys.exit(main())
