"""What is asked of the engine? A request: one row of tokens, or a question whose choices all continue one context."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from loopscope.arguments import as_array, as_count, as_token_row, check_flag, check_list
from loopscope.errors import UserError
from loopscope.exits.scope import Score
from loopscope.tasks import Examples

Tokens = NDArray[np.int64]


class ScoredTokens(NamedTuple):
    """The tokens of a question that are scored, in the order of its choices."""

    places: Tokens  # where in the question's row each is predicted
    ends: Tokens  # where it stands, if choices are whole
    tokens: Tokens
    choices: Tokens  # whose they are


@dataclass(frozen=True, eq=False)
class Request:
    """Rows that stop together. One row is answered with the class logits at its last token.

    With `scored`, the rows are the choices of a question: the last scored[i] tokens of row i are choice i, and the
    answer's logits are the log-probabilities of the choices, each divided by its norm. What all rows begin with is run
    once, and gate and pooled state are read at its last token.

    `shared` says how many tokens a request begins with that others begin with, too (the examples of a few-shot prompt):
    these run once for all of them.

    `score` says what the norms are: none (the `sum`, where there are no norms), characters or bytes.

    The last token of a choice predicts nothing that is scored, so it does not run, unless the choices are `whole`: a
    mean over the states of their tokens needs it.
    """

    key: Any  # comes back with the answer
    rows: Sequence[Tokens]
    scored: Sequence[int] = ()
    norms: Sequence[float] = ()
    shared: int = 0
    whole: bool = False
    score: Score | None = None
    trunk: int = field(init=False)  # how many tokens all rows begin with, before what is scored

    def __post_init__(self) -> None:
        rows = [as_token_row(row, "A row of a request") for row in check_list(self.rows, "The rows of a request")]
        if not rows:
            raise UserError("A request needs at least one row, and a row at least one token.")
        object.__setattr__(self, "rows", rows)
        object.__setattr__(self, "trunk", len(rows[0]))
        scored = tuple(as_count(count, "scored") for count in check_list(self.scored, "scored"))
        object.__setattr__(self, "scored", scored)
        object.__setattr__(self, "shared", as_count(self.shared, "shared", 0))
        check_flag(self.whole, "whole")
        if self.score is not None and self.score not in get_args(Score):
            raise UserError(f"A score is one of {', '.join(get_args(Score))}.")
        if len(self.scored):
            self._check_question()
        elif len(self.rows) != 1:
            raise UserError("A request of several rows must say how many tokens of each row are its choice.")
        if not 0 <= self.shared < self.trunk:
            raise UserError("What a request shares with others is less than what it reads before it is answered.")

    def _check_question(self) -> None:
        given = as_array(self.norms, "norms")
        given = given if given.size else np.ones(len(self.rows))
        if given.ndim != 1 or not np.isfinite(given).all():
            raise UserError("The norm of a choice is a number above 0.")
        norms = tuple(given.tolist())
        if not len(self.rows) == len(self.scored) == len(norms):
            raise UserError("Every choice of a question needs its number of tokens and its norm.")
        if any(not 0 < count < len(row) for row, count in zip(self.rows, self.scored, strict=True)):
            raise UserError("A choice needs at least one token, and a token before it.")
        if not all(norm > 0 for norm in norms):
            raise UserError("The norm of a choice is a number above 0.")
        if self.score == "sum" and any(norm != 1 for norm in norms):
            raise UserError("A score that is the 'sum' has no norms; leave them out, or name what they are.")
        if not len(self.norms) and self.score not in (None, "sum"):
            raise UserError(f"Scores that are '{self.score}' need the norms of the choices.")
        if self.score is None and all(norm == 1 for norm in norms):
            object.__setattr__(self, "score", "sum")
        object.__setattr__(self, "norms", norms)
        trunk = min(len(row) - count for row, count in zip(self.rows, self.scored, strict=True))
        first = self.rows[0][:trunk]
        for row in self.rows[1:]:
            differing = np.flatnonzero(first[:trunk] != row[:trunk])
            trunk = int(differing[0]) if len(differing) else trunk
        if trunk == 0:
            raise UserError("The choices of a question continue one context, and these rows begin with nothing alike.")
        object.__setattr__(self, "trunk", trunk)

    @cached_property
    def prefix(self) -> bytes:
        """What tells requests apart that begin with other shared tokens."""
        return self.rows[0][: self.shared].tobytes()

    @cached_property
    def ran(self) -> list[int]:
        """The tokens of every row that run, those that are shared included."""
        return [len(row) - (len(self.scored) > 0 and not self.whole) for row in self.rows]

    @cached_property
    def branches(self) -> list[int]:
        """The tokens of every choice that run after the trunk."""
        return [end - self.trunk for end in self.ran] if len(self.scored) else []

    @cached_property
    def tokens(self) -> Tokens:
        """The trunk after what is shared, and all branches, one after the other."""
        if not len(self.scored):
            return self.rows[0][self.shared :]
        tails = (row[self.trunk : end] for row, end in zip(self.rows, self.ran, strict=True))
        return np.concatenate((self.rows[0][self.shared : self.trunk], *tails))

    @cached_property
    def prediction(self) -> ScoredTokens:
        """A token is predicted where the one before it stands: in its branch, or at the end of the trunk."""
        start = self.trunk - self.shared
        last, places, ends, tokens, owners = start - 1, [], [], [], []
        for choice, (row, count, length) in enumerate(zip(self.rows, self.scored, self.branches, strict=True)):
            positions = np.arange(len(row) - count, len(row)) - self.trunk + start
            ends.append(positions)
            places.append(np.where(positions == start, last, positions - 1))
            tokens.append(row[len(row) - count :])
            owners.append(np.full(count, choice))
            start += length
        return ScoredTokens(*map(np.concatenate, (places, ends, tokens, owners)))


Requests = Sequence[Request] | NDArray[np.object_]


def choices(
    key: Any,
    context: Tokens,
    continuations: Sequence[Tokens],
    norms: Sequence[float] = (),
    shared: int = 0,
    whole: bool = False,
    score: Score | None = None,
) -> Request:
    """A question: which of these continues the context?"""
    before = as_token_row(context, "The context of a question")
    after = [as_token_row(each, "A choice of a question") for each in check_list(continuations, "continuations")]
    rows = [np.concatenate((before, each)) for each in after]
    return Request(key, rows, [len(each) for each in after], norms, shared, whole, score)


def task_requests(examples: Examples) -> Iterator[Request]:
    """One request an example; its number is the key."""
    for key, (tokens, length) in enumerate(zip(examples.tokens, examples.lengths.tolist(), strict=True)):
        yield Request(key, (tokens[:length],))
