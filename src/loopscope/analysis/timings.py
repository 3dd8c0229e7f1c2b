"""What was timed, how much did it spread, and on which machine? Data alone, for whoever only shows it."""

import msgspec


class Spread(msgspec.Struct, frozen=True):
    """Over the rounds."""

    median: float
    lower_quartile: float
    upper_quartile: float

    def __str__(self) -> str:
        """With its quartiles; of a single round there are none."""
        if self.lower_quartile == self.upper_quartile:
            return _short(self.median)
        return f"{_short(self.median)} [{_short(self.lower_quartile)}, {_short(self.upper_quartile)}]"


class Machine(msgspec.Struct, frozen=True):
    """What the machine could do while this was measured."""

    threads: int
    rounds: int
    width: int
    gigaflops: Spread  # matrix products [1024, width] x [width, 4 width]
    by_round: list[float]  # the same
    device: str = "cpu"  # that these were measured on, which is the one that was benched
    dtype: str = "float32"  # and in which precision


class QuestionTiming(msgspec.Struct, frozen=True):
    """One policy on the questions that were timed. Ratios are taken within a round."""

    readout: str
    threshold: float | None
    accuracy: float  # of the live answers
    average_loops: float
    milliseconds: Spread  # a question
    speedup: Spread  # against the first policy
    differing: int  # exits or answers that are not those of the recording, and not within rounding of the threshold


class QuestionBench(msgspec.Struct, frozen=True):
    """A checkpoint on a benchmark, timed; the first policy is what the others are compared with."""

    model: str
    benchmark: str
    questions: int
    num_loops: int
    machine: Machine
    policies: list[QuestionTiming]
    overhead: float = 0.0  # layers before the loops and before the head, by those of a loop


def _short(value: float) -> str:
    return f"{value:.3g}" if abs(value) < 100 else f"{value:,.0f}"
