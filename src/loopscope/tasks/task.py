"""What is a task? A generator of examples of known difficulty, with its splits.

A task defines its symbols, draws inputs of a given difficulty and answers them. Splits, seeds, disjointness and
extrapolation are the same for all tasks; `custom_task.py` imports custom tasks.

Shapes: N examples, M tokens. Tokens: first the symbols of the input, then begin and the answer marker.
"""

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Annotated, Any, ClassVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from loopscope.config import Seed, Settings
from loopscope.errors import UserError, reject
from loopscope.tasks.examples import Draws, Examples, Integers, fingerprints
from loopscope.trajectory import check_split_name

SplitSize = Annotated[int, msgspec.Meta(ge=1, le=10**8)]
StoredOrOnline = Annotated[int, msgspec.Meta(ge=0, le=10**8)]
"""The number of stored training examples; with 0, every step draws new examples."""

_BUCKETS = 10
_RESERVED = {"validation": 0, "test": 1}
"""With `disjoint`, a tenth of the input space is for validation, a tenth for test, and the rest for training."""
_MIN_DIVIDED_SPACE = 500
"""All splits share a difficulty with fewer distinct inputs than this: a tenth of them would be under 50."""
_MAX_REDRAWS = 1_000
"""At least a tenth of all draws belongs to a split, so only a difficulty with very few inputs needs more redraws."""


class Splits(Settings, frozen=True, kw_only=True):
    """Set the sizes of a task's splits, and the seeds from which they are drawn.

    Parameters
    ----------
    train_examples
        The number of stored training examples; 0 draws new examples at every step.
    validation_examples
        The number of examples in the validation split.
    test_examples
        The number of examples in the test split.
    train_seed
        The seed of the train split.
    validation_seed
        The seed of the validation split.
    test_seed
        The seed of the test split.
    extrapolation_seed
        The seed of the extrapolation split.
    disjoint
        Whether no input occurs in two splits.
    """

    train_examples: StoredOrOnline = 0
    validation_examples: SplitSize = 50_000
    test_examples: SplitSize = 50_000
    train_seed: Seed = 42
    validation_seed: Seed = 43
    test_seed: Seed = 44
    extrapolation_seed: Seed = 45
    disjoint: bool = False


class Task(Splits, frozen=True, kw_only=True, tag_field="name"):
    """Generate examples of known difficulty; the fields of the class are the settings of the task.

    A custom task defines `symbols`, `levels`, `length`, `draw_inputs` and `answers`. All other methods of a task have
    defaults.

    Parameters
    ----------
    train_examples, validation_examples, test_examples
        Sizes of the splits; if `train_examples` is 0, every training step draws new examples.
    train_seed, validation_seed, test_seed, extrapolation_seed
        The seeds of the splits.
    disjoint
        Whether no input occurs in two splits (default: no).

    Examples
    --------
    >>> class Last(ls.Task, frozen=True, kw_only=True, tag="last"):
    ...     symbols = ["a", "b"]
    ...     levels = range(1, 4)
    ...     def length(self, difficulty):
    ...         return difficulty + 2
    ...     def draw_inputs(self, draws, difficulty):
    ...         return draws.integers(np.full((len(difficulty), difficulty.max()), 2))
    ...     def answers(self, tokens, lengths):
    ...         return tokens[np.arange(len(tokens)), lengths - 2]
    >>> task = Last()
    >>> task.text(task.split("test", 2))
    ['a b', 'a']
    """

    separator: ClassVar[str] = " "  # between the symbols of an input, as a person reads it

    @property
    @abstractmethod
    def symbols(self) -> list[str]:
        """List the symbols of inputs in readable form; the tokens are the indices of the symbols."""

    @property
    @abstractmethod
    def levels(self) -> range:
        """Return the difficulties of the training, validation and test splits."""

    @abstractmethod
    def length(self, difficulty: Any) -> Any:
        """Count the tokens of an example: its symbols and two special tokens.

        Parameters
        ----------
        difficulty
            One difficulty, or [N] difficulties.

        Returns
        -------
        int or NDArray
            The number of tokens of an example of each difficulty.
        """

    @abstractmethod
    def draw_inputs(self, draws: Draws, difficulty: Integers) -> Integers:
        """Draw one input for each given difficulty.

        Parameters
        ----------
        draws
            The source of random draws.
        difficulty
            [N] the difficulties of the examples.

        Returns
        -------
        NDArray[np.int64]
            [N, M - 2] indices of symbols; LoopScope ignores values after the end of an input.
        """

    @abstractmethod
    def answers(self, tokens: Integers, lengths: Integers) -> Integers:
        """Compute the right answers of examples.

        Parameters
        ----------
        tokens
            [N, M] rows; the input begins at the second token.
        lengths
            [N] the length of each row.

        Returns
        -------
        NDArray[np.int64]
            [N] the right answers, as indices of symbols.
        """

    def difficulties(self, tokens: Integers, lengths: Integers) -> Integers:
        """Compute the difficulty of examples; by default, the length of an example determines its difficulty.

        Parameters
        ----------
        tokens
            [N, M] rows of tokens.
        lengths
            [N] the length of each row.

        Returns
        -------
        NDArray[np.int64]
            [N] the difficulties of the examples.
        """
        difficulty: Integers = (lengths - self.length(0)) // (self.length(1) - self.length(0))
        return difficulty

    @property
    def hardest(self) -> int | None:
        """Return the largest difficulty that an input can have; None if there is no limit."""
        return None

    def space(self, difficulty: int) -> int:
        """Return a lower bound for the number of distinct inputs; by default, every string of symbols is an input.

        Parameters
        ----------
        difficulty
            A difficulty of the task.

        Returns
        -------
        int
            The number of distinct inputs of the given difficulty, or a smaller number.
        """
        return int(len(self.symbols) ** (self.length(difficulty) - 2))

    @property
    def input_form(self) -> str:
        """Return a description of an input, for error messages."""
        return f"an input of the task {type(self).__name__}"

    def is_input(self, row: list[int]) -> bool:
        """Tell whether symbols form a valid input.

        Parameters
        ----------
        row
            Indices of symbols.

        Returns
        -------
        bool
            True if the input is valid.
        """
        return len(row) > 0

    @property
    def vocab_size(self) -> int:
        """Return the size of the vocabulary: the symbols, the begin token and the answer marker."""
        return len(self.symbols) + 2

    @property
    def positions(self) -> int:
        """Return the number of token positions that the longest training example needs."""
        return int(np.max(self.length(np.asarray(self.levels))))

    def draw(self, draws: Draws, difficulty: Integers) -> Examples:
        """Draw one example for each given difficulty.

        Parameters
        ----------
        draws
            The source of random draws.
        difficulty
            [N] the difficulties of the examples.

        Returns
        -------
        Examples
            Tokens, lengths, labels and difficulties.
        """
        lengths = np.asarray(self.length(difficulty), dtype=np.int64)
        return self._framed(self.draw_inputs(draws, difficulty), lengths, difficulty)

    def text(self, examples: Examples) -> list[str]:
        """Write inputs in readable form.

        Parameters
        ----------
        examples
            Examples of the task.

        Returns
        -------
        list[str]
            The input of every example.
        """
        rows = zip(examples.tokens.tolist(), examples.lengths.tolist(), strict=True)
        symbols = self.symbols
        return [self.separator.join(map(symbols.__getitem__, row[1 : length - 1])) for row, length in rows]

    def parse(self, texts: Sequence[str], longest: int | None = None) -> Examples:
        """Read examples from texts in the format of `text`.

        Parameters
        ----------
        texts
            Inputs in readable form.
        longest
            The maximum number of tokens (default: no limit).

        Returns
        -------
        Examples
            The examples, with their answers.

        Raises
        ------
        UserError
            If a text is not a valid input, or if a text is too long.
        """
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
        return self._framed(inputs, lengths)

    def _framed(self, inputs: Integers, lengths: Integers, difficulty: Integers | None = None) -> Examples:
        """Examples of inputs [N, M - 2], with begin and answer marker; symbols after an input's end are cut off."""
        reject(self._misshapen(inputs, lengths))
        tokens = np.zeros((len(inputs), inputs.shape[1] + 2), dtype=np.int64)
        tokens[:, 0] = self.vocab_size - 2
        tokens[:, 1:-1] = np.where(np.arange(inputs.shape[1]) < lengths[:, None] - 2, inputs, 0)
        tokens[np.arange(len(inputs)), lengths - 1] = self.vocab_size - 1
        labels = self.answers(tokens, lengths)
        reject(self._out_of_range(tokens[:, 1:-1], lengths, labels))
        if difficulty is None:
            difficulty = self.difficulties(tokens, lengths)
        return Examples(tokens, lengths, labels.astype(np.int64), difficulty)

    def _misshapen(self, inputs: Any, lengths: Integers) -> Iterator[str]:
        longest = int(lengths.max(initial=2)) - 2
        if not are_integers(inputs, (len(lengths), None)) or inputs.shape[1] < longest:
            rows = f"{len(lengths)} rows of whole numbers, with {longest} symbols where `length` says so"
            yield f"draw_inputs of the task {type(self).__name__} must return {rows}; it returned {_type_of(inputs)}."

    def _out_of_range(self, inputs: Integers, lengths: Integers, labels: Any) -> Iterator[str]:
        last, inside = len(self.symbols) - 1, np.arange(inputs.shape[1]) < lengths[:, None] - 2
        if inputs.min(initial=0) < 0 or inputs.max(initial=0, where=inside) > last:
            yield f"draw_inputs of the task {type(self).__name__} returned numbers that are of no symbol (0..{last})."
        if not are_integers(labels, lengths.shape):
            yield f"answers of the task {type(self).__name__} must return a whole number a row; got {_type_of(labels)}."
        elif labels.min(initial=0) < 0 or labels.max(initial=0) > last:
            found = f"{labels.min()} to {labels.max()}"
            yield f"answers of the task {type(self).__name__} must return numbers of symbols (0..{last}); got {found}."

    def split(self, name: str, size: int | None = None, levels: range | None = None) -> Examples:
        """Draw a split that is balanced over difficulties.

        Parameters
        ----------
        name
            "train", "validation", "test" or "extrapolation".
        size
            The number of examples to take from the beginning of the split (default: all).
        levels
            The difficulties (default: the difficulties in training); extrapolation needs this parameter.

        Returns
        -------
        Examples
            The examples of the split.

        Raises
        ------
        UserError
            If the split has fewer examples than requested, or lacks a requested difficulty.
        """
        check_split_name(name)
        if name == "extrapolation" and (levels is None or levels.start <= self.levels[-1]):
            raise UserError(
                f"The extrapolation split needs difficulties above {self.levels[-1]}, the hardest of training."
            )
        if levels is not None and self.hardest is not None and levels[-1] > self.hardest:
            raise UserError(f"No input of this task is harder than {self.hardest}; choose other levels.")
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
        """Draw the batch for a training step.

        Parameters
        ----------
        seed
            The seed of the run.
        step
            The number of the training step.
        size
            The number of examples in the batch.

        Returns
        -------
        Examples
            The examples of the batch; successive batches together are balanced over difficulties.
        """
        draws = Draws(self.train_seed, (seed << 32) + step)
        difficulty = np.asarray(self.levels)[(step * size + np.arange(size)) % len(self.levels)]
        return self._draw_allowed(draws, difficulty, "train")

    def _draw_allowed(self, draws: Draws, difficulty: Integers, split: str) -> Examples:
        """Draw examples of the split; inputs that belong to another split are drawn again."""
        examples = self.draw(draws, difficulty)
        if not self.disjoint or split == "extrapolation":
            return examples
        shared = np.array([level for level in self.levels if self.space(level) < _MIN_DIVIDED_SPACE])
        pending, redraws = np.flatnonzero(~np.isin(difficulty, shared)), 0
        while len(pending := pending[~_belong_to_split(examples.take(pending), split)]):
            redraws += 1
            if redraws > _MAX_REDRAWS:
                level = difficulty[pending[0]]
                raise UserError(
                    f"Difficulty {level} has too few inputs for splits of its own, and `space` says "
                    f"{self.space(level):,}; correct `space`, or set task.disjoint = false."
                )
            again = self.draw(draws, difficulty[pending])
            examples.tokens[pending, : again.tokens.shape[1]] = again.tokens
            examples.labels[pending] = again.labels
        return examples


@lru_cache(maxsize=3)
def drawn(task: Task, split: str, size: int | None = None, levels: range | None = None) -> Examples:
    """A split of a task, drawn once for all callers: training, the overlap, and recordings of several models."""
    return task.split(split, size, levels)


@lru_cache(maxsize=1)
def training_fingerprints(task: Task) -> NDArray[np.uint64]:
    """The sorted hashes of a task's training inputs."""
    return np.unique(fingerprints(drawn(task, "train")))


def are_integers(numbers: Any, shape: tuple[int | None, ...]) -> bool:
    """Whether `numbers` is an array of whole numbers of this shape, where None is any size."""
    if not isinstance(numbers, np.ndarray) or numbers.dtype.kind not in "iu" or numbers.ndim != len(shape):
        return False
    return all(expected in (None, size) for expected, size in zip(shape, numbers.shape, strict=True))


def _type_of(found: Any) -> str:
    """The shape and type of an array, or the type of any other object, for the errors of a custom task."""
    return f"shape {list(found.shape)}, {found.dtype}" if isinstance(found, np.ndarray) else type(found).__name__


def _belong_to_split(examples: Examples, split: str) -> NDArray[np.bool_]:
    """Whether the hash of each input puts it into the split of a disjoint task."""
    bucket = fingerprints(examples) % np.uint64(_BUCKETS)
    return bucket == _RESERVED[split] if split in _RESERVED else bucket >= len(_RESERVED)
