"""How do requests go through a model together? As the rows of one packed state, each with its choices as branches.

Shapes: N requests, S states, C choices, D width, V vocabulary.
"""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from loopscope.engine.prefix_cache import PrefixCache
from loopscope.engine.requests import Requests
from loopscope.errors import UserError
from loopscope.models import LoopedModel, LoopState
from loopscope.models.layout import Layout

Array = NDArray[Any]
_VOCABULARY = 1 << 26
"""Logits that are held at a time."""


def embed_requests(
    model: LoopedModel, requests: Requests, device: torch.device, prefix_cache: PrefixCache
) -> LoopState:
    """The requests before their first loop."""
    lengths = torch.tensor([len(request.tokens) for request in requests], device=device)
    branches = None
    if len(requests[0].scored):
        branches = torch.zeros(len(requests), max(len(request.rows) for request in requests), dtype=torch.long)
        for counts, request in zip(branches, requests, strict=True):
            counts[: len(request.rows)] = torch.tensor(request.branches)
        branches = branches.to(device)
    cache = prefix_cache.shared_prefix(requests, np.zeros(len(requests), dtype=np.int64))
    tokens = torch.from_numpy(np.concatenate([request.tokens for request in requests])).to(device)
    return model.begin_packed(tokens, Layout(lengths, branches=branches, cache=cache))


def trunk_ends(state: LoopState) -> Tensor:
    """[N] where every row is read: at the end of its trunk."""
    return state.layout.trunks - 1


def decision_states(model: LoopedModel, state: LoopState, requests: Requests, mean: bool = False) -> Tensor:
    """[N, D] the pooled states that decide: at the ends of the trunks, or averaged over the scored tokens."""
    if not mean:
        return model.pooled(state, trunk_ends(state))
    if not all(request.whole for request in requests):
        raise UserError("A mean over the choices' tokens needs all of them; ask with whole=True.")
    starts = state.layout.starts.cpu().numpy()
    predicted = [request.prediction for request in requests]
    places = np.concatenate([start + part.ends for start, part in zip(starts, predicted, strict=True)])
    counts = torch.tensor([len(part.tokens) for part in predicted], device=state.hidden.device)
    owners = torch.repeat_interleave(torch.arange(len(predicted), device=counts.device), counts)
    pooled = model.pooled(state).index_select(0, torch.from_numpy(places).to(owners.device))
    sums = pooled.new_zeros((len(predicted), pooled.shape[1]), dtype=torch.float32).index_add_(
        0, owners, pooled.float()
    )
    return (sums / counts[:, None]).to(pooled.dtype)


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
    starts = state.layout.starts.cpu().numpy()
    places = np.concatenate([start + part.places for start, part in zip(starts, predicted, strict=True)])
    owners = np.repeat(np.arange(len(requests)), [len(part.tokens) for part in predicted])
    choice = np.concatenate([part.choices for part in predicted])
    targets = torch.from_numpy(np.concatenate([part.tokens for part in predicted])).to(device)
    where, which = np.unique(places, return_inverse=True)  # all choices begin at one place
    read = model.head_input(state).index_select(0, torch.from_numpy(where).to(device))
    likeliest = torch.empty_like(targets) if greedy else None
    log_probs = log_likelihoods(model, read, torch.from_numpy(which).to(device), targets, likeliest)
    wide = max(len(request.rows) for request in requests)
    sums = np.zeros((len(requests), wide))
    np.add.at(sums, (owners, choice), log_probs.cpu().numpy())
    same = None
    if likeliest is not None:
        same = np.ones((len(requests), wide), dtype=bool)
        np.logical_and.at(same, (owners, choice), (likeliest == targets).cpu().numpy())
    norms = np.full((len(requests), wide), np.nan)
    for row, request in zip(norms, requests, strict=True):
        row[: len(request.rows)] = request.norms if divided else 1.0
    return np.where(np.isnan(norms), -np.inf, sums / norms), same


def log_likelihoods(
    model: LoopedModel, read: Tensor, which: Tensor, targets: Tensor, likeliest: Tensor | None = None
) -> Tensor:
    """[P] the log-probabilities of tokens, each read off the state `which` [P] of `read` [U, D] says; in float64.

    `likeliest` [P], if it is given, is filled with the tokens that have the highest one.
    """
    chunk = max(1, _VOCABULARY // model.vocab_size)
    normaliser, chosen = [], read.new_empty(len(which), dtype=torch.float64)
    for first in range(0, len(read), chunk):
        logits = model.predict(read[first : first + chunk]).float()
        normaliser.append(logits.logsumexp(-1).double())
        here = torch.nonzero((which >= first) & (which < first + chunk))[:, 0]
        chosen[here] = logits[which[here] - first, targets[here]].double()
        if likeliest is not None:
            likeliest[here] = logits.argmax(-1)[which[here] - first]
    return chosen - torch.cat(normaliser)[which]
