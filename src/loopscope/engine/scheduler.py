"""How do requests share a batch? Each runs until its policy lets it exit, and the next request takes its place.

When a request exits, the scheduler returns its answer, and gives its place to the next request in the queue. The block
is the same at every depth, so rows at different loops share a batch; rows of different lengths are packed. Every loop
computes only the inputs of the policy's signal, and logits beyond these only for the requests that exit. If a model
divides its loops (`early_pooled`), rows that exit skip the rest of their last loop. The choices of a question branch
off from its context, which runs once, only as deep as the question. The outputs of a request do not depend on its
neighbours, so a decision equals the policy's replay on a recording (`replay_agreement.py`).

Shapes: N active requests, T loops, D width, V vocabulary, C choices.
"""

from collections.abc import Iterable, Iterator
from functools import cached_property
from itertools import islice
from typing import Any

import msgspec
import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from loopscope.engine.exit_decision import ExitDecision, check_executable
from loopscope.engine.logit_signals import Array, Integers, not_finite
from loopscope.engine.requests import (
    PrefixCache,
    Request,
    check_tokens,
    choice_scores,
    decision_states,
    embed_requests,
    trunk_ends,
)
from loopscope.errors import UserError
from loopscope.models.device import to_host, upload
from loopscope.models.looped_model import LoopedModel, LoopState
from loopscope.policy import ExitPolicy
from loopscope.scope import Scope, StateRead
from loopscope.trajectory_checks import as_token_row


class Answer(msgspec.Struct, frozen=True, eq=False):
    """Hold the answer to one row or question.

    Parameters
    ----------
    key
        The key of the request; for a plain row of tokens, its place in the input.
    loop
        The loop at which the row or question exited.
    logits
        [V] logits of the classes, or [C] scores of the choices of a question.
    greedy
        [C] whether greedy decoding would write each choice; None unless `run` was called with `greedy`.

    Examples
    --------
    >>> (answer,) = ls.run(model, [[1, 2, 3]], ls.ExitPolicy("fixed", 2))
    >>> answer.loop, len(answer.logits)
    (2, 8)
    """

    key: Any
    loop: int  # the loop at which the request exited
    logits: NDArray[np.float32]  # [V], or [C] for a question with choices
    greedy: NDArray[np.bool_] | None = None  # [C] if requested: whether greedy decoding would write the choice

    @property
    def prediction(self) -> int:
        """Return the class or the choice with the highest score."""
        return int(self.logits.argmax())


def run(
    model: LoopedModel,
    inputs: Iterable[Request | ArrayLike],
    policy: ExitPolicy,
    batch_size: int = 64,
    num_loops: int | None = None,
    batch_tokens: int | None = None,
    mean: bool | None = None,
    greedy: bool = False,
) -> Iterator[Answer]:
    """Answer rows of tokens with adaptive depth; yield each answer as soon as its row exits.

    Parameters
    ----------
    model
        A looped model in evaluation mode (`model.eval()`).
    inputs
        Rows of tokens: an array [N, M], or vectors of any lengths. For questions with choices and for shared prefixes,
        pass `Request` objects, which have their own keys. LoopScope reads an input when the batch has room, so a
        generator may be endless.
    policy
        The rule by which a row exits. `ExitPolicy("fixed", T)` runs all T loops.
    batch_size
        The maximum number of rows per batch (default: 64).
    num_loops
        The number of loops at full depth (default: as in the model).
    batch_tokens
        The maximum number of tokens per batch (default: no limit); a longer row runs alone.
    mean
        Average the gate and the state of a question over the tokens of its choices (default: as in the calibration of
        the policy).
    greedy
        Report for every choice whether greedy decoding would write this choice (default: no).

    Returns
    -------
    Iterator[Answer]
        The answers, in the order in which the rows exit. The key of a plain row is the place of the row in the input.

    Raises
    ------
    UserError
        If the policy does not fit the model, or if the model cannot take a row. LoopScope first answers all rows before
        that row.

    Examples
    --------
    >>> tokens = np.array([[1, 2, 3], [4, 5, 6]])
    >>> answers = list(ls.run(model, tokens, ls.ExitPolicy("fixed", 2)))
    >>> [(answer.key, answer.loop) for answer in answers]
    [(0, 2), (1, 2)]
    """
    model.require_evaluation()
    num_loops = model.num_loops if num_loops is None else num_loops
    if min(batch_size, num_loops) < 1:
        raise UserError(f"A batch and its loops are at least 1; got {batch_size} and {num_loops}.")
    state_read: StateRead | None = None if mean is None else "mean_over_choices" if mean else "last_token"
    check_executable(model, policy, num_loops, Scope(state=state_read, precision=model.precision))
    mean = policy.scope.state == "mean_over_choices" if mean is None else mean
    batch = _RunningBatch(model, ExitDecision(model, policy, num_loops, on_device=False), mean, greedy)
    waiting = _as_requests(inputs)
    held: Request | None = None  # did not fit into the last batch
    invalid: UserError | None = None
    while True:
        room = batch_size - batch.count
        if batch_tokens is None:
            new = list(islice(waiting, room))
        else:
            new, held = _take_fitting(waiting, held, room, batch_tokens - batch.tokens, not batch.count)
        new, error = batch.checked(new)
        if error is not None:
            invalid, waiting, held = error, iter(()), None
        if not new and not batch.count:
            break
        yield from batch.advance(new)
        if batch.failure is not None:
            break
    if (failure := batch.failure or invalid) is not None:
        raise failure


def _as_requests(inputs: Iterable[Request | ArrayLike]) -> Iterator[Request]:
    """Turn rows of tokens into requests, with their index as key; requests stay as they are."""
    for place, given in enumerate(inputs):
        yield given if isinstance(given, Request) else Request(place, [as_token_row(given, "A row of tokens")])


def _take_fitting(
    waiting: Iterator[Request], held: Request | None, room: int, tokens: int, alone: bool
) -> tuple[list[Request], Request | None]:
    """Take the waiting requests that fit into the batch, and the first that is too long (`alone` it may run)."""
    new: list[Request] = []
    while len(new) < room and (request := held or next(waiting, None)) is not None:
        held = None
        tokens -= len(request.tokens)
        if tokens < 0 and (new or not alone):
            return new, request
        new.append(request)
    return new, held


def in_order(answers: Iterable[Answer]) -> Iterator[Answer]:
    """Answers in the order of their keys, which count from 0; answers that come too early are held."""
    early: dict[int, Answer] = {}
    expected = 0
    for answer in answers:
        early[answer.key] = answer
        while expected in early:
            yield early.pop(expected)
            expected += 1


class _RunningBatch:
    """Run a batch of requests, one loop at a time."""

    def __init__(self, model: LoopedModel, decision: ExitDecision, mean: bool, greedy: bool) -> None:
        self._model, self._decision, self._mean, self._greedy = model, decision, mean, greedy
        self._device = next(model.parameters()).device
        self._prefix_cache = PrefixCache(model, self._device)
        self._state: LoopState | None = None  # of the running requests, and of those that have just exited
        self._as_requests: Array = np.empty(0, dtype=object)  # [N]; `_decision.rows` are their rows of the state
        self._loops: Integers = np.empty(0, dtype=np.int64)  # [N] loops that they have run
        self._questions: bool | None = None
        self._shares = False  # whether some requests share a prefix
        self.failure: UserError | None = None
        """The error of a request that could not be answered; its neighbours are answered."""

    @property
    def count(self) -> int:
        return len(self._as_requests)

    @property
    def tokens(self) -> int:
        return sum(len(request.tokens) for request in self._as_requests)

    def checked(self, new: list[Request]) -> tuple[list[Request], UserError | None]:
        """The requests before the first that the model cannot take, alone or with the others, and the error for it."""
        try:
            self._check_together(new)
        except UserError:
            for place, request in enumerate(new):
                try:
                    self._check(request)
                except UserError as error:
                    return new[:place], error
        return new, None

    def _check_together(self, new: list[Request]) -> None:
        """Check plain rows as one array: checking them one by one takes a twentieth of a small model's time."""
        if not new or any(request.scored or request.shared or request.score for request in new):
            for request in new:
                self._check(request)
            return
        rows = [request.rows[0] for request in new]
        self._check(new[0])
        self._model.check_length(max(map(len, rows)))
        check_tokens(self._model, np.concatenate(rows), "A request")

    def _check(self, request: Request) -> None:
        scope, model = self._decision.policy.scope, self._model
        self._questions = bool(request.scored) if self._questions is None else self._questions
        if bool(request.scored) != self._questions:
            raise UserError("Requests with choices and requests without cannot run together.")
        if self._questions:
            if request.score is None and scope.score is not None:
                raise UserError(
                    "The choices of a request have norms, and nothing says of which kind; say it with score= "
                    "('per_character' or 'per_byte'), because this policy was calibrated on a kind of scores."
                )
            model.require("branches", "Questions with choices")
            model.require("causal", "Questions with choices")
            if self._decision.reads_logits and len(request.rows) < 2:
                raise UserError(
                    f"The readout '{self._decision.policy.readout}' compares the choices of a question, and this "
                    "one has a single continuation; run it with a gate, hidden_change or a fixed depth."
                )
        if request.shared:
            model.require("kv_cache", "Requests that share what they begin with")
        scope.check(Scope(unit="questions" if self._questions else "answers", score=request.score))
        model.check_length(max(request.ran))
        for row in request.rows:
            check_tokens(model, row, "A request")

    @torch.inference_mode()
    def advance(self, new: list[Request]) -> list[Answer]:
        """Add new requests, run one loop of all, and return the answers of the requests that exit."""
        state = self._gather(new)
        self._loops = self._loops + 1
        if self._shares:
            self._prefix_cache.evict_unused(self._as_requests)
            state = state.with_cache(self._prefix_cache.shared_prefix(self._as_requests, self._loops))
        begun = None if self._must_run_whole else self._model.early_pooled(state, trunk_ends(state))
        pooled, state = (None, self._model.step(state)) if begun is None else begun
        self._decision.rows = np.arange(self.count)
        outputs = _LoopOutputs(self._model, state, self._as_requests, self._mean, pooled)
        logits = outputs.logits if self._decision.reads_logits else None
        exits = self._decision.exits(self._loops, logits, lambda: outputs.pooled)
        answers = list(self._answers(outputs, np.flatnonzero(exits))) if exits.any() else []
        if exits.any():
            self._decision.keep(~exits)
            self._as_requests, self._loops = self._as_requests[~exits], self._loops[~exits]
        if begun is not None and self.count:
            state = self._model.finish_step(state.take(self._decision.rows) if exits.any() else state)
            self._decision.rows = np.arange(self.count)
        self._state = state
        return answers

    @property
    def _must_run_whole(self) -> bool:
        """Whether all rows must run the whole loop: no row may exit, or an answer reads more than one state."""
        return bool(self._questions or self._shares or (self._loops < self._decision.first_exit).all())

    def _answers(self, outputs: "_LoopOutputs", leaving: Integers) -> Iterator[Answer]:
        """The answers of these requests; a request whose logits are not finite gets none."""
        greedy = None
        if self._greedy and self._questions:
            scores, greedy = outputs.scores(leaving, greedy=True)
            logits = scores.astype(np.float32)
        else:
            logits = outputs.logits_of(leaving)
        requests, loops = self._as_requests[leaving].tolist(), self._loops[leaving].tolist()
        if self._questions:  # the scores of questions are already checked
            for place, (request, loop) in enumerate(zip(requests, loops, strict=True)):
                width = len(request.rows)
                same = None if greedy is None else greedy[place, :width]
                yield Answer(request.key, loop, logits[place, :width], same)
            return
        finite = np.isfinite(logits.max(axis=-1))
        if not finite.all():
            self.failure = not_finite("logits")
        for request, loop, row, answered in zip(requests, loops, logits, finite.tolist(), strict=True):
            if answered:
                yield Answer(request.key, loop, row)

    def _gather(self, new: list[Request]) -> LoopState:
        """The state of the remaining and the new requests, sorted by length, which leaves the least padding.

        Requests that share a prefix are neighbours, and among them requests at the same loop.
        """
        states = [] if self._state is None or not self.count else [self._state]
        if new:
            first = len(states[0].loop) if states else 0
            states.append(embed_requests(self._model, new, self._device, self._prefix_cache))
            self._decision.admit(np.arange(first, first + len(new)))
            self._loops = np.concatenate((self._loops, np.zeros(len(new), dtype=np.int64)))
            self._as_requests = np.concatenate((self._as_requests, np.fromiter(new, dtype=object, count=len(new))))
            self._shares = self._shares or any(request.shared for request in new)
        elif self.count == len(states[0].loop):
            return states[0]  # no request came or left
        state = states[0] if len(states) == 1 else type(states[0]).join(states)
        keys = [state.layout.host_lengths[self._decision.rows]]
        if self._shares:
            prefixes = [request.prefix for request in self._as_requests]
            keys += [self._loops, np.unique(np.array(prefixes, dtype=object), return_inverse=True)[1]]
        order = np.lexsort(keys)
        self._as_requests, self._loops = self._as_requests[order], self._loops[order]
        self._decision.reorder(order)
        return state.take(self._decision.rows)


class _LoopOutputs:
    """Hold the outputs of the active requests after a loop; each part is computed when it is first needed."""

    def __init__(
        self, model: LoopedModel, state: LoopState, requests: Array, mean: bool, pooled: Tensor | None = None
    ) -> None:
        self._model, self._state, self._as_requests, self._pooled = model, state, requests, pooled
        self._questions = bool(requests[0].scored)
        self._mean = mean and self._questions

    @cached_property
    def pooled(self) -> Tensor:
        """[N, D] the pooled states."""
        if self._pooled is not None:
            return self._pooled
        return decision_states(self._model, self._state, self._as_requests, self._mean)

    @cached_property
    def logits(self) -> Array:
        """[N, V] logits, or [N, C] scores in the precision of a recording."""
        if self._questions:
            return self.scores(np.arange(len(self._as_requests)))[0].astype(np.float32)
        if self._model.head_attends:
            return to_host(self._model.predict(self._model.head_input(self._state, trunk_ends(self._state))))
        return to_host(self._model.predict(self.pooled))

    def logits_of(self, chosen: Integers) -> Array:
        """[n, V] logits, or [n, C] scores, of these requests."""
        if "logits" in self.__dict__ or len(chosen) == len(self._as_requests):
            return self.logits[chosen]
        if self._questions or self._model.head_attends:
            return _LoopOutputs(self._model, self._state.take(chosen), self._as_requests[chosen], self._mean).logits
        return to_host(self._model.predict(self.pooled.index_select(0, upload(chosen, self.pooled.device))))

    def scores(self, chosen: Integers, greedy: bool = False) -> tuple[Array, Array | None]:
        """[n, C] the scores of these questions, and whether greedy decoding would write each choice."""
        state = self._state if len(chosen) == len(self._as_requests) else self._state.take(chosen)
        return choice_scores(self._model, state, self._as_requests[chosen], greedy=greedy)
