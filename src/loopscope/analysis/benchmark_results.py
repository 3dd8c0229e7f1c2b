"""What does the recording of a benchmark show? Accuracy at every loop by metric, and by subject."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from loopscope.analysis import schema
from loopscope.questions import BENCHMARKS
from loopscope.trajectory import Trajectory

METRICS = ("acc", "acc_norm")


def benchmark_result(name: str, test: Trajectory) -> schema.BenchmarkResult | None:
    """Summarise a recording of a benchmark: accuracy by metric and by subject. None for other recordings.

    Its logits are the metric's own scores: log-likelihoods for `acc`, the same divided by the characters of each choice
    for `acc_norm`. With the characters the other metric is known too.
    """
    benchmark = test.provenance.get("benchmark")
    if not isinstance(benchmark, str):
        return None
    known, model = BENCHMARKS.get(benchmark), test.provenance.get("model")
    return schema.BenchmarkResult(
        model=model if isinstance(model, str) else name,
        name=benchmark,
        title=known.title if known else benchmark,
        metric=test.provenance.get("metric", METRICS[0]),
        accuracy=metric_accuracies(test),
        subjects=[
            schema.SubjectResult(subject, int(rows.sum()), test.correct[rows].mean(axis=0).tolist())
            for subject, rows in rows_by_subject(test).items()
        ],
    )


def metric_accuracies(recording: Trajectory) -> dict[str, list[float]]:
    """The accuracy of a benchmark at every loop, by `acc` and `acc_norm` if the recording allows both."""
    scored = recording.provenance.get("metric")
    scored = scored if scored in METRICS else METRICS[0]
    right = {scored: recording.correct}
    if recording.norms is not None and recording.logits is not None:
        (other,) = (metric for metric in METRICS if metric != scored)
        norms = np.maximum(recording.norms, 1)[:, None, :].astype(np.float64)
        scores = recording.logits / norms if scored == "acc" else recording.logits * norms
        right[other] = scores.argmax(axis=-1) == recording.required_labels[:, None]
    return {metric: right[metric].mean(axis=0).tolist() for metric in METRICS if metric in right}


def rows_by_subject(recording: Trajectory) -> dict[str, NDArray[Any]]:
    """By subject of a benchmark (MMLU), a mask [N] of its questions; empty if the questions have no subjects.

    The key of a question, with which its text begins, may name a subject: `mmlu/anatomy/3`.
    """
    keys = [text.split(maxsplit=1)[0].split("/") for text in recording.examples or () if text.strip()]
    if len(keys) != recording.num_examples or any(len(key) != 3 for key in keys):
        return {}
    subjects = np.array([key[1] for key in keys])
    return {str(subject): subjects == subject for subject in np.unique(subjects)}
