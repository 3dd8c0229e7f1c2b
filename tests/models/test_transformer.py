"""The paper's looped Transformer: its size, its ties, its gates, its attention; and the options of its architecture."""

from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import GATED, tiny_settings
from torch import Tensor

import loopscope as ls
from loopscope.config import plain
from loopscope.engine.replay_agreement import compare_with_replay
from loopscope.engine.requests import task_requests
from loopscope.models.transformer import LoopedTransformer, TransformerLayer
from loopscope.recording.task_recording import record_task
from loopscope.training.settings import read_settings
from loopscope.training.task_run import initial_model, train

OPTIONS = {"injection": "model.injection=true", "post-norm": "model.norm=post", "loop norm": "model.loop_norm=true"}
EVERY = [(), *((change,) for change in OPTIONS.values()), tuple(OPTIONS.values())]
NAMES = ["none", *OPTIONS, "all"]


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


def by_hand(model: LoopedTransformer, tokens: Tensor, injection: bool, after: bool, loop_norm: bool) -> list[Tensor]:
    """r_t [B, M, D] of every loop, written as in the docs: whole rows, a mask, nothing packed."""
    embedded = model.embedding(tokens)
    hidden, pooled = torch.zeros_like(embedded) if injection else embedded, []
    for _ in range(model.num_loops):
        hidden = hidden + embedded if injection else hidden
        for layer in model.block:
            assert isinstance(layer, TransformerLayer)
            attended = _attention(layer, hidden if after else layer.attention_norm(hidden))
            hidden = hidden + layer.attention_out(attended)
            hidden = layer.attention_norm(hidden) if after else hidden
            hidden = hidden + layer.mlp_out(F.gelu(layer.mlp_in(hidden if after else layer.mlp_norm(hidden))))
            hidden = layer.mlp_norm(hidden) if after else hidden
        normed = model.norm(hidden)
        pooled.append(normed)
        hidden = normed if loop_norm else hidden
    return pooled


def _attention(layer: TransformerLayer, hidden: Tensor) -> Tensor:
    assert layer.rotary is not None
    heads = layer.attention_in(hidden).unflatten(2, (3 * layer.heads, -1)).transpose(1, 2).chunk(3, 1)
    query, key = (layer.rotary.rotate(each) for each in heads[:2])
    return F.scaled_dot_product_attention(query, key, heads[2], is_causal=True).transpose(1, 2).flatten(2)


@torch.no_grad()
@pytest.mark.parametrize(("injection", "after", "loop_norm"), [*product((False, True), repeat=3)])
def test_every_architecture_computes_what_the_docs_say(injection: bool, after: bool, loop_norm: bool) -> None:
    chosen = zip(OPTIONS.values(), (injection, after, loop_norm), strict=True)
    model = initial_model(tiny_settings("model.layers=2", *(change for change, wanted in chosen if wanted)))
    for norm in (each for each in model.modules() if isinstance(each, torch.nn.LayerNorm)):
        norm.weight.copy_(torch.linspace(0.5, 1.5, 16))  # or a norm of a norm would change nothing
    tokens = torch.randint(0, 8, (3, 7), generator=torch.Generator().manual_seed(0))
    assert isinstance(model, LoopedTransformer)
    expected = torch.stack(by_hand(model, tokens, injection, after, loop_norm))
    out = model.loops(tokens)
    assert torch.allclose(out.hidden, expected, atol=1e-5)
    assert torch.allclose(out.logits, expected @ model.embedding.weight.T, atol=1e-5)
    last = torch.tensor([6, 2, 4])
    assert torch.allclose(model.loops(tokens, positions=last).hidden, expected[:, torch.arange(3), last], atol=1e-5)


@pytest.mark.parametrize("changes", EVERY, ids=NAMES)
def test_every_architecture_keeps_the_contract(changes: tuple[str, ...]) -> None:
    """Packed rows, shared beginnings, KV cache, branches, the last loop, rows at different loops."""
    model = initial_model(tiny_settings(*GATED, "model.layers=2", *changes)).eval()
    held = ls.check_model(model)
    assert max(check.measured or 0.0 for check in held) < 1e-5


@pytest.mark.parametrize("changes", EVERY, ids=NAMES)
def test_every_architecture_trains_and_its_replay_is_live(changes: tuple[str, ...], tmp_path: Path) -> None:
    settings = tiny_settings(*GATED, *changes)
    run = train(settings, tmp_path / "run").folder
    recording, model = record_task(run, "test", tmp_path / "test"), ls.load_model(run)
    requests = list(task_requests(settings.task.split("test")))
    for readout in ("gate", "margin", "hidden_change"):
        values = ls.signal(readout, recording)
        policy = ls.ExitPolicy(readout, float(np.median(values[:, 1])))
        agreement = compare_with_replay(ls.run(model, requests, policy, batch_size=32), policy, recording)
        assert agreement.differing == 0
        assert 1 < agreement.average_loops < 3
    assert recording.provenance["weights_sha256"] == model.weights_sha256


def test_the_defaults_are_mentioned_nowhere_and_options_add_no_weights() -> None:
    usual, named = tiny_settings(), tiny_settings("model.injection=false", "model.norm=pre", "model.loop_norm=false")
    assert named == usual
    keys = ["layers", "heads", "width", "loops", "block_size", "bias", "gate", "positions"]
    assert list(plain(named.model)) == keys
    weights = initial_model(usual).state_dict()
    known = {initial_model(usual).weights_sha256}
    for changes in EVERY[1:]:
        model = initial_model(tiny_settings(*changes))
        assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
        known.add(model.weights_sha256)  # the same weights, and another model
    assert len(known) == 5


@torch.no_grad()
def test_with_injection_loop_1_is_that_of_a_model_without() -> None:
    tokens = torch.randint(0, 8, (2, 7))
    plainly, injected = (
        initial_model(tiny_settings(*changes)).loops(tokens).hidden for changes in ([], [OPTIONS["injection"]])
    )
    assert torch.equal(plainly[0], injected[0])
    assert not torch.allclose(plainly[1], injected[1])
