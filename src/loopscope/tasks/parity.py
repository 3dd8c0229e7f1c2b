"""The parity task: is the number of ones in this bit string odd?

Difficulty is the number of bits. A row is `begin, bits, answer marker`; the tokens are 0, 1, begin, marker.
Training examples are drawn online by default, balanced over lengths.
"""

from collections.abc import Sequence
from typing import Annotated

import msgspec
import numpy as np

from loopscope.errors import UserError
from loopscope.tasks.draws import Draws, Integers
from loopscope.tasks.task import Examples, StoredOrOnline, Task, padded

_BEGIN, _ANSWER = 2, 3


class Parity(Task, frozen=True, kw_only=True, tag="parity"):
    max_bits: Annotated[int, msgspec.Meta(ge=1, le=10_000)] = 40
    train_examples: StoredOrOnline = 0

    @property
    def vocab_size(self) -> int:
        return 4

    @property
    def levels(self) -> range:
        return range(1, self.max_bits + 1)

    def length(self, difficulty: int) -> int:
        return difficulty + 2

    def space(self, difficulty: int) -> int:
        return int(2**difficulty)

    def draw(self, draws: Draws, difficulty: Integers) -> Examples:
        rows, longest = np.arange(len(difficulty)), int(difficulty.max(initial=0))
        bits = draws.integers(np.full((len(rows), longest), 2))
        bits[np.arange(longest) >= difficulty[:, None]] = 0
        tokens = np.zeros((len(rows), longest + 2), dtype=np.int64)
        tokens[:, 0] = _BEGIN
        tokens[:, 1:-1] = bits
        tokens[rows, difficulty + 1] = _ANSWER
        return Examples(tokens, difficulty + 2, bits.sum(axis=1) % 2, difficulty)

    def parse(self, texts: Sequence[str], longest: int | None = None) -> Examples:
        for text in texts:
            if not text or set(text) - {"0", "1"}:
                raise UserError(f"'{text[:60]}' is not a string of the bits 0 and 1.")
        tokens, lengths = padded([[_BEGIN, *map(int, text), _ANSWER] for text in texts], longest)
        labels = np.array([text.count("1") % 2 for text in texts], dtype=np.int64)
        return Examples(tokens, lengths, labels, lengths - 2)

    def text(self, examples: Examples) -> list[str]:
        return [
            "".join(map(str, row[1 : length - 1]))
            for row, length in zip(examples.tokens.tolist(), examples.lengths.tolist(), strict=True)
        ]
