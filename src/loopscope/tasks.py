"""Where do examples come from? Tasks draw examples of known difficulty from seeds, split by split.

- MANO: what is the value of this arithmetic expression, modulo a small number? Expressions are in prefix notation;
  difficulty is the number of operations. An expression with n operations draws its operator uniformly, gives its left
  operand k ~ U{0..n-1} operations and the right one the rest; leaves are uniform. There is no length token, so
  difficulty has to be inferred from the expression itself.
- parity: is the number of ones in this bit string odd? Difficulty is the number of bits.

Shapes: N examples, M tokens. A row is `begin, input, answer marker`, right-padded with 0 (`lengths` says where it
ends). The model's prediction is read at the marker, and only there is a loss. Tokens: first the symbols of the input,
then begin and the marker.
"""

import math
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Any, ClassVar, Self

import msgspec
import numpy as np
from numpy.typing import NDArray

from loopscope.config import Seed, Settings
from loopscope.errors import UserError
from loopscope.trajectory import check_split_name

Integers = NDArray[np.int64]
SplitSize = Annotated[int, msgspec.Meta(ge=1, le=10**8)]
StoredOrOnline = Annotated[int, msgspec.Meta(ge=0, le=10**8)]
"""How many training examples are stored; 0: they are drawn online, new ones at every step."""

_BUCKETS = 10
_RESERVED = {"validation": 0, "test": 1}
"""With `disjoint`, a tenth of the space of inputs is validation's, a tenth is test's, the rest is training's."""
_MIN_DIVIDED_SPACE = 500
"""A difficulty with fewer distinct inputs than this is shared by all splits: a tenth of it would be under 50."""
_OPERATIONS = {"+": np.add, "-": np.subtract, "*": np.multiply}


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
    separator: ClassVar[str] = " "  # between the symbols of an input, as a person reads it

    @property
    @abstractmethod
    def symbols(self) -> list[str]:
        """What an input is made of, as a person reads it; their numbers are the tokens."""

    @property
    @abstractmethod
    def input_form(self) -> str:
        """What an input is, in words."""

    @property
    @abstractmethod
    def levels(self) -> range:
        """The difficulties of training, validation and test."""

    @abstractmethod
    def length(self, difficulty: Any) -> Any:
        """How many tokens an example of this difficulty has."""

    @abstractmethod
    def space(self, difficulty: int) -> int:
        """How many distinct inputs of this difficulty there are."""

    @abstractmethod
    def draw_inputs(self, draws: Draws, difficulty: Integers) -> Integers:
        """One input of each given difficulty; what stands beyond its end does not matter."""

    def is_input(self, row: list[int]) -> bool:
        """Whether these symbols make an input."""
        return len(row) > 0

    @abstractmethod
    def answers(self, tokens: Integers, lengths: Integers) -> Integers:
        """The right answers to rows [N, M]."""

    @property
    def vocab_size(self) -> int:
        return len(self.symbols) + 2

    @property
    def positions(self) -> int:
        """How many positions training needs."""
        return int(self.length(self.levels[-1]))

    def draw(self, draws: Draws, difficulty: Integers) -> Examples:
        """One example of each given difficulty."""
        return self._framed(self.draw_inputs(draws, difficulty), self.length(difficulty), difficulty)

    def text(self, examples: Examples) -> list[str]:
        """The inputs as a person reads them."""
        rows = zip(examples.tokens.tolist(), examples.lengths.tolist(), strict=True)
        symbols = self.symbols
        return [self.separator.join(map(symbols.__getitem__, row[1 : length - 1])) for row, length in rows]

    def parse(self, texts: Sequence[str], longest: int | None = None) -> Examples:
        """The examples that are written so; the inverse of `text`. More than `longest` tokens are rejected."""
        numbers = {symbol: token for token, symbol in enumerate(self.symbols)}
        rows = [[numbers.get(symbol, -1) for symbol in (text.split() if self.separator else text)] for text in texts]
        for text, row in zip(texts, rows, strict=True):
            if -1 in row or not self.is_input(row):
                raise UserError(f"'{text[:60]}' is not {self.input_form}.")
            if longest is not None and len(row) + 2 > longest:
                raise UserError(f"it makes {len(row) + 2:,} tokens, and the model's block size is {longest}.")
        lengths = np.array([len(row) + 2 for row in rows], dtype=np.int64)
        inputs = np.zeros((len(rows), int(lengths.max(initial=2)) - 2), dtype=np.int64)
        inputs[np.arange(inputs.shape[1]) < lengths[:, None] - 2] = [token for row in rows for token in row]
        difficulty = (lengths - self.length(0)) // (self.length(1) - self.length(0))
        return self._framed(inputs, lengths, difficulty)

    def _framed(self, inputs: Integers, lengths: Integers, difficulty: Integers) -> Examples:
        """Examples of inputs [N, M - 2], with begin and marker; what stands beyond an input's end is cut off."""
        tokens = np.zeros((len(inputs), inputs.shape[1] + 2), dtype=np.int64)
        tokens[:, 0] = self.vocab_size - 2
        tokens[:, 1:-1] = np.where(np.arange(inputs.shape[1]) < lengths[:, None] - 2, inputs, 0)
        tokens[np.arange(len(inputs)), lengths - 1] = self.vocab_size - 1
        return Examples(tokens, lengths, self.answers(tokens, lengths), difficulty)

    def split(self, name: str, size: int | None = None, levels: range | None = None) -> Examples:
        """A split (or its first `size` examples), balanced over difficulties.

        `extrapolation` needs `levels` beyond the range of training. If the task draws its training examples online,
        `train` has `size` other examples, drawn in the same way.
        """
        check_split_name(name)
        if name == "extrapolation" and (levels is None or levels.start <= self.levels[-1]):
            raise UserError(
                f"The extrapolation split needs difficulties above {self.levels[-1]}, the hardest of training."
            )
        stored: int = getattr(self, "test_examples" if name == "extrapolation" else f"{name}_examples")
        whole = stored or size or 0
        if not whole or (size or 0) > whole:
            raise UserError(
                f"The {name} split has {whole:,} examples, {size:,} were asked for."
                if whole and size
                else "This task draws its training examples online, so it stores none; say how many to draw."
            )
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
        """Draws again what belongs to another split, until every example is this split's own."""
        examples = self.draw(draws, difficulty)
        if not self.disjoint or split == "extrapolation":
            return examples
        shared = np.array([level for level in self.levels if self.space(level) < _MIN_DIVIDED_SPACE])
        pending = np.flatnonzero(~np.isin(difficulty, shared))
        while len(pending := pending[~_belongs(examples.take(pending), split)]):
            again = self.draw(draws, difficulty[pending])
            examples.tokens[pending, : again.tokens.shape[1]] = again.tokens
            examples.labels[pending] = again.labels
        return examples


class Mano(Task, frozen=True, kw_only=True, tag="mano"):
    modulus: Annotated[int, msgspec.Meta(ge=2, le=2**20)] = 23
    operators: str = "+-*"
    max_operations: Annotated[int, msgspec.Meta(ge=1, le=1000)] = 10
    train_examples: StoredOrOnline = 50_000

    def __post_init__(self) -> None:
        known = set(self.operators) <= set(_OPERATIONS)
        if not self.operators or not known or len(set(self.operators)) != len(self.operators):
            raise ValueError(f"operators must be distinct ones of {' '.join(_OPERATIONS)}, got '{self.operators}'")

    @property
    def symbols(self) -> list[str]:
        return [*map(str, range(self.modulus)), *self.operators]

    @property
    def levels(self) -> range:
        return range(1, self.max_operations + 1)

    @property
    def input_form(self) -> str:
        return (
            f"an expression in prefix notation, such as '{self.operators[0]} 1 0', with numbers below {self.modulus} "
            f"and the operators {' '.join(self.operators)}"
        )

    def length(self, difficulty: Any) -> Any:
        return 2 * difficulty + 3

    def space(self, difficulty: int) -> int:
        trees = math.comb(2 * difficulty, difficulty) // (difficulty + 1)
        return trees * len(self.operators) ** difficulty * self.modulus ** (difficulty + 1)

    def is_input(self, row: list[int]) -> bool:
        open_operands = np.cumsum([1, *(1 if token >= self.modulus else -1 for token in row)])
        return bool((open_operands[:-1] > 0).all() and not open_operands[-1])

    def draw_inputs(self, draws: Draws, difficulty: Integers) -> Integers:
        """Writes all expressions at once, token by token; each row keeps a stack of the sizes still to be written."""
        rows = np.arange(len(difficulty))
        longest = int(difficulty.max(initial=0))
        stack = np.zeros((len(rows), longest + 2), dtype=np.int64)
        stack[:, 0] = difficulty
        top = np.zeros(len(rows), dtype=np.int64)
        tokens = np.zeros((len(rows), 2 * longest + 1), dtype=np.int64)
        for position in range(tokens.shape[1]):
            size = stack[rows, top]  # a finished row stays at the bottom of its stack and writes what is cut off later
            split = size > 0
            symbol = draws.integers(np.where(split, len(self.operators), self.modulus))
            left = draws.integers(np.maximum(size, 1))
            tokens[:, position] = np.where(split, self.modulus + symbol, symbol)
            stack[rows, top] = np.where(split, size - 1 - left, 0)
            top = np.where(split, top + 1, np.maximum(top - 1, 0))
            stack[rows[split], top[split]] = left[split]
        return tokens

    def answers(self, tokens: Integers, lengths: Integers) -> Integers:
        """Evaluates all expressions at once, from the right, with a stack of values a row."""
        expression = tokens[:, 1:-1]
        rows = np.arange(len(expression))
        stack = np.zeros((len(rows), expression.shape[1] // 2 + 3), dtype=np.int64)
        top = np.full(len(rows), -1)
        for position in reversed(range(expression.shape[1])):
            token = expression[:, position]
            inside = position < lengths - 2
            operator = inside & (token >= self.modulus)
            left, right = stack[rows, top], stack[rows, top - 1]
            value = token
            for index, name in enumerate(self.operators):
                chosen = token == self.modulus + index
                value = np.where(chosen, _OPERATIONS[name](left, right) % self.modulus, value)
            top = np.where(inside, np.where(operator, top - 1, top + 1), top)
            stack[rows[inside], top[inside]] = value[inside]
        return stack[rows, 0]


class Parity(Task, frozen=True, kw_only=True, tag="parity"):
    max_bits: Annotated[int, msgspec.Meta(ge=1, le=10_000)] = 40
    train_examples: StoredOrOnline = 0
    separator: ClassVar[str] = ""

    @property
    def symbols(self) -> list[str]:
        return ["0", "1"]

    @property
    def levels(self) -> range:
        return range(1, self.max_bits + 1)

    @property
    def input_form(self) -> str:
        return "a string of the bits 0 and 1"

    def length(self, difficulty: Any) -> Any:
        return difficulty + 2

    def space(self, difficulty: int) -> int:
        return int(2**difficulty)

    def draw_inputs(self, draws: Draws, difficulty: Integers) -> Integers:
        return draws.integers(np.full((len(difficulty), int(difficulty.max(initial=0))), 2))

    def answers(self, tokens: Integers, lengths: Integers) -> Integers:
        return (tokens == 1).sum(axis=1) % 2


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
    """Which inputs are among these fingerprints."""
    return np.isin(fingerprints(examples), training)


def overlap(examples: Examples, training: NDArray[np.uint64]) -> dict[str, float]:
    """The share of examples whose input occurs in training: in all, and by difficulty."""
    known = seen(examples, training)
    levels = np.unique(examples.difficulty)
    shares = {str(level): float(known[examples.difficulty == level].mean()) for level in levels}
    return {"all": float(known.mean()), **shares}


def _belongs(examples: Examples, split: str) -> NDArray[np.bool_]:
    bucket = fingerprints(examples) % np.uint64(_BUCKETS)
    return bucket == _RESERVED[split] if split in _RESERVED else bucket >= len(_RESERVED)
