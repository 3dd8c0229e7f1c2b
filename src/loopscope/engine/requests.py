"""What is asked of the engine? A request: one row of tokens, or several that stop together."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loopscope.errors import UserError
from loopscope.tasks import Examples

Tokens = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Request:
    """Rows that stop together. One row is answered with the class logits at its last token.

    With `scored`, the rows are the choices of a question: the last scored[i] tokens of row i are choice i, and the
    answer's logits are the log-probabilities of the choices, each divided by its norm. Gate and pooled state are read
    where the first choice begins: at the last token of what all choices continue.
    """

    key: Any  # comes back with the answer
    rows: Sequence[Tokens]
    scored: Sequence[int] = ()
    norms: Sequence[float] = ()

    def __post_init__(self) -> None:
        rows = [np.asarray(row) for row in self.rows]
        if not rows or any(row.ndim != 1 or len(row) == 0 for row in rows):
            raise UserError("A request needs at least one row, and a row at least one token.")
        if any(row.dtype.kind not in "iu" for row in rows):
            raise UserError("Tokens are whole numbers.")
        object.__setattr__(self, "rows", [row.astype(np.int64, copy=False) for row in rows])
        if not len(self.scored):
            if len(self.rows) != 1:
                raise UserError("A request of several rows must say how many tokens of each row are its choice.")
            return
        norms = tuple(self.norms) if len(self.norms) else (1.0,) * len(self.rows)
        if not len(self.rows) == len(self.scored) == len(norms) or len(self.rows) < 2:
            raise UserError("A question needs two choices or more, each with its number of tokens and its norm.")
        if any(not 0 < count < len(row) for row, count in zip(self.rows, self.scored, strict=True)):
            raise UserError("A choice needs at least one token, and a token before it.")
        if not all(norm > 0 for norm in norms):
            raise UserError("The norm of a choice is a number above 0.")
        object.__setattr__(self, "norms", norms)


def choices(key: Any, context: Tokens, continuations: Sequence[Tokens], norms: Sequence[float] = ()) -> Request:
    """A question: which of these continues the context?"""
    rows = [np.concatenate((context, continuation)) for continuation in continuations]
    return Request(key, rows, [len(continuation) for continuation in continuations], norms)


def requests_of(examples: Examples) -> Iterator[Request]:
    """One request an example; its number is the key."""
    for key, (tokens, length) in enumerate(zip(examples.tokens, examples.lengths.tolist(), strict=True)):
        yield Request(key, (tokens[:length],))
