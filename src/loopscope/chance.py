"""How often is an answer right that knows nothing, and is a model right more often than that?

Shapes: N examples, M other examples, T loops, V classes.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import binom

SIGNIFICANCE = 0.05


def guess_accuracy(labels: NDArray[Any], known: NDArray[Any], logits: NDArray[Any] | None = None) -> float:
    """The accuracy [N] of drawing an answer by lot, or of always giving the label that is commonest in `known` [M].

    Other data may choose that label, so that a shift of the labels is nobody's knowledge. Without `logits` [N, T, V],
    which say how many answers an example has, nothing is drawn by lot.
    """
    different, counts = np.unique(known, return_counts=True)
    commonest = float((labels == different[counts.argmax()]).mean())
    if logits is None:
        return commonest
    choices = (~np.isneginf(logits[:, 0])).sum(axis=1)
    return float(max(commonest, (1 / choices).mean()))


def beats_guessing(right: NDArray[np.bool_], guessed: float) -> bool:
    """Whether so many are right [N] that guessing hardly reaches it: a one-sided exact binomial test at 5 %."""
    return bool(binom.sf(int(right.sum()) - 1, len(right), guessed) <= SIGNIFICANCE)
