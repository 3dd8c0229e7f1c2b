"""Looped decoders: is loop 1 the original model, as transformers runs it, does every option do what it says, and is
everything that cannot be looped explained?
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from benchmark_slices import byte_pairs
from safetensors.torch import load_file, save_file
from tiny_language import tiny_looped_llama, write_decoder

import loopscope as ls
from loopscope.engine.replay_agreement import compare_with_replay
from loopscope.models.checkpoint import gate_tensors
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
    answers = list(ls.run(model, requests, policy, batch_size=7))
    assert compare_with_replay(answers, policy, recorded).differing == 0
    assert sum(read) == (policy.exit_loops(recorded).sum() if readout == "margin" else 60)


def test_what_was_made_is_said(llama: tuple[Path, Any], tmp_path: Path) -> None:
    folder, original = llama
    with pytest.raises(ls.UserError, match="type 'llama'.*loopscope loop"):
        ls.load_model(folder)
    count = sum(parameter.numel() for parameter in original.parameters())
    layer, head = sum(each.numel() for each in original.model.layers[0].parameters()), 97 * 32
    made = ls.loop(folder, tmp_path / "a", 2, 2, 4, drop=[5], injection=True, gate="linear")
    assert (made.coda, made.original_layers, made.original_parameters) == (1, 6, count)
    assert made.parameters == count - layer + 32 * 32 + 33
    assert made.cost == pytest.approx((11 * layer + 4 * 32 * 32 + head) / (6 * layer + head))
    model = ls.load_model(tmp_path / "a")
    assert (model.embed_cost, model.head_cost) == (1, 0.5)
    assert model.ideal_speedup(1) == pytest.approx(5.5 / 2.5)
    assert ls.loop(folder, tmp_path / "b", 2, 2, 1).cost == pytest.approx(1)
    assert gate_tensors(tmp_path / "b") == {}
    assert set(gate_tensors(tmp_path / "a").values()) < set(load_file(tmp_path / "a" / "model.safetensors"))


def test_the_files_of_the_tokenizer_come_along(tmp_path: Path) -> None:
    write_decoder(tmp_path / "llama", tokenizer=byte_pairs())
    ls.loop(tmp_path / "llama", tmp_path / "out", 2, 2, 3)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "llama" / name).read_bytes()
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["model_type"] == "looped_llama"
    assert "architectures" not in config
    with pytest.raises(ls.UserError, match="is there already"):
        ls.loop(tmp_path / "llama", tmp_path / "out", 2, 2, 3)


@torch.inference_mode()
def test_old_and_low_precision_files(llama: tuple[Path, Any], tmp_path: Path) -> None:
    """A file of the first Llamas says less in its configuration, and holds angles; precisions stay as they are."""
    folder, original = llama
    tensors = {name: tensor.bfloat16() for name, tensor in load_file(folder / "model.safetensors").items()}
    tensors["model.layers.3.self_attn.rotary_emb.inv_freq"] = torch.zeros(4)
    (old := tmp_path / "old").mkdir()
    save_file(tensors, old / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    for name in ("rope_parameters", "tie_word_embeddings", "head_dim", "attention_bias"):
        del config[name]
    (old / "config.json").write_text(json.dumps(config))
    ls.loop(old, tmp_path / "looped", 2, 2, 3, gate="linear")
    model = ls.load_model(tmp_path / "looped")
    assert model.precision == "bfloat16"
    out = model.loops(tokens(1))
    assert (out.logits[0] - original(tokens(1)).logits).abs().max() < 0.3
    assert out.gate_logits is not None
    assert out.gate_logits.dtype == torch.float32


CONFIGURED: list[tuple[str, dict[str, Any], str]] = [
    ("llama", {"model_type": "mixtral"}, "of type 'mixtral'; what can be looped is llama, mistral, qwen2, qwen3"),
    ("llama", {"num_local_experts": 8}, "num_local_experts"),
    ("llama", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 500.0}}, "rope_type"),
    ("llama", {"rope_parameters": {"rope_type": "llama3", "rope_theta": 500.0}}, "factor is missing"),
    ("llama", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling"),
    ("llama", {"num_hidden_layers": 7}, "no tensor 'model.layers.6"),
    ("llama", {"attention_bias": True}, "no tensor 'model.layers.0.self_attn.q_proj.bias'"),
    ("mistral", {"sliding_window": 64}, "a sliding window .of 64 tokens. is not supported"),
    ("qwen2", {"use_sliding_window": True}, "use_sliding_window"),
    ("qwen2", {"layer_types": ["sliding_attention"] * 6}, "layer_types"),
]


def test_what_cannot_be_looped_is_refused(tmp_path: Path) -> None:
    for kind in ("llama", "mistral", "qwen2"):
        write_decoder(tmp_path / kind, kind)
    for kind, changes, words in CONFIGURED:
        file = tmp_path / kind / "config.json"
        before = file.read_text()
        file.write_text(json.dumps(json.loads(before) | changes))
        with pytest.raises(ls.UserError, match=words) as refused:
            ls.loop(tmp_path / kind, tmp_path / "out", 2, 2, 3)
        assert str(refused.value).rstrip().count("\n") == 0
        file.write_text(before)
    config = json.loads((tmp_path / "mistral" / "config.json").read_text())
    del config["sliding_window"]  # which means 4096
    (tmp_path / "mistral" / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 8192}))
    with pytest.raises(ls.UserError, match="of 4096 tokens"):
        ls.loop(tmp_path / "mistral", tmp_path / "out", 2, 2, 3)
    assert not (tmp_path / "out").exists()


OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"prelude": 4, "core": 3}, "the core .3. are more than the 6 layers"),
    ({"drop": [0], "core": 4}, "more than the 5 layers"),
    ({"drop": [6]}, "no layer 6 to drop"),
    ({"damping": 1.5}, "damping"),
]
SPOILT: list[tuple[dict[str, Any], str]] = [
    ({"prelude": 5}, "more than the 6 layers"),
    ({"more": 1}, "unknown key"),
    ({"injection": True}, "no tensor 'model.injection.weight'"),
    ({"gate": "none"}, "does not know: 'model.early_exit_gate"),
]


def test_wrong_options_and_a_spoilt_looping_are_refused(llama: tuple[Path, Any], tmp_path: Path) -> None:
    for changes, words in OPTIONS:
        with pytest.raises(ls.UserError, match=words):
            ls.loop(llama[0], tmp_path / "out", **{"prelude": 2, "core": 2, "loops": 3, **changes})
    ls.loop(llama[0], tmp_path / "out", 2, 2, 3, gate="linear")
    file = tmp_path / "out" / "config.json"
    config = json.loads(file.read_text())
    for changes, words in SPOILT:
        file.write_text(json.dumps(config | {"looping": config["looping"] | changes}))
        with pytest.raises(ls.UserError, match=words):
            ls.load_model(tmp_path / "out")
