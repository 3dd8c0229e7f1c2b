"""Which token comes next? The likeliest, or a random draw.

A draft of lossless text is drawn as full depth draws: by a race in which every token has its own random time, the same
at every loop. A draft is accepted if the same token wins at both loops, so drafts never change the text of full depth.

Shapes: n rows, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from loopscope.engine.logit_signals import NO_ANSWER, check_answers
from loopscope.errors import UserError
from loopscope.models.device import accumulator, upload


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Choose how tokens are drawn; temperature 0 takes the likeliest token."""

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
    """Draw a token for every row of logits [n, V], with one number from each row's own generator."""
    shares = _probabilities(logits, sampling)
    drawn = upload(torch.tensor([own.random() for own in draws], dtype=shares.dtype), shares.device)
    summed = shares.cumsum(-1)
    reached = summed > drawn[:, None] * summed[:, -1:]
    tokens = torch.where(reached.any(-1), reached.int().argmax(-1), shares.argmax(-1))  # if rounding leaves none
    return _tokens_to_host(tokens.masked_fill(~summed[:, -1].isfinite(), NO_ANSWER))


def race_times(sampling: Sampling, number: int, position: int, vocab_size: int, device: torch.device) -> Tensor:
    """[V] the random times of the race for the token after a position of a prompt, independent of all other draws."""
    bits = np.random.Philox(key=[sampling.seed, number], counter=[0, 0, 0, 1 + position])
    times = torch.from_numpy(np.random.Generator(bits).standard_exponential(vocab_size))
    return upload(times.to(accumulator(device)), device)


def race_winners(logits: Tensor, times: Tensor, sampling: Sampling) -> list[int]:
    """The winner for every row of logits [n, V]: the token with the least exponential time [n, V] over its probability.

    A token wins with its own probability. With the same times, nearly equal probabilities nearly always have the same
    winner.
    """
    shares = _probabilities(logits, sampling)
    first = (shares / times).argmax(-1)
    return _tokens_to_host(first.masked_fill(~shares.sum(-1).isfinite(), NO_ANSWER))


def _probabilities(logits: Tensor, sampling: Sampling) -> Tensor:
    """[n, V] the probability of every token under the sampling; NaN where logits are not finite."""
    scaled = logits.to(accumulator(logits.device)) / sampling.temperature
    size = scaled.shape[-1]
    top_k = min(sampling.top_k or size, size)
    if top_k < size:
        likeliest = _among_likeliest(scaled, top_k)
        scaled = scaled.masked_fill(~likeliest, -torch.inf)
    shares = scaled.softmax(-1)
    if sampling.top_p == 1:
        return shares
    tokens = torch.arange(size, device=scaled.device).expand_as(scaled)
    if top_k < size:  # else nothing needs sorting
        tokens = tokens.masked_fill(~likeliest, size).topk(top_k, largest=False).values
    ordered, order = shares.gather(1, tokens).sort(dim=-1, descending=True, stable=True)
    ordered = ordered.masked_fill(ordered.cumsum(-1) - ordered >= sampling.top_p * ordered.sum(-1, keepdim=True), 0.0)
    ordered = ordered / ordered.sum(-1, keepdim=True)
    return torch.zeros_like(shares).scatter_(1, tokens.gather(1, order), ordered)


def _among_likeliest(logits: Tensor, count: int) -> Tensor:
    """[n, V] whether a token is among the `count` likeliest; of equal logits the first tokens count."""
    least = logits.topk(count).values[:, -1:]
    above = ~(logits <= least)  # NaN counts as likelier, so that it shows in the probabilities
    equal = logits == least
    return above | (equal & (equal.cumsum(-1) <= count - above.sum(-1, keepdim=True)))


def _tokens_to_host(tokens: Tensor) -> list[int]:
    """Copy drawn tokens to the host; reject `NO_ANSWER`."""
    found: list[int] = check_answers(tokens.cpu().numpy()).tolist()
    return found
