"""Does the engine do what the replay says? Its answers beside a policy's exits on the recorded trajectory."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from loopscope.engine.scheduler import Answer
from loopscope.exits import ExitPolicy
from loopscope.exits.thresholds import is_whole
from loopscope.trajectory import Trajectory

_CLOSE = 1e-5


@dataclass(frozen=True)
class Agreement:
    """How many examples there are, and in how many of them live running and replay differ."""

    examples: int
    close: int  # whose signal comes within 1e-5 (relative) of the threshold before they exit: these may differ
    close_differing: int  # of these, the exits or predictions that do, by decisions that are so close
    differing: int  # what differs otherwise: there should be none
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
    near = _near(policy, trajectory, _CLOSE)
    close = _before_exit(near, np.maximum(loops, replayed))
    differing = (loops != replayed) | (predicted != expected)
    excused = close & _explained(policy, trajectory, loops, near)
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


def close_calls(
    policy: ExitPolicy, trajectory: Trajectory, loops: NDArray[np.int64], tolerance: float
) -> NDArray[np.bool_]:
    """[N] whose signal comes so near (relative) to the threshold up to these loops that rounding may decide."""
    return _before_exit(_near(policy, trajectory, tolerance), loops)


def _near(policy: ExitPolicy, trajectory: Trajectory, tolerance: float) -> NDArray[np.bool_]:
    """[N, T] where rounding may decide. Whole numbers are not rounded: one that meets the threshold is not close."""
    if policy.readout == "fixed" or policy.threshold is None or is_whole(values := policy.values(trajectory)):
        return np.zeros((trajectory.num_examples, trajectory.num_loops), dtype=bool)
    return np.abs(values - policy.threshold) <= tolerance * abs(policy.threshold)


def _before_exit(near: NDArray[np.bool_], loops: NDArray[np.int64]) -> NDArray[np.bool_]:
    """[N] whether any loop up to these, but the last, where everybody exits, is near."""
    return np.asarray((near & (np.arange(1, near.shape[1] + 1) <= loops[:, None]))[:, :-1].any(axis=1))


def _explained(
    policy: ExitPolicy, trajectory: Trajectory, loops: NDArray[np.int64], near: NDArray[np.bool_]
) -> NDArray[np.bool_]:
    """[N] whether other decisions at near loops alone lead to these exits; what is clear is as in the replay."""
    clear = policy.stops(trajectory) & ~near if policy.readout != "fixed" else near
    passed = np.arange(1, near.shape[1] + 1) < loops[:, None]
    rows = np.arange(len(loops))
    exits = (loops == near.shape[1]) | near[rows, loops - 1] | clear[rows, loops - 1]
    return np.asarray(exits & ~(clear & passed).any(axis=1))
