"""Which token comes next? The likeliest, or one that is drawn.

A draft of lossless text is drawn as full depth draws: by a race in which every token has a time of its own, the same at
every loop. So a draft stands if both loops see the same token win, and the text is full depth's whatever was drafted.

Shapes: n rows, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from loopscope.engine.exit_decision import NO_ANSWER, check_answers
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


def draw_tokens(logits: Tensor, draws: Sequence[np.random.Generator], sampling: Sampling) -> list[int]:
    """A token of every row of logits [n, V], drawn with one number of the row's own."""
    shares = _shares(logits, sampling)
    drawn = upload(torch.tensor([own.random() for own in draws], dtype=shares.dtype), shares.device)
    summed = shares.cumsum(-1)
    reached = summed > drawn[:, None] * summed[:, -1:]
    tokens = torch.where(reached.any(-1), reached.int().argmax(-1), shares.argmax(-1))  # none: by rounding
    return _fetched(tokens.masked_fill(~summed[:, -1].isfinite(), NO_ANSWER))


def race_times(sampling: Sampling, number: int, position: int, vocab_size: int, device: torch.device) -> Tensor:
    """[V] by which the next token after a position of a prompt's text is drawn, whatever was drawn elsewhere."""
    bits = np.random.Philox(key=[sampling.seed, number], counter=[0, 0, 0, 1 + position])
    times = torch.from_numpy(np.random.Generator(bits).standard_exponential(vocab_size))
    return upload(times.to(accumulator(device)), device)


def race(logits: Tensor, times: Tensor, sampling: Sampling) -> list[int]:
    """The token of every row of logits [n, V] that is first: each takes its exponential time [n, V] by its share.

    The first is a token with the probability of its share. With the same times, shares that are nearly the same have
    nearly always the same one.
    """
    shares = _shares(logits, sampling)
    first = (shares / times).argmax(-1)
    return _fetched(first.masked_fill(~shares.sum(-1).isfinite(), NO_ANSWER))


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


def _fetched(tokens: Tensor) -> list[int]:
    found: list[int] = check_answers(tokens.cpu().numpy()).tolist()
    return found
