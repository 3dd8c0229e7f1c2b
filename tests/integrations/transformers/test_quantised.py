"""Quantised weights (torchao): do they run, are they told from others, and is a policy certified in that precision?"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from benchmark_slices import byte_pairs
from conftest import GOLDEN
from test_modeling import EVERY_LOOP, padded, rows
from tiny_language import write_ouro
from transformers import AutoModelForCausalLM, TorchAoConfig

import loopscope as ls
from loopscope.recording.text_recording import record_text

torchao = pytest.importorskip("torchao.quantization")
pytestmark = pytest.mark.filterwarnings("ignore")  # torchao's own
TOKENS, MASK = padded(rows(), "left")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
    return write_ouro(tmp_path_factory.mktemp("plain") / "ouro", byte_pairs(), **sizes, sure=3.0)


def load(folder: Path, kind: str | None = None) -> Any:
    given = {} if kind is None else {"quantization_config": TorchAoConfig(getattr(torchao, kind)())}
    return AutoModelForCausalLM.from_pretrained(folder, **given)


def size(model: Any) -> int:
    """Bytes of the weights of linear layers."""
    found = 0
    for layer in model.modules():
        if isinstance(layer, torch.nn.Linear) and layer.out_features > 1:
            parts = getattr(layer.weight, "__tensor_flatten__", None)
            tensors = [layer.weight] if parts is None else [getattr(layer.weight, name) for name in parts()[0]]
            found += sum(each.nbytes for each in tensors)
    return found


@torch.no_grad()
@pytest.mark.parametrize("kind", ["Int8WeightOnlyConfig", "Int8DynamicActivationInt8WeightConfig"])
def test_quantised_weights_say_about_what_plain_ones_say(folder: Path, kind: str) -> None:
    plain, model = load(folder), load(folder, kind)
    layers = [layer for layer in model.model.modules() if isinstance(layer, torch.nn.Linear)]
    assert {type(layer.weight).__name__ for layer in layers} == {"Int8Tensor"}
    assert size(model.model) < 0.3 * size(plain.model)
    given = {"attention_mask": MASK, **EVERY_LOOP}
    found, expected = model(TOKENS, **given), plain(TOKENS, **given)
    for ours, theirs in zip(found.loop_logits, expected.loop_logits, strict=True):
        assert 0 < (ours - theirs)[MASK.bool()].norm() < 0.05 * theirs[MASK.bool()].norm()
    for text in rows():  # few tokens take another way than many
        alone = model(text[None], **EVERY_LOOP)
        assert (alone.logits - plain(text[None]).logits).norm() < 0.05 * plain(text[None]).logits.norm()


def test_quantised_models_are_told_apart(folder: Path) -> None:
    kinds = (None, "Int8WeightOnlyConfig", "Int8DynamicActivationInt8WeightConfig")
    models = [load(folder, kind).looped for kind in (*kinds, "Int8WeightOnlyConfig")]
    assert [each.precision for each in models] == ["float32", *["float32 with Int8Tensor"] * 3]
    hashes = [each.weights_sha256 for each in models]
    assert len({*hashes}) == 3
    assert hashes[1] == hashes[3]
    layer = models[1].model.layers[0].mlp.up_proj.weight
    with torch.no_grad():
        layer.qdata[0, 0] += 1
    assert models[1].weights_sha256 != hashes[1]


def test_a_policy_is_certified_in_the_precision_in_which_it_runs(folder: Path, tmp_path: Path) -> None:
    """Recorded, calibrated, run, saved and run again."""
    documents = [byte_pairs().decode(row) for row in np.random.default_rng(0).integers(3, 500, (400, 12))]
    (tmp_path / "text.txt").write_text("<|endoftext|>".join(documents), encoding="utf-8")
    model = load(folder, "Int8WeightOnlyConfig")
    given = {"context": 16, "model": model.looped}
    recording = record_text(folder, [tmp_path / "text.txt"], "validation", tmp_path / "recording", **given)
    plain = record_text(folder, [tmp_path / "text.txt"], "validation", tmp_path / "plain", context=16)
    agreement = (recording.predictions[:, -1] == plain.predictions[:, -1]).mean()
    assert 0.9 < agreement < 1, "rounded weights that still say about the same"
    policy = ls.calibrate(recording, 0.3, loss="disagreement", readout="margin")
    assert policy.scope.precision == "float32 with Int8Tensor"
    prompt = torch.tensor([byte_pairs().encode(documents[0])])
    options = {"max_new_tokens": 8, "eos_token_id": None, "do_sample": False}
    text = ls.generate(model.looped, [ls.Prompt(0, prompt[0].numpy())], policy, max_new_tokens=8)[0]
    assert min(text.loops) < model.num_loops
    model.exit_policy = policy
    assert model.generate(prompt, **options)[0, prompt.shape[1] :].tolist() == text.tokens
    model.save_pretrained(tmp_path / "saved")
    again = load(tmp_path / "saved")
    assert again.exit_policy.guarantee == policy.guarantee
    assert again.generate(prompt, **options)[0, prompt.shape[1] :].tolist() == text.tokens
    with pytest.raises(ls.UserError, match="calibrated on weights in|calibrated for another model"):
        load(folder).generate(prompt, policy=policy, **options)
    with pytest.raises(ls.UserError, match="quantised.*AutoModelForCausalLM"):
        ls.load_model(tmp_path / "saved")


@torch.no_grad()
def test_quantised_huginn() -> None:
    plain, model = load(GOLDEN / "huginn-tiny"), load(GOLDEN / "huginn-tiny", "Int8WeightOnlyConfig")
    found, expected = model(TOKENS, attention_mask=MASK), plain(TOKENS, attention_mask=MASK)
    assert 0 < (found.logits - expected.logits).norm() < 0.1 * expected.logits.norm()
