"""What is a task? A source of examples of known difficulty, drawn from seeds, split by split.

Shapes: N examples, M tokens (right-padded with 0; `lengths` says where a row ends). The last token of every row is
the answer marker: the model's prediction is read there, and only there is a loss.
"""

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Any, Self

import msgspec
import numpy as np
from numpy.typing import NDArray

from loopscope.arguments import check_split_name
from loopscope.config import Seed, Settings
from loopscope.errors import UserError
from loopscope.tasks.draws import Draws, Integers

SplitSize = Annotated[int, msgspec.Meta(ge=1, le=10**8)]
StoredOrOnline = Annotated[int, msgspec.Meta(ge=0, le=10**8)]
"""How many training examples are stored; 0: they are drawn online, new ones at every step."""

_BUCKETS = 10
_RESERVED = {"validation": 0, "test": 1}
"""With `disjoint`, a tenth of the space of inputs is validation's, a tenth is test's, the rest is training's."""
_LARGE_ENOUGH = 500
"""A difficulty with fewer distinct inputs than this is shared by all splits: a tenth of it would be under 50."""


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


class Task(Settings, frozen=True, kw_only=True, tag_field="name"):
    """A task's settings and its generator; in a file, `name` says which task it is."""

    train_examples: StoredOrOnline
    validation_examples: SplitSize = 50_000
    test_examples: SplitSize = 50_000
    train_seed: Seed = 42
    validation_seed: Seed = 43
    test_seed: Seed = 44
    extrapolation_seed: Seed = 45
    disjoint: bool = False

    @property
    @abstractmethod
    def vocab_size(self) -> int: ...

    @property
    @abstractmethod
    def levels(self) -> range:
        """The difficulties of training, validation and test."""

    @abstractmethod
    def length(self, difficulty: int) -> int:
        """How many tokens the longest example of this difficulty has."""

    @abstractmethod
    def space(self, difficulty: int) -> int:
        """How many distinct inputs of this difficulty there are."""

    @abstractmethod
    def draw(self, draws: Draws, difficulty: Integers) -> Examples:
        """One example of each given difficulty."""

    @abstractmethod
    def text(self, examples: Examples) -> list[str]:
        """The inputs as a person reads them."""

    @abstractmethod
    def parse(self, texts: Sequence[str], longest: int | None = None) -> Examples:
        """The examples that are written so; the inverse of `text`. More than `longest` tokens are refused."""

    @property
    def positions(self) -> int:
        """How many positions training needs."""
        return self.length(self.levels[-1])

    def split(self, name: str, size: int | None = None, levels: range | None = None) -> Examples:
        """A split (or its first `size` examples), balanced over difficulties.

        `extrapolation` needs `levels` beyond the range of training. Of a task that draws its training examples online,
        `train` is so many others, drawn as those were.
        """
        check_split_name(name)
        if name == "extrapolation" and (levels is None or levels.start <= self.levels[-1]):
            raise UserError(
                f"The extrapolation split needs difficulties above {self.levels[-1]}, the hardest of training."
            )
        whole: int = getattr(self, "test_examples" if name == "extrapolation" else f"{name}_examples")
        if whole == 0 and size is None:
            raise UserError(
                "This task draws its training examples online: there is no stored train split; say how many to draw."
            )
        whole = whole or size or 0
        if size is not None and size > whole:
            raise UserError(f"The {name} split has {whole:,} examples, {size:,} were asked for.")
        draws = Draws(getattr(self, f"{name}_seed"))
        levels = levels or self.levels
        difficulty = np.asarray(levels)[draws.permutation(whole) % len(levels)]
        examples = self._draw_allowed(draws, difficulty, name)
        return examples if size in (None, whole) else examples.take(np.arange(size))

    def batch(self, seed: int, step: int, size: int) -> Examples:
        """The online batch of a step of a run, balanced over the difficulties of successive steps."""
        draws = Draws(self.train_seed, (seed << 32) + step)
        difficulty = np.asarray(self.levels)[(step * size + np.arange(size)) % len(self.levels)]
        return self._draw_allowed(draws, difficulty, "train")

    def _draw_allowed(self, draws: Draws, difficulty: Integers, split: str) -> Examples:
        """Draws again whatever belongs to another split, until every example is this split's own."""
        examples = self.draw(draws, difficulty)
        if not self.disjoint or split == "extrapolation":
            return examples
        shared = np.array([level for level in self.levels if self.space(level) < _LARGE_ENOUGH])
        pending = np.flatnonzero(~np.isin(difficulty, shared))
        while len(pending := pending[~_belongs(examples.take(pending), split)]):
            again = self.draw(draws, difficulty[pending])
            examples.tokens[pending, : again.tokens.shape[1]] = again.tokens
            examples.labels[pending] = again.labels
        return examples


def padded(rows: Sequence[Sequence[int]], longest: int | None) -> tuple[Integers, Integers]:
    """Rows of tokens as one array [N, M], and their lengths [N]."""
    lengths = np.array([len(row) for row in rows], dtype=np.int64)
    if longest is not None and (length := lengths.max(initial=0)) > longest:
        raise UserError(f"it makes {length:,} tokens, and the model's block size is {longest}.")
    tokens = np.zeros((len(rows), int(lengths.max(initial=1))), dtype=np.int64)
    tokens[np.arange(tokens.shape[1]) < lengths[:, None]] = [token for row in rows for token in row]
    return tokens, lengths


@lru_cache(maxsize=3)
def drawn(task: Task, split: str, size: int | None = None, levels: range | None = None) -> Examples:
    """A split, drawn once for all who need it: training, the overlap, and the recordings of several models."""
    return task.split(split, size, levels)


@lru_cache(maxsize=1)
def training_fingerprints(task: Task) -> NDArray[np.uint64]:
    """The hashes of all training inputs, sorted."""
    return np.unique(fingerprints(drawn(task, "train")))


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
    """Which inputs are among these sorted fingerprints."""
    hashes = fingerprints(examples)
    nearest = np.searchsorted(training, hashes).clip(max=len(training) - 1)
    return training[nearest] == hashes


def overlap(examples: Examples, training: NDArray[np.uint64]) -> dict[str, float]:
    """The share of examples whose input occurs in training: in all, and by difficulty."""
    known = seen(examples, training)
    levels = np.unique(examples.difficulty)
    shares = {str(level): float(known[examples.difficulty == level].mean()) for level in levels}
    return {"all": float(known.mean()), **shares}


def _belongs(examples: Examples, split: str) -> NDArray[np.bool_]:
    bucket = fingerprints(examples) % np.uint64(_BUCKETS)
    if split in _RESERVED:
        return bucket == _RESERVED[split]
    return bucket >= len(_RESERVED)
