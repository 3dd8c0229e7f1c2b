"""What is an example, and how is it drawn? Rows of tokens with labels and difficulty, and random draws from seeds.

Shapes: N examples, M tokens. A row is `begin, input, answer marker`, right-padded with 0 to M (`lengths` holds the
lengths). The model's prediction is read at the marker, and only the marker has a loss.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

Integers = NDArray[np.int64]


class Draws:
    """Draw uniform numbers: the same seed and stream give the same draws on every machine.

    Parameters
    ----------
    seed
        The random seed.
    stream
        The stream (default: 0); a training run has one stream per batch.

    Examples
    --------
    >>> draws = ls.Draws(seed=1)
    >>> int(draws.integers(np.array([10]))[0]) == int(ls.Draws(seed=1).integers(np.array([10]))[0])
    True
    """

    def __init__(self, seed: int, stream: int = 0) -> None:
        self._bits = np.random.Philox(key=np.array([seed, stream], dtype=np.uint64))

    def integers(self, bounds: Integers) -> Integers:
        """Draw one random integer from 0 to each bound minus 1.

        Parameters
        ----------
        bounds
            Bounds up to 2**31, of any shape.

        Returns
        -------
        NDArray[np.int64]
            Integers from 0 to bound - 1, in the same shape.
        """
        raw = self._bits.random_raw(bounds.shape) >> np.uint64(32)
        return ((raw * bounds.astype(np.uint64)) >> np.uint64(32)).astype(np.int64)

    def permutation(self, size: int) -> Integers:
        """Draw a random order of numbers.

        Parameters
        ----------
        size
            The count of numbers to order.

        Returns
        -------
        NDArray[np.int64]
            [size] the numbers from 0 to size - 1.
        """
        return np.argsort(self._bits.random_raw(size), kind="stable")

    def permutations(self, rows: int, size: int) -> Integers:
        """Draw a separate random order for every row.

        Parameters
        ----------
        rows, size
            The number of rows, and the count of numbers in each row.

        Returns
        -------
        NDArray[np.int64]
            [rows, size] the numbers from 0 to size - 1.
        """
        return np.argsort(self._bits.random_raw((rows, size)), axis=1, kind="stable")


@dataclass(frozen=True)
class Examples:
    """Hold rows of tokens with their labels and difficulties."""

    tokens: Integers  # [N, M]
    lengths: Integers  # [N]
    labels: Integers  # [N]
    difficulty: Integers  # [N]

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, rows: Any) -> Self:
        """The given rows, cut to the longest of them."""
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
    """A 64-bit hash of every example's input, the same on every machine."""
    value = np.zeros(len(examples), dtype=np.uint64)
    for position in range(examples.tokens.shape[1]):
        token = examples.tokens[:, position].astype(np.uint64) + np.uint64(1)
        mixed = (value ^ token) * np.uint64(0x9E3779B97F4A7C15)
        mixed = (mixed ^ (mixed >> np.uint64(32))) * np.uint64(0xD6E8FEB86659FD93)
        mixed ^= mixed >> np.uint64(29)
        value = np.where(position < examples.lengths, mixed, value)
    return value


def seen(examples: Examples, training: NDArray[np.uint64]) -> NDArray[np.bool_]:
    """Whether each example's input is among the fingerprints of the training inputs."""
    return np.isin(fingerprints(examples), training)


def overlap(examples: Examples, training: NDArray[np.uint64]) -> dict[str, float]:
    """The share of examples whose input occurs in training: of all examples, and by difficulty."""
    known = seen(examples, training)
    levels = np.unique(examples.difficulty)
    shares = {str(level): float(known[examples.difficulty == level].mean()) for level in levels}
    return {"all": float(known.mean()), **shares}
