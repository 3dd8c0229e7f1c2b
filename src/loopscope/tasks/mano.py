"""The MANO task: what is the value of this arithmetic expression, modulo a small number?

Expressions are in prefix notation; difficulty is the number of operations. An expression with n operations draws
its operator uniformly, gives its left operand k ~ U{0..n-1} operations and the right one the rest; leaves are
uniform. A row is `begin, expression (2n+1 tokens), answer marker`: no length token, and one marker for all lengths,
so that difficulty has to be inferred from the expression itself.

Tokens: 0..modulus-1 are the numbers, then the operators, then begin and the answer marker.
"""

import math
from collections.abc import Sequence
from typing import Annotated

import msgspec
import numpy as np

from loopscope.errors import UserError
from loopscope.tasks.draws import Draws, Integers
from loopscope.tasks.task import Examples, StoredOrOnline, Task, padded

_APPLY = {"+": np.add, "-": np.subtract, "*": np.multiply}


class Mano(Task, frozen=True, kw_only=True, tag="mano"):
    modulus: Annotated[int, msgspec.Meta(ge=2, le=2**20)] = 23
    operators: str = "+-*"
    max_operations: Annotated[int, msgspec.Meta(ge=1, le=1000)] = 10
    train_examples: StoredOrOnline = 50_000

    def __post_init__(self) -> None:
        if not self.operators or set(self.operators) - set(_APPLY) or len(set(self.operators)) != len(self.operators):
            raise ValueError(f"operators must be distinct ones of {' '.join(_APPLY)}, got '{self.operators}'")

    @property
    def vocab_size(self) -> int:
        return self.modulus + len(self.operators) + 2

    @property
    def levels(self) -> range:
        return range(1, self.max_operations + 1)

    def length(self, difficulty: int) -> int:
        return 2 * difficulty + 3

    def space(self, difficulty: int) -> int:
        trees = math.comb(2 * difficulty, difficulty) // (difficulty + 1)
        return trees * len(self.operators) ** difficulty * self.modulus ** (difficulty + 1)

    def draw(self, draws: Draws, difficulty: Integers) -> Examples:
        expression = self._expressions(draws, difficulty)
        rows = np.arange(len(difficulty))
        lengths = 2 * difficulty + 3
        tokens = np.zeros((len(rows), expression.shape[1] + 2), dtype=np.int64)
        tokens[:, 0] = self.vocab_size - 2
        tokens[:, 1:-1] = np.where(np.arange(expression.shape[1]) < lengths[:, None] - 2, expression, 0)
        tokens[rows, lengths - 1] = self.vocab_size - 1
        return Examples(tokens, lengths, self._values(expression, lengths - 2), difficulty)

    def parse(self, texts: Sequence[str], longest: int | None = None) -> Examples:
        numbers = {name: token for token, name in enumerate(self._names)}
        rows = []
        for text in texts:
            words = text.split()
            tokens = [numbers.get(word, -1) for word in words]
            open_operands = np.cumsum([1, *(1 if token >= self.modulus else -1 for token in tokens)])
            if -1 in tokens or (open_operands[:-1] <= 0).any() or open_operands[-1]:
                raise UserError(
                    f"'{text[:60]}' is not an expression in prefix notation, such as '{self.operators[0]} 1 0', with "
                    f"numbers below {self.modulus} and the operators {' '.join(self.operators)}."
                )
            rows.append([self.vocab_size - 2, *tokens, self.vocab_size - 1])
        table, lengths = padded(rows, longest)
        return Examples(table, lengths, self._values(table[:, 1:-1], lengths - 2), (lengths - 3) // 2)

    @property
    def _names(self) -> list[str]:
        return [*map(str, range(self.modulus)), *self.operators]

    def text(self, examples: Examples) -> list[str]:
        names = self._names
        return [
            " ".join(map(names.__getitem__, row[1 : length - 1]))
            for row, length in zip(examples.tokens.tolist(), examples.lengths.tolist(), strict=True)
        ]

    def _expressions(self, draws: Draws, difficulty: Integers) -> Integers:
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

    def _values(self, expression: Integers, lengths: Integers) -> Integers:
        """Evaluates all expressions at once, from the right, with a stack of values a row."""
        rows = np.arange(len(expression))
        stack = np.zeros((len(rows), expression.shape[1] // 2 + 3), dtype=np.int64)
        top = np.full(len(rows), -1)
        for position in reversed(range(expression.shape[1])):
            token = expression[:, position]
            inside = position < lengths
            operator = inside & (token >= self.modulus)
            left, right = stack[rows, top], stack[rows, top - 1]
            value = token
            for index, name in enumerate(self.operators):
                chosen = token == self.modulus + index
                value = np.where(chosen, _APPLY[name](left, right) % self.modulus, value)
            top = np.where(inside, np.where(operator, top - 1, top + 1), top)
            stack[rows[inside], top[inside]] = value[inside]
        return stack[rows, 0]
