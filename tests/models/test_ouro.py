"""Ouro: does it match the reference run at every loop, and is every broken checkpoint explained?"""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import GOLDEN
from safetensors.torch import load_file, save_file

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


def test_sharded_equals_single(copy: Path) -> None:
    tensors = load_file(copy / "model.safetensors")
    names = sorted(tensors)
    shards = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, part in shards.items():
        save_file({name: tensors[name] for name in part}, copy / file)
    index = {"metadata": {}, "weight_map": {name: file for file, part in shards.items() for name in part}}
    (copy / "model.safetensors.index.json").write_text(json.dumps(index))
    (copy / "model.safetensors").unlink()
    with torch.no_grad():
        out = ls.load_model(copy).loops(EXPECTED["input_ids"])
    assert (out.logits - EXPECTED["logits"]).abs().max() < 1e-4
    (copy / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ls.UserError, match="00002-of-00002"):
        ls.load_model(copy)


@torch.no_grad()
def test_tied_embeddings(copy: Path) -> None:
    tensors = load_file(copy / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, copy / "model.safetensors")
    _configure(copy, tie_word_embeddings=True)
    model = ls.load_model(copy)
    out = model.loops(EXPECTED["input_ids"])
    expected = EXPECTED["hidden"] @ tensors["model.embed_tokens.weight"].T
    assert (out.logits - expected).abs().max() < 1e-4


def test_unknown_keys_are_ignored(copy: Path) -> None:
    _configure(copy, transformers_version="9.9", auto_map={"AutoModel": "evil.py"})
    ls.load_model(copy)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"attention_bias": True}, "attention_bias"),
        ({"rope_scaling": {"type": "yarn"}}, "rope_scaling"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"vocab_size": "97"}, "vocab_size"),
        ({"total_ut_steps": 0}, "total_ut_steps"),
        ({"num_attention_heads": 0}, "num_attention_heads"),
        ({"num_key_value_heads": 0}, "num_key_value_heads"),
        ({"num_key_value_heads": 3}, "multiple"),
        ({"head_dim": 7}, "even width"),
        ({"rope_theta": 0.0}, "rope_theta"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_parameters"),
        ({"layer_types": ["sliding_attention"]}, "layer_types"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"rms_norm_eps": None}, "rms_norm_eps"),
        ({"hidden_size": 64}, "the tensor .* has shape .*configuration asks for"),
        ({"num_hidden_layers": 3}, "no tensor 'model.layers.2"),
        ({"num_hidden_layers": 1}, "does not know: 'model.layers.1"),
        ({"model_type": "llama"}, "type 'llama'"),
        ({"model_type": 3}, "model_type"),
    ],
)
def test_unsupported_values_are_refused(copy: Path, changes: dict[str, object], words: str) -> None:
    _configure(copy, **changes)
    with pytest.raises(ls.UserError, match=words):
        ls.load_model(copy)


def test_the_gate_is_computed_in_float32() -> None:
    """In a bf16 model too: its exit CDF would round to 1 too early."""
    model = ls.load_model(FOLDER).bfloat16()
    with torch.no_grad():
        out = model.loops(EXPECTED["input_ids"])
    assert out.logits.dtype == torch.bfloat16
    assert out.gate_logits.dtype == torch.float32


def test_weights_must_be_floats(copy: Path) -> None:
    tensors = load_file(copy / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"].long()
    save_file(tensors, copy / "model.safetensors")
    with pytest.raises(ls.UserError, match="not floating-point"):
        ls.load_model(copy)


def test_a_missing_key_is_named(copy: Path) -> None:
    config = json.loads((copy / "config.json").read_text())
    del config["rope_theta"]
    (copy / "config.json").write_text(json.dumps(config))
    with pytest.raises(ls.UserError, match="rope_theta"):
        ls.load_model(copy)


def test_broken_files_are_explained(copy: Path) -> None:
    weights = copy / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(ls.UserError, match=r"model\.safetensors cannot be read"):
        ls.load_model(copy)
    weights.unlink()
    with pytest.raises(ls.UserError, match="has no weights"):
        ls.load_model(copy)
    (copy / "config.json").write_text("{")
    with pytest.raises(ls.UserError, match=r"config\.json"):
        ls.load_model(copy)
    with pytest.raises(ls.UserError, match="There is no folder"):
        ls.load_model(copy / "nowhere")


def _configure(folder: Path, **changes: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
