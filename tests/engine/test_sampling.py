"""Shares of tokens: are they those of a plain sort, without one where none is needed?"""

import numpy as np
import pytest
import torch
from torch import Tensor

import loopscope as ls
from loopscope.engine.sampling import Sampling, _probabilities, draw_tokens


def sorted_probabilities(logits: Tensor, sampling: Sampling) -> Tensor:
    """By its definition: all tokens in order, the first `top_k` of them, the first that make up `top_p` of those."""
    ordered, tokens = (logits.double() / sampling.temperature).sort(dim=-1, descending=True, stable=True)
    shares = ordered.softmax(-1)
    if sampling.top_k:
        shares[:, sampling.top_k :] = 0
    shares.masked_fill_(shares.cumsum(-1) - shares >= sampling.top_p * shares.sum(-1, keepdim=True), 0.0)
    return torch.zeros_like(shares).scatter_(1, tokens, shares / shares.sum(-1, keepdim=True))


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize(
    "settings", [{}, {"top_k": 3}, {"top_k": 40}, {"top_k": 99}, {"top_p": 0.7}, {"top_k": 9, "top_p": 0.6}]
)
def test_shares_are_those_of_a_sort(settings: dict[str, float], ties: bool) -> None:
    logits = 2 * torch.randn(6, 40, generator=torch.Generator().manual_seed(0))
    logits[0, 5:] = -torch.inf  # fewer than `top_k` are there at all
    if ties:
        logits = logits.round()
    sampling = Sampling(temperature=0.8, **settings)  # type: ignore[arg-type]
    ours = _probabilities(logits, sampling)
    torch.testing.assert_close(ours, sorted_probabilities(logits, sampling), rtol=1e-12, atol=0)
    assert torch.equal(ours[2:3], _probabilities(logits[2:3], sampling))  # whatever stands beside it


@pytest.mark.parametrize("settings", [{}, {"top_k": 3}])
def test_the_vocabulary_is_not_sorted_for_nothing(settings: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tensor, "sort", None)
    assert _probabilities(torch.randn(2, 9), Sampling(temperature=1.0, **settings)).count_nonzero() > 0  # type: ignore[arg-type]


@pytest.mark.parametrize("settings", [{}, {"top_k": 3}, {"top_p": 0.5}])
@pytest.mark.parametrize("wrong", [torch.nan, torch.inf])
def test_logits_that_are_not_finite_say_nothing(settings: dict[str, float], wrong: float) -> None:
    logits = torch.randn(1, 9)
    logits[0, 4] = wrong
    with pytest.raises(ls.UserError, match="not finite"):
        draw_tokens(logits, [np.random.default_rng(0)], Sampling(temperature=1.0, **settings))  # type: ignore[arg-type]
