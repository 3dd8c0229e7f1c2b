"""How often does a diagnosis blame a part that is not at fault, and how often does it find one that is?

python -m benchmarks.verdicts
python -m benchmarks.verdicts --diagnoses 50 --examples 500 --json

Two models are drawn from populations whose truth is known: the second is the reference. Trajectories are the same bit
for bit, alike (drawn apart from one population), or the model solves a third of the examples a loop later. Each is
diagnosed without gates, with a gate on either side and with gates on both. A good gate knows more than the confidence
that both models show, a poor one less. A verdict on the trajectory must not depend on any of them.
"""

import argparse
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import product

import msgspec
import numpy as np

from benchmarks.command import run_benchmark, simulate
from loopscope.analysis.diagnosis import diagnose_subject
from loopscope.analysis.gaps import Subject
from loopscope.cli.options import Parser, add_shared, option
from loopscope.cli.output import percent
from loopscope.trajectory import Trajectory

LOOPS = 4
TARGET = 0.9
FIRST_RIGHT = (0.55, 0.25, 0.12, 0.08)
"""The shares of examples that become right at each loop."""
SLOWER_SHARE = 0.35
"""Of the examples that a slower trajectory solves a loop later."""
_NOISE = {"confidence": 0.7, "good": 0.3, "poor": 2.5}
"""Of a signal that is 0 while the answer is wrong and 1 once it is right."""
_RESAMPLES = 300

TRAJECTORIES = ("the same", "alike", "slower")
GATES = {"none": ("", ""), "good, on the model": ("good", ""), "good, on the reference": ("", "good")}
GATES |= {"good, on both": ("good", "good"), "poor, on the model": ("poor", "")}


class Verdicts(msgspec.Struct, frozen=True):
    """What was said of the models of one kind, as shares of all diagnoses."""

    trajectory: str
    gates: str
    examples: int
    diagnoses: int
    trajectory_blamed: float
    trajectory_better: float
    trajectory_no_worse: float
    readout_blamed: float
    average_gap: float


def draw_model(rng: np.random.Generator, examples: int, slower: bool, gate: str, inputs: int) -> list[Trajectory]:
    """Validation and test recordings of one model; `inputs` seeds the labels, which two models share."""
    recordings = []
    for number, split in enumerate(("validation", "test")):
        labels = np.random.default_rng([inputs, number]).integers(0, 10, examples)
        first = rng.choice(LOOPS, examples, p=FIRST_RIGHT)
        first = np.minimum(first + (slower & (rng.random(examples) < SLOWER_SHARE)), LOOPS - 1)
        right = np.arange(LOOPS) >= first[:, None]
        noisy = {name: right + rng.normal(0, noise, right.shape) for name, noise in _NOISE.items()}
        recordings.append(
            Trajectory(
                predictions=np.where(right, labels[:, None], (labels[:, None] + 1) % 10),
                labels=labels,
                signals={"margin": noisy["confidence"]},
                gate_logits=6 * noisy[gate] - 3 if gate else None,
                split=split,
            )
        )
    return recordings


def verdicts(examples: int, trajectory: str, gates: str, diagnoses: int, seed: int = 0) -> Verdicts:
    """Diagnose so many pairs of models."""
    counts: Counter[str] = Counter()
    total = 0.0
    for number in range(diagnoses):
        ours, theirs = (np.random.default_rng([seed, number, part]) for part in (0, trajectory != "the same"))
        own_gate, other_gate = GATES[gates]
        model = Subject(*draw_model(ours, examples, trajectory == "slower", own_gate, number), resamples=_RESAMPLES)
        reference = Subject(*draw_model(theirs, examples, False, other_gate, number), resamples=_RESAMPLES)
        found = diagnose_subject(model, reference, TARGET)
        gap = found.trajectory_gap
        assert gap is not None  # every model reaches 90 %
        total += gap.value
        counts.update(found.blamed)
        counts["better"] += gap.sign < 0
        counts["no worse"] += gap.is_no_more
    shares = [counts[name] / diagnoses for name in ("trajectory", "better", "no worse", "readout")]
    return Verdicts(trajectory, gates, examples, diagnoses, *shares, total / diagnoses)


def define(parser: Parser) -> None:
    option(parser, "--diagnoses N", "pairs of models of each kind", default=200)
    option(parser, "--examples N", "validation and test examples of a model", type=int, nargs="+", default=[500, 2000])
    add_shared(parser, "--json")


COLUMNS: dict[str, Callable[[Verdicts], str]] = {
    "examples": lambda each: f"{each.examples:,}",
    "trajectory": lambda each: each.trajectory,
    "gates": lambda each: each.gates,
    "gap": lambda each: f"{each.average_gap:+.2f}",
    "blamed": lambda each: percent(each.trajectory_blamed),
    "called better": lambda each: percent(each.trajectory_better),
    "no worse": lambda each: percent(each.trajectory_no_worse),
    "readout blamed": lambda each: percent(each.readout_blamed),
}


def execute(options: argparse.Namespace) -> None:
    kinds = [(*kind, options.diagnoses) for kind in product(options.examples, TRAJECTORIES, GATES)]
    title = f"{options.diagnoses:,} diagnoses of each kind, at {percent(TARGET, 0)}"
    simulate("diagnosing", verdicts, kinds, title, COLUMNS, options.json)


def main(words: Sequence[str] | None = None) -> int:
    return run_benchmark("verdicts", __doc__, define, execute, words)


if __name__ == "__main__":
    sys.exit(main())
