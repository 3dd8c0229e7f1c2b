"""Where does randomness in data come from? From a counter-based bit stream that is the same on every machine.

NumPy promises that a bit generator's raw stream never changes, but not what `Generator` makes of it, so the few
distributions that the tasks need are derived from the raw bits here. A stream is addressed by (seed, stream):
batch k of a run is stream k, so a resumed run needs no saved random state.
"""

import numpy as np
from numpy.typing import NDArray

Integers = NDArray[np.int64]


class Draws:
    """Independent uniform draws; the same (seed, stream) gives the same sequence of draws."""

    def __init__(self, seed: int, stream: int = 0) -> None:
        self._bits = np.random.Philox(key=np.array([seed, stream], dtype=np.uint64))

    def integers(self, bounds: Integers) -> Integers:
        """One integer of 0..bound-1 for each bound (up to 2**31; the bias is below bound / 2**32)."""
        raw = self._bits.random_raw(bounds.shape) >> np.uint64(32)
        return ((raw * bounds.astype(np.uint64)) >> np.uint64(32)).astype(np.int64)

    def permutation(self, size: int) -> Integers:
        return np.argsort(self._bits.random_raw(size), kind="stable")
