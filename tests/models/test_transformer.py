"""The paper's looped Transformer: its size, its ties, its gates, its attention."""

import pytest
import torch
from conftest import GATED, tiny_settings

from loopscope.training.settings import read_settings
from loopscope.training.task_run import initial_model


def test_the_paper_s_model_has_the_closed_form_s_parameters() -> None:
    """4 layers of 12 D^2 + 13 D, a final norm of 2 D, 28 tokens of D; the head is tied."""
    settings = read_settings("paper", [])
    count = sum(parameter.numel() for parameter in initial_model(settings).parameters())
    assert count == 4 * (12 * 512**2 + 13 * 512) + 2 * 512 + 28 * 512 == 12_624_896


@pytest.mark.parametrize("gate", ["linear", "mlp"])
def test_gate_reads_the_pooled_state(gate: str) -> None:
    model = initial_model(tiny_settings(*GATED, f"model.gate={gate}"))
    tokens = torch.randint(0, 8, (2, 5))
    state = model.step(model.begin(tokens))
    positions = torch.tensor([4, 1])
    assert model.gate is not None
    pooled = model.pooled(state, positions)
    assert torch.equal(model.halt(pooled), model.gate(pooled))
    assert torch.allclose(pooled.mean(-1), torch.zeros(2), atol=1e-6)  # it carries the final norm
    assert torch.allclose(model.predict(pooled), pooled @ model.embedding.weight.T)


def test_small_widths_start_with_logits_of_order_one() -> None:
    for width in (16, 64, 256):
        model = initial_model(tiny_settings(f"model.width={width}"))
        logits = model.loops(torch.randint(0, 8, (64, 7))).logits
        assert 0.3 < logits.std() < 3
