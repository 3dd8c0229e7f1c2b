"""Is a looped model refused, or right, after others changed its configuration or put something around its parts?"""

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import GOLDEN
from peft import LoraConfig, get_peft_model
from tiny_language import write_ouro
from transformers import AutoModelForCausalLM

import loopscope as ls
import loopscope.integrations.transformers

TOKENS = torch.arange(1, 10).view(1, -1)


def load(folder: Path, **changes: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, **changes).eval()


@pytest.fixture(scope="module")
def ouro(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_ouro(tmp_path_factory.mktemp("changed") / "ouro", total_ut_steps=3)


def test_a_threshold_in_the_configuration_is_refused(ouro: Path) -> None:
    with pytest.raises(ls.UserError, match="early_exit_threshold has no effect here and must be 1"):
        load(GOLDEN / "ouro-tiny", early_exit_threshold=0.5)
    model = load(ouro)
    model.config.early_exit_threshold = 0.5
    for call in (model, lambda tokens: model.generate(tokens, max_new_tokens=2)):
        with pytest.raises(ls.UserError, match=r"must be 1; exits are a policy's.*policy="):
            call(TOKENS)


@pytest.mark.parametrize(("name", "value"), [("ouro-tiny", 2), ("huginn-tiny", 3)])
def test_another_depth_of_the_configuration_is_refused(name: str, value: int, tmp_path: Path) -> None:
    key = "total_ut_steps" if name == "ouro-tiny" else "mean_recurrence"
    assert load(GOLDEN / name, **{key: value}).num_loops == value
    model = load(GOLDEN / name)
    setattr(model.config, key, value)
    for call in (lambda: model(TOKENS), lambda: model.save_pretrained(tmp_path / "saved")):
        with pytest.raises(ls.UserError, match=f"changed to {value} loops, and the model has {model.num_loops}"):
            call()
    assert not (tmp_path / "saved").exists()


def test_an_adapter_on_embeddings_that_are_the_head_is_refused() -> None:
    """It would change what is read and not what is said; merged, both."""
    adapted = get_peft_model(load(GOLDEN / "huginn-tiny"), LoraConfig(target_modules=["wte"], init_lora_weights=False))
    with pytest.raises(ls.UserError, match="are its head, too"):
        adapted(TOKENS)
    whole = get_peft_model(load(GOLDEN / "huginn-tiny"), LoraConfig(target_modules=["Wqkv"], modules_to_save=["wte"]))
    assert whole(TOKENS).logits.isfinite().all()


@pytest.mark.parametrize("way", ["pissa", False], ids=["weights that are changed", "weights beside the gate's"])
def test_an_adapter_on_the_gate_counts(ouro: Path, way: Any) -> None:
    """The gate says with its adapter what it says merged; PiSSA takes a part out of the weights it adapts."""
    before = load(ouro)(TOKENS, output_loop_logits=True).gate_logits
    adapted = get_peft_model(load(ouro), LoraConfig(target_modules="all-linear", r=1, init_lora_weights=way)).eval()
    said = adapted(TOKENS, output_loop_logits=True).gate_logits
    merged = adapted.merge_and_unload()(TOKENS, output_loop_logits=True).gate_logits
    torch.testing.assert_close(said, merged, atol=1e-4, rtol=1e-4)
    alike = torch.allclose(torch.stack(said), torch.stack(before), atol=1e-4)
    assert alike is (way == "pissa")


def test_noise_on_embeddings_is_refused(ouro: Path) -> None:
    model = load(ouro).train()
    model.get_input_embeddings().neftune_noise_alpha = 5.0
    with pytest.raises(ls.UserError, match="neftune_noise_alpha"):
        model(TOKENS, labels=TOKENS)


@pytest.mark.parametrize("places", [{"": "disk"}, {"model": "cpu", "lm_head": "disk"}])
def test_weights_left_on_the_disk_are_refused(ouro: Path, places: dict[str, str], tmp_path: Path) -> None:
    with pytest.raises(ls.UserError, match="runs on one device"):
        load(ouro, device_map=places, offload_folder=str(tmp_path))


def test_several_texts_in_one_row_are_refused(ouro: Path) -> None:
    with pytest.raises(ls.UserError, match="Several texts in one row"):
        load(ouro)(TOKENS, cu_seq_lens_q=torch.tensor([0, 4, 9]), max_length_q=5)
    with pytest.raises(ls.UserError, match=r"must have the shape \[rows, tokens\]"):
        load(ouro)(TOKENS[0])
