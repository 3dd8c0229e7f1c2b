"""What does a recording of multiple-choice questions say beside the metric that it was scored by?

Its logits are the metric's own scores: log-likelihoods for `acc`, the same divided by the characters of each choice for
`acc_norm`. With the characters the other metric is known too. The key of a question, with which its text begins, may
name a subject: `mmlu/anatomy/3`.

Shapes: N questions, T loops, C choices.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from loopscope.trajectory import Trajectory

METRICS = ("acc", "acc_norm")


def metrics(recording: Trajectory) -> dict[str, list[float]]:
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
