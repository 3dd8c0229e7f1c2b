"""Making a looped model of a decoder: is what was made right, and is everything that cannot be looped explained?"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmark_slices import byte_pairs
from safetensors.torch import load_file, save_file
from tiny_language import write_decoder

import loopscope as ls
from loopscope.models.checkpoint import gate_tensors

TOKENS = torch.arange(40)[None]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("decoders") / "llama"
    return folder, write_decoder(folder)


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
    out = model.loops(TOKENS)
    assert (out.logits[0] - original(TOKENS).logits).abs().max() < 0.3
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


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"prelude": 4, "core": 3}, "the core .3. are more than the 6 layers"),
        ({"drop": [0], "core": 4}, "more than the 5 layers"),
        ({"drop": [6]}, "no layer 6 to drop"),
        ({"damping": 1.5}, "damping"),
    ],
)
def test_wrong_options_are_refused(
    llama: tuple[Path, Any], tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(ls.UserError, match=words):
        ls.loop(llama[0], tmp_path / "out", **{"prelude": 2, "core": 2, "loops": 3, **changes})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"prelude": 5}, "more than the 6 layers"),
        ({"more": 1}, "unknown key"),
        ({"injection": True}, "no tensor 'model.injection.weight'"),
        ({"gate": "none"}, "does not know: 'model.early_exit_gate"),
    ],
)
def test_a_spoilt_looping_is_refused(
    llama: tuple[Path, Any], tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    ls.loop(llama[0], tmp_path / "out", 2, 2, 3, gate="linear")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    config["looping"] |= changes
    (tmp_path / "out" / "config.json").write_text(json.dumps(config))
    with pytest.raises(ls.UserError, match=words):
        ls.load_model(tmp_path / "out")
