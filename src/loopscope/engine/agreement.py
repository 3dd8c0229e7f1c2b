"""Does the engine do what the replay says? Its answers beside a policy's exits on the recorded trajectory."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from loopscope.engine.scheduler import Answer
from loopscope.exits import ExitPolicy
from loopscope.trajectory import Trajectory

_CLOSE = 1e-5


@dataclass(frozen=True)
class Agreement:
    """How many examples there are, and in how many of them live running and replay differ."""

    examples: int
    close: int  # whose signal comes within 1e-5 (relative) of the threshold before they exit: these may differ
    close_differing: int  # of these, the exits or predictions that do
    differing: int  # of the others: there should be none
    accuracy: float  # of the live answers
    replayed_accuracy: float
    average_loops: float
    replayed_average_loops: float


def compare(answers: Iterable[Answer], policy: ExitPolicy, trajectory: Trajectory) -> Agreement:
    """Answers whose keys are row numbers of `trajectory`, against the policy's replay on it."""
    loops = np.zeros(trajectory.num_examples, dtype=np.int64)
    predicted = np.zeros_like(loops)
    for answer in answers:
        loops[answer.key], predicted[answer.key] = answer.loop, answer.prediction
    replayed = policy.exit_loops(trajectory)
    rows = np.arange(len(loops))
    expected = trajectory.predicted[rows, replayed - 1]
    close = close_calls(policy, trajectory, np.maximum(loops, replayed), _CLOSE)
    differing = (loops != replayed) | (predicted != expected)
    return Agreement(
        examples=len(loops),
        close=int(close.sum()),
        close_differing=int((differing & close).sum()),
        differing=int((differing & ~close).sum()),
        accuracy=float((predicted == trajectory.required_labels).mean()),
        replayed_accuracy=float(trajectory.correct[rows, replayed - 1].mean()),
        average_loops=float(loops.mean()),
        replayed_average_loops=float(replayed.mean()),
    )


def close_calls(
    policy: ExitPolicy, trajectory: Trajectory, loops: NDArray[np.int64], tolerance: float
) -> NDArray[np.bool_]:
    """[N] whose signal comes so near (relative) to the threshold up to these loops that rounding may decide."""
    if policy.readout == "fixed" or policy.threshold is None:
        return np.zeros(len(loops), dtype=bool)
    near = np.abs(policy.values(trajectory) - policy.threshold) <= tolerance * abs(policy.threshold)
    reached = np.arange(1, trajectory.num_loops + 1) <= loops[:, None]
    return np.asarray((near & reached)[:, :-1].any(axis=1))  # at the last loop everybody exits
