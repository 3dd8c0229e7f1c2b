"""One pass over a batch of questions: every loop is read out on the way, and no token runs twice.

The context of a question runs once and its choices branch off from it; what questions of one subject begin with runs
once for all of them; only where a choice's token is predicted does a state go through the head.

Shapes: N questions, T loops, C choices of the question that has most, D width.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from loopscope.engine.batches import Beginnings, begin, decision_states, scores
from loopscope.engine.requests import Request, choices
from loopscope.models import LoopedModel
from loopscope.questions import Encoded, Question

Array = NDArray[Any]
TOKENS = 8192
"""Tokens of a batch, unless it is asked for otherwise: enough to keep a machine busy."""


@dataclass(frozen=True)
class Scores:
    """What a model says of some questions at every loop."""

    log_likelihoods: NDArray[np.float64]  # [N, T, C]; -inf where a question has fewer choices
    gate_logits: NDArray[np.float32] | None  # [N, T]
    hidden: NDArray[np.float32]  # [N, T, D] the pooled states


def requests_for(
    questions: Sequence[Question], encoded: Sequence[Encoded], metric: str, mean: bool = False
) -> list[Request]:
    """One request a question, numbered; its norms are those of the metric. `mean` is as for `score`."""
    return [
        choices(
            number,
            tokens.context,
            tokens.choices,
            [max(norm, 1) for norm in question.norms] if metric == "acc_norm" else (),
            tokens.prefix,
            mean,
        )
        for number, (question, tokens) in enumerate(zip(questions, encoded, strict=True))
    ]


def batches(requests: Sequence[Request], tokens: int = TOKENS) -> Iterator[NDArray[np.int64]]:
    """The numbers of questions that run together: of one beginning and about one length, up to so many tokens."""
    beginnings = [request.rows[0][: request.shared].tobytes() for request in requests]
    lengths = np.array([len(request.tokens) for request in requests])
    order = np.lexsort((lengths, np.unique(np.array(beginnings, dtype=object), return_inverse=True)[1]))
    start = 0
    for end in range(1, len(order) + 1):
        if end < len(order):
            apart = beginnings[order[start]] != beginnings[order[end]]
            if not apart and (end + 1 - start) * lengths[order[end]] <= tokens:
                continue
        yield order[start:end]
        start = end


@torch.inference_mode()
def score(
    model: LoopedModel, requests: Sequence[Request], beginnings: Beginnings | None = None, mean: bool = False
) -> Scores:
    """All loops of these questions; `mean` takes gate and state from the choices' tokens not the context's end."""
    device = next(model.parameters()).device
    beginnings = beginnings or Beginnings(model, device)
    beginnings.keep(requests)
    state = begin(model, requests, device, beginnings)
    likely, gates, hidden = [], [], []
    for loop in range(1, model.num_loops + 1):
        state = model.step(state.after(beginnings.before(requests, np.full(len(requests), loop))))
        likely.append(scores(model, state, requests, divided=False))
        pooled = decision_states(model, state, requests, mean)
        hidden.append(pooled.float().cpu().numpy())
        halting = model.halt(pooled)
        if halting is not None:
            gates.append(halting.float().cpu().numpy())
    return Scores(np.stack(likely, 1), np.stack(gates, 1) if gates else None, np.stack(hidden, 1))
