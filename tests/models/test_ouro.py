"""Ouro: does it match the reference run at every loop, and is every broken checkpoint explained?"""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import GOLDEN
from safetensors.torch import load_file

import loopscope as ls

FOLDER = GOLDEN / "ouro-tiny"
EXPECTED = load_file(FOLDER / "expected.safetensors")


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    return Path(shutil.copytree(FOLDER, tmp_path / "ouro"))


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


@torch.no_grad()
def test_greedy_continuation() -> None:
    """Full depth, without a cache: the prompt grows by the most likely token."""
    model = ls.load_model(FOLDER)
    tokens = EXPECTED["input_ids"]
    while tokens.shape[1] < EXPECTED["greedy"].shape[1]:
        last = torch.full((len(tokens),), tokens.shape[1] - 1)
        logits = model.loops(tokens, positions=last).logits[-1]
        tokens = torch.cat((tokens, logits.argmax(-1, keepdim=True)), dim=1)
    assert torch.equal(tokens, EXPECTED["greedy"])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"attention_bias": True}, "attention_bias"),
        ({"rope_scaling": {"type": "yarn"}}, "rope_scaling"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"vocab_size": "97"}, "vocab_size"),
        ({"num_key_value_heads": 0}, "num_key_value_heads"),
        ({"num_key_value_heads": 3}, "multiple"),
        ({"head_dim": 7}, "even width"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_parameters"),
        ({"layer_types": ["sliding_attention"]}, "layer_types"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"rms_norm_eps": None}, "rms_norm_eps"),
        ({"early_exit_threshold": 0.5}, "early_exit_threshold has no effect here"),
        ({"model_type": 3}, "model_type"),
    ],
)
def test_unsupported_values_are_refused(copy: Path, changes: dict[str, object], words: str) -> None:
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "auto_map": {"AutoModel": "evil.py"}}))
    ls.load_model(copy)  # unknown keys are ignored
    (copy / "config.json").write_text(json.dumps({**config, **changes}))
    with pytest.raises(ls.UserError, match=words):
        ls.load_model(copy)
