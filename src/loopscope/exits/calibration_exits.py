"""How deep did the calibration examples go? Their exits as counts, small enough for the file of a policy.

An example exits at a loop. A sequence of decisions has the average of their loops, rounded to a sixteenth: the rounding
is the same for whatever comes later, so that ranks among the counts stay exact.
"""

from typing import Literal, Self

import msgspec
import numpy as np
from numpy.typing import NDArray

from loopscope.config import Settings, Tally

_PER_LOOP_OF_SEQUENCES: Literal[16] = 16


class CalibrationExits(Settings, frozen=True, kw_only=True):
    per_loop: Literal[1, 16]  # levels a loop: 1 for examples, 16 for averages over sequences
    counts: list[Tally]  # [levels] of units, from loop 1 to full depth

    @classmethod
    def of(cls, depths: NDArray[np.float64], num_loops: int, sequences: bool) -> Self:
        """Of the loops [units] at which units exit, on average over each."""
        empty = cls(per_loop=_PER_LOOP_OF_SEQUENCES if sequences else 1, counts=[])
        levels = (num_loops - 1) * empty.per_loop + 1
        found = np.bincount(empty.levels(depths), minlength=levels)
        return msgspec.structs.replace(empty, counts=found.tolist())

    def levels(self, depths: NDArray[np.float64]) -> NDArray[np.int64]:
        """[units] the place of each among the counts."""
        return np.rint((depths - 1) * self.per_loop).astype(np.int64)

    @property
    def mean(self) -> float:
        """The average loop, as far as the rounding goes."""
        return 1 + float(np.average(np.arange(len(self.counts)), weights=self.counts)) / self.per_loop
