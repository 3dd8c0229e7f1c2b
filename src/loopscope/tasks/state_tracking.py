"""State tracking: what is the product of a sequence of symbols? Difficulty is the length of the sequence.

- parity: is the number of ones in this bit string odd?
- the word problem of a symmetric group: which permutation is the product of these? With three letters (S3) the group is
  solvable; with five (S5) it is not, and no model of constant depth finds the product of words of every length.
"""

from functools import lru_cache
from itertools import permutations
from typing import Annotated, Any, ClassVar

import msgspec
import numpy as np

from loopscope.tasks.examples import Draws, Integers
from loopscope.tasks.task import StoredOrOnline, Task


class Parity(Task, frozen=True, kw_only=True, tag="parity"):
    """Tell whether the number of ones in a row of bits is even or odd.

    Parameters
    ----------
    max_bits
        The maximum number of bits; the number of bits is the difficulty.
    train_examples
        The number of stored training examples; 0 draws new examples at every step.
    """

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


class StateTracking(Task, frozen=True, kw_only=True, tag="state-tracking"):
    """Multiply permutations that are drawn uniformly; the leftmost permutation of an input is applied first.

    Parameters
    ----------
    letters
        The number of letters that are permuted.
    max_factors
        The maximum number of factors; the number of factors is the difficulty.
    """

    letters: Annotated[int, msgspec.Meta(ge=2, le=5)] = 5
    max_factors: Annotated[int, msgspec.Meta(ge=1, le=10_000)] = 16

    @property
    def symbols(self) -> list[str]:
        return ["".join(str(letter + 1) for letter in images) for images in permutations(range(self.letters))]

    @property
    def levels(self) -> range:
        return range(1, self.max_factors + 1)

    @property
    def input_form(self) -> str:
        return f"a list of permutations of {self.letters} letters, such as '{self.symbols[1]} {self.symbols[-1]}'"

    def length(self, difficulty: Any) -> Any:
        return difficulty + 2

    def draw_inputs(self, draws: Draws, difficulty: Integers) -> Integers:
        factors = int(difficulty.max(initial=0))
        return draws.integers(np.full((len(difficulty), factors), len(self.symbols)))

    def answers(self, tokens: Integers, lengths: Integers) -> Integers:
        products, state = _products(self.letters), np.zeros(len(tokens), dtype=np.int64)  # 0 changes nothing
        for position in range(1, tokens.shape[1] - 1):
            inside = position < lengths - 1
            state = np.where(inside, products[state, np.where(inside, tokens[:, position], 0)], state)
        return state


@lru_cache
def _products(letters: int) -> Integers:
    """[i, j] the number of the permutation that applies i, then j."""
    images = np.array(list(permutations(range(letters))))
    numbers = {tuple(row): number for number, row in enumerate(images.tolist())}
    return np.array([[numbers[tuple(then[first])] for then in images] for first in images])
