"""MANO: what is the value of this arithmetic expression, modulo a small number?

Expressions are in prefix notation; difficulty is the number of operations. An expression with n operations draws its
operator uniformly, gives its left operand k ~ U{0..n-1} operations and the right one the rest; leaves are uniform.
There is no length token, so difficulty has to be inferred from the expression itself.
"""

import math
from typing import Annotated, Any

import msgspec
import numpy as np

from loopscope.tasks.examples import Draws, Integers
from loopscope.tasks.task import StoredOrOnline, Task

_OPERATIONS = {"+": np.add, "-": np.subtract, "*": np.multiply}


class Mano(Task, frozen=True, kw_only=True, tag="mano"):
    """Evaluate modular arithmetic in prefix notation, as in the paper.

    Parameters
    ----------
    modulus
        The modulus of the arithmetic.
    operators
        The operators, each as one character.
    max_operations
        The maximum number of operations; the number of operations is the difficulty.
    train_examples
        The number of stored training examples; 0 draws new examples at every step.
    """

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
        """Write all expressions at once, token by token; each row has a stack of the sizes of the operands to come."""
        rows = np.arange(len(difficulty))
        longest = int(difficulty.max(initial=0))
        stack = np.zeros((len(rows), longest + 2), dtype=np.int64)
        stack[:, 0] = difficulty
        top = np.zeros(len(rows), dtype=np.int64)
        tokens = np.zeros((len(rows), 2 * longest + 1), dtype=np.int64)
        for position in range(tokens.shape[1]):
            size = stack[
                rows, top
            ]  # a finished row stays at the bottom of its stack; its further symbols are cut off later
            split = size > 0
            symbol = draws.integers(np.where(split, len(self.operators), self.modulus))
            left = draws.integers(np.maximum(size, 1))
            tokens[:, position] = np.where(split, self.modulus + symbol, symbol)
            stack[rows, top] = np.where(split, size - 1 - left, 0)
            top = np.where(split, top + 1, np.maximum(top - 1, 0))
            stack[rows[split], top[split]] = left[split]
        return tokens

    def answers(self, tokens: Integers, lengths: Integers) -> Integers:
        """Evaluate all expressions at once, from the right, with a stack of values for each row."""
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
