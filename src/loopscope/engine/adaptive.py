"""The adaptive engine: every request runs until its policy says stop, and the batch is kept full.

A request that exits is answered at once, and its slots go to the next in the queue. The block is the same at every
depth, so rows at different loops share a batch; rows of different lengths are packed. Only what the policy's signal
needs is computed at every loop; logits beyond that only for who exits. Nothing of a request's computation depends on
its neighbours, so a decision is the one that the policy's replay on a recording makes.

Shapes: N active requests, B their rows, D width, V vocabulary, C choices.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from loopscope.engine.requests import Request
from loopscope.errors import UserError
from loopscope.exits import ExitPolicy
from loopscope.exits.live import Follower
from loopscope.models import LoopedModel, LoopState
from loopscope.models.packing import Layout

Array = NDArray[Any]


@dataclass(frozen=True, eq=False)
class Answer:
    key: Any
    loop: int  # the loop at which the request stopped
    logits: NDArray[np.float32]  # [V], or [C] for a question with choices

    @property
    def prediction(self) -> int:
        return int(self.logits.argmax())


def run(
    model: LoopedModel,
    policy: ExitPolicy,
    requests: Iterable[Request],
    batch_size: int = 64,
    num_loops: int | None = None,
) -> Iterator[Answer]:
    """Answers requests as they exit. Takes from `requests` only what there is room for: `batch_size` rows at a time.

    A question with more rows than that runs alone. A request that the model cannot take is an error, raised when all
    before it are answered.
    """
    for name, value in (("batch_size", batch_size), ("num_loops", model.num_loops if num_loops is None else num_loops)):
        if value < 1:
            raise UserError(f"{name} must be at least 1, got {value}.")
    tied = policy.model is not None or policy.gate is not None
    policy.check(model.weights_sha256 if tied else None, num_loops or model.num_loops)
    batch = _Batch(model, Follower(policy, num_loops or model.num_loops))
    waiting = iter(requests)
    held: Request | None = None  # did not fit any more
    bad: UserError | None = None
    while True:
        new, rows = [], batch.rows
        for request in chain([held] if held else [], waiting):
            held = None
            if rows and rows + len(request.rows) > batch_size:
                held = request
                break
            new.append(request)
            rows += len(request.rows)
            if rows >= batch_size:
                break
        bad = bad or batch.refuse(new)
        if bad is not None:
            waiting, held = iter(()), None
        if not new and not batch.rows:
            break
        yield from batch.advance(new)
    if bad is not None:
        raise bad


def in_order(answers: Iterable[Answer]) -> Iterator[Answer]:
    """Answers whose keys count from 0, in that order; only those that came too early are held."""
    early: dict[int, Answer] = {}
    wanted = 0
    for answer in answers:
        early[answer.key] = answer
        while wanted in early:
            yield early.pop(wanted)
            wanted += 1


class _Batch:
    """The requests that are running."""

    def __init__(self, model: LoopedModel, follower: Follower) -> None:
        self._model, self._follower = model, follower
        self._device = next(model.parameters()).device
        self._requests: Array = np.empty(0, dtype=object)  # [N]
        self._owner = self._choice = torch.empty(0, dtype=torch.long)  # [B] whose row it is, and which of its rows
        self._state: LoopState | None = None  # of these rows and of those that have just left
        self._rows = torch.empty(0, dtype=torch.long)  # [B] where they lie in it
        self._questions: bool | None = None

    @property
    def rows(self) -> int:
        return len(self._owner)

    def refuse(self, new: list[Request]) -> UserError | None:
        """Takes from `new` the first request that the model cannot take and all after it; says what is wrong."""
        if not new:
            return None
        if self._questions is None:
            self._questions = bool(new[0].scored)
        lengths = [max(map(len, request.rows)) for request in new]
        tokens = np.concatenate([row for request in new for row in request.rows])
        mixed = any(bool(request.scored) != self._questions for request in new)
        if not mixed and max(lengths) <= self._model.block_size and self._known(tokens):
            return None
        for place, request in enumerate(new):
            try:
                if bool(request.scored) != self._questions:
                    raise UserError("Requests with choices and requests without cannot run together.")
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
        state = self._state = self._model.step(self._gather(new))
        self._rows = torch.arange(len(self._owner))
        reading = _Reading(self._model, state, self._requests, self._owner, self._choice)
        loop, source = reading.loop, self._follower.source
        stops = self._follower.stops(loop, None if source is None else reading.of(source))
        if not stops.any():
            return []
        leaving = np.flatnonzero(stops)
        told = zip(self._requests[leaving], loop[leaving].tolist(), reading.logits(leaving), strict=True)
        answers = [
            Answer(request.key, at, logits[: len(request.rows)] if request.scored else logits)
            for request, at, logits in told
        ]
        self._drop(~stops)
        return answers

    def _gather(self, new: list[Request]) -> LoopState:
        """The state of who stays and who is new, by length: that leaves the fewest empty slots in attention."""
        if not len(self._rows):
            self._state = None
        states = [] if self._state is None else [self._state]
        if new:
            states.append(self._admit(new))
        elif len(self._rows) == len(states[0].loop):
            return states[0]  # nobody came, nobody left
        state = states[0] if len(states) == 1 else type(states[0]).join(states)
        order = torch.argsort(state.lengths.cpu()[self._rows], stable=True)
        self._owner, self._choice = self._owner[order], self._choice[order]
        return state.take(self._rows[order].to(self._device))

    def _admit(self, new: list[Request]) -> LoopState:
        rows = [row for request in new for row in request.rows]
        tokens = np.concatenate(rows)
        counts = torch.tensor([len(request.rows) for request in new])
        owner = torch.repeat_interleave(torch.arange(len(new)), counts)
        self._choice = torch.cat((self._choice, Layout(counts).positions))
        self._owner = torch.cat((self._owner, owner + len(self._requests)))
        before = 0 if self._state is None else len(self._state.loop)
        self._rows = torch.cat((self._rows, torch.arange(before, before + len(rows))))
        self._requests = np.concatenate((self._requests, np.fromiter(new, dtype=object, count=len(new))))
        self._follower.admit(len(new))
        lengths = torch.tensor([len(row) for row in rows], device=self._device)
        return self._model.begin_packed(torch.from_numpy(tokens).to(self._device), Layout(lengths))

    def _drop(self, keep: NDArray[np.bool_]) -> None:
        self._requests = self._requests[keep]
        self._follower.keep(keep)
        staying = torch.from_numpy(keep)[self._owner]
        self._owner = torch.from_numpy(keep.cumsum() - 1)[self._owner[staying]]
        self._choice, self._rows = self._choice[staying], self._rows[staying]


class _Reading:
    """What the active requests say after a loop; each part is computed when it is asked for."""

    def __init__(self, model: LoopedModel, state: LoopState, requests: Array, owner: Tensor, choice: Tensor) -> None:
        self._model, self._state, self._requests = model, state, requests
        self._owner, self._choice = owner, choice
        self._questions = bool(requests[0].scored)
        first = torch.empty(len(requests), dtype=torch.long)
        leads = torch.nonzero(choice == 0)[:, 0]
        first[owner[leads]] = leads
        self._first = first.to(state.loop.device)  # [N] the first row of every request

    @cached_property
    def loop(self) -> NDArray[np.int64]:
        """[N]"""
        return self._state.loop[self._first].cpu().numpy()

    def of(self, source: str) -> Array:
        """[N, ...] logits, pooled states or halt logits."""
        if source == "logits":
            return self._all_logits
        if source == "hidden":
            return _numpy(self._pooled)
        halting = self._model.halt(self._pooled)
        if halting is None:
            raise UserError("The model has no gate, so it cannot be run with the readout 'gate'.")
        return _numpy(halting)

    def logits(self, chosen: NDArray[np.int64]) -> Array:
        """[n, V], or [n, C], of these requests."""
        if "_all_logits" in self.__dict__:
            return self._all_logits[chosen]
        if self._questions:
            return self._scores(chosen)
        return _numpy(self._model.predict(self._pooled[torch.from_numpy(chosen).to(self._first.device)]))

    @cached_property
    def _all_logits(self) -> Array:
        everybody = np.arange(len(self._requests))
        return self._scores(everybody) if self._questions else _numpy(self._model.predict(self._pooled))

    @cached_property
    def _pooled(self) -> Tensor:
        """[N, D]"""
        positions = self._state.lengths - 1
        if self._questions:
            positions = positions - torch.as_tensor(self._scored, device=positions.device)
        return self._model.pooled(self._state, positions)[self._first]

    @cached_property
    def _scored(self) -> list[int]:
        """[B] how many tokens at the end of every row are its choice."""
        owners = self._requests[self._owner.numpy()]
        return [request.scored[choice] for request, choice in zip(owners, self._choice.tolist(), strict=True)]

    def _scores(self, chosen: NDArray[np.int64]) -> Array:
        """[n, C] the log-probability of every choice by its norm; -inf where a question has fewer choices."""
        number = np.full(len(self._requests), -1)
        number[chosen] = np.arange(len(chosen))
        theirs = number[self._owner.numpy()] >= 0
        owner, choice = number[self._owner.numpy()[theirs]], self._choice.numpy()[theirs]
        told = list(zip(self._requests[chosen][owner], choice.tolist(), strict=True))
        device = self._state.hidden.device
        state = self._state.take(torch.from_numpy(theirs).to(device))
        counts = torch.tensor([request.scored[choice] for request, choice in told], device=device)
        ends = state.layout.starts + state.lengths
        places = Layout(counts).counting(ends - counts - 1)  # a token is predicted where the one before it stands
        targets = np.concatenate([request.rows[choice][-request.scored[choice] :] for request, choice in told])
        logits = self._model.predict(self._model.pooled(state)[places])
        log_probs = logits.double().log_softmax(-1).gather(1, torch.from_numpy(targets).to(device)[:, None])[:, 0]
        rows = torch.repeat_interleave(torch.arange(len(counts), device=device), counts)
        sums = log_probs.new_zeros(len(counts)).index_add_(0, rows, log_probs).cpu().numpy()
        norms = np.array([request.norms[choice] for request, choice in told])
        scores = np.full((len(chosen), int(choice.max()) + 1), -np.inf, dtype=np.float32)
        scores[owner, choice] = sums / norms
        return scores


def _numpy(values: Tensor) -> Array:
    return values.float().cpu().numpy()
