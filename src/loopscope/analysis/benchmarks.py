"""What does a recording of a benchmark say beside what every recording says? Both metrics, and every subject.

Its logits are the metric's own scores: log-likelihoods for `acc`, the same divided by the characters of each choice for
`acc_norm`. With the characters the other metric is known too. The key of a question, with which its text begins, may
name a subject: `mmlu/anatomy/3`.

Shapes: N questions, T loops, C choices.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from loopscope.analysis.schema import BenchmarkResult, SubjectResult
from loopscope.questions import BENCHMARKS
from loopscope.trajectory import Trajectory

METRICS = ("acc", "acc_norm")


def benchmark_result(name: str, test: Trajectory) -> BenchmarkResult | None:
    """Nothing where the examples are not a benchmark's questions; `name` is the model's where it is not recorded."""
    benchmark = test.provenance.get("benchmark")
    if not isinstance(benchmark, str):
        return None
    known = BENCHMARKS.get(benchmark)
    return BenchmarkResult(
        model=test.provenance.get("model", name),
        name=benchmark,
        title=known.title if known else benchmark,
        metric=test.provenance.get("metric", METRICS[0]),
        accuracy=metric_accuracies(test),
        subjects=[
            SubjectResult(subject, int(rows.sum()), test.correct[rows].mean(axis=0).tolist())
            for subject, rows in by_subject(test).items()
        ],
    )


def metric_accuracies(recording: Trajectory) -> dict[str, list[float]]:
    """The accuracy of every loop, by both metrics where both can be told."""
    scored = recording.provenance.get("metric")
    scored = scored if scored in METRICS else METRICS[0]
    right = {scored: recording.correct}
    if recording.norms is not None and recording.logits is not None:
        (other,) = (metric for metric in METRICS if metric != scored)
        norms = np.maximum(recording.norms, 1)[:, None, :].astype(np.float64)
        scores = recording.logits / norms if scored == "acc" else recording.logits * norms
        right[other] = scores.argmax(axis=-1) == recording.required_labels[:, None]
    return {metric: right[metric].mean(axis=0).tolist() for metric in METRICS if metric in right}


def by_subject(recording: Trajectory) -> dict[str, NDArray[Any]]:
    """[N] which questions are of each subject, by name; nothing where questions have none."""
    keys = [text.split(maxsplit=1)[0].split("/") for text in recording.examples or () if text.strip()]
    if len(keys) != recording.num_examples or any(len(key) != 3 for key in keys):
        return {}
    subjects = np.array([key[1] for key in keys])
    return {str(subject): subjects == subject for subject in np.unique(subjects)}
