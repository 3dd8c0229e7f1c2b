"""Where is a valid guarantee weaker than it looks? Cautions about copies and models that guess, as warnings.

A model that is right no more often than a guess is the first of it; a diagnosis asks here, too.

Shapes: N examples, M other examples, T loops, V classes.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import binom

from loopscope.certify.live_runs import LiveRuns, Recorded
from loopscope.certify.losses import population
from loopscope.policy import ExitPolicy, Loss
from loopscope.trajectory import Trajectory

SIGNIFICANCE = 0.05
_AT_CHANCE: dict[Loss, str] = {
    "gap": "So there is little that exiting early could lose.",
    "disagreement": "So an answer that agrees with full depth is not a right one.",
}


def cautions(recorded: Recorded, policy: ExitPolicy) -> Iterator[str]:
    """Warn where a guarantee is weaker than it looks: copies, or a model that is no better than guessing."""
    guarantee = policy.guarantee
    assert guarantee is not None
    if isinstance(recorded, Trajectory):
        if not guarantee.distinct and not guarantee.new_inputs:
            yield from _copy_cautions(recorded)
        recorded = population(recorded, guarantee)
    right = guarantee.full_depth_accuracy
    if guarantee.loss == "gap" and right is not None and right <= guarantee.max_drop:
        yield (
            f"This guarantee says nothing: full depth is right in {100 * right:.1f} % of the tested examples, so no "
            f"exit could lose more than {100 * guarantee.max_drop:g} %; ask for less, or try --loss disagreement."
        )
    elif recorded.labels is not None:
        yield from _guessing_caution(recorded, guarantee.loss)


def _copy_cautions(recording: Trajectory) -> Iterator[str]:
    """Warn about copies of examples, found by their texts or scores (signals may have few values without copies)."""
    if recording.sequences is not None:
        return
    if recording.examples is not None:
        copies = recording.num_examples - len(set(recording.examples))
        if copies:
            yield (
                f"{copies:,} examples are copies of others. If copies are not drawn on their own, add --distinct; if "
                "the inputs to come are new ones, add --new-inputs."
            )
    elif recording.copies is not None and not (recording.logits is None and recording.label_log_probs is None):
        yield (
            f"Only {recording.copies.max() + 1:,} of the {recording.num_examples:,} examples differ in their scores; "
            "if they are copies and not drawn on their own, the guarantee counts far more than there is: give every "
            "example once."
        )


def _guessing_caution(recorded: Recorded, loss: Loss) -> Iterator[str]:
    """Warn about a model that is not above chance, by an exact binomial test: it has nothing to lose."""
    labels = recorded.labels
    assert labels is not None
    if (labels == labels[0]).all():  # a constant answer cannot be told from knowledge
        return
    answers, logits = (
        (recorded.full_depth, None) if isinstance(recorded, LiveRuns) else (recorded.predicted[:, -1], recorded.logits)
    )
    right, guessed = answers == labels, guess_accuracy(labels, labels, logits)
    if not beats_guessing(right, guessed):
        yield (
            f"The model is not above chance: full depth is right in {100 * right.mean():.1f} % of the examples, "
            f"and a guess, or always the commonest answer, in {100 * guessed:.1f} %. {_AT_CHANCE[loss]}"
        )


def guess_accuracy(labels: NDArray[Any], known: NDArray[Any], logits: NDArray[Any] | None = None) -> float:
    """[N] the accuracy of guessing: by lot, or always the commonest label in `known` [M].

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
    """Whether a model with these right answers [N] beats guessing: a one-sided exact binomial test at 5 %."""
    return bool(binom.sf(int(right.sum()) - 1, len(right), guessed) <= SIGNIFICANCE)
