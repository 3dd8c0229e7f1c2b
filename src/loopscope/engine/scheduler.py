"""The scheduler: every request runs until its policy says stop, and the batch is kept full.

A request that exits is answered at once, and its slots go to the next in the queue. The block is the same at every
depth, so rows at different loops share a batch; rows of different lengths are packed. Only what the policy's signal
needs is computed at every loop; logits beyond that only for who exits. The choices of a question branch off from its
context, which runs once, and only as deep as the question goes. Nothing of a request's computation depends on its
neighbours, so a decision is the one that the policy's replay on a recording makes.

Shapes: N active requests, D width, V vocabulary, C choices.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from loopscope.arguments import as_count, check_kind, check_list
from loopscope.engine.logit_stats import check_finite, check_logits, not_finite
from loopscope.engine.prefix_cache import PrefixCache
from loopscope.engine.request_batch import (
    choice_scores,
    choice_scores_and_greedy,
    decision_states,
    embed_requests,
    trunk_ends,
)
from loopscope.engine.requests import Request
from loopscope.errors import UserError
from loopscope.exits import ExitPolicy
from loopscope.exits.exit_state import ExitState
from loopscope.exits.scope import Scope, StateRead
from loopscope.models import LoopedModel, LoopState
from loopscope.models.device import upload

Array = NDArray[Any]


@dataclass(frozen=True, repr=False, eq=False)
class Answer:
    key: Any
    loop: int  # the loop at which the request stopped
    logits: NDArray[np.float32]  # [V], or [C] for a question with choices
    greedy: NDArray[np.bool_] | None = None  # [C] where it was asked for: the choice is what greedy decoding would say

    @property
    def prediction(self) -> int:
        return int(self.logits.argmax())

    def __repr__(self) -> str:
        return f"Answer(key={self.key!r}, loop={self.loop}, prediction={self.prediction})"


def run(
    model: LoopedModel,
    policy: ExitPolicy,
    requests: Iterable[Request],
    batch_size: int = 64,
    num_loops: int | None = None,
    batch_tokens: int | None = None,
    mean: bool | None = None,
    greedy: bool = False,
) -> Iterator[Answer]:
    """Answers requests as they exit. Takes from `requests` only what there is room for: `batch_size` at a time.

    With `batch_tokens` a batch has no more tokens than that, too; a longer request runs alone. With `mean`, gate and
    state of a question are averaged over its choices' tokens, as in a recording that was made so; a calibrated policy
    says which it is. With `greedy`, the answers to questions say which choices are what the model itself would say. A
    request that the model cannot take is an error, raised when all before it are answered.
    """
    check_kind(model, LoopedModel, "The model", "a LoopedModel, as load_model gives them")
    check_kind(policy, ExitPolicy, "The policy", "an ExitPolicy")
    check_list(requests, "requests", "a list of requests")
    as_count(batch_size, "batch_size")
    for name, value in (("num_loops", num_loops), ("batch_tokens", batch_tokens)):
        if value is not None:
            as_count(value, name)
    model.require_evaluation()
    tied = policy.model is not None or policy.gate is not None
    read: StateRead | None = None if mean is None else "mean_over_choices" if mean else "last_token"
    here = Scope(state=read, precision=model.precision)
    policy.check(model.weights_sha256 if tied else None, num_loops or model.num_loops, here)
    mean = policy.scope.state == "mean_over_choices" if mean is None else mean
    batch = _RunningBatch(model, ExitState(policy, num_loops or model.num_loops), mean, greedy)
    waiting = iter(requests)
    held: Request | None = None  # did not fit any more
    bad: UserError | None = None
    while True:
        new, count, tokens = [], batch.count, 0 if batch_tokens is None else batch.tokens
        while count < batch_size:
            request = held or next(waiting, None)
            held = None
            if request is None:
                break
            check_kind(request, Request, "What is asked", "a Request")
            if count and batch_tokens is not None and tokens + len(request.tokens) > batch_tokens:
                held = request
                break
            new.append(request)
            count, tokens = count + 1, tokens + len(request.tokens)
        bad = bad or batch.reject_invalid(new)
        if bad is not None:
            waiting, held = iter(()), None
        if not new and not batch.count:
            break
        yield from batch.advance(new)
        if batch.failure is not None:
            raise batch.failure
    if bad is not None:
        raise bad


def in_order(answers: Iterable[Answer]) -> Iterator[Answer]:
    """Answers whose keys count from 0, in that order; only those that came too early are held."""
    early: dict[int, Answer] = {}
    expected = 0
    for answer in answers:
        early[answer.key] = answer
        while expected in early:
            yield early.pop(expected)
            expected += 1


class _RunningBatch:
    """The requests that are running."""

    def __init__(self, model: LoopedModel, exit_state: ExitState, mean: bool, greedy: bool) -> None:
        self._model, self._exit_state, self._mean, self._greedy = model, exit_state, mean, greedy
        self._device = next(model.parameters()).device
        self._prefix_cache = PrefixCache(model, self._device)
        self._requests: Array = np.empty(0, dtype=object)  # [N]
        self._state: LoopState | None = None  # of these requests and of those that have just left
        self._rows: NDArray[np.int64] = np.empty(0, dtype=np.int64)  # [N] where they lie in it
        self._loops: NDArray[np.int64] = np.empty(0, dtype=np.int64)  # [N] that they have been through
        self._questions: bool | None = None
        self._shares = False  # whether some begin alike
        self.failure: UserError | None = None
        """Why a request could not be answered; those beside it are."""

    @property
    def count(self) -> int:
        return len(self._requests)

    @property
    def tokens(self) -> int:
        return sum(len(request.tokens) for request in self._requests)

    def reject_invalid(self, new: list[Request]) -> UserError | None:
        """Takes from `new` the first request that the model cannot take and all after it; says what is wrong."""
        if not new:
            return None
        if self._questions is None:
            self._questions = bool(new[0].scored)
        scope = self._exit_state.policy.scope
        for score in {request.score for request in new}:
            if self._questions and score is None and scope.score is not None:
                raise UserError(
                    "The choices of a request have norms, and nothing says of which kind; say it with score= "
                    "('per_character' or 'per_byte'), because this policy was calibrated on a kind of scores."
                )
            scope.check(Scope(unit="questions" if self._questions else "answers", score=score))
        lengths = [max(request.ran) for request in new]
        tokens = np.concatenate([row for request in new for row in request.rows])
        mixed = any(bool(request.scored) != self._questions for request in new)
        sees = self._questions and not self._model.causal
        if self._questions:
            self._model.require("branches", "Questions with choices")
            if any(request.shared for request in new):
                self._model.require("kv_cache", "Requests that share what they begin with")
        compares = not {"logits", "predictions"}.isdisjoint(self._exit_state.sources())
        choiceless = self._questions and compares and any(len(r.rows) < 2 for r in new)
        if not (mixed or sees or choiceless) and max(lengths) <= self._model.block_size and self._known(tokens):
            return None
        for place, request in enumerate(new):
            try:
                if bool(request.scored) != self._questions:
                    raise UserError("Requests with choices and requests without cannot run together.")
                if sees:
                    raise UserError(
                        "A model that looks ahead sees a choice before it scores it; ask it without choices."
                    )
                if choiceless and len(request.rows) < 2:
                    raise UserError(
                        f"The readout '{self._exit_state.policy.readout}' compares the choices of a question, and this "
                        "one has a single continuation; run it with a gate, hidden_change or a fixed depth."
                    )
                self._model.check_length(lengths[place])
                if not all(map(self._known, request.rows)):
                    size = self._model.vocab_size
                    raise UserError(f"A request has a token outside the model's vocabulary (0..{size - 1}).")
            except UserError as error:
                del new[place:]
                return error
        raise AssertionError("a request was refused for no reason")

    def _known(self, tokens: NDArray[np.int64]) -> bool:
        return bool(tokens.min() >= 0 and tokens.max() < self._model.vocab_size)

    @torch.inference_mode()
    def advance(self, new: list[Request]) -> list[Answer]:
        """One loop of everybody, with these requests added; answers who exits."""
        before = self._gather(new)
        loop = self._loops = self._loops + 1
        if self._shares:
            self._prefix_cache.evict_unused(self._requests)
            before = before.with_cache(self._prefix_cache.shared_prefix(self._requests, loop))
        state = self._state = self._model.step(before)
        self._rows = np.arange(self.count)
        reading = _LoopOutputs(self._model, state, self._requests, self._mean)
        stops = self._exit_state.stops(loop, {source: reading.of(source) for source in self._exit_state.sources()})
        if not stops.any():
            return []
        leaving = np.flatnonzero(stops)
        if self._greedy and self._questions:
            logits, greedy = reading.logits_and_greedy(leaving)
        else:
            logits, greedy = reading.logits(leaving), None
        answers = []
        sound = np.isfinite(logits.max(axis=-1)) | bool(self._questions)  # whose scores were checked
        if not sound.all():
            self.failure = not_finite("logits")
        for place, (request, at) in enumerate(zip(self._requests[leaving], loop[leaving].tolist(), strict=True)):
            if not sound[place]:
                continue
            wide = len(request.rows) if request.scored else None
            same = None if greedy is None else greedy[place, :wide]
            answers.append(Answer(request.key, at, logits[place, :wide], same))
        self._requests, self._rows, self._loops = (each[~stops] for each in (self._requests, self._rows, self._loops))
        self._exit_state.keep(~stops)
        return answers

    def _gather(self, new: list[Request]) -> LoopState:
        """The state of who stays and who is new, by length: that leaves the fewest empty slots in attention.

        Requests with a common beginning stand together, and among them those at one loop.
        """
        states = [] if self._state is None or not self.count else [self._state]
        if new:
            before = len(states[0].loop) if states else 0
            states.append(embed_requests(self._model, new, self._device, self._prefix_cache))
            self._rows = np.concatenate((self._rows, np.arange(before, before + len(new))))
            self._loops = np.concatenate((self._loops, np.zeros(len(new), dtype=np.int64)))
            self._requests = np.concatenate((self._requests, np.fromiter(new, dtype=object, count=len(new))))
            self._exit_state.admit(len(new))
            self._shares = self._shares or any(request.shared for request in new)
        elif self.count == len(states[0].loop):
            return states[0]  # nobody came, nobody left
        state = states[0] if len(states) == 1 else type(states[0]).join(states)
        return state.take(self._sorted(state))

    def _sorted(self, state: LoopState) -> NDArray[np.int64]:
        """[N] their rows in the order in which they run together; all that goes by request is brought into it."""
        keys = [state.layout.counts.lengths[self._rows]]
        if self._shares:
            prefixes = [request.prefix for request in self._requests]
            keys += [self._loops, np.unique(np.array(prefixes, dtype=object), return_inverse=True)[1]]
        order = np.lexsort(keys)
        self._requests, self._loops = self._requests[order], self._loops[order]
        self._exit_state.reorder(order)
        rows: NDArray[np.int64] = self._rows[order]
        return rows


class _LoopOutputs:
    """What the active requests say after a loop; each part is computed when it is asked for."""

    def __init__(self, model: LoopedModel, state: LoopState, requests: Array, mean: bool) -> None:
        self._model, self._state, self._requests, self._mean = model, state, requests, mean
        self._questions = bool(requests[0].scored)

    def of(self, source: str) -> Array:
        """[N, ...] logits, what they answer, pooled states or halt logits."""
        if source in ("logits", "predictions"):
            logits = check_logits(self._all_logits)
            return logits if source == "logits" else logits.argmax(axis=-1)
        if source == "hidden":
            return check_finite(_numpy(self._pooled), "states")
        halting = self._model.halt(self._pooled)
        if halting is None:
            raise UserError("The model has no gate, so it cannot be run with the readout 'gate'.")
        return check_finite(_numpy(halting), "halt logits")

    def logits(self, chosen: NDArray[np.int64]) -> Array:
        """[n, V], or [n, C], of these requests."""
        if "_all_logits" in self.__dict__ or len(chosen) == len(self._requests):
            return self._all_logits[chosen]
        if self._questions:
            return _single(choice_scores(self._model, self._state.take(chosen), self._requests[chosen]))
        if self._model.head_attends:
            theirs = self._state.take(chosen)
            return _numpy(self._model.predict(self._model.head_input(theirs, trunk_ends(theirs))))
        rows = upload(chosen, self._pooled.device)
        return _numpy(self._model.predict(self._pooled.index_select(0, rows)))

    def logits_and_greedy(self, chosen: NDArray[np.int64]) -> tuple[Array, Array | None]:
        """[n, C] of these questions."""
        state = self._state if len(chosen) == len(self._requests) else self._state.take(chosen)
        values, same = choice_scores_and_greedy(self._model, state, self._requests[chosen])
        return _single(values), same

    @cached_property
    def _all_logits(self) -> Array:
        if self._questions:
            return _single(choice_scores(self._model, self._state, self._requests))
        if self._model.head_attends:
            read = self._model.head_input(self._state, trunk_ends(self._state))
            return _numpy(self._model.predict(read))
        return _numpy(self._model.predict(self._pooled))

    @cached_property
    def _pooled(self) -> Tensor:
        """[N, D]"""
        mean = self._mean and self._questions
        return decision_states(self._model, self._state, self._requests, mean)


def _single(values: Array) -> Array:
    """As a recording has them."""
    return values.astype(np.float32)


def _numpy(values: Tensor) -> Array:
    return values.float().cpu().numpy()
