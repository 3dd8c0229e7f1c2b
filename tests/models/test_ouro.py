"""Ouro: does it match the reference run at every loop, and exit where that exits?"""

import numpy as np
import pytest
import torch
from conftest import GOLDEN
from safetensors.torch import load_file

import loopscope as ls

FOLDER = GOLDEN / "ouro-tiny"
EXPECTED = load_file(FOLDER / "expected.safetensors")


@torch.no_grad()
def test_matches_the_reference_at_every_loop() -> None:
    out = ls.load_model(FOLDER).loops(EXPECTED["input_ids"])
    for name in ("logits", "hidden", "gate_logits"):
        assert (getattr(out, name) - EXPECTED[name]).abs().max() < 1e-4, name


@torch.no_grad()
@pytest.mark.parametrize("threshold", [0.3, 0.6, 0.9])
def test_exits_where_the_reference_exits(threshold: float) -> None:
    """Every token as an example of a recording, the gate as its readout."""
    out = ls.load_model(FOLDER).loops(EXPECTED["input_ids"])
    loops, rows, length, vocab = out.logits.shape
    trajectory = ls.Trajectory(
        logits=out.logits.flatten(1, 2).transpose(0, 1).numpy(),
        labels=np.zeros(rows * length, dtype=int),
        gate_logits=out.gate_logits.flatten(1).T.numpy(),
    )
    exits = torch.from_numpy(ls.ExitPolicy("gate", threshold).exit_loops(trajectory))
    assert len(set(exits.tolist())) > 1
    chosen = out.logits.flatten(1, 2)[exits - 1, torch.arange(rows * length)].view(rows, length, vocab)
    assert (chosen - EXPECTED[f"logits_exit_threshold_{threshold}"]).abs().max() < 1e-4
    assert set(exits.tolist()) <= set(range(1, loops + 1))
