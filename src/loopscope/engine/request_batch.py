"""How do requests go through a model together? As the rows of one packed state, each with its choices as branches.

Shapes: N requests, S states, C choices, D width, V vocabulary.
"""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from loopscope.engine.logit_stats import not_finite
from loopscope.engine.prefix_cache import PrefixCache
from loopscope.engine.requests import Requests
from loopscope.errors import UserError
from loopscope.models import LoopedModel, LoopState
from loopscope.models.device import accumulator, upload
from loopscope.models.layout import Layout

Array = NDArray[Any]
_VOCABULARY = 1 << 26
"""Logits that are held at a time."""


def embed_requests(
    model: LoopedModel, requests: Requests, device: torch.device, prefix_cache: PrefixCache
) -> LoopState:
    """The requests before their first loop."""
    lengths = np.array([len(request.tokens) for request in requests])
    branches = None
    if len(requests[0].scored):
        branches = np.zeros((len(requests), max(len(request.rows) for request in requests)), dtype=np.int64)
        for counts, request in zip(branches, requests, strict=True):
            counts[: len(request.rows)] = request.branches
    cache = prefix_cache.shared_prefix(requests, np.zeros(len(requests), dtype=np.int64))
    tokens = upload(np.concatenate([request.tokens for request in requests]), device)
    return model.begin_packed(tokens, Layout.from_host(lengths, device, branches, cache))


def trunk_ends(state: LoopState) -> Tensor:
    """[N] where every row is read: at the end of its trunk."""
    return state.layout.trunks - 1


def decision_states(model: LoopedModel, state: LoopState, requests: Requests, mean: bool = False) -> Tensor:
    """[N, D] the pooled states that decide: at the ends of the trunks, or averaged over the scored tokens."""
    if not mean:
        return model.pooled(state, trunk_ends(state))
    if not all(request.whole for request in requests):
        raise UserError("A mean over the choices' tokens needs all of them; ask with whole=True.")
    device, predicted = state.hidden.device, [request.prediction for request in requests]
    starts = state.layout.host_starts
    places = np.concatenate([start + part.ends for start, part in zip(starts, predicted, strict=True)])
    counts = np.array([len(part.tokens) for part in predicted])
    owners = upload(np.repeat(np.arange(len(predicted)), counts), device)
    pooled = model.pooled(state).index_select(0, upload(places, device))
    sums = pooled.new_zeros((len(predicted), pooled.shape[1]), dtype=torch.float32).index_add_(
        0, owners, pooled.float()
    )
    return (sums / upload(counts, device)[:, None]).to(pooled.dtype)


def choice_scores(model: LoopedModel, state: LoopState, requests: Requests, divided: bool = True) -> Array:
    """[N, C] the log-probability of every choice (by its norm); -inf where a question has fewer choices.

    `requests` are those of the rows of `state`, in that order.
    """
    return choice_scores_and_greedy(model, state, requests, divided, False)[0]


def choice_scores_and_greedy(
    model: LoopedModel, state: LoopState, requests: Requests, divided: bool = True, greedy: bool = True
) -> tuple[Array, NDArray[np.bool_] | None]:
    """The scores, and [N, C] (if that is asked for) whether every token of a choice is the likeliest there."""
    device, predicted = state.hidden.device, [request.prediction for request in requests]
    starts = state.layout.host_starts
    places = np.concatenate([start + part.places for start, part in zip(starts, predicted, strict=True)])
    owners = np.repeat(np.arange(len(requests)), [len(part.tokens) for part in predicted])
    choice = np.concatenate([part.choices for part in predicted])
    targets = upload(np.concatenate([part.tokens for part in predicted]), device)
    where, which = np.unique(places, return_inverse=True)  # all choices begin at one place
    read = model.head_input(state).index_select(0, upload(where, device))
    likeliest = torch.empty_like(targets) if greedy else None
    values = [log_likelihoods(model, read, which, targets, likeliest)]
    if likeliest is not None:
        values.append((likeliest == targets).to(values[0]))
    log_probs, *likely = torch.stack(values).cpu().numpy()
    if np.isnan(log_probs).any():
        raise not_finite("logits")
    wide = max(len(request.rows) for request in requests)
    sums = np.zeros((len(requests), wide))
    np.add.at(sums, (owners, choice), log_probs)
    same = np.ones((len(requests), wide), dtype=bool) if greedy else None
    if same is not None:
        np.logical_and.at(same, (owners, choice), likely[0] > 0)
    norms = np.full((len(requests), wide), np.nan)
    for row, request in zip(norms, requests, strict=True):
        row[: len(request.rows)] = request.norms if divided else 1.0
    return np.where(np.isnan(norms), -np.inf, sums / norms), same


def require_vocabulary(model: LoopedModel, logits: Tensor) -> None:
    """Refuses answers that are no tokens where tokens are what is asked for."""
    if logits.shape[-1] != model.vocab_size:
        raise UserError(
            f"The model answers with {logits.shape[-1]} classes and has {model.vocab_size} tokens, so that it can "
            "neither write text nor score choices; run its rows."
        )


def log_likelihoods(
    model: LoopedModel, read: Tensor, which: NDArray[np.int64], targets: Tensor, likeliest: Tensor | None = None
) -> Tensor:
    """[P] the log-probabilities of tokens, each read off the state `which` [P] of `read` [U, D] says, in float64.

    `likeliest` [P], if it is given, is filled with the tokens that have the highest one. NaN where logits are not
    finite: an infinite one leaves the others a probability of 0, which would look like an answer.
    """
    chunk = max(1, _VOCABULARY // model.vocab_size)
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
