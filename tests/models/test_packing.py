"""Packing: the same loss and gradients as the plain, padded way, and rows that find their tokens again."""

import numpy as np
import pytest
import torch
from conftest import GATED, tiny_settings
from torch import Tensor

from benchmarks.padded_baseline import plain_losses
from loopscope.models.attention import attention_groups
from loopscope.models.packing import Layout, share_prefixes
from loopscope.models.transformer import LoopedTransformer
from loopscope.training.objectives import objective_loss
from loopscope.training.settings import RunSettings
from loopscope.training.task_run import AnswerLosses, initial_model, training_batches


def gradients(settings: RunSettings, model: LoopedTransformer, losses: Tensor, gates: Tensor | None) -> list[Tensor]:
    loss = objective_loss(settings.objective, losses, gates)
    return [loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))]


@pytest.mark.parametrize("overrides", [(), GATED, ("model.positions=learned",), ("model.layers=2", "model.bias=false")])
def test_loss_and_gradients_are_those_of_the_plain_way(overrides: tuple[str, ...]) -> None:
    settings = tiny_settings("task.max_operations=4", "training.batch_size=40", *overrides)
    model = initial_model(settings)
    batch = training_batches(settings)(0)
    assert len(set(batch.lengths)) > 2
    losses, _, gates, _ = AnswerLosses(model)(batch, torch.device("cpu"))
    packed = gradients(settings, model, losses, gates)
    other = plain_losses(model, batch)
    plain = gradients(settings, model, other.cross_entropy, other.gate_logits)
    for ours, theirs in zip(packed, plain, strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-4, atol=1e-6)


def test_a_layout_by_hand() -> None:
    layout = Layout(np.array([2, 2, 3, 1]))
    assert layout.starts.tolist() == [0, 2, 4, 7]
    assert layout.positions.tolist() == [0, 1, 0, 1, 0, 1, 2, 0]
    assert [(group.rows, group.cells.tolist()) for group in attention_groups(layout)] == [
        (slice(0, 3), [[0, 1, 1], [2, 3, 3], [4, 5, 6]]),  # 9 slots for 7 tokens: worth it
        (slice(3, 4), [[7]]),  # 12 slots for 8 tokens: not
    ]
    taken, tokens = layout.take(np.array([2, 0]))
    assert taken.lengths.tolist() == [3, 2]
    assert tokens.tolist() == [4, 5, 6, 0, 1]
    padded = torch.tensor([[1, 2, 0], [3, 4, 0], [5, 6, 7], [8, 0, 0]])
    assert layout.pack(padded).tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    assert torch.equal(layout.unpack(layout.pack(padded), 3), padded)


def test_shared_beginnings_by_hand() -> None:
    """A tree of beginnings: 1-2-3, 1-2-4 and its own beginning 1-2, and 5."""
    tokens = torch.tensor([[1, 2, 4], [5, 0, 0], [1, 2, 3], [1, 2, 0]])
    layout = share_prefixes(tokens, torch.tensor([3, 1, 3, 2]))
    packed = layout.pack(tokens)
    assert sorted(packed.tolist()) == [1, 2, 3, 4, 5]
    assert torch.equal(layout.unpack(packed, 3), tokens)
    assert dict(zip(packed.tolist(), layout.positions.tolist(), strict=True)) == {1: 0, 2: 1, 3: 2, 4: 2, 5: 0}


def test_padding_is_no_token() -> None:
    """Token 0 and what stands beyond a row's end are not the same."""
    tokens = torch.zeros(3, 4, dtype=torch.long)
    layout = share_prefixes(tokens, torch.tensor([4, 2, 1]))
    assert len(layout.pack(tokens)) == 4
    assert layout.sharing is not None
    assert layout.positions[layout.sharing.places].tolist() == [0, 1, 2, 3, 0, 1, 0]
