"""What is said of exits that were timed on a benchmark's questions? Data alone, for whoever only shows it."""

import msgspec

from loopscope.bench.measure import Machine, Spread


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
