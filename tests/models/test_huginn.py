"""Huginn: does it match the reference run at every loop, and does all that reads logits go through its coda?"""

import shutil
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from conftest import GOLDEN
from safetensors.torch import load_file, save_file

import loopscope as ls
from loopscope.config import read_json
from loopscope.engine.requests import Request
from loopscope.models.checkpoint import gate_tensors
from loopscope.models.huginn import Huginn, HuginnConfig

FOLDER = GOLDEN / "huginn-tiny"
EXPECTED = load_file(FOLDER / "expected.safetensors")


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    return Path(shutil.copytree(FOLDER, tmp_path / "huginn"))


@pytest.fixture
def model() -> Any:
    return ls.load_model(FOLDER)


@torch.no_grad()
def test_matches_the_reference_at_every_loop(model: Huginn) -> None:
    """Batched; and beside a shorter row, and at one position."""
    tokens = EXPECTED["input_ids"]
    out = model.loops(tokens)
    assert out.logits.shape == EXPECTED["logits"].shape
    assert (out.logits - EXPECTED["logits"]).abs().max() < 1e-4
    assert out.gate_logits is None
    padded = model.loops(tokens, torch.tensor([9, 4]))
    assert (padded.logits[:, 0] - EXPECTED["logits"][:, 0]).abs().max() < 1e-4
    assert (padded.logits[:, 1, :4] - EXPECTED["logits"][:, 1, :4]).abs().max() < 1e-4
    there = model.loops(tokens, positions=torch.tensor([3, 8]))
    assert (there.logits - EXPECTED["logits"][:, [0, 1], [3, 8]]).abs().max() < 1e-4


@torch.no_grad()
def test_a_random_beginning_is_the_same_in_every_batch(model: Huginn) -> None:
    zeros = model.loops(EXPECTED["input_ids"]).hidden
    model.initial_state = "random"
    model.num_loops = 1
    ls.check_model(model)
    model.num_loops = 8
    state = model.begin(torch.zeros(1, 64, dtype=torch.long))
    assert state.hidden.std().item() == pytest.approx((2 / 5) ** 0.5, rel=0.05)
    assert state.hidden.abs().max() <= 3 * (2 / 5) ** 0.5
    random = model.loops(EXPECTED["input_ids"]).hidden
    assert not torch.allclose(random[0], zeros[0], atol=1e-2)
    model.seed = 1
    assert not torch.allclose(model.loops(EXPECTED["input_ids"]).hidden[0], random[0], atol=1e-2)


@torch.no_grad()
def test_the_head_and_the_angles_may_be_in_the_file(copy: Path) -> None:
    """As in a file from the Hub: both follow from the other tensors."""
    tensors = load_file(copy / "model.safetensors")
    tensors |= {"lm_head.weight": tensors["transformer.wte.weight"].clone(), "freqs_cis": torch.zeros(1, 64, 1, 4, 2)}
    save_file(tensors, copy / "model.safetensors")
    out = ls.load_model(copy).loops(EXPECTED["input_ids"])
    assert (out.logits - EXPECTED["logits"]).abs().max() < 1e-4
    save_file(tensors | {"transformer.more": torch.zeros(1)}, copy / "model.safetensors")
    with pytest.raises(ls.UserError, match="does not know: 'transformer.more'"):
        ls.load_model(copy)


def test_the_published_size() -> None:
    config = read_json(HuginnConfig, FOLDER / "config.json", "configuration")
    sizes = {"n_embd": 5280, "n_heads": 55, "num_key_value_heads": 55, "head_dim": 96, "intermediate_size": 17920}
    with torch.device("meta"):
        model = Huginn(msgspec.structs.replace(config, vocab_size=65536, **sizes))
    assert sum(parameter.numel() for parameter in model.parameters()) == 3_564_976_800


def test_it_has_no_gate(model: Huginn) -> None:
    assert gate_tensors(FOLDER) == {}
    with pytest.raises(ls.UserError, match="no gate"):
        list(ls.run(model, [Request(0, [np.array([1, 2])])], ls.ExitPolicy("gate", 0.5)))
