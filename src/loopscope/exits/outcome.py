"""What did a policy do on some examples? Where each exited and what it answered, beside full depth: replayed or live.

Shapes: N examples.
"""

from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from loopscope.errors import UserError
from loopscope.exits.guarantee import Loss
from loopscope.exits.policy import ExitPolicy
from loopscope.trajectory import NO_LABELS, Trajectory

Array = NDArray[Any]


@dataclass(frozen=True, eq=False)
class Outcome:
    loops: NDArray[np.int64]  # [N]
    predicted: Array  # [N]
    full_depth: Array  # [N] what full depth answers
    labels: Array | None  # [N]

    @classmethod
    def replayed(cls, policy: ExitPolicy, trajectory: Trajectory) -> Self:
        loops = policy.exit_loops(trajectory)
        predicted = trajectory.predicted[np.arange(len(loops)), loops - 1]
        return cls(loops, predicted, trajectory.predicted[:, -1], trajectory.labels)

    def lost(self, loss: Loss) -> NDArray[np.bool_]:
        """[N] whether each loses against full depth."""
        if loss == "disagreement":
            return np.asarray(self.predicted != self.full_depth)
        if self.labels is None:
            raise UserError(NO_LABELS)
        return np.asarray((self.full_depth == self.labels) & (self.predicted != self.labels))
