"""What is a request to the engine, and how do requests run through a model together?

A request is one row of tokens, or a question whose choices all continue one context. Requests run as the rows of one
packed state, each with its choices as branches. A prefix that several requests share runs once for all of them, only as
deep as the deepest of them.

Shapes: N requests, S states, C choices, D width, V vocabulary.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from loopscope.engine.logit_signals import Array, Integers, check_finite
from loopscope.errors import UserError
from loopscope.models.device import accumulator, upload
from loopscope.models.kv_cache import AppendingRows, KVCache, SharedPrefix
from loopscope.models.looped_model import LoopedModel, LoopState
from loopscope.models.packing import Layout
from loopscope.scope import Score
from loopscope.tasks import Examples
from loopscope.trajectory_checks import as_array, as_token_row

_MAX_LOGITS = 1 << 26
"""Logits that are in memory at a time."""


class ScoredTokens(NamedTuple):
    """Hold the scored tokens of a question, in the order of its choices."""

    places: Integers  # the position in the question's row at which each token is predicted
    ends: Integers  # the token's own position, if choices are whole
    tokens: Integers
    choices: Integers  # the choice of each token


@dataclass(eq=False)
class Request:
    """Ask for one answer: to a row of tokens, or to a question with choices. The rows of a request exit together.

    `choices` makes a request from a question.

    Parameters
    ----------
    key
        A key that LoopScope returns with the answer.
    rows
        One row of tokens; for a question, one row per choice.
    scored
        For a question: the number of tokens at the end of each row that belong to the choice.
    norms
        The number by which LoopScope divides the log-probability of each choice (default: 1).
    shared
        The number of tokens at the beginning that other requests share; these tokens run only once.
    whole
        Whether to run the last token of every choice too; only a mean over the states needs this last token.
    score
        The kind of score that the norms give: "sum" (no norms), "per_character" or "per_byte".

    Raises
    ------
    UserError
        If `rows`, `scored`, `norms` and `shared` contradict each other.

    Examples
    --------
    >>> request = ls.Request("mine", [[1, 2, 3]])
    >>> next(ls.run(model, [request], ls.ExitPolicy("fixed", 1))).key
    'mine'
    """

    key: Any  # returned with the answer
    rows: Sequence[Integers]
    scored: Sequence[int] = ()
    norms: Sequence[float] = ()
    shared: int = 0
    whole: bool = False
    score: Score | None = None
    trunk: int = field(init=False)  # tokens that all rows share before the scored tokens

    def __post_init__(self) -> None:
        if all(np.ndim(row) == 0 for row in self.rows):
            raise UserError("A request takes a list of rows of tokens; give one row as Request(key, [row]).")
        self.rows = [as_token_row(row, "Each of the rows of a request") for row in self.rows]
        self.scored = tuple(self.scored)
        self.trunk = len(self.rows[0])
        if self.scored or len(self.rows) > 1:
            self._check_question()
        if not 0 <= self.shared < self.trunk:
            raise UserError("What a request shares with others is less than what it reads before it is answered.")

    def _check_question(self) -> None:
        norms = as_array(self.norms, "norms") if len(self.norms) else np.ones(len(self.rows))
        numbers = norms.shape == (len(self.rows),) and (np.isfinite(norms) & (norms > 0)).all()
        plain = bool((norms == 1).all())
        fits = self.score is None or (plain if self.score == "sum" else len(self.norms) > 0)
        if not numbers or not fits:
            raise UserError(
                "The norm of a choice is a number above 0, and every choice has one; the score 'sum' has no norms, "
                "and other scores need the norms of the choices."
            )
        trunk = max(0, min(len(row) - count for row, count in zip(self.rows, self.scored, strict=True)))
        for row in self.rows[1:]:
            differing = np.flatnonzero(self.rows[0][:trunk] != row[:trunk])
            trunk = int(differing[0]) if len(differing) else trunk
        if trunk == 0 or min(self.scored) < 1:
            raise UserError(
                "Every choice of a question has at least one token and continues one context; these have an empty "
                "choice, or begin with nothing alike."
            )
        self.score = "sum" if self.score is None and plain else self.score
        self.norms = tuple(norms.tolist())
        self.trunk = trunk

    @cached_property
    def prefix(self) -> bytes:
        """Return the shared tokens as bytes, which differ between requests with different prefixes."""
        return self.rows[0][: self.shared].tobytes()

    @cached_property
    def ran(self) -> list[int]:
        """Return how many tokens of each row run, including the shared tokens."""
        return [len(row) - (len(self.scored) > 0 and not self.whole) for row in self.rows]

    @cached_property
    def branches(self) -> list[int]:
        """Return how many tokens of each choice run after the trunk."""
        return [end - self.trunk for end in self.ran] if self.scored else []

    @cached_property
    def tokens(self) -> Integers:
        """Return the tokens of the trunk after the shared tokens, and then the tokens of all branches."""
        if not self.scored:
            return self.rows[0][self.shared :]
        tails = (row[self.trunk : end] for row, end in zip(self.rows, self.ran, strict=True))
        return np.concatenate((self.rows[0][self.shared : self.trunk], *tails))

    @cached_property
    def prediction(self) -> ScoredTokens:
        """Return the position that predicts each scored token: in its branch, or at the end of the trunk."""
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
    context: Integers,
    continuations: Sequence[Integers],
    norms: Sequence[float] = (),
    shared: int = 0,
    whole: bool = False,
    score: Score | None = None,
) -> Request:
    """Ask a question: which choice continues the context?

    Parameters
    ----------
    key
        A key that LoopScope returns with the answer.
    context
        [M] tokens that all choices continue.
    continuations
        The tokens of every choice.
    norms, shared, whole, score
        The parameters of `Request` with the same names.

    Returns
    -------
    Request
        The request; the logits of its answer are the scores of the choices.

    Raises
    ------
    UserError
        If a choice or the context is empty.

    Examples
    --------
    >>> question = ls.choices("q", context=[1, 2], continuations=[[3], [4, 5]])
    >>> len(question.rows)
    2
    """
    before = as_token_row(context, "The context of a question")
    after = [as_token_row(row, "A choice of a question") for row in continuations]
    rows = [np.concatenate((before, row)) for row in after]
    return Request(key, rows, [len(row) for row in after], norms, shared, whole, score)


def task_requests(examples: Examples) -> Iterator[Request]:
    """One request per example of a task, with its index as key."""
    for key, (tokens, length) in enumerate(zip(examples.tokens, examples.lengths.tolist(), strict=True)):
        yield Request(key, (tokens[:length],))


class PrefixCache:
    """Keep the KV caches of prefixes that requests share, at every loop that a request needed."""

    def __init__(self, model: LoopedModel, device: torch.device) -> None:
        self._model, self._device = model, device
        self._prefixes: dict[bytes, _CachedPrefix] = {}

    def shared_prefix(self, requests: Requests, loops: Integers) -> SharedPrefix | None:
        """The KV cache of the prefixes of these requests, which are about to run these loops."""
        if not any(request.shared for request in requests):
            return None
        kv_caches: NDArray[np.object_] = np.full(len(requests), None, dtype=object)
        for place, (request, loop) in enumerate(zip(requests, loops.tolist(), strict=True)):
            if request.shared:
                if request.prefix not in self._prefixes:
                    tokens = request.rows[0][: request.shared]
                    self._prefixes[request.prefix] = _CachedPrefix(self._model, tokens, self._device)
                kv_caches[place] = self._prefixes[request.prefix].run_to(loop)
        return SharedPrefix(kv_caches, np.array([request.shared for request in requests]), loops)

    def evict_unused(self, requests: Requests) -> None:
        """Forget the prefixes that none of these requests begins with."""
        needed = {request.prefix for request in requests}
        self._prefixes = {name: prefix for name, prefix in self._prefixes.items() if name in needed}


class _CachedPrefix:
    """Hold the KV cache of one shared prefix, up to the loop that it has run."""

    def __init__(self, model: LoopedModel, tokens: Integers, device: torch.device) -> None:
        self._model, self._loop = model, 0
        self._kv_cache = KVCache(1, len(tokens), most_loops=model.num_loops)
        layout = Layout(np.array([len(tokens)]), device, cache=self._appending())
        self._state = model.begin_packed(upload(tokens, device), layout)

    def run_to(self, loop: int) -> KVCache:
        """Run the prefix up to this loop, unless it has run it already."""
        while self._loop < loop:
            self._loop += 1
            self._state = self._model.step(self._state.with_cache(self._appending()))
            if self._model.head_attends:
                self._model.head_input(self._state)
        return self._kv_cache

    def _appending(self) -> AppendingRows:
        nothing = np.zeros(1, dtype=np.int64)
        return AppendingRows(self._kv_cache, nothing, nothing, np.array([self._loop]))


def embed_requests(
    model: LoopedModel, requests: Requests, device: torch.device, prefix_cache: PrefixCache
) -> LoopState:
    """Pack requests into the state before their first loop."""
    lengths = np.array([len(request.tokens) for request in requests])
    branches = None
    if requests[0].scored:
        branches = np.zeros((len(requests), max(len(request.rows) for request in requests)), dtype=np.int64)
        for counts, request in zip(branches, requests, strict=True):
            counts[: len(request.rows)] = request.branches
    cache = prefix_cache.shared_prefix(requests, np.zeros(len(requests), dtype=np.int64))
    tokens = upload(np.concatenate([request.tokens for request in requests]), device)
    return model.begin_packed(tokens, Layout(lengths, device, branches, cache))


def trunk_ends(state: LoopState) -> Tensor:
    """[N] the position at which every row is read: the end of its trunk."""
    return state.layout.trunks - 1


def decision_states(model: LoopedModel, state: LoopState, requests: Requests, mean: bool = False) -> Tensor:
    """[N, D] the pooled states that a policy reads: at the ends of the trunks, or averaged over the scored tokens."""
    if not mean:
        return model.pooled(state, trunk_ends(state))
    if not all(request.whole for request in requests):
        raise UserError("A mean over the choices' tokens needs all of them; ask with whole=True.")
    device, scored = state.hidden.device, [request.prediction for request in requests]
    places = np.concatenate([start + part.ends for start, part in zip(state.layout.host_starts, scored, strict=True)])
    counts = np.array([len(part.tokens) for part in scored])
    owners = upload(np.repeat(np.arange(len(scored)), counts), device)
    pooled = model.pooled(state).index_select(0, upload(places, device))
    sums = pooled.new_zeros((len(scored), pooled.shape[1]), dtype=torch.float32)
    sums.index_add_(0, owners, pooled.float())
    return (sums / upload(counts, device)[:, None]).to(pooled.dtype)


def choice_scores(
    model: LoopedModel, state: LoopState, requests: Requests, divided: bool = True, greedy: bool = False
) -> tuple[Array, NDArray[np.bool_] | None]:
    """[N, C] the log-probability of every choice (divided by its norm), -inf where a question has fewer choices.

    With `greedy`, also [N, C] whether greedy decoding would write the choice. `requests` are in the order of the rows
    of `state`.
    """
    device, scored = state.hidden.device, [request.prediction for request in requests]
    places = np.concatenate([start + part.places for start, part in zip(state.layout.host_starts, scored, strict=True)])
    owners = np.repeat(np.arange(len(requests)), [len(part.tokens) for part in scored])
    choice = np.concatenate([part.choices for part in scored])
    targets = upload(np.concatenate([part.tokens for part in scored]), device)
    where, which = np.unique(places, return_inverse=True)  # all choices begin at one position
    read = model.head_input(state).index_select(0, upload(where, device))
    likeliest = torch.empty_like(targets) if greedy else None
    values = [log_likelihoods(model, read, which, targets, likeliest)]
    if likeliest is not None:
        values.append((likeliest == targets).to(values[0]))
    log_probs, *likely = torch.stack(values).cpu().numpy()
    check_finite(log_probs[np.isnan(log_probs)], "logits")
    norms = np.full((len(requests), max(len(request.rows) for request in requests)), np.nan)
    for row, request in zip(norms, requests, strict=True):
        row[: len(request.rows)] = request.norms if divided else 1.0
    sums = np.zeros(norms.shape)
    np.add.at(sums, (owners, choice), log_probs)
    scores = np.where(np.isnan(norms), -np.inf, sums / norms)
    if not greedy:
        return scores, None
    same = np.ones(norms.shape, dtype=bool)
    np.logical_and.at(same, (owners, choice), likely[0] > 0)
    return scores, same


def check_tokens(model: LoopedModel, tokens: Integers, what: str) -> None:
    """Reject tokens outside the model's vocabulary."""
    if tokens.min() < 0 or tokens.max() >= model.vocab_size:
        raise UserError(f"{what} has a token outside the model's vocabulary (0..{model.vocab_size - 1}).")


def require_vocabulary(model: LoopedModel, logits: Tensor) -> None:
    """Reject a model whose classes are not the tokens of its vocabulary, if a request needs tokens."""
    if logits.shape[-1] != model.vocab_size:
        raise UserError(
            f"The model answers with {logits.shape[-1]} classes and has {model.vocab_size} tokens, so that it can "
            "neither write text nor score choices; run its rows."
        )


def log_likelihoods(
    model: LoopedModel, read: Tensor, which: Integers, targets: Tensor, likeliest: Tensor | None = None
) -> Tensor:
    """[P] the log-probabilities of target tokens in float64, each read from the state `which` [P] of `read` [U, D].

    `likeliest` [P], if given, is filled with the likeliest tokens. The result is NaN where logits are not finite: an
    infinite logit gives all other tokens the probability 0, which would look like an answer.
    """
    chunk = max(1, _MAX_LOGITS // model.vocab_size)
    normaliser, chosen = [], read.new_empty(len(which), dtype=accumulator(read.device))
    for first in range(0, len(read), chunk):
        logits = model.predict(read[first : first + chunk]).float()
        require_vocabulary(model, logits)
        sums = logits.logsumexp(-1).to(chosen.dtype)
        normaliser.append(sums.masked_fill(~sums.isfinite(), torch.nan))
        there = np.flatnonzero((which >= first) & (which < first + chunk))
        here, rows = upload(np.stack((there, which[there] - first)), read.device)
        chosen[here] = logits[rows, targets[here]].to(chosen.dtype)
        if likeliest is not None:
            likeliest[here] = logits.argmax(-1)[rows]
    return chosen - torch.cat(normaliser)[upload(which, read.device)]
