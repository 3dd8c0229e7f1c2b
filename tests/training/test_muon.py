"""Muon: the same update as PyTorch's, up to the precision of its bf16."""

import pytest
import torch
from torch.optim import Muon as Reference

from loopscope.training.muon import Muon, orthogonalised


@pytest.mark.parametrize("shape", [(12, 12), (30, 10), (8, 24)])
def test_follows_pytorch_s_muon(shape: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(shape, generator=generator)
    ours, theirs = (torch.nn.Parameter(start.clone()) for _ in range(2))
    optimizers = [Muon([ours], lr=0.1, weight_decay=0.2), Reference([theirs], lr=0.1, weight_decay=0.2)]
    for _ in range(4):
        gradient = torch.randn(shape, generator=generator)
        for parameter, optimizer in zip((ours, theirs), optimizers, strict=True):
            parameter.grad = gradient.clone()
            optimizer.step()
    moved = (ours - start).norm()
    assert moved > 0.1
    assert (ours - theirs).norm() < 0.02 * moved


def test_singular_values_come_close_to_one() -> None:
    matrix = torch.randn(20, 50, generator=torch.Generator().manual_seed(1))
    values = torch.linalg.svdvals(orthogonalised(matrix))
    assert 0.6 < values.min() <= values.max() < 1.3
