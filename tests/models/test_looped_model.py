"""The protocol: can rows be taken, joined and sit at different loops without disturbing each other?"""

import copy
import pickle
import shutil
from pathlib import Path

import pytest
import torch
from conftest import GOLDEN, tiny_settings
from tiny_language import MODELS

import loopscope as ls
from loopscope.models.checkpoint import weights_sha256
from loopscope.models.looped_model import LoopedModel
from loopscope.training.task_run import initial_model


@pytest.fixture(params=["transformer", "learned positions", "ouro", "huginn"])
def model(request: pytest.FixtureRequest) -> LoopedModel:
    if request.param in ("ouro", "huginn"):
        return ls.load_model(GOLDEN / f"{request.param}-tiny")
    positions = "learned" if "positions" in request.param else "rotary"
    return initial_model(tiny_settings(f"model.positions={positions}")).eval()


def random_tokens(rows: int, length: int) -> torch.Tensor:
    return torch.randint(0, 8, (rows, length), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", MODELS)
def test_every_model_keeps_the_contract(name: str) -> None:
    """Rows in a batch, at different loops, written token by token, with branches: each is the plain pass."""
    assert max(check.measured for check in ls.check_model(MODELS[name]())) < 1e-4


@torch.no_grad()
def test_rows_that_begin_alike_share_their_states(model: LoopedModel) -> None:
    tokens, lengths = random_tokens(4, 9), torch.tensor([5, 9, 9, 7])
    tokens[1, :6] = tokens[2, :6]
    tokens[3, :3] = tokens[2, :3]
    shared, alone = model.begin(tokens, lengths, share=True), model.begin(tokens, lengths)
    assert len(shared.hidden) < len(alone.hidden)
    for _ in range(2):
        shared, alone = model.step(shared), model.step(alone)
    rows = torch.tensor([3, 1])
    for ours, theirs in ((shared, alone), (shared.take(rows), alone.take(rows)), (type(shared).join([shared]), alone)):
        for positions in (ours.lengths - 1, torch.zeros_like(ours.lengths)):
            assert torch.allclose(model.pooled(ours, positions), model.pooled(theirs, positions), atol=1e-5)
            assert torch.allclose(model.head_input(ours, positions), model.head_input(theirs, positions), atol=1e-5)
    assert torch.allclose(shared.layout.unpack(shared.hidden, 9), alone.layout.unpack(alone.hidden, 9), atol=1e-5)


@torch.no_grad()
def test_one_position_a_row_is_a_row_of_all_positions(model: LoopedModel) -> None:
    tokens, positions = random_tokens(3, 7), torch.tensor([2, 6, 0])
    everywhere, there = model.loops(tokens), model.loops(tokens, positions=positions)
    longer = model.loops(tokens, num_loops=model.num_loops + 2)
    assert torch.equal(longer.logits[: model.num_loops], everywhere.logits)
    rows = torch.arange(3)
    assert torch.allclose(everywhere.logits[:, rows, positions], there.logits, atol=1e-6)
    assert torch.allclose(everywhere.hidden[:, rows, positions], there.hidden, atol=1e-6)
    assert (everywhere.gate_logits is None) == (there.gate_logits is None)
    if everywhere.gate_logits is not None and there.gate_logits is not None:
        assert torch.allclose(everywhere.gate_logits[:, rows, positions], there.gate_logits, atol=1e-6)


@torch.no_grad()
def test_no_rows_are_no_problem(model: LoopedModel) -> None:
    nobody = model.step(model.begin(random_tokens(2, 5)).take(torch.tensor([], dtype=torch.long)))
    assert nobody.hidden.shape[0] == 0
    assert model.predict(model.head_input(nobody, nobody.lengths - 1)).shape[0] == 0


def test_nothing_is_cut_off(gated_run: Path) -> None:
    with pytest.raises(ls.UserError, match="block size is 11"):
        ls.load_model(gated_run).begin(random_tokens(1, 12))


def test_a_model_in_memory_is_known_by_its_parameters() -> None:
    first, second = (initial_model(tiny_settings()) for _ in range(2))
    known = first.weights_sha256
    assert known == second.weights_sha256 == first.weights_sha256
    assert first.double().float().weights_sha256 == known == copy.deepcopy(first).weights_sha256
    with torch.no_grad():
        next(second.parameters()).view(-1)[0].add_(1e-3)
    assert second.weights_sha256 != known


def test_a_loaded_model_that_is_changed_is_another_one(tmp_path: Path) -> None:
    shutil.copytree(GOLDEN / "ouro-tiny", tmp_path / "model")
    model, other = (ls.load_model(tmp_path / "model") for _ in range(2))
    assert model.weights_sha256 == weights_sha256(tmp_path / "model") == other.weights_sha256
    with torch.no_grad():
        model.lm_head.weight.mul_(2)
    assert model.weights_sha256 != other.weights_sha256
    assert pickle.loads(pickle.dumps(model)).weights_sha256 == model.weights_sha256
    assert copy.deepcopy(other).weights_sha256 == other.weights_sha256


@pytest.mark.parametrize("fused", [False, True])
def test_training_further_makes_another_model(fused: bool, tmp_path: Path) -> None:
    """A fused optimizer leaves no trace in PyTorch's own count of changes."""
    shutil.copytree(GOLDEN / "ouro-tiny", tmp_path / "model")
    for model in (initial_model(tiny_settings()), ls.load_model(tmp_path / "model")):
        known = model.requires_grad_(True).weights_sha256
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=fused)
        model.loops(random_tokens(2, 5)).logits.sum().backward()
        optimizer.step()
        assert model.weights_sha256 != known
        copied = copy.deepcopy(model)
        assert copied.weights_sha256 == model.weights_sha256
