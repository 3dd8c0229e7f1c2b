"""Which rule picks the exit? A readout maps a trajectory to an exit loop; with its threshold it is an exit policy.

The policy is the same object in replay (on a recording, here) and in live running.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from loopscope.errors import UserError
from loopscope.exits.signals import signal
from loopscope.trajectory import Trajectory

Kind = Literal["above", "below", "depth", "oracle"]

READOUTS: dict[str, Kind] = {
    "fixed": "depth",
    "gate": "above",
    "entropy": "below",
    "top1": "above",
    "margin": "above",
    "kl": "below",
    "logit_change": "below",
    "hidden_change": "below",
    "hidden_cosine": "below",
    "oracle": "oracle",
}
"""Every readout, and when it exits: at the first loop whose signal is above or below its threshold (or meets it), at a
fixed depth, or (the oracle) at the first correct loop. One that never comes exits at loop T."""


@dataclass(frozen=True)
class ExitPolicy:
    """A readout with its threshold. `fixed` takes the depth as its threshold, `oracle` takes none."""

    readout: str
    threshold: float | None = None

    def __post_init__(self) -> None:
        kind = readout_kind(self.readout)
        if self.threshold is not None and not isinstance(self.threshold, (int, float, np.number)):
            raise UserError(f"A threshold is a number, got {self.threshold!r}.")
        if kind == "oracle":
            if self.threshold is not None:
                raise UserError("The oracle takes no threshold.")
        elif self.threshold is None or np.isnan(self.threshold):
            raise UserError(f"The readout '{self.readout}' needs a threshold that is a number.")
        elif kind == "depth" and (self.threshold < 1 or not float(self.threshold).is_integer()):
            raise UserError(f"A fixed depth is a whole number from 1 on, got {self.threshold}.")

    def exit_loops(self, trajectory: Trajectory) -> NDArray[np.int64]:
        """[N] the loop in 1..T at which every example exits."""
        if readout_kind(self.readout) == "depth":
            assert self.threshold is not None
            if self.threshold > trajectory.num_loops:
                raise UserError(
                    f"A fixed depth of {self.threshold} is beyond the recording's {trajectory.num_loops} loops."
                )
            return np.full(trajectory.num_examples, int(self.threshold))
        stops = np.array(self.stops(trajectory))
        stops[:, -1] = True
        return stops.argmax(axis=1) + 1

    def stops(self, trajectory: Trajectory) -> NDArray[np.bool_]:
        """[N, T] at which loops the rule says stop; a signal that is NaN never does."""
        if self.threshold is None:  # the oracle
            return trajectory.correct
        return self.decide(signal(self.readout, trajectory))

    def decide(self, values: NDArray[np.float64]) -> NDArray[np.bool_]:
        """Whether these values of the policy's signal say stop, whatever their shape: recorded or live."""
        assert self.threshold is not None
        return values >= self.threshold if READOUTS[self.readout] == "above" else values <= self.threshold


def readout_kind(readout: str) -> Kind:
    if readout not in READOUTS:
        raise UserError(f"There is no readout '{readout}'; choose one of {', '.join(READOUTS)}.")
    return READOUTS[readout]


def accuracy_and_loops(policy: ExitPolicy, trajectory: Trajectory) -> tuple[float, float]:
    """Accuracy and average loops of a policy replayed on a recording."""
    loops = policy.exit_loops(trajectory)
    right = trajectory.correct[np.arange(len(loops)), loops - 1]
    return float(right.mean()), float(loops.mean())
