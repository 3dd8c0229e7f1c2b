"""Looped models in transformers: do they say what LoopScope's own say, padded, cached, saved and loaded?"""

import copy
import json
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import GOLDEN
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from tiny_language import looped_llama_config, ouro_config, tiny_looped_llama, tiny_ouro
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, DataCollatorWithFlattening

import loopscope as ls
from loopscope.integrations.transformers import lora_config
from loopscope.models.checkpoint import save_model

OURO, HUGINN = GOLDEN / "ouro-tiny", GOLDEN / "huginn-tiny"
LENGTHS = (9, 4, 1, 7)
EVERY_LOOP = {"output_loop_logits": True, "output_hidden_states": True}


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


@pytest.fixture(params=["ouro", pytest.param("huginn", marks=pytest.mark.long), "llama"])
def folder(request: pytest.FixtureRequest, llama: Path) -> Path:
    return {"ouro": OURO, "huginn": HUGINN, "llama": llama}[request.param]


def load(folder: Path, **options: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, **options)


loaded = cache(load)
"""A model that no test changes."""


def rows(seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(1, 49, (length,), generator=generator) for length in LENGTHS]


TEXT = rows()[0][None]


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
def test_all_loops_are_those_of_the_engine_s_model(folder: Path) -> None:
    tokens = torch.stack([text[:4] for text in rows() if len(text) >= 4])
    out = loaded(folder)(tokens, **EVERY_LOOP, num_loops=3)
    assert torch.equal(out.logits, out.loop_logits[-1])
    ours = ls.load_model(folder).loops(tokens, num_loops=3)
    torch.testing.assert_close(torch.stack(out.loop_logits), ours.logits)
    torch.testing.assert_close(torch.stack(out.hidden_states[1:]), ours.hidden)
    if ours.gate_logits is not None:
        torch.testing.assert_close(torch.stack(out.gate_logits), ours.gate_logits)
    assert isinstance(loaded(folder)(tokens, return_dict=False), tuple)


@torch.no_grad()
def test_the_base_model_gives_what_a_head_reads(folder: Path) -> None:
    """As trainers want it that bring a head of their own, so that no logits are kept."""
    model, (tokens, mask) = loaded(folder), padded(rows(), "right")
    read = model.base_model(tokens, attention_mask=mask).last_hidden_state
    head = model.get_output_embeddings() or model.get_input_embeddings()  # Huginn's embeddings are its head
    torch.testing.assert_close(F.linear(read, head.weight), model(tokens, attention_mask=mask).logits)


def test_saved_and_loaded_again_byte_by_byte(folder: Path, tmp_path: Path) -> None:
    load(folder).save_pretrained(tmp_path / "one")
    load(tmp_path / "one").save_pretrained(tmp_path / "two")
    for name in ("config.json", "model.safetensors", "generation_config.json"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()
    assert (tmp_path / "one" / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()
    saved, given = (json.loads((each / "config.json").read_text()) for each in (tmp_path / "one", folder))
    assert saved.items() >= given.items()
    assert ls.load_model(tmp_path / "one").weights_sha256 == ls.load_model(folder).weights_sha256


@torch.no_grad()
@pytest.mark.parametrize("side", ["left", "both"])
def test_a_padded_batch_equals_single_rows(folder: Path, side: str) -> None:
    tokens, mask = padded(rows(), side)
    out = loaded(folder)(tokens, attention_mask=mask, **EVERY_LOOP)
    for row, text in enumerate(rows()):
        alone = loaded(folder)(text[None], **EVERY_LOOP)
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
    model, (tokens, mask) = loaded(folder), padded(rows(), side)
    later = torch.randint(1, 49, (4, 5), generator=torch.Generator().manual_seed(9))
    whole = torch.cat((tokens, later), 1), torch.cat((mask, torch.ones_like(later)), 1)
    expected = model(whole[0], attention_mask=whole[1], output_loop_logits=True)
    cache = model(tokens, attention_mask=mask, use_cache=True, output_loop_logits=True).past_key_values
    found = []
    for first, last in ((0, 1), (1, 4), (4, 5)):
        given = {"attention_mask": whole[1][:, : tokens.shape[1] + last], "past_key_values": cache}
        found.append(torch.stack(model(later[:, first:last], output_loop_logits=True, **given).loop_logits))
    torch.testing.assert_close(torch.cat(found, 2), torch.stack(expected.loop_logits)[:, :, -5:], atol=1e-5, rtol=1e-4)
    assert cache.get_seq_length() == whole[0].shape[1]
    assert cache.lengths.tolist() == [length + 5 for length in LENGTHS]
    hidden = torch.cat((0 * whole[1], 1 + 0 * later), 1)
    for match, batch, options in (
        ("begin another", later[:2], {}),
        ("begin another", later, {"num_loops": model.num_loops + 1}),
        ("hides tokens", later, {"attention_mask": hidden}),
    ):
        with pytest.raises(ls.UserError, match=match):
            model(batch, past_key_values=cache, **options)


@torch.no_grad()
def test_rows_of_a_cache_are_repeated_and_forgotten() -> None:
    model, (one, other) = loaded(OURO), (text[None, :4] for text in rows() if len(text) > 4)
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
    """What a coda kept of earlier loops is not there, and is not made up; a head that does not attend needs none."""
    cache = loaded(HUGINN)(TEXT[:, :6], use_cache=True).past_key_values
    with pytest.raises(ls.UserError, match="without reading every loop"):
        loaded(HUGINN)(TEXT[:, 6:], past_key_values=cache, output_loop_logits=True)
    torch.testing.assert_close(
        loaded(HUGINN)(TEXT[:, 6:], past_key_values=cache).logits, loaded(HUGINN)(TEXT).logits[:, 6:]
    )
    cache = loaded(OURO)(TEXT[:, :6], use_cache=True).past_key_values
    more = loaded(OURO)(TEXT[:, 6:8], past_key_values=cache, output_loop_logits=True)
    whole = loaded(OURO)(TEXT[:, :8], output_loop_logits=True)
    torch.testing.assert_close(torch.stack(more.loop_logits), torch.stack(whole.loop_logits)[:, :, 6:])
    fewer = loaded(OURO)(TEXT[:, 8:], past_key_values=cache, num_loops=2).past_key_values
    with pytest.raises(ls.UserError, match="1 rows and 2 loops"):
        loaded(OURO)(TEXT[:, :1], past_key_values=fewer)


@torch.no_grad()
def test_what_forward_refuses() -> None:
    model, (tokens, mask) = loaded(OURO), padded(rows(), "left")
    places = (mask.cumsum(1) - 1).clamp(min=0)
    assert torch.equal(
        model(tokens, attention_mask=mask, position_ids=places).logits, model(tokens, attention_mask=mask).logits
    )
    bounds = {"cu_seq_lens_q": torch.tensor([0, 4, 9]), "max_length_q": 5}
    for match, given in {
        "does not take inputs_embeds": {"inputs_embeds": torch.zeros(1, 9, 32)},
        "does not take output_attentions": {"output_attentions": True},
        "does not take cu_seq_lens_q.* by their position_ids alone": bounds,
        "must count the tokens.* from 0 in every text": {"position_ids": torch.arange(1, 10)[None]},
        "here num_loops=N runs N loops, so that step 2 is num_loops=3": {"exit_at_step": 2},
        "exit_threshold belongs to the code of the model's authors.*policy=": {"exit_threshold": 0.5},
        "use_weighted_exit belongs to the code": {"use_weighted_exit": True},
        "num_steps belongs to the code.*num_loops": {"num_steps": 4},
        "one number for every token": {"attention_mask": torch.ones(1, 1, 9, 9)},
        "1 for tokens and 0": {"attention_mask": torch.full((1, 9), 2)},
        "shape of input_ids": {"labels": torch.zeros(1, 8, dtype=torch.long)},
        "logits of all tokens": {"labels": TEXT, "logits_to_keep": 1},
    }.items():
        with pytest.raises(ls.UserError, match=match):
            model(**{"input_ids": TEXT, **given})
    model(TEXT, exit_at_step=None, use_weighted_exit=False)


@torch.no_grad()
@pytest.mark.parametrize("bounds", [False, True])
def test_packed_texts_do_not_see_each_other(folder: Path, bounds: bool) -> None:
    """Several texts in a row, as collators flatten a batch, are what each of them is alone."""
    model, texts = loaded(folder), rows()
    flat = DataCollatorWithFlattening(return_flash_attn_kwargs=bounds, return_seq_idx=bounds)
    packed = flat([{"input_ids": text.tolist()} for text in texts])
    alone = [model(text[None], **EVERY_LOOP) for text in texts]
    out = model(**{name: value for name, value in packed.items() if name != "labels"}, **EVERY_LOOP)
    for loop in range(model.num_loops):
        expected = torch.cat([each.loop_logits[loop][0] for each in alone])
        torch.testing.assert_close(out.loop_logits[loop][0], expected, atol=1e-5, rtol=1e-4)
    tokens, mask = padded(texts, "right")
    labels = tokens.masked_fill(mask == 0, -100)
    losses = model(tokens, attention_mask=mask, labels=labels)
    torch.testing.assert_close(model(**packed).loss, losses.loss)
    torch.testing.assert_close(model(**{**packed, "labels": packed["input_ids"]}).loss, losses.loss)
    given = {"num_items_in_batch": (packed["labels"] != -100).sum()}
    torch.testing.assert_close(model(**packed, **given).loss, losses.loss)
    for collated in (packed, {**packed, "labels": packed["input_ids"]}):
        loops = model(**collated, loop_losses=True).cross_entropy
        expected = model(tokens, attention_mask=mask, labels=labels, loop_losses=True).cross_entropy
        torch.testing.assert_close(loops, expected)
    masked = {"attention_mask": torch.cat((torch.zeros(1, 2), torch.ones(1, sum(LENGTHS))), 1).long()}
    masked |= {name: F.pad(packed[name], (2, 0), value=7) for name in ("input_ids", "position_ids")}
    torch.testing.assert_close(model(**masked).logits[:, 2:], out.logits, atol=1e-5, rtol=1e-4)
    with pytest.raises(ls.UserError, match="beside a cache a row holds one text"):
        model(packed["input_ids"], position_ids=packed["position_ids"], use_cache=True)


@torch.no_grad()
def test_some_logits_are_the_same_ones() -> None:
    logits = loaded(HUGINN)(TEXT).logits
    for keep, columns in ((2, [-2, -1]), (torch.tensor([0, 5]), [0, 5])):
        torch.testing.assert_close(loaded(HUGINN)(TEXT, logits_to_keep=keep).logits, logits[:, columns])


@pytest.mark.parametrize("side", ["left", "right"])
def test_the_loss_is_that_of_the_single_rows(folder: Path, side: str) -> None:
    model, texts = loaded(folder), rows()
    tokens, mask = padded(texts, side)
    labels = tokens.masked_fill(mask == 0, -100)
    expected = torch.cat(
        [F.cross_entropy(model(text[None]).logits[0, :-1], text[1:], reduction="none") for text in texts]
    )
    for given in (labels, tokens):  # transformers counts labels, and knows nothing of those that cannot count
        counted = (given[:, 1:] != -100).sum()
        for parts, items in ((1, None), (1, counted), (4, 4 * counted)):
            loss = model(tokens, attention_mask=mask, labels=given, num_items_in_batch=items).loss
            torch.testing.assert_close(loss, expected.mean() / parts)
    losses = model(tokens, attention_mask=mask, labels=labels, loop_losses=True)
    torch.testing.assert_close(losses.cross_entropy[-1], expected)
    assert losses.cross_entropy.shape == (model.num_loops, sum(LENGTHS) - 4)
    assert losses.logits is None


def test_gradient_checkpointing_changes_no_gradient(folder: Path) -> None:
    """Adapters drop units at random; the loop that is run again drops the same ones."""
    base, (tokens, mask) = load(folder), padded(rows(), "left")
    model = get_peft_model(base, lora_config(base, lora_dropout=0.5, init_lora_weights=False)).train()
    gradients = []
    for enable in (False, True):
        if enable:
            model.gradient_checkpointing_enable()
        assert base.is_gradient_checkpointing == base.looped.gradient_checkpointing == enable
        model.zero_grad()
        torch.manual_seed(1)
        losses = model(tokens, attention_mask=mask, labels=tokens, loop_losses=True).cross_entropy
        losses.mean().backward()
        gradients.append({name: each.grad for name, each in model.named_parameters() if each.grad is not None})
    assert gradients[0]
    torch.testing.assert_close(*gradients)


@pytest.mark.filterwarnings("ignore")  # PyTorch's own compiler
@torch.no_grad()
@pytest.mark.parametrize("path", [OURO, HUGINN], ids=["ouro", "huginn"])
def test_compiled_mlps(path: Path) -> None:
    model = load(path)
    expected, names = model(TEXT, num_loops=1).logits, list(model.state_dict())
    model.compile_mlps(backend="eager", fullgraph=True)
    torch.testing.assert_close(model(TEXT, num_loops=1).logits, expected)
    assert list(model.state_dict()) == names


def test_precision_and_place() -> None:
    half = load(OURO, dtype=torch.bfloat16, device_map="auto")
    assert (half.dtype, half.looped.precision) == (torch.bfloat16, "bfloat16")
    out = half(TEXT, output_loop_logits=True)
    assert (out.logits.dtype, out.gate_logits[0].dtype) == (torch.bfloat16, torch.float32)


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


def test_checkpoints_that_would_mislead_are_refused(tmp_path: Path) -> None:
    spoiled = Path(shutil.copytree(OURO, tmp_path / "ouro"))
    tensors = load_file(spoiled / "model.safetensors")
    for match, changed in {
        "no tensor 'lm_head.weight'": {name: each for name, each in tensors.items() if "lm_head" not in name},
        "does not know the tensor 'extra'": {**tensors, "extra": torch.zeros(2)},
        "not finite": {**tensors, "model.norm.weight": torch.full((32,), float("nan"))},
    }.items():
        save_file(changed, spoiled / "model.safetensors", {"format": "pt"})
        with pytest.raises(ls.UserError, match=match):
            load(spoiled)
    save_file(tensors, spoiled / "model.safetensors", {"format": "pt"})
    with pytest.raises(ls.UserError, match="another shape for the tensor 'lm_head.weight'"):
        load(spoiled, ignore_mismatched_sizes=True, vocab_size=64)
    with pytest.raises(ls.UserError, match="runs on one device"):
        load(OURO, device_map={"model": "cpu", "lm_head": "disk"}, offload_folder=str(tmp_path))


@pytest.mark.parametrize(("path", "key"), [(OURO, "total_ut_steps"), (HUGINN, "mean_recurrence")])
def test_another_depth_after_loading_is_not_saved(path: Path, key: str, tmp_path: Path) -> None:
    model = load(path, **{key: 2})
    assert model.num_loops == 2
    setattr(model.config, key, 3)
    with pytest.raises(ls.UserError, match="changed to 3 loops, and the model has 2"):
        model.save_pretrained(tmp_path / "saved")
    assert not (tmp_path / "saved").exists()


def test_an_adapter_on_embeddings_that_are_the_head_is_refused() -> None:
    """It would change what is read and not what is said; merged, both."""
    adapted = get_peft_model(load(HUGINN), LoraConfig(target_modules=["wte"], init_lora_weights=False))
    with pytest.raises(ls.UserError, match="are its head, too"):
        adapted(TEXT)
    whole = get_peft_model(load(HUGINN), LoraConfig(target_modules=["Wqkv"], modules_to_save=["wte"]))
    assert whole(TEXT).logits.isfinite().all()


@pytest.mark.parametrize("way", ["pissa", False])
def test_an_adapter_on_the_gate_counts(way: Any) -> None:
    """The gate says with its adapter what it says merged; PiSSA takes a part out of the weights it adapts."""
    torch.manual_seed(0)
    before = loaded(OURO)(TEXT, output_loop_logits=True).gate_logits
    small = LoraConfig(target_modules="all-linear", r=1, lora_alpha=1, init_lora_weights=way)
    adapted = get_peft_model(load(OURO), small).eval()
    said = adapted(TEXT, output_loop_logits=True).gate_logits
    merged = adapted.merge_and_unload()(TEXT, output_loop_logits=True).gate_logits
    torch.testing.assert_close(said, merged, atol=1e-4, rtol=1e-4)
    assert torch.allclose(torch.stack(said), torch.stack(before), atol=1e-3) is (way == "pissa")


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
