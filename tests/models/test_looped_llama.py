"""Looped decoders: is loop 1 the original model, as transformers runs it, and does every option do what it says?"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_language import tiny_looped_llama, write_decoder

import loopscope as ls
from loopscope.engine.scheduler import compare_with_replay
from loopscope.models.looped_llama import LoopedLlama
from loopscope.models.looped_model import LoopState
from loopscope.recording.recording_folder import Keep

LLAMA3 = {"rope_type": "llama3", "rope_theta": 500.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
DECODERS: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": True},
    "llama with biases": {"attention_bias": True, "mlp_bias": True},
    "llama 3": {"rope_parameters": {**LLAMA3, "original_max_position_embeddings": 32}},
    "mistral": {"num_key_value_heads": 1, "head_dim": 10},
    "qwen2": {},
    "qwen3": {},
}


def tokens(rows: int = 3, length: int = 40) -> torch.Tensor:
    return torch.randint(0, 97, (rows, length), generator=torch.Generator().manual_seed(0))


def looped(source: Path, **changes: Any) -> LoopedLlama:
    """`source`, looped beside it: two layers once, two in three loops, two at every exit."""
    out = source.with_name(f"{source.name}-{len(list(source.parent.iterdir()))}")
    ls.loop(source, out, **{"prelude": 2, "core": 2, "loops": 3, **changes})
    model = ls.load_model(out)
    assert isinstance(model, LoopedLlama)
    return model


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("decoders") / "llama"
    return folder, write_decoder(folder)


@torch.inference_mode()
@pytest.mark.parametrize("name", DECODERS)
def test_loop_1_is_the_original(name: str, tmp_path: Path) -> None:
    """Its logits, and ten tokens of greedy text with a cache; an injection and a gate at zero change nothing."""
    original = write_decoder(tmp_path / "original", name.split()[0], **DECODERS[name])
    model = looped(tmp_path / "original", injection=True, gate="linear")
    expected, out = original(tokens()).logits, model.loops(tokens())
    assert (out.logits[0] - expected).abs().max() < 1e-4
    assert (out.logits[1] - expected).abs().max() > 0.1
    assert out.gate_logits is not None
    assert not out.gate_logits.any()
    prompt = tokens(1, 9)
    text = original.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=10, do_sample=False)
    (completion,) = ls.generate(model, [ls.Prompt(0, prompt[0].numpy())], ls.ExitPolicy("fixed", 1), max_new_tokens=10)
    assert completion.tokens == text[0, 9:].tolist()


@torch.inference_mode()
def test_a_loop_is_the_core_again(llama: tuple[Path, Any]) -> None:
    """Against transformers' layers, one after the other; damped, without a coda, and with layers dropped."""
    folder, original = llama
    layers, rows = original.model.layers, tokens()
    angles = original.model.rotary_emb(torch.zeros(1), torch.arange(rows.shape[1])[None])
    mask = torch.full((40, 40), float("-inf")).triu(1)[None, None]

    def through(hidden: torch.Tensor, numbers: list[int]) -> torch.Tensor:
        for number in numbers:
            hidden = layers[number](hidden, attention_mask=mask, position_embeddings=angles)
        return hidden

    embedded = original.model.embed_tokens(rows)
    for options, prelude, core, coda in (
        ({}, [0, 1], [2, 3], [4, 5]),
        ({"damping": 0.25}, [0, 1], [2, 3], [4, 5]),
        ({"drop": [1, 4]}, [0, 2], [3, 5], []),
        ({"prelude": 0, "core": 6, "damping": 0.5}, [], [0, 1, 2, 3, 4, 5], []),
    ):
        model = looped(folder, **options)
        out, hidden, damping = model.loops(rows), through(embedded, prelude), options.get("damping", 1.0)
        assert model.head_attends == bool(coda)
        for logits, pooled in zip(out.logits, out.hidden, strict=True):
            hidden = hidden + damping * (through(hidden, core) - hidden)
            expected = original.lm_head(original.model.norm(through(hidden, coda)))
            assert (logits - expected).abs().max() < 2e-4
            assert coda == [] or torch.allclose(pooled.square().mean(-1), torch.ones(3, 40), atol=1e-3)


@torch.inference_mode()
def test_an_injection_adds_the_prelude_s_output(llama: tuple[Path, Any]) -> None:
    """With the identity as its map, loop 1 is the core of twice what the prelude made."""
    model = looped(llama[0], injection=True)
    plain = looped(llama[0])
    assert model.model.injection is not None
    model.model.injection.weight.copy_(torch.eye(32))
    state = plain.begin(tokens())
    once = plain.step(LoopState(2 * state.hidden, state.layout, state.loop))
    assert torch.allclose(model.step(model.begin(tokens())).hidden, once.hidden, atol=1e-5)
    twice = plain.step(LoopState(once.hidden + state.hidden, state.layout, once.loop))
    assert torch.allclose(model.step(model.step(model.begin(tokens()))).hidden, twice.hidden, atol=1e-4)


@pytest.mark.parametrize("readout", ["margin", "gate", "hidden_change"])
def test_live_exits_are_those_of_the_replay(readout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the coda runs at every loop only for who asks for logits."""
    model, random = tiny_looped_llama(), np.random.default_rng(0)
    rows, lengths = random.integers(0, 50, (60, 12)), random.integers(2, 13, 60)
    recorded = ls.record_model(model, rows, lengths, rows[:, 0], keep=Keep(hidden=True))
    values = np.sort(ls.signal(readout, recorded)[:, 1:-1].ravel())
    policy = ls.ExitPolicy(readout, float(values[len(values) // 2 :][:2].mean()))
    assert len(set(policy.exit_loops(recorded))) > 1
    read, head_input = [], model.head_input
    monkeypatch.setattr(
        model, "head_input", lambda state, at=None: read.append(len(state.loop)) or head_input(state, at)
    )
    requests = [ls.Request(row, [rows[row, :length]]) for row, length in enumerate(lengths)]
    answers = list(ls.run(model, policy, requests, batch_size=7))
    assert compare_with_replay(answers, policy, recorded).differing == 0
    assert sum(read) == (policy.exit_loops(recorded).sum() if readout == "margin" else 60)
