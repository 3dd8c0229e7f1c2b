"""What `results.json` holds. The schema is versioned and described in docs/reference/results.md.

It holds no dates and no host names: the same artifacts give the same bytes.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from loopscope.analysis.bootstrap import Interval
from loopscope.analysis.comparison import Paired
from loopscope.analysis.diagnosis import NO_VERDICT, Diagnosis, Rooms
from loopscope.analysis.gaps import Gap
from loopscope.analysis.held_out import HeldOut
from loopscope.analysis.targets import Target, TargetLevel
from loopscope.analysis.transfer import TransferResult
from loopscope.policy import Guarantee
from loopscope.scope import Unit, example_count_text, unit_of

RESULTS_SCHEMA = 8
_DIGITS = 5


class Binned(msgspec.Struct, frozen=True):
    """Values by difficulty and loop, with their intervals."""

    levels: list[float]
    counts: list[int]
    values: list[list[float | None]]  # [levels][loops]; null where there is no value
    low: list[list[float | None]]  # of the 95 % interval over the examples of a difficulty
    high: list[list[float | None]]


@dataclass(frozen=True)
class Ordering:
    """The rank correlation of a signal with difficulty, averaged over loops: 1 if harder always looks harder."""

    bin_mean: float | None  # between difficulty and the bin means, as in the paper
    per_example: float | None  # between difficulty and the signal of single examples


class Selected(msgspec.Struct, frozen=True):
    """The operating point of a readout that validation chose, in `results.json`."""

    threshold: float | None
    accuracy: float
    average_loops: float
    calibration_accuracy: float
    calibration_average_loops: float
    accuracy_interval: Interval | None
    loops_interval: Interval | None

    @property
    def rank(self) -> tuple[float, float]:
        """The order in which validation prefers operating points: the most accurate first, ties to fewer loops."""
        return -self.calibration_accuracy, self.calibration_average_loops


class FrontierResult(msgspec.Struct, frozen=True):
    """The frontier of a readout in `results.json`: points for drawing, D@X and the selected point."""

    readout: str
    thresholds: list[float]
    accuracy: list[float]
    average_loops: list[float]
    accuracy_low: list[float]  # of the 95 % interval over test examples
    accuracy_high: list[float]
    depth_at: dict[str, float | None]  # on the evaluation curve, as in the paper
    depth_interval: dict[str, Interval | None]  # over test examples
    calibration_depth_at: dict[str, float | None]
    selected: Selected


class PaperGrid(msgspec.Struct, frozen=True):
    """The frontiers on the paper's grid of thresholds in `results.json`, beside the paper's numbers."""

    frontiers: list[FrontierResult]
    paired: list[Paired]


class Extrapolation(msgspec.Struct, frozen=True):
    """The results on examples that are harder than those of training, in `results.json`."""

    examples: int
    forced_accuracy_by_difficulty: Binned
    signals: dict[str, Binned]


class Certified(msgspec.Struct, frozen=True):
    """A calibrated policy in `results.json`, with its check on test data."""

    readout: str
    threshold: float | None
    guarantee: Guarantee | None  # None: used without it
    held_out: HeldOut

    def counted_on(self, unit: Unit) -> str:
        """The test examples that the guarantee was checked on, in words."""
        guarantee, held = self.guarantee, self.held_out
        once = ", every input once" if guarantee is not None and guarantee.distinct else ""
        once = ", inputs that occur once" if guarantee is not None and guarantee.new_inputs else once
        return example_count_text("test", held.examples, held.sequences, unit) + once


class SubjectResult(msgspec.Struct, frozen=True):
    """The questions of one subject of a benchmark in `results.json`."""

    name: str
    questions: int
    accuracy: list[float]  # of every loop, by the metric that is scored


class BenchmarkResult(msgspec.Struct, frozen=True):
    """The checkpoint and the benchmark of a model in `results.json`, with accuracy by metric and subject."""

    model: str
    name: str
    title: str
    metric: str  # that is scored
    accuracy: dict[str, list[float]]  # metric -> of every loop
    subjects: list[SubjectResult]


class ModelResult(msgspec.Struct, frozen=True, omit_defaults=True):
    """Everything that a report says about one model."""

    name: str
    label: str
    group: str  # the same for runs that differ in their seed only
    is_reference: bool
    unseen_only: bool  # whether examples that training had were left out
    provenance: dict[str, Any]
    validation_examples: int
    test_examples: int
    forced_accuracy: list[float]
    forced_cross_entropy: list[float] | None
    forced_accuracy_by_difficulty: Binned
    forced_cross_entropy_by_difficulty: Binned | None
    exit_distribution: Binned | None
    signals: dict[str, Binned]
    ordering: dict[str, Ordering]
    targets: dict[str, TargetLevel]  # target -> which accuracy it is for this model
    frontiers: list[FrontierResult]
    paper_grid: PaperGrid
    diagnosis: Diagnosis
    rooms: dict[str, Rooms]  # target -> room left and its reachable part there; nothing without a verdict
    paired: list[Paired]  # at the operating points that validation chose
    fitted_gaps: list[Gap]  # D@X of every fitted gate minus that of the model's own gate, or of margin without one
    extrapolation: Extrapolation | None
    certified: list[Certified]
    refused: list[str]  # why a guarantee that was asked for could not be made
    benchmark: BenchmarkResult | None = None  # where the examples are a benchmark's questions
    sequences: int | None = None  # to which the test examples belong, where each is one decision of many

    @property
    def unit(self) -> Unit:
        """The unit of the model's decisions: questions, tokens or answers."""
        return unit_of(self.provenance, self.sequences is not None)

    @property
    def tested(self) -> str:
        """The number of test examples, in words."""
        return example_count_text("test", self.test_examples, self.sequences, self.unit)

    @property
    def verdict(self) -> str:
        if not self.is_reference:
            return self.diagnosis.verdict
        if self.diagnosis.blamed:
            return f"{self.diagnosis.verdict} (the reference)"
        return "the reference, no verdict" if self.diagnosis.verdict == NO_VERDICT else "the reference"

    def frontier(self, readout: str) -> FrontierResult | None:
        return next((frontier for frontier in self.frontiers if frontier.readout == readout), None)

    def best(self, readouts: Iterable[str]) -> FrontierResult | None:
        """The readout that validation prefers among these."""
        found = [frontier for name in readouts if (frontier := self.frontier(name)) is not None]
        return min(found, key=lambda frontier: frontier.selected.rank, default=None)


@dataclass(frozen=True)
class OverSeeds:
    """A number over seeds: mean, deviation, and how many seeds have it."""

    mean: float | None  # None where no seed has a value
    deviation: float | None  # sample standard deviation; None with fewer than two values
    reached: int
    seeds: int

    def __str__(self) -> str:
        if self.mean is None:
            return "N/A"
        text = f"{self.mean:z.2f}" + ("" if self.deviation is None else f" ± {self.deviation:.2f}")
        return text if self.seeds == 1 else f"{text} ({self.reached} of {self.seeds})"


class GroupResult(msgspec.Struct, frozen=True):
    """The runs that differ only in their seed in `results.json`, summarised over seeds."""

    label: str
    names: list[str]
    depth_at: dict[str, dict[str, OverSeeds]]  # readout -> target -> over the runs
    selected_accuracy: dict[str, OverSeeds]  # readout -> of the operating points chosen on validation
    selected_loops: dict[str, OverSeeds]
    ordering: dict[str, OverSeeds]  # signal -> the bin-mean correlation over the runs


class Spread(msgspec.Struct, frozen=True):
    """The median of a measurement over rounds, with its quartiles, in `results.json`."""

    median: float
    lower_quartile: float
    upper_quartile: float

    def __str__(self) -> str:
        """With its quartiles; of a single round there are none."""
        if self.lower_quartile == self.upper_quartile:
            return _five_digits(self.median)
        return f"{_five_digits(self.median)} [{_five_digits(self.lower_quartile)}, {_five_digits(self.upper_quartile)}]"


class Machine(msgspec.Struct, frozen=True):
    """The speed of the machine during a measurement, in `results.json`."""

    threads: int
    rounds: int
    width: int
    gigaflops: Spread  # matrix products [1024, width] x [width, 4 width]
    by_round: list[float]  # the same
    device: str = "cpu"  # that these were measured on, which is the one that was benched
    dtype: str = "float32"  # and in which precision


class PolicyLatency(msgspec.Struct, frozen=True):
    """The time of one policy in `results.json`; ratios are taken within a round."""

    readout: str
    threshold: float | None
    accuracy: float  # of the live answers
    average_loops: float
    milliseconds: Spread  # a question or an example
    speedup: Spread  # against the first policy
    differing: int  # exits or answers that are not those of the recording, and not within rounding of the threshold


class Latency(msgspec.Struct, frozen=True):
    """The times of a checkpoint on a benchmark, or of a run on its task, in `results.json`."""

    model: str
    benchmark: str | None  # None: the task of the run of this name
    questions: int  # or examples, of a task
    num_loops: int
    machine: Machine
    policies: list[PolicyLatency]
    overhead: float = 0.0  # layers before the loops and before the head, by those of a loop

    def realised(self, policy: PolicyLatency) -> float:
        """The speed-up as a share of the ideal one for its loops: 1 means that every saved loop was saved time."""
        ideal = (self.num_loops + self.overhead) / (policy.average_loops + self.overhead)
        return policy.speedup.median / ideal


class Results(msgspec.Struct, frozen=True, omit_defaults=True):
    """Everything that a report says, as `results.json` holds it."""

    schema_version: int
    loopscope: str
    targets: list[Target]
    models: list[ModelResult]
    groups: list[GroupResult]
    latency: list[Latency] = []  # of checkpoints and runs whose exits were timed
    transfer: list[TransferResult] = []  # rules of models on other models, where that was asked for

    @property
    def grouped(self) -> list[tuple[GroupResult, list[ModelResult]]]:
        """Every group with its runs, which differ in their seed only."""
        models = {model.name: model for model in self.models}
        return [(group, [models[name] for name in group.names]) for group in self.groups]


def rounded(values: Any) -> Any:
    """Round the numbers of `results.json` to five significant digits, in any nesting; NaN becomes null."""
    if isinstance(values, int):
        return values
    if isinstance(values, float | None):
        return None if values is None or np.isnan(values) else float(f"{values:.{_DIGITS}g}")
    return [rounded(value) for value in values]


def _five_digits(value: float) -> str:
    """Round one number to five significant digits."""
    return f"{value:.3g}" if abs(value) < 100 else f"{value:,.0f}"
