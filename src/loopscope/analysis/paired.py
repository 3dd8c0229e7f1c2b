"""Is one exit policy better than another? Both on the same examples, compared example by example.

Resampling the examples resamples both at once, so what they have in common (which examples are hard) cancels out.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from loopscope.analysis.bootstrap import RESAMPLES, SEED, Estimate, estimate, resampled_means
from loopscope.errors import UserError
from loopscope.exits import ExitPolicy
from loopscope.trajectory import Trajectory


@dataclass(frozen=True)
class Paired:
    """Two policies on the same examples."""

    first: str
    second: str
    accuracy: Estimate  # first minus second
    loops: Estimate
    only_first_right: int
    only_second_right: int
    examples: int


@dataclass(frozen=True)
class Side:
    """A policy on a recording, under a name."""

    name: str
    policy: ExitPolicy
    trajectory: Trajectory


def paired(first: Side, second: Side, resamples: int = RESAMPLES, seed: int = SEED) -> Paired:
    """Compares two policies; they may run on trajectories of different models, if the examples are the same."""
    if not np.array_equal(first.trajectory.required_labels, second.trajectory.required_labels):
        raise UserError("A paired comparison needs the same examples in both recordings, in the same order.")
    ours, theirs = (exits_of(side.policy, side.trajectory) for side in (first, second))
    means = resampled_means(ours - theirs, resamples, seed, first.trajectory.units)
    return Paired(
        first.name,
        second.name,
        accuracy=estimate(means[:, 0]),
        loops=estimate(means[:, 1]),
        only_first_right=int((ours[:, 0] > theirs[:, 0]).sum()),
        only_second_right=int((ours[:, 0] < theirs[:, 0]).sum()),
        examples=len(ours),
    )


def exits_of(policy: ExitPolicy, trajectory: Trajectory) -> NDArray[np.float32]:
    """[N, 2] whether each example is right where the policy lets it exit, and at which loop that is."""
    loops = policy.exit_loops(trajectory)
    right = np.take_along_axis(trajectory.correct, loops[:, None] - 1, axis=1)[:, 0]
    return np.stack((right, loops), axis=1).astype(np.float32)
