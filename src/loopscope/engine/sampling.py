"""Which token comes next? The likeliest, or one that is drawn; and a draft, checked against what full depth says.

A draft that was drawn from the shares q of an early loop is kept with probability min(1, p / q), where p is its share
at full depth; in place of one that is not, a token is drawn from what p has more than q. What is said then has the
shares of full depth, whatever the drafts were (Leviathan et al., 2023).

Shapes: n rows, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from loopscope.engine.exit_decision import NO_ANSWER, check_answers, likeliest_classes
from loopscope.errors import UserError
from loopscope.models.device import accumulator, upload


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Temperature 0 takes the likeliest token."""

    temperature: float = 0.0
    top_k: int = 0  # 0: of all tokens
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if (
            not all(0 <= number < 2**63 for number in (self.temperature, self.top_k, self.seed))
            or not 0 < self.top_p <= 1
        ):
            raise UserError("temperature, top_k and seed lie between 0 and 2**63, and top_p above 0 and up to 1.")


def greedy_tokens(logits: Tensor) -> list[int]:
    """The likeliest token of every row of logits [n, V]."""
    return _fetched(likeliest_classes(logits))


class Draft(NamedTuple):
    """A token that was said at an early loop; where it was drawn, with the shares that it was drawn from."""

    token: int
    loops: int
    shares: Tensor | None  # [V], by token


def draw_drafts(
    logits: Tensor, loops: Sequence[int], draws: Sequence[np.random.Generator], sampling: Sampling
) -> list[Draft]:
    """What every row says at this loop of its own, where it is drawn."""
    shares = _shares(logits, sampling)
    tokens = _drawn_tokens(shares, draws)
    return [Draft(*draft) for draft in zip(tokens, loops, shares, strict=True)]


def verify_greedy(chosen: Sequence[int], drafts: Sequence[Sequence[Draft]]) -> list[tuple[int, int]]:
    """As `verify`, of the likeliest tokens by the same logits."""
    found, start = [], 0
    for own in drafts:
        stood = next((place for place, each in enumerate(own) if each.token != chosen[start + place]), len(own))
        found.append((stood, chosen[start + stood]))
        start += len(own) + 1
    return found


def verify(
    logits: Tensor, drafts: Sequence[Sequence[Draft]], draws: Sequence[np.random.Generator], sampling: Sampling
) -> list[tuple[int, int]]:
    """For every row how many of its drafts, which were drawn, stand, and the token after those.

    `logits` [sum over rows of (drafts + 1), V] are full depth's where each draft was said, and after the last of them.
    """
    ends = np.cumsum([len(own) + 1 for own in drafts])
    starts = [int(end) - len(own) - 1 for own, end in zip(drafts, ends, strict=True)]
    full = _shares(logits, sampling)
    kept = _kept_drafts(full, drafts, starts, draws)
    rows = upload(np.array(starts) + np.array(kept), logits.device)
    left = full.index_select(0, rows)
    for place, (count, own) in enumerate(zip(kept, drafts, strict=True)):
        if count < len(own):
            refused = own[count].shares
            assert refused is not None
            more = (left[place] - refused).clamp_(min=0)
            left[place] = torch.where(more.sum() > 0, more, left[place])  # 0: they differ by rounding alone
    return list(zip(kept, _drawn_tokens(left, draws), strict=True))


def _kept_drafts(
    full: Tensor, drafts: Sequence[Sequence[Draft]], starts: Sequence[int], draws: Sequence[np.random.Generator]
) -> list[int]:
    """How many drafts of every row stand before the first that does not."""
    drafted = [each for own in drafts for each in own]
    if not drafted:
        return [0] * len(drafts)
    rows = np.concatenate([start + np.arange(len(own)) for own, start in zip(drafts, starts, strict=True)])
    chosen = upload(np.array([each.token for each in drafted]), full.device)
    early = torch.stack([each.shares for each in drafted if each.shares is not None])
    there = full.index_select(0, upload(rows, full.device))
    both = torch.stack([shares.gather(1, chosen[:, None])[:, 0] for shares in (there, early)]).cpu().numpy()
    kept, first = [], 0
    for own, own_draws in zip(drafts, draws, strict=True):
        part = both[:, first : first + len(own)]
        count = 0
        while count < len(own) and own_draws.random() * part[1, count] < part[0, count]:
            count += 1
        kept.append(count)
        first += len(own)
    return kept


def _shares(logits: Tensor, sampling: Sampling) -> Tensor:
    """[n, V] the share of every token, by token; NaN where logits are not finite."""
    scaled = logits.to(accumulator(logits.device)) / sampling.temperature
    size = scaled.shape[-1]
    top_k = min(sampling.top_k or size, size)
    if top_k < size:
        likeliest = _likeliest(scaled, top_k)
        scaled = scaled.masked_fill(~likeliest, -torch.inf)
    shares = scaled.softmax(-1)
    if sampling.top_p == 1:
        return shares
    tokens = torch.arange(size, device=scaled.device).expand_as(scaled)
    if top_k < size:  # there is nothing else to be sorted
        tokens = tokens.masked_fill(~likeliest, size).topk(top_k, largest=False).values
    ordered, order = shares.gather(1, tokens).sort(dim=-1, descending=True, stable=True)
    ordered = ordered.masked_fill(ordered.cumsum(-1) - ordered >= sampling.top_p * ordered.sum(-1, keepdim=True), 0.0)
    ordered = ordered / ordered.sum(-1, keepdim=True)
    return torch.zeros_like(shares).scatter_(1, tokens.gather(1, order), ordered)


def _likeliest(logits: Tensor, count: int) -> Tensor:
    """[n, V] whether a token is among so many; of equal ones the first are, whatever stands beside them."""
    least = logits.topk(count).values[:, -1:]
    above = ~(logits <= least)  # a NaN, too, which shows in the shares then
    equal = logits == least
    return above | (equal & (equal.cumsum(-1) <= count - above.sum(-1, keepdim=True)))


def _drawn_tokens(shares: Tensor, draws: Sequence[np.random.Generator]) -> list[int]:
    """A token of every row of shares [n, V], which need not sum to 1."""
    drawn = upload(torch.tensor([own.random() for own in draws], dtype=shares.dtype), shares.device)
    summed = shares.cumsum(-1)
    reached = summed > drawn[:, None] * summed[:, -1:]
    tokens = torch.where(reached.any(-1), reached.int().argmax(-1), shares.argmax(-1))  # none: by rounding
    return _fetched(tokens.masked_fill(~summed[:, -1].isfinite(), NO_ANSWER))


def _fetched(tokens: Tensor) -> list[int]:
    found: list[int] = check_answers(tokens.cpu().numpy()).tolist()
    return found
