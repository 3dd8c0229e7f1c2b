"""Do two recordings hold the same examples, beyond what chance repeats? Counted by content, row by row.

Every row gets a key: of its input as text, or of its rounded answers. Draws of few inputs repeat keys by chance, within
a recording as often as between two. For n and m rows of a key among N and M that were drawn alike,

    excess = n m - N M / 2 (n (n - 1) / N (N - 1) + m (m - 1) / M (M - 1))

is 0 on average and has the variance c (c - 1) / 2 for the c = n + m rows of the key, whatever the distribution of keys;
a row that is in both adds one. Keys are weighted by 1 / (c - 1), so that a few frequent ones do not hide the others.
Where whole sequences are drawn, the variance is larger by their length. All this holds for each key alone, so a sample
of the keys (a sketch, small enough for a file) serves as well as all of them.

Shapes: N examples, F numbers of an example.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf, sqrt
from typing import Annotated, Self

import msgspec
import numpy as np
from numpy.typing import NDArray

from loopscope.config import Settings, Tally

Keys = NDArray[np.uint64]
HexKey = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{13}$")]
_STEP = 0.125
"""To which answers are rounded: far above the rounding of half precision, far below how examples differ."""
_SKETCHED_KEYS = 128
_DEVIATIONS = 4
"""An excess within so many standard deviations can be chance."""
_AT_ONCE = 1 << 22
"""Numbers that are projected at a time."""


class KeySketch(Settings, frozen=True, kw_only=True):
    """The smallest keys of a recording with their counts: a sample of its inputs, the same for every recording."""

    examples: Tally
    units: Tally  # sequences, or examples
    counts: dict[HexKey, Tally]  # key -> rows
    complete: bool  # all keys are here


@dataclass(frozen=True)
class RowKeys:
    """The different keys of a recording, ascending, and how many rows have each."""

    keys: Keys
    counts: NDArray[np.int64]
    examples: int
    units: int
    largest: float = inf  # keys beyond this are not listed

    @classmethod
    def of(cls, keys: Keys, units: int) -> Self:
        """Of the key [N] of every row."""
        return cls(*np.unique(keys, return_counts=True), len(keys), units)

    @classmethod
    def of_sketch(cls, sketch: KeySketch) -> Self:
        keys = np.array([int(key, 16) for key in sketch.counts], dtype=np.uint64)
        largest = inf if sketch.complete else float(keys.max(initial=0))
        return cls(keys, np.array([*sketch.counts.values()]), sketch.examples, sketch.units, largest)

    def sketch(self) -> KeySketch:
        smallest = zip(self.keys[:_SKETCHED_KEYS].tolist(), self.counts[:_SKETCHED_KEYS].tolist(), strict=True)
        return KeySketch(
            examples=self.examples,
            units=self.units,
            counts={f"{key:013x}": count for key, count in smallest},
            complete=len(self.keys) <= _SKETCHED_KEYS,
        )

    def num_shared(self, other: "RowKeys") -> int:
        """How many rows of `other` are in this recording, too, beyond what chance explains."""
        largest = min(self.largest, other.largest)
        ours, theirs = self._up_to(largest), other._up_to(largest)
        keys = np.union1d(ours.keys, theirs.keys)
        n, m = ours._counts_of(keys), theirs._counts_of(keys)
        size, other_size = self.examples, other.examples
        if min(size, other_size) < 2 or not m.any():
            return 0
        within = n * (n - 1) / (size * (size - 1)) + m * (m - 1) / (other_size * (other_size - 1))
        rows = n + m
        weights = 1 / np.maximum(rows - 1, 1)
        excess = float((weights * (n * m - size * other_size * within / 2)).sum())
        length = max(size / self.units, other_size / other.units)
        deviation = sqrt(float((weights**2 * rows * (rows - 1)).sum()) / 2 * length)
        if excess <= _DEVIATIONS * deviation:
            return 0
        shared = min(excess, float((weights * m)[n > 0].sum()))
        return round(shared / float((weights * m).sum()) * other_size)

    def _up_to(self, largest: float) -> "RowKeys":
        listed = self.keys <= largest
        return RowKeys(self.keys[listed], self.counts[listed], self.examples, self.units, largest)

    def _counts_of(self, keys: Keys) -> NDArray[np.float64]:
        """As floats: squares of counts stay finite."""
        found = np.zeros(len(keys))
        found[np.searchsorted(keys, self.keys)] = self.counts
        return found


def text_keys(texts: Sequence[str]) -> Keys:
    """[N] a key of every text, in 52 bits: exact in JSON and as a float."""
    hashes = b"".join(hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=8).digest() for text in texts)
    return np.frombuffer(hashes, dtype="<u8") >> np.uint64(12)


def number_keys(whole: NDArray[np.int64], scores: NDArray[np.floating] | None = None) -> Keys:
    """[N] a key of whole numbers [N, F], and of real ones [N, ...], which may differ a little where the row is one.

    Real numbers are projected on three random directions: the fewer are rounded, the fewer fall on the other side.
    """
    mixed = np.zeros(len(whole), dtype=np.uint64)
    rounded = [] if scores is None else [_projected(scores.reshape(len(scores), -1))]
    for column in np.concatenate([whole, *rounded], axis=1).T:
        mixed = (mixed ^ column.astype(np.uint64)) * np.uint64(0x9E3779B97F4A7C15)
        mixed ^= mixed >> np.uint64(29)
        mixed *= np.uint64(0xD6E8FEB86659FD93)
        mixed ^= mixed >> np.uint64(32)
    return mixed >> np.uint64(12)


def _projected(scores: NDArray[np.floating]) -> NDArray[np.int64]:
    """[N, 3] projections of the rows, in steps; what is not finite (a missing class, a first loop) counts as 0."""
    directions = np.random.default_rng(0).standard_normal((scores.shape[1], 3))
    directions /= np.linalg.norm(directions, axis=0)
    step = max(1, _AT_ONCE // scores.shape[1])
    parts = (scores[start : start + step].astype(np.float64) for start in range(0, len(scores), step))
    return np.concatenate(
        [np.rint(np.where(np.isfinite(part), part, 0) @ directions / _STEP).astype(np.int64) for part in parts]
    )


def common_kind(ours: Mapping[str, object], theirs: Mapping[str, object]) -> str | None:
    """The first kind of key that both have, the surest first."""
    return next((kind for kind in ours if kind in theirs), None)
