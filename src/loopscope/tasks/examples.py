"""What is an example, and how is it drawn? Rows of tokens with labels and difficulty, and random draws from seeds.

Shapes: N examples, M tokens. A row is `begin, input, answer marker`, right-padded with 0 (`lengths` says where it
ends). The model's prediction is read at the marker, and only there is a loss.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

Integers = NDArray[np.int64]


class Draws:
    """Independent uniform draws; the same (seed, stream) gives the same sequence of draws on every machine.

    NumPy guarantees that a bit generator's raw stream never changes, but not what `Generator` makes of it, so the few
    distributions that are needed are derived from the raw bits here. Batch k of a run is stream k, so a resumed run
    needs no saved random state.
    """

    def __init__(self, seed: int, stream: int = 0) -> None:
        self._bits = np.random.Philox(key=np.array([seed, stream], dtype=np.uint64))

    def integers(self, bounds: Integers) -> Integers:
        """One integer of 0..bound-1 for each bound (up to 2**31; the bias is below bound / 2**32)."""
        raw = self._bits.random_raw(bounds.shape) >> np.uint64(32)
        return ((raw * bounds.astype(np.uint64)) >> np.uint64(32)).astype(np.int64)

    def permutation(self, size: int) -> Integers:
        return np.argsort(self._bits.random_raw(size), kind="stable")

    def permutations(self, rows: int, size: int) -> Integers:
        """[rows, size] a random order of 0..size-1 in every row."""
        return np.argsort(self._bits.random_raw((rows, size)), axis=1, kind="stable")


@dataclass(frozen=True)
class Examples:
    tokens: Integers  # [N, M]
    lengths: Integers  # [N]
    labels: Integers  # [N]
    difficulty: Integers  # [N]

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, rows: Any) -> Self:
        """The given rows, cut to their longest."""
        lengths = self.lengths[rows]
        longest = int(lengths.max(initial=1))
        return type(self)(self.tokens[rows, :longest], lengths, self.labels[rows], self.difficulty[rows])

    def by_length(self) -> Self:
        """The same rows, shortest first."""
        return self.take(np.argsort(self.lengths, kind="stable"))

    def same_length_batches(self, size: int) -> Iterator[Integers]:
        """Rows of at most `size` examples of one length, shortest first: batches without padding."""
        order = np.argsort(self.lengths, kind="stable")
        for group in np.split(order, np.flatnonzero(np.diff(self.lengths[order])) + 1):
            for start in range(0, len(group), size):
                yield group[start : start + size]


def fingerprints(examples: Examples) -> NDArray[np.uint64]:
    """A 64-bit hash of every input, the same on every machine."""
    value = np.zeros(len(examples), dtype=np.uint64)
    for position in range(examples.tokens.shape[1]):
        token = examples.tokens[:, position].astype(np.uint64) + np.uint64(1)
        mixed = (value ^ token) * np.uint64(0x9E3779B97F4A7C15)
        mixed = (mixed ^ (mixed >> np.uint64(32))) * np.uint64(0xD6E8FEB86659FD93)
        mixed ^= mixed >> np.uint64(29)
        value = np.where(position < examples.lengths, mixed, value)
    return value


def seen(examples: Examples, training: NDArray[np.uint64]) -> NDArray[np.bool_]:
    """Which inputs are among these fingerprints."""
    return np.isin(fingerprints(examples), training)


def overlap(examples: Examples, training: NDArray[np.uint64]) -> dict[str, float]:
    """The share of examples whose input occurs in training: in all, and by difficulty."""
    known = seen(examples, training)
    levels = np.unique(examples.difficulty)
    shares = {str(level): float(known[examples.difficulty == level].mean()) for level in levels}
    return {"all": float(known.mean()), **shares}
