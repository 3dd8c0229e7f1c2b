"""Which choice does a metric take? The most likely one (acc) or the most likely one per character (acc_norm).

Shapes: N questions, T loops, C choices of the question that has most. A choice that a question lacks has the
log-likelihood -inf. Ties go to the first choice, as in lm_eval, so scores are kept in float64.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from loopscope.questions.benchmarks import Metric
from loopscope.questions.lm_eval_tasks import Question

Floats = NDArray[np.float64]


def norms_of(questions: Sequence[Question]) -> NDArray[np.int64]:
    """[N, C] characters of every choice; 1 where there is no choice."""
    norms = np.ones((len(questions), max((len(q.norms) for q in questions), default=0)), dtype=np.int64)
    for row, question in zip(norms, questions, strict=True):
        row[: len(question.norms)] = question.norms
    return norms


def metric_scores(log_likelihoods: NDArray[np.floating], norms: NDArray[np.int64], metric: Metric) -> Floats:
    """[N, T, C] log-likelihoods as the metric compares them."""
    scores = log_likelihoods.astype(np.float64)
    if metric == "acc":
        return scores
    with np.errstate(divide="ignore"):  # lm_eval gives an empty choice the score -inf
        return scores / norms[:, None]


def correct(
    log_likelihoods: NDArray[np.floating], norms: NDArray[np.int64], labels: NDArray[np.integer], metric: Metric
) -> NDArray[np.bool_]:
    """[N, T] whether the metric takes the right choice."""
    return metric_scores(log_likelihoods, norms, metric).argmax(-1) == labels[:, None]
