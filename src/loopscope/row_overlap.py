"""Do two recordings hold the same examples, beyond what chance repeats? Counted by content, row by row.

Every row gets a key: of its input as text, or of its rounded answers. Draws of few inputs repeat keys by chance, within
a recording as often as between two. For n and m rows of a key among N and M that were drawn alike,

    excess = n m - N M / 2 (n (n - 1) / N (N - 1) + m (m - 1) / M (M - 1))

is 0 on average and has the variance c (c - 1) / 2 for the c = n + m rows of the key, whatever the distribution of keys;
a row that is in both adds one. Keys are weighted by 1 / (c - 1), so that a few frequent ones do not hide the others.
An excess is chance if it lies within some standard deviations, and if chance could split the keys of few rows, of which
each row is in one recording or the other by lot, nearly as evenly (Chernoff's bound). The second finds what few rows
show, and needs fewer of them, the more the sizes of the two differ.

Copies within a recording are no chance, and would hide what is shared. Where nearly all keys have the same number of
rows, which chance does for one row only, so many are a copy each and count as one. Where whole sequences are drawn, a
sequence has one key and counts as one row. All this holds for each key alone, so a sample of the keys (a sketch, small
enough for a file) serves as well as all of them.

Shapes: N examples, F numbers of an example, S sequences.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import comb, inf, sqrt
from typing import Annotated, Self

import msgspec
import numpy as np
from numpy.typing import NDArray

from loopscope.config import Count, Settings

Keys = NDArray[np.uint64]
Counts = NDArray[np.float64]
KEY_BITS = 36
"""Of 100,000 keys each, two recordings have a tenth of one in common by chance."""
_STEP = 0.125
"""Answers are rounded to this step: far above the rounding of half precision, far below real differences."""
_RUN = 4
"""The key of a sequence joins so many neighbouring decisions, because a single one repeats in many texts."""
_SKETCHED_KEYS = 4096
"""Some 30 kB of a policy's file."""
_GAPS = r"^[0-9a-f]{1,9}(\*[0-9]{1,12})?( [0-9a-f]{1,9}(\*[0-9]{1,12})?)*$"
_MIN_ALIKE = 0.9
"""The share of keys that have the same number of rows where rows are copied; chance does it for a third at most."""
_DEVIATIONS = 4
"""An excess within so many standard deviations can be chance."""
_MAX_CHANCE = 0.001
"""An event that is more probable than this may be chance."""
_FEW_ROWS = 4
"""A key of more rows is split evenly by any design that draws as many of each difficulty."""
_TILTS = np.geomspace(0.001, 64, 48)
"""Chernoff's bound is evaluated at these tilts, and the smallest bound counts."""
_AT_ONCE = 1 << 22
"""Numbers that are projected at a time."""


class KeySketch(Settings, frozen=True, kw_only=True):
    """A sketch of a recording: its smallest row keys with their counts, the same for each copy of it."""

    units: Count  # sequences, or examples
    keys: Annotated[str, msgspec.Meta(pattern=_GAPS)]  # hexadecimal, from key to key; `*3` behind one that 3 rows have
    complete: bool  # all keys are here


@dataclass(frozen=True)
class RowKeys:
    """The distinct row keys of a recording, rising, and how many examples (or sequences) have each."""

    keys: Keys
    counts: NDArray[np.int64]
    units: int
    largest: float = inf  # keys beyond this are not listed

    @classmethod
    def of(cls, keys: Keys) -> Self:
        """Of the key of every unit; copies count once where nearly all keys have as many."""
        different, counts = np.unique(keys, return_counts=True)
        sizes, often = np.unique(counts, return_counts=True)
        if len(sizes) and often.max() >= _MIN_ALIKE * len(different):
            counts = -(-counts // sizes[often.argmax()])
        return cls(different, counts, int(counts.sum()))

    @classmethod
    def of_sketch(cls, sketch: KeySketch) -> Self:
        words = [word.partition("*") for word in sketch.keys.split()]
        keys = np.cumsum([int(gap, 16) for gap, _, _ in words], dtype=np.uint64)
        counts = np.array([int(count or 1) for _, _, count in words])
        return cls(keys, counts, sketch.units, inf if sketch.complete else float(keys[-1]))

    def sketch(self) -> KeySketch:
        keys, counts = self.keys[:_SKETCHED_KEYS], self.counts[:_SKETCHED_KEYS].tolist()
        gaps = np.diff(keys, prepend=np.uint64(0)).tolist()
        words = [f"{gap:x}" + (f"*{count}" if count > 1 else "") for gap, count in zip(gaps, counts, strict=True)]
        return KeySketch(units=self.units, keys=" ".join(words), complete=len(self.keys) <= _SKETCHED_KEYS)

    def num_shared(self, other: "RowKeys") -> int:
        """The number of units of `other` that this recording has, too, beyond chance."""
        largest = min(self.largest, other.largest)
        ours, theirs = self._up_to(largest), other._up_to(largest)
        keys = _merged_keys(ours.keys, theirs.keys)
        n, m = ours._counts_of(keys), theirs._counts_of(keys)
        sizes = (self.units, other.units)
        if min(sizes) < 2 or not m.any():
            return 0
        rows, excess = n + m, _overlap_excess(n, m, *sizes)
        total, weights = float(excess.sum()), 1 / np.maximum(rows - 1, 1)
        deviation = sqrt(float((weights**2 * rows * (rows - 1)).sum()) / 2)
        if total <= _DEVIATIONS * deviation and _chance_of_excess(rows, excess, *sizes) > _MAX_CHANCE:
            return 0
        shared = min(total, float((weights * m)[n > 0].sum()))
        return max(0, round(shared / float((weights * m).sum()) * other.units))

    def _up_to(self, largest: float) -> "RowKeys":
        listed = self.keys <= largest
        return RowKeys(self.keys[listed], self.counts[listed], self.units, largest)

    def _counts_of(self, keys: Keys) -> Counts:
        """The counts of these keys as floats, so that their squares stay finite."""
        found = np.zeros(len(keys))
        found[np.searchsorted(keys, self.keys)] = self.counts
        return found


def _overlap_excess(n: Counts, m: Counts, size: int, other_size: int) -> Counts:
    """The weighted excess of keys with n and m rows over what chance splits of this size give."""
    within = n * (n - 1) / (size * (size - 1)) + m * (m - 1) / (other_size * (other_size - 1))
    return (n * m - size * other_size * within / 2) / np.maximum(n + m - 1, 1)


def _chance_of_excess(rows: Counts, excess: Counts, size: int, other_size: int) -> float:
    """An upper bound on the probability that chance gives keys of few rows such an excess."""
    few = (rows > 1) & (rows <= _FEW_ROWS)
    exponents = -_TILTS * excess[few].sum()
    ours = size / (size + other_size)
    for number in range(2, _FEW_ROWS + 1):
        n = np.arange(number + 1.0)
        likely = [comb(number, k) * ours**k * (1 - ours) ** (number - k) for k in range(number + 1)]
        tilted = np.exp(np.outer(_TILTS, _overlap_excess(n, number - n, size, other_size))) @ likely
        exponents += np.sum(rows == number) * np.log(tilted)
    return float(np.exp(min(0.0, exponents.min())))


def _merged_keys(ours: Keys, theirs: Keys) -> Keys:
    """Merge two rising arrays of keys, each key once; this takes linear time."""
    keys = np.sort(np.concatenate((ours, theirs)), kind="stable")
    return keys[np.append(True, keys[1:] != keys[:-1])[: len(keys)]]


def text_keys(texts: Sequence[str]) -> Keys:
    """[N] the row key of every text."""
    hashes = b"".join(hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=8).digest() for text in texts)
    return np.frombuffer(hashes, dtype="<u8") >> np.uint64(64 - KEY_BITS)


def number_keys(whole: NDArray[np.int64], scores: NDArray[np.floating] | None = None, step: float = _STEP) -> Keys:
    """[N] row keys from whole numbers [N, F] and from scores [N, ...], which may differ by rounding.

    Real numbers are projected on three random directions: the fewer are rounded, the fewer fall on the other side.
    """
    mixed = np.zeros(len(whole), dtype=np.uint64)
    rounded = [] if scores is None else [_row_projections(scores.reshape(len(scores), -1), step)]
    for column in np.concatenate([whole, *rounded], axis=1).T:
        mixed = (mixed ^ column.astype(np.uint64)) * np.uint64(0x9E3779B97F4A7C15)
        mixed ^= mixed >> np.uint64(29)
        mixed *= np.uint64(0xD6E8FEB86659FD93)
        mixed ^= mixed >> np.uint64(32)
    return mixed >> np.uint64(64 - KEY_BITS)


def sequence_keys(keys: Keys, sequences: NDArray[np.integer]) -> Keys:
    """[S] the key of every sequence, from the row keys [N] of its decisions.

    So a sequence is mostly known again if a few of its decisions are rounded to the other side, or cut off.
    """
    _, number, lengths = np.unique(sequences, return_inverse=True, return_counts=True)
    order = np.argsort(number, kind="stable")
    start = np.repeat(np.cumsum(lengths) - lengths, lengths)
    length, place = np.repeat(lengths, lengths), np.arange(len(keys)) - start
    runs = [keys[order[start + (place + ahead) % length]] for ahead in range(_RUN)]  # its first follows its last
    return np.minimum.reduceat(number_keys(np.stack(runs, axis=1).astype(np.int64)), np.cumsum(lengths) - lengths)


def _row_projections(scores: NDArray[np.floating], step: float) -> NDArray[np.int64]:
    """[N, 3] random projections of the rows, in steps; numbers that are not finite count as 0."""
    directions = np.random.default_rng(0).standard_normal((scores.shape[1], 3))
    directions /= np.linalg.norm(directions, axis=0)
    rows = max(1, _AT_ONCE // scores.shape[1])
    parts = (scores[start : start + rows].astype(np.float64) for start in range(0, len(scores), rows))
    return np.concatenate(
        [np.rint(np.where(np.isfinite(part), part, 0) @ directions / step).astype(np.int64) for part in parts]
    )


def common_kind(ours: Mapping[str, object], theirs: Mapping[str, object]) -> str | None:
    """The most reliable kind of row key that two recordings share; None if they share none."""
    return next((kind for kind in ours if kind in theirs), None)
