"""Are guarantees kept, and what do they cost, where the truth is known?

python -m benchmarks.guarantees
python -m benchmarks.guarantees runs/demo/fixed-geometric/recordings/test --figure guarantees.png
python -m benchmarks.guarantees --calibrations 100 --examples 500 --json
python -m benchmarks.guarantees --population sequences --population "sequences, all or nothing"

Thousands of calibrations on populations whose risk is known, beside the usual way: the least strict threshold whose
loss on the same data is within the limit. Recordings serve as populations for the price.

A population is a large recording; a calibration data set is drawn from it with replacement, so that the risk of a
threshold is known: its loss on the whole population. The cost is told against hindsight: the fewest loops of any
threshold of the readout whose risk is within the limit. N examples of the population, T loops.
"""

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from benchmarks.command import run_benchmark
from loopscope.certify.calibration import calibrate, conformal_risk_control
from loopscope.certify.losses import losses, lost_at, risk_groups
from loopscope.certify.not_proven import NotProven
from loopscope.cli.options import Parser, add_shared, option
from loopscope.cli.output import percent, print_json, print_table
from loopscope.errors import UserError
from loopscope.frontier import crossings, totals_at_exit
from loopscope.learned.attach import attach
from loopscope.learned.stopper import StopperKind
from loopscope.learned.stopper_fitting import fit_stopper
from loopscope.policy import ExitPolicy
from loopscope.progress import ProgressCallback, silent, track
from loopscope.readouts.replay import available_readouts, signal
from loopscope.recording_paths import find_recording, recorded_name
from loopscope.threshold_grids import gap_grid
from loopscope.trajectory import Trajectory

MAX_DROP, CONFIDENCE = 0.01, 0.95
SIZES = (500, 1_000, 2_000, 5_000, 10_000, 20_000, 50_000)
LOOPS = 6
_UNIVERSE = 40_000
_FITTED_TO = 2_000
_SEQUENCE = 20
_POINTS = 10_000
_PRICED = ("calm", "overthinking", "not monotone")

Array = NDArray[Any]
Method = Callable[[Trajectory], ExitPolicy]


@dataclass(frozen=True)
class Population:
    name: str
    trajectory: Trajectory
    risk_options: Mapping[str, Any] = field(default_factory=dict)  # what `calibrate` is asked for, beyond the defaults

    @property
    def loss(self) -> Any:
        return self.risk_options.get("loss", "gap")


class Coverage(msgspec.Struct, frozen=True):
    """One method on one population, over many calibrations."""

    population: str
    method: str
    examples: int
    calibrations: int
    refused: int  # these exit nowhere early: no risk, full depth
    broken: float  # share of calibrations whose threshold has a risk above the limit
    broken_error: float  # its standard error
    risk: float  # on average
    risk_error: float
    loops: float  # on average
    hindsight_loops: float


class GuaranteeBench(msgspec.Struct, frozen=True):
    max_drop: float
    confidence: float
    coverage: list[Coverage]
    price: list[Coverage]  # of the guarantee, for several numbers of examples


def bench_guarantees(
    recordings: Mapping[str, Trajectory],
    size: int,
    calibrations: int,
    progress: ProgressCallback,
    only: Sequence[str] = (),
) -> GuaranteeBench:
    """Populations (all, or `only` some) at one size; the guarantee's price on some and on recordings, at several."""
    given = [recorded(name, trajectory) for name, trajectory in recordings.items()]
    known = populations()
    known = [each for each in known if not only or each.name in only]
    priced = [*(each for each in known if each.name in _PRICED), *given]
    fewer = max(1, calibrations // 5)
    jobs: list[tuple[Population, int, int, list[str] | None]] = [(each, size, calibrations, None) for each in known]
    jobs += [(each, count, fewer, ["guarantee"]) for each in priced for count in SIZES]
    total, before = sum(job[2] for job in jobs), 0
    found = []
    for job in jobs:
        found += coverage(*job, progress=partial(_shifted, progress, before, total))
        before += job[2]
    rows = sum(len(methods(each)) for each in known)
    return GuaranteeBench(MAX_DROP, CONFIDENCE, found[:rows], found[rows:])


def _shifted(progress: ProgressCallback, before: int, total: int, done: int, _: int, note: str) -> None:
    progress(before + done, total, note)


def recorded(name: str, trajectory: Trajectory) -> Population:
    """A recording as a population: what it holds of its readouts, each computed once."""
    if trajectory.sequences is not None:
        raise UserError("A recording of sequences cannot be drawn from here; give one with an example a decision.")
    names = [each for each in available_readouts(trajectory) if each not in ("fixed", "oracle")]
    if not names or trajectory.num_loops == 1:
        raise UserError(f"The recording of {name} has one loop, or no signals; give one with logits at every loop.")
    signals = {each: signal(each, trajectory) for each in names}
    return Population(name, _recorded(signals, trajectory.correct, trajectory.difficulty), {"readout": "auto"})


@cache
def populations(until: str | None = None) -> list[Population]:
    """Synthetic ones: in each, most examples are right from some loop on, and confidence grows from about there.

    All share one stream of random numbers; `until` names the last one that is drawn.
    """
    rng, names = np.random.default_rng(0), list(POPULATIONS)
    drawn = names if until is None else names[: names.index(until) + 1]
    return [Population(name, POPULATIONS[name][0](rng), POPULATIONS[name][1]) for name in drawn]


def _settling(rng: np.random.Generator) -> Trajectory:
    """Right from a random loop on (3 % never), by chance before; confidence grows from about that loop."""
    confidence, right = _confidence(rng)
    return _recorded({"margin": confidence}, right)


def _confidence(rng: np.random.Generator, later: Array | float = 0.0) -> tuple[Array, Array]:
    size = _UNIVERSE
    settled = np.minimum(rng.geometric(0.55, size) + later, LOOPS)[:, None]
    loop = np.arange(1, LOOPS + 1)
    confidence = 1.2 * (loop - settled) + rng.normal(size=(size, 1)) + rng.normal(0, 0.7, (size, LOOPS))
    right = (loop >= settled) | (rng.random((size, LOOPS)) < 0.3)
    right[rng.random(size) < 0.03] = False
    return confidence, right


def _overthinking(rng: np.random.Generator) -> Trajectory:
    """A tenth of the examples are right up to loop 3 and wrong after it; a twentieth waver at loops 3 and 4."""
    confidence, right = _confidence(rng)
    kind = rng.random(_UNIVERSE)
    right[kind < 0.10] = np.arange(1, LOOPS + 1) <= 3
    wavering = (kind >= 0.10) & (kind < 0.15)
    right[wavering] = ~np.isin(np.arange(1, LOOPS + 1), (3, 4))
    return _recorded({"margin": confidence}, right)


def _bump(rng: np.random.Generator) -> Trajectory:
    """Some are most confident where they are wrong, at loop 2, and right before: the risk rises, falls, and rises."""
    confidence, right = _confidence(rng)
    confidence[:, 0] += 1.5 * right[:, 0]
    fooled = rng.random(_UNIVERSE) < 0.012
    count = int(fooled.sum())
    right[fooled] = np.arange(1, LOOPS + 1) != 2
    confidence[fooled, 0] = rng.normal(2.5, 0.2, count)
    confidence[fooled, 1] = rng.normal(8.0, 0.5, count)
    return _recorded({"margin": confidence}, right)


def _many(rng: np.random.Generator) -> Trajectory:
    """Eight readouts that see the same confidence, each through noise of its own."""
    confidence, right = _confidence(rng)
    names = ("margin", "top1", "entropy", "kl", "logit_change", "hidden_change", "hidden_cosine", "gate")
    signals = {}
    for name in names:
        seen = confidence + rng.normal(0, 0.5, confidence.shape)
        below = name not in ("margin", "top1", "gate")
        signals[name] = 1 / (1 + np.exp(-seen)) if name == "gate" else -seen if below else seen
    signals["patience"] = np.full(confidence.shape, np.nan)  # whether they are right is not what they answer
    return _recorded(signals, right)


def _learned(rng: np.random.Generator, kind: StopperKind = "induction") -> Trajectory:
    """The eight readouts, and a stopper that was fitted to others of their kind."""
    stopper = fit_stopper(_many(rng).take(np.arange(_FITTED_TO)), kind=kind)
    return attach(_many(rng), {kind: stopper})


def _levels(rng: np.random.Generator) -> Trajectory:
    """Harder ones settle later, and the hardest are the most overconfident."""
    difficulty = rng.integers(1, 6, _UNIVERSE)
    confidence, right = _confidence(rng, (difficulty - 1) // 2)
    confidence[difficulty == 5] += 1.0
    return _recorded({"margin": confidence}, right, difficulty=difficulty)


def _sequences(rng: np.random.Generator) -> Trajectory:
    """Twenty decisions each; some sequences are overconfident throughout, so that their losses come together."""
    confidence, right = _confidence(rng)
    number = np.arange(_UNIVERSE) // _SEQUENCE
    confidence += 2.5 * (rng.random(number.max() + 1) < 0.1)[number, None]
    return _recorded({"margin": confidence}, right, sequences=number)


def _independent(rng: np.random.Generator) -> Trajectory:
    """Twenty decisions each that have nothing in common: averages over a sequence vary little."""
    confidence, right = _confidence(rng)
    return _recorded({"margin": confidence}, right, sequences=np.arange(_UNIVERSE) // _SEQUENCE)


def _together(rng: np.random.Generator) -> Trajectory:
    """Twenty decisions each that are all alike: a sequence is lost or not, and says no more than one decision."""
    confidence, right = _confidence(rng)
    first = np.arange(_UNIVERSE) // _SEQUENCE * _SEQUENCE
    return _recorded({"margin": confidence[first]}, right[first], sequences=first // _SEQUENCE)


POPULATIONS: dict[str, tuple[Callable[[np.random.Generator], Trajectory], dict[str, Any]]] = {
    "calm": (_settling, {"readout": "margin"}),
    "overthinking": (_overthinking, {"readout": "margin"}),
    "overthinking, disagreement": (_overthinking, {"readout": "margin", "loss": "disagreement"}),
    "not monotone": (_bump, {"readout": "margin"}),
    "eight readouts": (_many, {"readout": "auto"}),
    "five difficulties": (_levels, {"readout": "margin", "per_difficulty": True}),
    "sequences": (_sequences, {"readout": "margin"}),
    "learned stopper": (_learned, {"readout": "stopper:induction"}),
    "learned classifier": (partial(_learned, kind="classifier"), {"readout": "stopper:classifier"}),
    "sequences that differ little": (_independent, {"readout": "margin"}),
    "sequences, all or nothing": (_together, {"readout": "margin"}),
}
"""In this order they are drawn, from one stream of random numbers."""


def _recorded(
    signals: Mapping[str, Array], right: Array, difficulty: Array | None = None, sequences: Array | None = None
) -> Trajectory:
    return Trajectory(
        predictions=(~right).astype(np.int64),
        labels=np.zeros(len(right), dtype=np.int64),
        signals=signals,
        difficulty=difficulty,
        sequences=sequences,
    )


def methods(population: Population) -> dict[str, Method]:
    """The guarantee, the guarantee on average, and the usual way.

    For sequences also the guarantee by another bound than bets, and their decisions taken for examples.
    """
    risk_options = population.risk_options
    made: dict[str, Method] = {
        "guarantee": lambda drawn: calibrate(drawn, MAX_DROP, CONFIDENCE, **risk_options),
        "on average": lambda drawn: conformal_risk_control(drawn, MAX_DROP, **risk_options),
        "usual": lambda drawn: usual(population, drawn),
    }
    if population.trajectory.sequences is not None:
        made["guarantee, Hoeffding-Bentkus"] = lambda drawn: calibrate(
            drawn, MAX_DROP, CONFIDENCE, bound="hoeffding_bentkus", **risk_options
        )
        made["guarantee, decisions counted"] = lambda drawn: calibrate(
            _recorded(drawn.signals, drawn.correct), MAX_DROP, CONFIDENCE, **risk_options
        )
    return made


def usual(population: Population, drawn: Trajectory, points: int = 1000) -> ExitPolicy:
    """The fewest loops of any threshold whose loss on these examples is within the limit."""
    best, fewest = ExitPolicy("fixed", drawn.num_loops), float(drawn.num_loops)
    readout = population.risk_options["readout"]
    for name in drawn.signals if readout == "auto" else [readout]:
        thresholds = gap_grid(name, drawn, points)
        risk, loops = _risks(population, name, thresholds, drawn)
        loops = np.where(risk <= MAX_DROP, loops, np.inf)
        if loops.min(initial=np.inf) < fewest:
            best, fewest = ExitPolicy(name, float(thresholds[loops.argmin()])), float(loops.min())
    return best


def _risks(population: Population, readout: str, thresholds: Array, trajectory: Trajectory) -> tuple[Array, Array]:
    """[G] the loss (of the worst difficulty, where it is for each) and the average loops, thresholds laxest first."""
    crossed, size = crossings(readout, thresholds, trajectory), len(thresholds)
    lost = losses(population.loss, trajectory)
    parts = risk_groups(trajectory, population.risk_options.get("per_difficulty", False))
    risks = [part.totals(crossed, lost, size) / part.units for part in parts]
    depth = np.broadcast_to(np.arange(1.0, trajectory.num_loops + 1), lost.shape)
    return np.max(risks, axis=0), totals_at_exit(crossed, depth, size) / trajectory.num_examples


def hindsight(population: Population) -> float:
    """The fewest loops of any threshold whose risk is within the limit."""
    return float(usual(population, population.trajectory, _POINTS).exit_loops(population.trajectory).mean())


def truth(population: Population, policy: ExitPolicy) -> tuple[float, float]:
    """The risk and the average loops of a policy."""
    trajectory = population.trajectory
    loops = ExitPolicy(policy.readout, policy.threshold).exit_loops(trajectory)
    lost = lost_at(population.loss, trajectory, loops)
    parts = risk_groups(trajectory, population.risk_options.get("per_difficulty", False))
    return max(part.mean(lost) for part in parts), float(loops.mean())


def draw(population: Population, size: int, rng: np.random.Generator) -> Trajectory:
    """So many examples, or sequences, with replacement."""
    trajectory = population.trajectory
    if trajectory.sequences is None:
        return trajectory.take(rng.integers(0, trajectory.num_examples, size))
    drawn = rng.integers(0, trajectory.num_examples // _SEQUENCE, size)
    rows = (drawn[:, None] * _SEQUENCE + np.arange(_SEQUENCE)).ravel()
    taken = trajectory.take(rows)
    return _recorded(taken.signals, taken.correct, sequences=np.repeat(np.arange(size), _SEQUENCE))


def coverage(
    population: Population,
    size: int,
    calibrations: int,
    only: Sequence[str] | None = None,
    seed: int = 0,
    progress: ProgressCallback = silent,
) -> list[Coverage]:
    """Every method on the same calibration data sets."""
    chosen = {name: make for name, make in methods(population).items() if only is None or name in only}
    best = hindsight(population)
    found: dict[str, list[tuple[float, float, bool]]] = {name: [] for name in chosen}
    rng = np.random.default_rng(seed)
    for done in range(calibrations):
        drawn = draw(population, size, rng)
        for name, make in chosen.items():
            try:
                found[name].append((*truth(population, make(drawn)), False))
            except NotProven:
                found[name].append((0.0, float(population.trajectory.num_loops), True))
        progress(done + 1, calibrations, population.name)
    return [_coverage(population, name, size, np.array(values), best) for name, values in found.items()]


def _coverage(population: Population, method: str, size: int, found: Array, best: float) -> Coverage:
    risk, loops, refused = found.T
    count, broken = len(found), float((risk > MAX_DROP + 1e-12).mean())
    return Coverage(
        population=population.name,
        method=method,
        examples=size,
        calibrations=count,
        refused=int(refused.sum()),
        broken=broken,
        broken_error=float(np.sqrt(broken * (1 - broken) / count)),
        risk=float(risk.mean()),
        risk_error=float(risk.std() / np.sqrt(count)),
        loops=float(loops.mean()),
        hindsight_loops=best,
    )


def define(parser: Parser) -> None:
    serve = "runs or recordings that serve as populations for the price"
    option(parser, "recordings", serve, type=Path, nargs="*", metavar="RUN|RECORDING")
    option(parser, "--calibrations N", "calibrations of each population", default=1000)
    option(parser, "--examples N", "examples of each calibration", default=2000)
    only = "simulate only this population (repeatable)"
    option(parser, "--population NAME", only, action="append", choices=list(POPULATIONS))
    option(parser, "--figure FILE", "draw the result to this file, as PNG and PDF")
    add_shared(parser, "--json")


def execute(options: argparse.Namespace) -> None:
    if options.figure is not None and options.figure.suffix != ".png":
        raise UserError("The figure is written as PNG, with PDF and SVG beside it; give a file that ends in .png.")
    recordings = load_populations(options.recordings)
    with track("calibrating") as advance:
        result = bench_guarantees(recordings, options.examples, options.calibrations, advance, options.population)
    if options.json:
        print_json(result)
    else:
        _print(result, options)
    if options.figure is not None:
        from benchmarks.guarantee_figure import write_guarantee_figure

        write_guarantee_figure(result, options.figure)


def load_populations(paths: Sequence[Path]) -> dict[str, Trajectory]:
    """Recordings by the names of their runs."""
    found = [find_recording(path, "test") for path in paths]
    names = [recorded_name(path.parent) if path.parent.name == "recordings" else path.absolute().name for path in found]
    if len(set(names)) < len(names):
        raise UserError("Two of the recordings are of one run; give one of each.")
    return {name: Trajectory.load(path) for name, path in zip(names, found, strict=True)}


def _print(result: GuaranteeBench, options: argparse.Namespace) -> None:
    title = (
        f"{options.calibrations:,} calibrations each, on {options.examples:,} examples: a risk of at most "
        f"{percent(result.max_drop)}, with probability {percent(result.confidence)}"
    )
    columns = ["population", "method", "broken, %", "risk, %", "loops", "hindsight", "ratio", "refused"]
    rows = [
        [
            each.population,
            each.method,
            f"{100 * each.broken:.1f} ± {100 * each.broken_error:.1f}",
            f"{100 * each.risk:.3f} ± {100 * each.risk_error:.3f}",
            f"{each.loops:.2f}",
            f"{each.hindsight_loops:.2f}",
            f"{each.loops / each.hindsight_loops:.3f}",
            f"{each.refused:,}",
        ]
        for each in result.coverage
    ]
    print_table(title, columns, rows, keys=2)
    if not result.price:
        return
    sizes = sorted({each.examples for each in result.price})
    priced: dict[str, list[str]] = {}
    for each in result.price:
        priced.setdefault(each.population, [f"{each.hindsight_loops:.2f}"]).append(f"{each.loops:.2f}")
    title = (
        f"The price: loops of the guarantee, by the number of examples ({result.price[0].calibrations:,} calibrations)"
    )
    columns = ["population", "hindsight", *(f"{size:,}" for size in sizes)]
    print_table(title, columns, [[name, *cells] for name, cells in priced.items()])


def main(words: Sequence[str] | None = None) -> int:
    return run_benchmark("guarantees", __doc__, define, execute, words)


if __name__ == "__main__":
    sys.exit(main())
