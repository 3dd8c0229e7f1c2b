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

from loopscope.engine.logit_stats import check_finite
from loopscope.engine.prefix_cache import PrefixCache
from loopscope.engine.request_batch import choice_scores, decision_states, embed_requests
from loopscope.engine.requests import Request, choices
from loopscope.exits.scope import SCORE_OF_METRIC
from loopscope.models import LoopedModel
from loopscope.questions import EncodedQuestion, Question

Array = NDArray[Any]
BATCH_TOKENS = 8192
"""Tokens of a batch, unless it is asked for otherwise: enough to keep a machine busy."""


@dataclass(frozen=True)
class LoopScores:
    """What a model says of some questions at every loop."""

    log_likelihoods: NDArray[np.float64]  # [N, T, C]; -inf where a question has fewer choices
    gate_logits: NDArray[np.float32] | None  # [N, T]
    hidden: NDArray[np.float32]  # [N, T, D] the pooled states


def question_requests(
    questions: Sequence[Question], encoded: Sequence[EncodedQuestion], metric: str, mean: bool = False
) -> list[Request]:
    """One request a question, numbered; its norms are those of the metric. `mean` is as for `score_all_loops`."""
    return [
        choices(
            number,
            tokens.context,
            tokens.choices,
            [max(norm, 1) for norm in question.norms] if metric == "acc_norm" else (),
            tokens.prefix,
            mean,
            SCORE_OF_METRIC[metric],
        )
        for number, (question, tokens) in enumerate(zip(questions, encoded, strict=True))
    ]


def question_batches(requests: Sequence[Request], tokens: int = BATCH_TOKENS) -> Iterator[NDArray[np.int64]]:
    """The numbers of questions that run together: of one prefix and about one length, up to so many tokens."""
    prefixes = [request.prefix for request in requests]
    lengths = np.array([len(request.tokens) for request in requests])
    order = np.lexsort((lengths, np.unique(np.array(prefixes, dtype=object), return_inverse=True)[1]))
    start = 0
    for end in range(1, len(order) + 1):
        if end < len(order):
            apart = prefixes[order[start]] != prefixes[order[end]]
            if not apart and (end + 1 - start) * lengths[order[end]] <= tokens:
                continue
        yield order[start:end]
        start = end


@torch.inference_mode()
def score_all_loops(
    model: LoopedModel, requests: Sequence[Request], prefix_cache: PrefixCache | None = None, mean: bool = False
) -> LoopScores:
    """All loops of these questions; `mean` takes gate and state from the choices' tokens not the context's end."""
    device = next(model.parameters()).device
    prefix_cache = prefix_cache or PrefixCache(model, device)
    prefix_cache.evict_unused(requests)
    embedded = embed_requests(model, requests, device, prefix_cache)
    log_likelihoods, gate_logits, hidden = [], [], []
    for state in model.unroll(
        embedded, cache=lambda loop: prefix_cache.shared_prefix(requests, np.full(len(requests), loop))
    ):
        log_likelihoods.append(choice_scores(model, state, requests, divided=False))
        pooled = decision_states(model, state, requests, mean)
        hidden.append(check_finite(pooled.float().cpu().numpy(), "states"))
        gate_logit = model.halt(pooled)
        if gate_logit is not None:
            gate_logits.append(check_finite(gate_logit.float().cpu().numpy(), "halt logits"))
    return LoopScores(
        np.stack(log_likelihoods, 1), np.stack(gate_logits, 1) if gate_logits else None, np.stack(hidden, 1)
    )
