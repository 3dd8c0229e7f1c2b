"""Does a live run agree with its replay? Exits and predictions may differ only where rounding decides.

Shapes: N examples, T loops.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from loopscope.engine.logit_signals import Integers
from loopscope.engine.scheduler import Answer
from loopscope.policy import ExitPolicy
from loopscope.threshold_grids import is_whole
from loopscope.trajectory import Trajectory

_CLOSE = 1e-5
"""How close (relative) a signal is to the threshold if rounding may decide."""


@dataclass(frozen=True)
class Agreement:
    """Count the examples of a live run, and in how many of them the live run and its replay differ."""

    examples: int
    close: int  # the signal comes within 1e-5 (relative) of the threshold up to the exit: these may differ
    close_differing: int  # differences in exit or prediction that such a close decision explains
    differing: int  # all other differences: there should be none
    accuracy: float  # of the live answers
    replayed_accuracy: float
    average_loops: float
    replayed_average_loops: float


def compare_with_replay(answers: Iterable[Answer], policy: ExitPolicy, trajectory: Trajectory) -> Agreement:
    """Compare live answers, whose keys are row numbers of `trajectory`, with the policy's replay on this recording."""
    loops = np.zeros(trajectory.num_examples, dtype=np.int64)
    predicted = np.zeros_like(loops)
    for answer in answers:
        loops[answer.key], predicted[answer.key] = answer.loop, answer.prediction
    replayed = policy.exit_loops(trajectory)
    rows = np.arange(len(loops))
    differing = (loops != replayed) | (predicted != trajectory.predicted[rows, replayed - 1])
    near = _near_threshold(policy, trajectory, _CLOSE)
    close = _near_before_exit(near, np.maximum(loops, replayed))
    # Only decisions at near loops may differ: together with the replay's clear decisions they must lead to these exits.
    clear = near if policy.fixed_depth is not None else policy.stops(trajectory) & ~near
    exits = (loops == near.shape[1]) | near[rows, loops - 1] | clear[rows, loops - 1]
    passed = np.arange(1, near.shape[1] + 1) < loops[:, None]
    excused = close & exits & ~(clear & passed).any(axis=1)
    return Agreement(
        examples=len(loops),
        close=int(close.sum()),
        close_differing=int((differing & excused).sum()),
        differing=int((differing & ~excused).sum()),
        accuracy=float((predicted == trajectory.required_labels).mean()),
        replayed_accuracy=float(trajectory.correct[rows, replayed - 1].mean()),
        average_loops=float(loops.mean()),
        replayed_average_loops=float(replayed.mean()),
    )


def close_calls(policy: ExitPolicy, trajectory: Trajectory, loops: Integers, tolerance: float) -> NDArray[np.bool_]:
    """[N] whether the signal comes so close (relative) to the threshold up to these loops that rounding may decide."""
    return _near_before_exit(_near_threshold(policy, trajectory, tolerance), loops)


def _near_threshold(policy: ExitPolicy, trajectory: Trajectory, tolerance: float) -> NDArray[np.bool_]:
    """[N, T] whether rounding may decide at this loop; a whole number at the threshold is exact, and not near."""
    threshold = None if policy.fixed_depth is not None else policy.threshold
    if threshold is None or is_whole(values := policy.values(trajectory)):
        return np.zeros((trajectory.num_examples, trajectory.num_loops), dtype=bool)
    return np.abs(values - threshold) <= tolerance * abs(threshold)


def _near_before_exit(near: NDArray[np.bool_], loops: Integers) -> NDArray[np.bool_]:
    """[N] whether the signal is near the threshold at any of these loops but the last, at which every row exits."""
    return np.asarray((near & (np.arange(1, near.shape[1] + 1) <= loops[:, None]))[:, :-1].any(axis=1))
