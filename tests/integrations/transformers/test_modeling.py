"""Looped models in transformers: do they say what LoopScope's own say, padded, cached, saved and loaded?"""

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import GOLDEN
from safetensors.torch import load_file, save_file
from peft import LoraConfig, get_peft_model
from tiny_language import looped_llama_config, ouro_config, tiny_looped_llama, tiny_ouro
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, DataCollatorWithFlattening
from transformers.generation import EosTokenCriteria, TemperatureLogitsWarper

import loopscope as ls
from loopscope.engine import Prompt, Sampling
from loopscope.models.checkpoint import save_model
from loopscope.integrations.transformers.padded_batch import LoopedCache

OURO, HUGINN = GOLDEN / "ouro-tiny", GOLDEN / "huginn-tiny"
LENGTHS = (9, 4, 1, 7)


def write(folder: Path, model: ls.LoopedModel, config: dict[str, Any]) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_model({name: each for name, each in model.state_dict().items() if name not in model.tied}, folder)
    return folder


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With prelude, coda, injection and gate, and tied embeddings."""
    folder = tmp_path_factory.mktemp("llama") / "looped"
    return write(folder, tiny_looped_llama(tie_word_embeddings=True), looped_llama_config(tie_word_embeddings=True))


LONG = pytest.mark.long


@pytest.fixture(params=["ouro", pytest.param("huginn", marks=LONG), "llama"])
def folder(request: pytest.FixtureRequest, llama: Path) -> Path:
    return {"ouro": OURO, "huginn": HUGINN, "llama": llama}[request.param]


def load(folder: Path, **options: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, **options)


def rows(seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(1, 49, (length,), generator=generator) for length in LENGTHS]


def padded(texts: list[Tensor], side: str) -> tuple[Tensor, Tensor]:
    """Tokens and mask; `both` puts padding before, after and, where there is room, between."""
    longest = max(map(len, texts)) + (3 if side == "both" else 0)
    tokens, mask = torch.full((2, len(texts), longest), 3).unbind()
    mask = torch.zeros_like(mask)
    for row, text in enumerate(texts):
        free = {"left": range(longest - len(text), longest), "right": range(len(text))}
        cells = free.get(side) or ([1, *range(3, 2 + len(text))] if len(text) > 1 else [1])
        tokens[row, list(cells)], mask[row, list(cells)] = text, 1
    return tokens, mask


@torch.no_grad()
@pytest.mark.parametrize("folder", [OURO, HUGINN], ids=["ouro", "huginn"])
def test_golden_logits_at_every_loop(folder: Path) -> None:
    expected = load_file(folder / "expected.safetensors")
    out = load(folder)(expected["input_ids"], output_loop_logits=True, output_hidden_states=True)
    assert (torch.stack(out.loop_logits) - expected["logits"]).abs().max() < 1e-4
    assert torch.equal(out.logits, out.loop_logits[-1])
    if folder == OURO:
        assert (torch.stack(out.hidden_states[1:]) - expected["hidden"]).abs().max() < 1e-4
        assert (torch.stack(out.gate_logits) - expected["gate_logits"]).abs().max() < 1e-4
    else:
        assert out.gate_logits is None
        assert len(out.hidden_states) == 1 + 8


@torch.no_grad()
def test_all_loops_are_those_of_the_engine_s_model(folder: Path) -> None:
    tokens = torch.stack([text[:4] for text in rows() if len(text) >= 4])
    out = load(folder)(tokens, output_loop_logits=True, output_hidden_states=True, num_loops=3)
    ours = ls.load_model(folder).loops(tokens, num_loops=3)
    torch.testing.assert_close(torch.stack(out.loop_logits), ours.logits)
    torch.testing.assert_close(torch.stack(out.hidden_states[1:]), ours.hidden)
    if ours.gate_logits is not None:
        torch.testing.assert_close(torch.stack(out.gate_logits), ours.gate_logits)
    assert isinstance(load(folder)(tokens, return_dict=False), tuple)


def test_the_base_model_gives_what_a_head_reads(folder: Path) -> None:
    """As trainers want it that bring a head of their own, so that no logits are kept."""
    model, (tokens, mask) = load(folder), padded(rows(), "right")
    with torch.no_grad():
        read = model.base_model(tokens, attention_mask=mask).last_hidden_state
        logits = model(tokens, attention_mask=mask).logits
    head = model.get_output_embeddings() or model.get_input_embeddings()  # Huginn's embeddings are its head
    torch.testing.assert_close(F.linear(read, head.weight), logits)


def test_saved_and_loaded_again_byte_by_byte(folder: Path, tmp_path: Path) -> None:
    load(folder).save_pretrained(tmp_path / "one")
    load(tmp_path / "one").save_pretrained(tmp_path / "two")
    for name in ("config.json", "model.safetensors", "generation_config.json"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()
    assert (tmp_path / "one" / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()
    saved, given = (json.loads((each / "config.json").read_text()) for each in (tmp_path / "one", folder))
    assert saved.items() >= given.items()
    assert ls.load_model(tmp_path / "one").weights_sha256 == ls.load_model(folder).weights_sha256


def test_shards(tmp_path: Path) -> None:
    load(OURO).save_pretrained(tmp_path / "shards", max_shard_size="20KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 2
    assert ls.load_model(tmp_path / "shards").loops(rows()[0][None]).logits.shape == (4, 1, 9, 97)
    again = load(tmp_path / "shards")
    assert all(torch.equal(each, again.state_dict()[name]) for name, each in load(OURO).state_dict().items())


@torch.no_grad()
@pytest.mark.parametrize("side", ["left", "both"])
def test_a_padded_batch_equals_single_rows(folder: Path, side: str) -> None:
    model = load(folder)
    tokens, mask = padded(rows(), side)
    out = model(tokens, attention_mask=mask, output_loop_logits=True, output_hidden_states=True)
    for row, text in enumerate(rows()):
        alone = model(text[None], output_loop_logits=True, output_hidden_states=True)
        inside = mask[row].bool()
        for batch, single in (
            *zip(out.loop_logits, alone.loop_logits, strict=True),
            *zip(out.hidden_states, alone.hidden_states, strict=True),
            *zip(out.gate_logits or (), alone.gate_logits or (), strict=True),
        ):
            torch.testing.assert_close(batch[row, inside], single[0], atol=1e-5, rtol=1e-4)
            assert not batch[row, ~inside].any() or batch is out.hidden_states[0]


@torch.no_grad()
@pytest.mark.parametrize("side", ["left", "right"])
def test_a_cache_changes_nothing(folder: Path, side: str) -> None:
    model = load(folder)
    tokens, mask = padded(rows(), side)
    later = torch.randint(1, 49, (4, 5), generator=torch.Generator().manual_seed(9))
    whole = torch.cat((tokens, later), 1), torch.cat((mask, torch.ones_like(later)), 1)
    expected = model(whole[0], attention_mask=whole[1], output_loop_logits=True)
    out = model(tokens, attention_mask=mask, use_cache=True, output_loop_logits=True)
    found, cache = [], out.past_key_values
    for first, last in ((0, 1), (1, 4), (4, 5)):
        upto = tokens.shape[1] + last
        out = model(
            later[:, first:last], attention_mask=whole[1][:, :upto], past_key_values=cache, output_loop_logits=True
        )
        found.append(torch.stack(out.loop_logits))
    torch.testing.assert_close(torch.cat(found, 2), torch.stack(expected.loop_logits)[:, :, -5:], atol=1e-5, rtol=1e-4)
    assert cache.get_seq_length() == whole[0].shape[1]
    assert cache.lengths.tolist() == [length + 5 for length in LENGTHS]
    with pytest.raises(ls.UserError, match="begin another"):
        model(later[:2], past_key_values=cache)
    with pytest.raises(ls.UserError, match="begin another"):
        model(later, past_key_values=cache, num_loops=model.num_loops + 1)
    with pytest.raises(ls.UserError, match="hides tokens"):
        model(later, past_key_values=cache, attention_mask=torch.cat((0 * whole[1], 1 + 0 * later), 1))


@torch.no_grad()
def test_rows_of_a_cache_are_repeated_and_forgotten() -> None:
    model, (one, other) = load(OURO), (text[None, :4] for text in rows() if len(text) > 4)
    cache = model(torch.cat((one, other)), use_cache=True).past_key_values
    cache.batch_repeat_interleave(2)
    later = torch.tensor([[5], [6], [7], [8]])
    whole = torch.cat((torch.cat((one, one, other, other)), later), 1)
    torch.testing.assert_close(model(later, past_key_values=cache).logits, model(whole).logits[:, -1:])
    with pytest.raises(ls.UserError, match="assistant"):
        cache.crop(1)
    cache.reset()
    assert cache.get_seq_length() == 0
    torch.testing.assert_close(model(one, past_key_values=cache).logits, model(one).logits)


@torch.no_grad()
def test_a_cache_that_was_read_at_the_last_loop_only() -> None:
    """What a coda kept of earlier loops is not there, and is not made up."""
    model, text = load(HUGINN), rows()[0][None]
    cache = model(text[:, :6], use_cache=True).past_key_values
    with pytest.raises(ls.UserError, match="without reading every loop"):
        model(text[:, 6:], past_key_values=cache, output_loop_logits=True)
    torch.testing.assert_close(model(text[:, 6:], past_key_values=cache).logits, model(text).logits[:, 6:])


@torch.no_grad()
def test_what_forward_refuses() -> None:
    model, text = load(OURO), rows()[0][None]
    tokens, mask = padded(rows(), "left")
    places = (mask.cumsum(1) - 1).clamp(min=0)
    assert torch.equal(
        model(tokens, attention_mask=mask, position_ids=places).logits, model(tokens, attention_mask=mask).logits
    )
    for match, given in {
        "position_ids": {"position_ids": torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]])},
        "does not take inputs_embeds": {"inputs_embeds": torch.zeros(1, 9, 32)},
        "does not take output_attentions": {"output_attentions": True},
        "does not take cu_seq_lens_q": {"cu_seq_lens_q": torch.tensor([0, 4, 9]), "max_length_q": 5},
        "one number for every token": {"attention_mask": torch.ones(1, 1, 9, 9)},
        "1 for tokens and 0": {"attention_mask": torch.full((1, 9), 2)},
        "shape of input_ids": {"labels": torch.zeros(1, 8, dtype=torch.long)},
        "logits of all tokens": {"labels": text, "logits_to_keep": 1},
        "past_key_values and num_loops": {"loop_losses": True, "labels": text, "num_loops": 2},
        "without a cache": {"loop_losses": True, "labels": text, "use_cache": True},
    }.items():
        with pytest.raises(ls.UserError, match=match):
            model(text, **given)
    with pytest.raises(ls.UserError, match="block size"):
        model(torch.ones(1, 129, dtype=torch.long))


@torch.no_grad()
def test_several_texts_in_one_row_are_refused_with_and_without_losses() -> None:
    """Each would see those before it."""
    packed = DataCollatorWithFlattening()([{"input_ids": text.tolist()} for text in rows()[:2]])
    for options in ({}, {"loop_losses": True}):
        with pytest.raises(ls.UserError, match="a row of its own"):
            load(OURO)(**packed, **options)


@torch.no_grad()
def test_some_logits_are_the_same_ones() -> None:
    model, text = load(HUGINN), rows()[0][None]
    logits = model(text).logits
    torch.testing.assert_close(model(text, logits_to_keep=2).logits, logits[:, -2:])
    torch.testing.assert_close(model(text, logits_to_keep=torch.tensor([0, 5])).logits, logits[:, [0, 5]])


@pytest.mark.parametrize("side", ["left", "right"])
def test_the_loss_is_that_of_the_single_rows(folder: Path, side: str) -> None:
    model, texts = load(folder), rows()
    tokens, mask = padded(texts, side)
    labels = tokens.masked_fill(mask == 0, -100)
    expected = torch.cat(
        [F.cross_entropy(model(text[None]).logits[0, :-1], text[1:], reduction="none") for text in texts]
    )
    out = model(tokens, attention_mask=mask, labels=labels)
    torch.testing.assert_close(out.loss, expected.mean())
    assert out.logits.shape == (*tokens.shape, model.config.vocab_size)
    torch.testing.assert_close(model(tokens, attention_mask=mask, labels=tokens).loss, expected.mean())
    for given in (labels, tokens):  # transformers counts labels, and knows nothing of those that cannot count
        counted = (given[:, 1:] != -100).sum()
        whole = model(tokens, attention_mask=mask, labels=given, num_items_in_batch=counted)
        torch.testing.assert_close(whole.loss, expected.mean())
        part = model(tokens, attention_mask=mask, labels=given, num_items_in_batch=4 * counted)
        torch.testing.assert_close(part.loss, expected.mean() / 4)
    losses = model(tokens, attention_mask=mask, labels=labels, loop_losses=True)
    torch.testing.assert_close(losses.cross_entropy[-1], expected)
    assert losses.cross_entropy.shape == (model.num_loops, sum(LENGTHS) - 4)
    assert losses.logits is None


def test_gradient_checkpointing_changes_no_gradient(folder: Path) -> None:
    model = load(folder).train()
    assert not model.is_gradient_checkpointing
    tokens, mask = padded(rows(), "left")
    gradients = []
    for enable in (False, True):
        if enable:
            model.gradient_checkpointing_enable()
            assert model.looped.gradient_checkpointing
        model.zero_grad()
        model(tokens, attention_mask=mask, labels=tokens).loss.backward()
        gradients.append([parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None])
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.filterwarnings("ignore")  # PyTorch's own compiler
@torch.no_grad()
@pytest.mark.parametrize("path", [OURO, HUGINN], ids=["ouro", "huginn"])
def test_compiled_mlps(path: Path) -> None:
    model, text = load(path), rows()[0][None]
    expected, names = model(text).logits, list(model.state_dict())
    model.compile_mlps(backend="eager", fullgraph=True)
    torch.testing.assert_close(model(text).logits, expected)
    assert list(model.state_dict()) == names


def test_precision_and_place() -> None:
    half = load(OURO, dtype=torch.bfloat16, device_map="auto")
    assert (half.dtype, half.looped.precision) == (torch.bfloat16, "bfloat16")
    out = half(rows()[0][None], output_loop_logits=True)
    assert out.logits.dtype == torch.bfloat16
    assert out.gate_logits[0].dtype == torch.float32


def test_parts_are_shared_with_the_engine_s_model() -> None:
    model = load(OURO)
    assert not model.looped.training
    assert model.train().looped.training
    model.eval().resize_token_embeddings(105, mean_resizing=False)
    assert (model.looped.vocab_size, model.looped.lm_head.weight.shape[0]) == (105, 105)
    assert model(torch.tensor([[104, 3]])).logits.shape == (1, 2, 105)
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.lm_head.weight.zero_()
    assert not other.looped.lm_head.weight.any()
    assert model.looped.lm_head.weight.any()


@pytest.fixture
def spoiled(tmp_path: Path) -> Path:
    return Path(shutil.copytree(OURO, tmp_path / "ouro"))


def test_checkpoints_that_would_mislead_are_refused(spoiled: Path) -> None:
    tensors = load_file(spoiled / "model.safetensors")
    for match, changed in {
        "no tensor 'model.early_exit_gate.bias'": {
            k: v for k, v in tensors.items() if k != "model.early_exit_gate.bias"
        },
        "does not know the tensor 'extra'": {**tensors, "extra": torch.zeros(2)},
        "not finite": {**tensors, "model.norm.weight": torch.full((32,), float("nan"))},
    }.items():
        save_file(changed, spoiled / "model.safetensors", {"format": "pt"})
        with pytest.raises(ls.UserError, match=match):
            load(spoiled)
    save_file(tensors, spoiled / "model.safetensors", {"format": "pt"})
    with pytest.raises(ls.UserError, match="another shape for the tensor 'lm_head.weight'"):
        load(spoiled, ignore_mismatched_sizes=True, vocab_size=64)
    config = json.loads((spoiled / "config.json").read_text())
    (spoiled / "config.json").write_text(json.dumps({**config, "hidden_act": "gelu"}))
    with pytest.raises(ls.UserError, match="hidden_act"):
        load(spoiled)


@pytest.mark.parametrize("places", [{"": "disk"}, {"model": "cpu", "lm_head": "disk"}])
def test_weights_left_on_the_disk_are_refused(places: dict[str, str], tmp_path: Path) -> None:
    with pytest.raises(ls.UserError, match="runs on one device"):
        load(OURO, device_map=places, offload_folder=str(tmp_path))


def test_a_threshold_in_the_configuration_is_refused() -> None:
    with pytest.raises(ls.UserError, match="early_exit_threshold has no effect here and must be 1"):
        load(OURO, early_exit_threshold=0.5)
    model, text = load(OURO), rows()[0][None]
    model.config.early_exit_threshold = 0.5
    for call in (model, lambda tokens: model.generate(tokens, max_new_tokens=2)):
        with pytest.raises(ls.UserError, match=r"must be 1; exits are a policy's.*policy="):
            call(text)


@pytest.mark.parametrize(("path", "key", "value"), [(OURO, "total_ut_steps", 2), (HUGINN, "mean_recurrence", 3)])
def test_another_depth_after_loading_is_refused(path: Path, key: str, value: int, tmp_path: Path) -> None:
    assert load(path, **{key: value}).num_loops == value
    model = load(path)
    setattr(model.config, key, value)
    for call in (lambda: model(rows()[0][None]), lambda: model.save_pretrained(tmp_path / "saved")):
        with pytest.raises(ls.UserError, match=f"changed to {value} loops, and the model has {model.num_loops}"):
            call()
    assert not (tmp_path / "saved").exists()


def test_an_adapter_on_embeddings_that_are_the_head_is_refused() -> None:
    """It would change what is read and not what is said; merged, both."""
    text = rows()[0][None]
    adapted = get_peft_model(load(HUGINN), LoraConfig(target_modules=["wte"], init_lora_weights=False))
    with pytest.raises(ls.UserError, match="are its head, too"):
        adapted(text)
    whole = get_peft_model(load(HUGINN), LoraConfig(target_modules=["Wqkv"], modules_to_save=["wte"]))
    assert whole(text).logits.isfinite().all()


@pytest.mark.parametrize("way", ["pissa", False], ids=["weights that are changed", "weights beside the gate's"])
def test_an_adapter_on_the_gate_counts(way: Any) -> None:
    """The gate says with its adapter what it says merged; PiSSA takes a part out of the weights it adapts."""
    text = rows()[0][None]
    before = load(OURO)(text, output_loop_logits=True).gate_logits
    adapted = get_peft_model(load(OURO), LoraConfig(target_modules="all-linear", r=1, init_lora_weights=way)).eval()
    said = adapted(text, output_loop_logits=True).gate_logits
    merged = adapted.merge_and_unload()(text, output_loop_logits=True).gate_logits
    torch.testing.assert_close(said, merged, atol=1e-4, rtol=1e-4)
    assert torch.allclose(torch.stack(said), torch.stack(before), atol=1e-4) is (way == "pissa")


def test_configurations_of_the_hub(tmp_path: Path) -> None:
    """Code beside the weights is neither used nor named again; rotary positions in every spelling."""
    given = ouro_config(
        auto_map={"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}, rope_scaling=None, use_cache=True
    )
    folder = write(tmp_path / "hub", tiny_ouro(), given)
    (folder / "evil.py").write_text("raise SystemExit('code of a checkpoint was run')")
    model = load(folder, trust_remote_code=True)
    load(folder).save_pretrained(tmp_path / "saved")
    assert torch.equal(model.lm_head.weight, load(tmp_path / "saved").lm_head.weight)
    assert "auto_map" not in json.loads((tmp_path / "saved" / "config.json").read_text())
    assert AutoConfig.from_pretrained(tmp_path / "saved").rope_theta == 10_000.0
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling["original_max_position_embeddings"] = 64
    for number, spelling in enumerate(
        ({"rope_theta": 500.0, "rope_scaling": scaling}, {"rope_parameters": {**scaling, "rope_theta": 500.0}})
    ):
        config = {**looped_llama_config(), **spelling}
        if number:
            del config["rope_theta"]
        path = write(tmp_path / f"llama{number}", tiny_looped_llama(), config)
        load(path).save_pretrained(path / "again")
        rotary = [ls.load_model(each).model.layers[0].self_attn.rotary for each in (path, path / "again")]
        assert rotary[0] == rotary[1] == load(path).model.layers[0].self_attn.rotary
        assert rotary[0].scaling is not None


def prompts(texts: list[Tensor]) -> list[Prompt]:
    return [Prompt(number, text.numpy()) for number, text in enumerate(texts)]


def new_tokens(sequences: Tensor, given: Tensor, ends: set[int] = frozenset()) -> list[list[int]]:  # type: ignore[assignment]
    """What was generated, up to the token that ends a text."""
    found = []
    for row in sequences[:, given.shape[1] :].tolist():
        end = next((place for place, token in enumerate(row, start=1) if token in ends), len(row))
        found.append(row[:end])
    return found


def test_generates_what_the_engine_generates(folder: Path) -> None:
    model, ours = load(folder), ls.load_model(folder)
    tokens, mask = padded(rows(), "left")
    free = [text.tokens for text in ls.generate(ours, prompts(rows()), max_new_tokens=12)]
    ends = {free[0][4], free[1][7]}  # so that texts end at different times
    options: dict[str, Any] = {"max_new_tokens": 12, "eos_token_id": sorted(ends), "pad_token_id": 0}
    written = model.generate(tokens, attention_mask=mask, do_sample=False, **options)
    expected = ls.generate(ours, prompts(rows()), max_new_tokens=12, stop=ends)
    assert new_tokens(written, tokens, ends) == [text.tokens for text in expected]
    assert len({len(text.tokens) for text in expected}) > 1
    slow = model.generate(tokens, attention_mask=mask, do_sample=False, use_cache=False, **options)
    assert torch.equal(written, slow)


@pytest.mark.parametrize("mode", ["full", pytest.param("propagate", marks=LONG), pytest.param("latest", marks=LONG)])
def test_generates_under_a_policy_as_the_engine_does(folder: Path, mode: str, tmp_path: Path) -> None:
    model, ours = load(folder), ls.load_model(folder)
    tokens, mask = padded(rows(), "left")
    rules = {OURO: ("margin", 0.3), HUGINN: ("margin", 0.02)}
    policy = ls.ExitPolicy(*rules.get(folder, ("gate", 0.5)))
    expected = ls.generate(ours, prompts(rows()), policy, max_new_tokens=10, cache=mode)
    loops = np.array([text.loops for text in expected])
    assert len(np.unique(loops)) > 1, "a policy that this test says something about"
    given = {"policy": policy, "cache": mode, "max_new_tokens": 10, "eos_token_id": None}
    out = model.generate(tokens, attention_mask=mask, return_dict_in_generate=True, **given)
    assert new_tokens(out.sequences, tokens) == [text.tokens for text in expected]
    assert np.array_equal(out.loops.numpy(), loops)
    if mode == "full":
        free = {name: value for name, value in given.items() if name not in ("policy", "cache")}
        full_depth = model.generate(tokens, attention_mask=mask, do_sample=False, **free)
        assert torch.equal(model.generate(tokens, attention_mask=mask, lossless=True, **given), full_depth)
    policy.save(tmp_path / "policy.json")
    assert torch.equal(
        model.generate(tokens, attention_mask=mask, **{**given, "policy": tmp_path / "policy.json"}), out.sequences
    )


def test_samples_under_a_policy_as_the_engine_does() -> None:
    model, ours = load(OURO), ls.load_model(OURO)
    tokens, mask = padded(rows(), "left")
    policy = ls.ExitPolicy("gate", 0.6)
    settings = {"temperature": 1.3, "top_k": 20, "top_p": 0.9}
    texts = []
    for seed in (5, 5, 6):
        torch.manual_seed(seed)
        texts.append(
            model.generate(
                tokens,
                attention_mask=mask,
                do_sample=True,
                policy=policy,
                max_new_tokens=8,
                eos_token_id=None,
                **settings,
            )
        )
    assert torch.equal(texts[0], texts[1])
    assert not torch.equal(texts[0], texts[2])
    torch.manual_seed(5)
    sampling = Sampling(**settings, seed=int(torch.randint(2**62, ())))
    expected = ls.generate(ours, prompts(rows()), policy, max_new_tokens=8, sampling=sampling)
    assert new_tokens(texts[0], tokens) == [text.tokens for text in expected]


@pytest.mark.filterwarnings("ignore")
def test_sampling_and_beams_with_the_cache_are_those_without(folder: Path) -> None:
    model = load(folder)
    tokens, mask = padded(rows(), "left")
    for options in ({"do_sample": True, "num_return_sequences": 2}, {"num_beams": 3}, {"num_loops": 2}):
        texts = []
        for use_cache in (True, False):
            torch.manual_seed(0)
            texts.append(
                model.generate(
                    tokens, attention_mask=mask, use_cache=use_cache, max_new_tokens=8, eos_token_id=None, **options
                )
            )
        assert torch.equal(*texts), options


@pytest.mark.filterwarnings("ignore")
def test_a_text_goes_on_from_its_cache() -> None:
    model, text = load(OURO), rows()[0][None]
    cache = LoopedCache()
    first = model.generate(text, past_key_values=cache, max_new_tokens=4, eos_token_id=None, do_sample=False)
    second = model.generate(first, past_key_values=cache, max_new_tokens=4, eos_token_id=None, do_sample=False)
    assert torch.equal(second, model.generate(text, max_new_tokens=8, eos_token_id=None, do_sample=False))


def test_what_a_policy_does_not_go_with() -> None:
    model = load(OURO)
    tokens, mask = padded(rows(), "left")
    for match, given in {
        "beams": {"num_beams": 2},
        "RepetitionPenalty": {"repetition_penalty": 1.2},
        "output_scores": {"output_scores": True, "return_dict_in_generate": True},
        "no cache 'some'": {"cache": "some"},
        "lossless is of an exit policy": {"policy": None, "lossless": True},
        "cache is of an exit policy": {"policy": None, "cache": "propagate"},
        "num_loops is not done": {"num_loops": 1},
        "output_loop_logits is not done": {"output_loop_logits": True},
        "past_key_values is not done": {"past_key_values": LoopedCache()},
        "a row of its own": {"position_ids": torch.zeros_like(tokens)},
        "EosTokenCriteria is not done": {"stopping_criteria": [EosTokenCriteria(5)]},
        "TemperatureLogitsWarper is not done": {"logits_processor": [TemperatureLogitsWarper(0.3)]},
    }.items():
        with pytest.raises(ls.UserError, match=match):
            model.generate(
                tokens, attention_mask=mask, max_new_tokens=4, **{"policy": ls.ExitPolicy("margin", 0.5), **given}
            )
    tokens, mask = padded(rows(), "right")
    with pytest.raises(ls.UserError, match="pad prompts on the left"):
        model.generate(tokens, attention_mask=mask, max_new_tokens=4)
    with pytest.raises(ls.UserError, match="training mode"):
        model.train().generate(tokens, attention_mask=mask, policy=ls.ExitPolicy("margin", 0.5), max_new_tokens=4)


def test_a_stream_of_one_row() -> None:
    class Collected:
        tokens: list[int]

        def __init__(self) -> None:
            self.tokens, self.ended = [], False

        def put(self, tokens: Tensor) -> None:
            self.tokens += tokens.flatten().tolist()

        def end(self) -> None:
            self.ended = True

    model, text, streamer = load(OURO), rows()[0][None], Collected()
    written = model.generate(
        text,
        attention_mask=torch.ones_like(text),
        policy=ls.ExitPolicy("gate", 0.5),
        max_new_tokens=5,
        eos_token_id=None,
        streamer=streamer,
    )
    assert streamer.tokens == written[0].tolist()
    assert streamer.ended
    tokens, mask = padded(rows(), "left")
    with pytest.raises(ls.UserError, match="several rows"):
        model.generate(
            tokens, attention_mask=mask, policy=ls.ExitPolicy("gate", 0.5), max_new_tokens=2, streamer=Collected()
        )


def test_a_policy_knows_its_model(spoiled: Path) -> None:
    """Loaded by transformers it is the model that it was calibrated on, until its weights change."""
    model, text = load(spoiled), rows()[0][None]
    tied = ls.ExitPolicy("margin", 0.3, model=ls.load_model(spoiled).weights_sha256)
    options = {"attention_mask": torch.ones_like(text), "max_new_tokens": 3, "policy": tied}
    assert model.generate(text, **options).shape[1] == 12
    with torch.no_grad():
        model.lm_head.weight[5] += 1
    with pytest.raises(ls.UserError, match="model"):
        model.generate(text, **options)
