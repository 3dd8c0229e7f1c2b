"""Where do multiple-choice questions come from? lm_eval's own task definitions, from the Hub or a folder."""

from loopscope.questions.building import Question, questions_of
from loopscope.questions.catalogue import BENCHMARKS, Benchmark, Metric, Split, benchmark_named
from loopscope.questions.encoding import Encoded, encode
from loopscope.questions.metrics import choice_scores, correct, norms_of

__all__ = [
    "BENCHMARKS",
    "Benchmark",
    "Encoded",
    "Metric",
    "Question",
    "Split",
    "benchmark_named",
    "choice_scores",
    "correct",
    "encode",
    "norms_of",
    "questions_of",
]
