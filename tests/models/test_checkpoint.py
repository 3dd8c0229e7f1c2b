"""Checkpoints: do weights come back as they were saved, in any precision, and is all that is wrong with them said?"""

import json
import shutil
from collections.abc import Callable
from functools import reduce
from pathlib import Path

import pytest
import torch
from conftest import GOLDEN
from safetensors.torch import load_file
from tiny_language import tiny_ouro, write_ouro

import loopscope as ls
from loopscope.models.checkpoint import save_model, weight_files, weights_sha256
from loopscope.models.checkpoint_folder import beside_weights, end_tokens
from loopscope.models.looped_model import LoopedModel
from loopscope.models.transformer import Gate
from loopscope.training.run_folder import read_run_settings

TOKENS = torch.arange(20).view(2, 10)
NORM = "model.norm.weight"


def logits(model: LoopedModel) -> torch.Tensor:
    with torch.no_grad():
        return model.loops(TOKENS).logits


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_any_precision(tmp_path: Path, dtype: str) -> None:
    """All tensors have it; the gate computes in float32 whatever they have."""
    model = ls.load_model(write_ouro(tmp_path), dtype=dtype)
    assert {tensor.dtype for tensor in model.state_dict().values()} == {getattr(torch, dtype)}
    with torch.no_grad():
        out, exact = model.loops(TOKENS), tiny_ouro().loops(TOKENS)
    assert out.logits.dtype == out.hidden.dtype == getattr(torch, dtype)
    assert out.gate_logits is not None
    assert out.gate_logits.dtype == torch.float32
    assert torch.allclose(out.logits.float(), exact.logits, atol=1e-6 if dtype == "float32" else 0.1)
    assert torch.equal(out.logits.float(), exact.logits) == (dtype == "float32")


def test_shards_come_back_as_one_model(tmp_path: Path) -> None:
    whole, parts = write_ouro(tmp_path / "whole"), write_ouro(tmp_path / "parts", shard_bytes=9000)
    assert [file.name for file in weight_files(whole)] == ["model.safetensors"]
    files = weight_files(parts)
    assert len(files) > 2
    assert files[0].name == f"model-00001-of-{len(files):05d}.safetensors"
    index = json.loads((parts / "model.safetensors.index.json").read_text())
    tensors = tiny_ouro().state_dict()
    assert set(index["weight_map"]) == set(tensors)
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors.values())
    assert {name: tensor.tolist() for file in files for name, tensor in load_file(file).items()} == {
        name: tensor.tolist() for name, tensor in tensors.items()
    }
    shard_of(parts, NORM).rename(tmp_path / "blob")
    shard_of(parts, NORM).symlink_to(tmp_path / "blob")  # as in the cache of the Hub
    assert torch.equal(logits(ls.load_model(parts)), logits(ls.load_model(whole)))
    assert len({weights_sha256(parts), weights_sha256(whole), ls.load_model(parts).weights_sha256}) == 2
    for shard_bytes in (1 << 30, 9000):  # what was saved last is loaded, whether in one file or in several
        tensors[NORM] = torch.rand_like(tensors[NORM])
        save_model(tensors, parts, shard_bytes)
        assert torch.equal(ls.load_model(parts).state_dict()[NORM], tensors[NORM])


def test_tied_embeddings_are_one_tensor(tmp_path: Path) -> None:
    """Whether the file has them once or twice."""
    folder = write_ouro(tmp_path)
    configured(tie_word_embeddings=True)(folder)
    for drop in ((), ("lm_head.weight",)):
        tensors = tiny_ouro().state_dict()
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        save_model({name: t for name, t in tensors.items() if name not in drop}, folder)
        state = ls.load_model(folder, dtype="bfloat16").state_dict()
        assert state["lm_head.weight"].data_ptr() == state["model.embed_tokens.weight"].data_ptr()


def shard_of(folder: Path, tensor: str) -> Path:
    return folder / json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"][tensor]


def configured(**changes: object) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, **changes}))

    return spoil


def moved(to: str) -> Callable[[Path], None]:
    """The shard of the final norm lies outside of the checkpoint's folder, and the index says so."""

    def spoil(folder: Path) -> None:
        index = folder / "model.safetensors.index.json"
        shard = shard_of(folder, NORM).rename(folder.parent / "outside.safetensors")
        text = index.read_text().replace(shard_of(folder, NORM).name, to.format(folder.parent) + shard.name)
        index.write_text(text)

    return spoil


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda folder: shard_of(folder, NORM).unlink(), "model-.*safetensors cannot be read .*fetch or make it again"),
        (
            lambda folder: shard_of(folder, NORM).write_bytes(shard_of(folder, NORM).read_bytes()[:-1]),
            "model-.*safetensors cannot be read .*fetch or make it again",
        ),
        (lambda folder: (folder / "model.safetensors.index.json").write_text("{}"), "weight_map"),
        (lambda folder: (folder / "model.safetensors.index.json").unlink(), "has no weights"),
        (lambda folder: (folder / "config.json").unlink(), "not a checkpoint: it has no config.json"),
        (configured(num_hidden_layers=2), "no tensor .model.layers.1"),
        (configured(num_hidden_layers=10**9), "num_hidden_layers: expected a whole number <= 4096"),
        (configured(max_position_embeddings=10**9), "max_position_embeddings: expected a whole number <= 67108864"),
        (configured(rope_theta=None, rope_parameters={"rope_theta": 0}), "rope_parameters.rope_theta: expected"),
        (configured(rope_scaling={"rope_type": "yarn"}), "rope_scaling.rope_type: there is no 'yarn' here"),
        (configured(num_attention_heads=3, num_key_value_heads=3), "does not divide into 3 heads"),
        (configured(model_type="\x1b[31m" + "x" * 1000), r"of type '\\u001b\[31mxxx"),
        (lambda folder: (folder / "config.json").write_text('{"a":' * 60_000), "nested"),
        (moved("../"), "'../outside.safetensors', which does not lie beside it"),
        (moved("{}/"), "/outside.safetensors', which does not lie beside it"),
    ],
)
def test_what_is_wrong_is_said_in_a_sentence(tmp_path: Path, spoil: Callable[[Path], None], words: str) -> None:
    folder = write_ouro(tmp_path / "model", shard_bytes=9000)
    ls.load_model(folder)
    spoil(folder)
    with pytest.raises(ls.UserError, match=words) as refused:
        ls.load_model(folder)
    assert str(refused.value).endswith(".")
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("nobody/no-such-model", "no-such-model, and the Hub does not give it .it cannot be reached.; check the"),
        ("./nobody/nothing", "no folder nobody/nothing; give the folder of a checkpoint, or its name on the Hub"),
        (Path("/nowhere/at/all"), "There is no folder /nowhere/at/all; give the"),
    ],
)
def test_a_model_that_is_nowhere(source: str | Path, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ls.UserError, match=words) as refused:
        ls.load_model(source)
    assert str(refused.value).endswith(".")
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("ends", [-1, 50, "x"])
def test_ends_of_texts_are_tokens_of_the_vocabulary(tmp_path: Path, ends: object) -> None:
    folder = write_ouro(tmp_path)
    configured(eos_token_id=[5, 49])(folder)
    assert end_tokens(folder) == {5, 49}
    (folder / "generation_config.json").write_text('{"eos_token_id": 7, "temperature": 1.0}')
    assert end_tokens(folder) == {5, 7, 49}
    configured(eos_token_id=ends)(folder)
    with pytest.raises(ls.UserError, match="eos_token_id"):
        end_tokens(folder)


def test_a_checkpoint_that_is_made_of_another_has_no_policy_of_it(tmp_path: Path) -> None:
    folder, name = write_ouro(tmp_path), "generation_config.json"
    for config in ('{"top_k":3}', '{"policy": "exit_policy/policy.json", "cache": "latest", "top_k": 3}'):
        (folder / name).write_text(config)
        kept = beside_weights(folder, name)
        assert json.loads(kept) == {"top_k": 3}
    (folder / name).write_text('{"top_k":3}')
    assert beside_weights(folder, name) == b'{"top_k":3}'


@pytest.mark.parametrize("place", ["vocab_size", "block_size", "model layers", "run model loops", "run task modulus"])
def test_a_run_that_contradicts_itself(place: str, gated_run: Path, tmp_path: Path) -> None:
    """Whatever of its configuration is changed alone, nobody works with it."""
    file = Path(shutil.copytree(gated_run, tmp_path / "run")) / "config.json"
    config = json.loads(file.read_text())
    *parents, key = place.split()
    reduce(dict.__getitem__, parents, config)[key] += 1
    file.write_text(json.dumps(config))
    for read in (read_run_settings, ls.load_model):
        with pytest.raises(ls.UserError, match=r"config.json"):
            read(file.parent)


def test_one_precision_for_all(tmp_path: Path) -> None:
    """A file that keeps its norms more precise than its matrices is run in the precision of the matrices."""
    tensors = {
        name: value if "norm" in name else value.to(torch.bfloat16) for name, value in tiny_ouro().state_dict().items()
    }
    write_ouro(tmp_path)
    save_model(tensors, tmp_path)
    model = ls.load_model(tmp_path)
    assert {value.dtype for value in model.parameters()} == {torch.bfloat16}
    assert model.loops(TOKENS).gate_logits.dtype == torch.float32
    with pytest.raises(ls.UserError, match="no precision 'int4'; choose one of float32, bfloat16, float16, int8"):
        ls.load_model(tmp_path, dtype="int4")


def test_rotary_base_in_either_place(tmp_path: Path) -> None:
    folder = write_ouro(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    before = ls.load_model(folder).loops(torch.arange(9)[None]).logits
    base = config.pop("rope_theta")
    (folder / "config.json").write_text(json.dumps({**config, "rope_parameters": {"rope_theta": base}}))
    assert torch.equal(ls.load_model(folder).loops(torch.arange(9)[None]).logits, before)
    for wrong in ({}, {"rope_theta": base, "rope_parameters": {"rope_theta": 2 * base}}):
        (folder / "config.json").write_text(json.dumps({**config, **wrong}))
        with pytest.raises(ls.UserError, match="rope_theta is (missing|given twice)"):
            ls.load_model(folder)


def test_a_gate_is_read_in_float32_under_autocast() -> None:
    pooled = torch.randn(3, 8)
    gate = Gate("mlp", 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert gate(pooled).dtype == torch.float32
        assert torch.equal(gate(pooled), gate(pooled.float()))
    assert gate.to(torch.bfloat16)(pooled.to(torch.bfloat16)).dtype == torch.float32


UNSUPPORTED: list[tuple[str, dict[str, object], str]] = [
    ("ouro", {"attention_bias": True}, "attention_bias"),
    ("ouro", {"use_sliding_window": True}, "use_sliding_window"),
    ("ouro", {"num_key_value_heads": 3}, "multiple"),
    ("ouro", {"head_dim": 7}, "even width"),
    ("ouro", {"rope_parameters": {"rope_type": "yarn"}}, "rope_parameters"),
    ("ouro", {"layer_types": ["sliding_attention"]}, "layer_types"),
    ("ouro", {"rms_norm_eps": None}, "rms_norm_eps"),
    ("huginn", {"injection_type": "add"}, "injection_type"),
    ("huginn", {"qk_bias": False}, "qk_bias"),
    ("huginn", {"tie_embeddings": False}, "tie_embeddings"),
    ("huginn", {"test_time_noise": 1}, "test_time_noise"),
    ("huginn", {"num_key_value_heads": 2}, "num_key_value_heads"),
    ("huginn", {"n_heads": 5}, "5 heads"),
    ("huginn", {"head_dim": 16}, "head_dim"),
    ("huginn", {"n_layers_in_coda": 3}, "no tensor 'transformer.coda.2"),
]


@pytest.mark.parametrize(("name", "changes", "words"), UNSUPPORTED)
def test_unsupported_values_are_refused(name: str, changes: dict[str, object], words: str, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(GOLDEN / f"{name}-tiny", tmp_path / name))
    configured(auto_map={"AutoModel": "evil.py"})(folder)
    ls.load_model(folder)  # unknown keys are ignored
    configured(**changes)(folder)
    with pytest.raises(ls.UserError, match=words):
        ls.load_model(folder)
