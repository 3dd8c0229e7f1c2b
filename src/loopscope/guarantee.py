"""What does a policy guarantee, and what does that rest on? The certificate in a policy's file."""

from typing import Annotated, Literal, Self

import msgspec
import numpy as np
from numpy.typing import NDArray

from loopscope.config import Settings, Tally

Loss = Literal["gap", "disagreement"]
Bound = Literal["betting", "hoeffding_bentkus"]
BOUNDS: tuple[Bound, ...] = ("betting", "hoeffding_bentkus")
"""With which the losses of sequences are tested."""
_LEVELS_PER_LOOP_OF_SEQUENCES: Literal[16] = 16
Share = Annotated[float, msgspec.Meta(gt=0, lt=1)]


class DataSummary(Settings, frozen=True, kw_only=True):
    """Some examples: which, and how many."""

    sha256: str  # `Trajectory.sha256`
    split: str | None
    examples: int
    sequences: int | None  # where an example is one decision of many
    seen: int | None  # how many of them occur in the training data, if that is known
    difficulty: dict[str, int] | None  # how many of each; None without difficulties, or with very many


class Evidence(Settings, frozen=True, kw_only=True):
    """What was observed at the threshold: in all, or at one difficulty."""

    difficulty: float | None
    units: int  # examples, or sequences
    loss: float  # on average
    p_value: float | None  # of "the risk is above the limit"; None for a promise in expectation


class Guarantee(Settings, frozen=True, kw_only=True, omit_defaults=True):
    sentence: str
    loss: Loss
    max_drop: Share  # the risk that is allowed
    confidence: Share | None  # None: on average over calibration draws
    per_difficulty: bool
    unseen: bool  # for inputs that training did not have
    distinct: bool  # every input counts once: for inputs that are new
    loops: int  # T of the model: full depth
    candidates: list[str]  # the readouts among which the data of the grid chose
    finalists: list[str]  # those that were tested
    level: float | None  # the p-value that proves a threshold: 1 - confidence, by the number of finalists
    recording: str  # the hash of the whole recording; the tested examples may be a part of it
    tested: DataSummary
    grid: DataSummary  # where the thresholds come from
    thresholds: int  # how many were proven, of how many
    grid_size: int
    evidence: list[Evidence]
    full_depth_accuracy: float | None  # of the tested examples; None without labels
    average_loops: float  # what to expect
    average_loops_interval: tuple[float, float]  # 95 %, over examples
    average_loops_at_limit: float  # of the laxest threshold whose observed loss is within the limit: the price
    bound: Bound | None = None  # of sequences; examples, which are lost or not, have the exact binomial test
    order_seed: int | None = None  # with which the order was drawn in which sequences were bet on


class CalibrationExits(Settings, frozen=True, kw_only=True):
    """How deep the calibration examples went, as counts: small enough for a file.

    An example exits at a loop. A sequence of decisions has the average of their loops, rounded to a sixteenth: the
    rounding is the same for whatever comes later, so that ranks among the counts stay exact.
    """

    per_loop: Literal[1, 16]  # levels a loop: 1 for examples, 16 for averages over sequences
    counts: list[Tally]  # [levels] of units, from loop 1 to full depth

    @classmethod
    def of(cls, depths: NDArray[np.float64], num_loops: int, sequences: bool) -> Self:
        """Of the loops [units] at which units exit, on average over each."""
        empty = cls(per_loop=_LEVELS_PER_LOOP_OF_SEQUENCES if sequences else 1, counts=[])
        levels = (num_loops - 1) * empty.per_loop + 1
        found = np.bincount(empty.levels(depths), minlength=levels)
        return msgspec.structs.replace(empty, counts=found.tolist())

    def levels(self, depths: NDArray[np.float64]) -> NDArray[np.int64]:
        """[units] the place of each among the counts."""
        return np.rint((depths - 1) * self.per_loop).astype(np.int64)

    @property
    def mean(self) -> float:
        """The average loop, as far as the rounding goes."""
        return 1 + float(np.average(np.arange(len(self.counts)), weights=self.counts)) / self.per_loop


class Certificate(Settings, frozen=True, kw_only=True):
    """What calibration found: the guarantee, and the exits of the examples that it was tested on, for a monitor."""

    guarantee: Guarantee
    exits: CalibrationExits
