"""Pretraining: is a language model trained on every next token, and is its folder a checkpoint in Ouro's layout?"""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import tiny_language_run, tiny_ouro_settings
from safetensors.torch import load_file

import loopscope as ls
from loopscope.models import Ouro
from loopscope.models.ouro import read_ouro_config
from loopscope.models.tokenizer import chat_prompt, load_tokenizer, stop_tokens
from loopscope.training.language_run import LanguageRun, TokenLosses, TokenWindows, cut_windows, token_stream
from loopscope.training.loop import train_run

CPU = torch.device("cpu")


def test_the_folder_is_a_checkpoint_in_ouro_s_layout(tiny_ouro: LanguageRun) -> None:
    assert sorted(path.name for path in tiny_ouro.folder.iterdir() if path.is_file()) == [
        "config.json",
        "data.json",
        "hashes.json",
        "metrics.jsonl",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    config = json.loads((tiny_ouro.folder / "config.json").read_text())
    assert (config["model_type"], config["total_ut_steps"], config["eos_token_id"]) == ("ouro", 3, 0)
    trained = Ouro(read_ouro_config(tiny_ouro.folder))
    trained.load_state_dict(load_file(tiny_ouro.folder / "model.safetensors"))
    tokens = torch.randint(300, (2, 20))
    with torch.no_grad():
        assert torch.equal(ls.load_model(tiny_ouro.folder).loops(tokens).logits, trained.loops(tokens).logits)


def test_the_tokenizer_has_ouro_s_special_tokens(tiny_ouro: LanguageRun) -> None:
    tokenizer = load_tokenizer(tiny_ouro.folder)
    assert tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|im_start|>", "<|im_end|>"]) == [0, 1, 2]
    assert (tokenizer.eos_token_id, stop_tokens(tokenizer)) == (0, {0, 2})
    text = "12 and é\n make"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert chat_prompt(tokenizer, [{"role": "user", "content": "hi"}])[0] == 1


def test_it_learns(tmp_path: Path) -> None:
    run = tiny_language_run(tmp_path, "training.steps=80", "model.hidden_size=32", "objective.beta=1.0")
    losses = train_run(run, CPU).final["validation_loss"]
    assert max(losses) < math.log(300) - 2.5


def test_losses_are_those_of_every_next_token_at_every_loop(tiny_ouro: LanguageRun) -> None:
    model = ls.load_model(tiny_ouro.folder)
    windows = cut_windows(token_stream(tiny_ouro.validation, tiny_ouro.folder), 16).take(np.arange(5))
    losses, correct, gate_logits, detached = TokenLosses(model)(windows, CPU)
    tokens = torch.from_numpy(windows.tokens)
    out = model.loops(tokens[:, :-1])
    targets = tokens[:, 1:].expand(3, -1, -1)
    plain = F.cross_entropy(out.logits.flatten(0, 2), targets.flatten(), reduction="none").view(3, -1)
    assert torch.allclose(losses, plain, atol=1e-5)
    assert torch.equal(correct, (out.logits.argmax(-1) == targets).view(3, -1))
    assert torch.allclose(gate_logits, out.gate_logits.view(3, -1), atol=1e-5)
    assert torch.equal(gate_logits, detached)
    shifted = TokenLosses(model)(TokenWindows(np.roll(windows.tokens, 1, axis=1)), CPU)[0]
    assert not torch.allclose(losses, shifted, atol=0.1)


def test_every_token_of_the_text_is_predicted_once(tiny_ouro: LanguageRun) -> None:
    tokens = token_stream(tiny_ouro.train, tiny_ouro.folder)
    windows = cut_windows(tokens, 16)
    assert np.array_equal(windows.tokens[:, 1:].ravel(), tokens[1 : 1 + 16 * len(windows)])
    assert len(tokens) - 1 - 16 * len(windows) < 16
    assert (tokens == 0).sum() == 150  # an end before every document
    batch = tiny_ouro.batches()
    epoch = np.concatenate([batch(step).tokens for step in range(len(windows) // 4)])
    assert len(np.unique(epoch, axis=0)) == len(np.unique(windows.tokens[: len(epoch)], axis=0)) or len(windows) % 4
    assert np.array_equal(batch(7).tokens, tiny_ouro.batches()(7).tokens)
    assert not np.array_equal(batch(7).tokens, batch(8).tokens)


def test_an_interrupted_run_ends_bit_identical(tiny_ouro: LanguageRun, tmp_path: Path) -> None:
    run = tiny_language_run(tmp_path)

    def stop(done: int, total: int, note: str) -> None:
        if done == 7:  # beyond the last saved state
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train_run(run, CPU, stop)
    assert not (run.folder / "model.safetensors").exists()
    assert train_run(tiny_language_run(tmp_path), CPU).resumed_from == 4
    assert _contents(run.folder) == _contents(tiny_ouro.folder)


def test_another_text_or_another_model_s_folder_is_refused(tiny_ouro: LanguageRun, tmp_path: Path) -> None:
    other = LanguageRun(tiny_ouro.settings, tiny_ouro.validation, tiny_ouro.train, tiny_ouro.folder)
    with pytest.raises(ls.UserError, match=r"other settings \(--text, --validation\)"):
        train_run(other, CPU)
    (tmp_path / "config.json").write_text('{"model_type": "ouro"}')
    with pytest.raises(ls.UserError, match="not trained here"):
        train_run(LanguageRun(tiny_ouro.settings, tiny_ouro.train, tiny_ouro.validation, tmp_path), CPU)


def test_tied_embeddings_are_saved_once(tmp_path: Path) -> None:
    run = tiny_language_run(tmp_path, "model.tie_word_embeddings=true", "training.steps=5")
    with pytest.raises(KeyboardInterrupt):
        train_run(run, CPU, _interrupt_after_saving)
    assert train_run(run, CPU).resumed_from == 4
    assert "lm_head.weight" not in load_file(run.folder / "model.safetensors")
    model = ls.load_model(run.folder)
    assert torch.equal(model.lm_head.weight, model.model.embed_tokens.weight)


def _interrupt_after_saving(done: int, total: int, note: str) -> None:
    if done == 4:
        raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("context=65", "max_position_embeddings"),
        ("vocab_size=100", "at least 259"),
        ("model.num_attention_heads=16", "even width"),
        ("model.layers=2", "unknown key"),
    ],
)
def test_settings_that_cannot_be_are_explained(tmp_path: Path, override: str, told: str) -> None:
    with pytest.raises(ls.UserError, match=told):
        tiny_ouro_settings(tmp_path, override)


@pytest.mark.parametrize("short", ["train", "validation"])
def test_a_text_of_less_than_a_window_is_refused_before_any_step(tmp_path: Path, short: str) -> None:
    run = tiny_language_run(tmp_path, "context=32")
    getattr(run, short)[0].write_text("Too short.")
    with pytest.raises(ls.UserError, match=f"The {short} text has .* less than one window of 32"):
        train_run(run, CPU)
    assert not list(run.folder.glob("checkpoint*"))
    assert not (run.folder / "metrics.jsonl").exists()


def _contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}
