"""Language models: is a new one trained on every next token, is a checkpoint trained further as its settings say?"""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import GOLDEN, tiny_language_run
from safetensors.torch import load_file, save_file
from test_run_folder import contents, interrupt

import loopscope as ls
from loopscope.cli import main
from loopscope.config import build
from loopscope.models.checkpoint import read_config, stored_sha256
from loopscope.models.ouro import Ouro
from loopscope.models.tokenizer import chat_prompt, load_tokenizer, stop_tokens
from loopscope.training.language_run import (
    ContinuedRun,
    LanguageRun,
    TokenLosses,
    TokenWindows,
    cut_windows,
    token_stream,
)
from loopscope.training.settings import ContinueSettings
from loopscope.training.training_loop import train_run

CPU = torch.device("cpu")
GATE = {"model.early_exit_gate.weight", "model.early_exit_gate.bias"}
FEW = {"steps": 6, "batch_size": 6, "warmup_steps": 1, "learning_rate": 3e-3, "log_every": 1, "checkpoint_every": 3}
FEW |= {"validate_every": 3, "validation_sample": 8}


def test_the_folder_is_a_checkpoint_in_ouro_s_layout(tiny_ouro: LanguageRun) -> None:
    folder, text = tiny_ouro.folder, "12 and é\n make"
    prepared = {"config.json", "data.json", "tokenizer.json", "tokenizer_config.json"}
    assert set(contents(folder)) == prepared | {"hashes.json", "metrics.jsonl", "model.safetensors"}
    config = json.loads((folder / "config.json").read_text())
    assert (config["model_type"], config["total_ut_steps"], config["eos_token_id"]) == ("ouro", 3, 0)
    trained = Ouro(read_config(folder))
    trained.load_state_dict(load_file(folder / "model.safetensors"))
    tokens = torch.randint(300, (2, 20))
    with torch.no_grad():
        assert torch.equal(ls.load_model(folder).loops(tokens).logits, trained.loops(tokens).logits)
    tokenizer = load_tokenizer(folder)
    assert tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|im_start|>", "<|im_end|>"]) == [0, 1, 2]
    assert (tokenizer.eos_token_id, stop_tokens(tokenizer)) == (0, {0, 2})
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert chat_prompt(tokenizer, [{"role": "user", "content": "hi"}])[0] == 1


def test_it_learns(tmp_path: Path) -> None:
    run = tiny_language_run(tmp_path, "training.steps=80", "model.hidden_size=32", "objective.beta=1.0")
    assert max(train_run(run, CPU).final["validation_loss"]) < math.log(300) - 2.5


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
    interrupt(run, 7)  # beyond the last saved state
    assert train_run(tiny_language_run(tmp_path), CPU).resumed_from == 4
    assert contents(run.folder) == contents(tiny_ouro.folder)


def test_another_text_or_another_model_s_folder_is_rejected(tiny_ouro: LanguageRun, tmp_path: Path) -> None:
    other = LanguageRun(tiny_ouro.settings, tiny_ouro.validation, tiny_ouro.train, tiny_ouro.folder)
    with pytest.raises(ls.UserError, match=r"other settings \(--text, --validation\)"):
        train_run(other, CPU)
    (tmp_path / "config.json").write_text('{"model_type": "ouro"}')
    with pytest.raises(ls.UserError, match="not trained here"):
        train_run(LanguageRun(tiny_ouro.settings, tiny_ouro.train, tiny_ouro.validation, tmp_path), CPU)


def test_tied_embeddings_are_saved_once(tmp_path: Path) -> None:
    run = tiny_language_run(tmp_path, "model.tie_word_embeddings=true", "training.steps=5")
    interrupt(run, 4)
    assert train_run(run, CPU).resumed_from == 4
    assert "lm_head.weight" not in load_file(run.folder / "model.safetensors")
    model = ls.load_model(run.folder)
    assert torch.equal(model.lm_head.weight, model.model.embed_tokens.weight)


@pytest.mark.parametrize("short", ["train", "validation"])
def test_a_text_of_less_than_a_window_is_rejected_before_any_step(tmp_path: Path, short: str) -> None:
    run = tiny_language_run(tmp_path, "context=32")
    getattr(run, short)[0].write_text("Too short.")
    with pytest.raises(ls.UserError, match=f"The {short} text has .* less than one window of 32"):
        train_run(run, CPU)
    assert not run.folder.exists() or not list(run.folder.iterdir())  # the corrected run has its place


def test_a_random_depth_leaves_the_gate_alone(tmp_path: Path) -> None:
    run = tiny_language_run(tmp_path, "objective.name=random_depth", "objective.truncated=1")
    begun = {name: value.clone() for name, value in run.initial_model().state_dict().items()}
    assert len(train_run(run, CPU).final["validation_loss"]) == 3
    after = load_file(run.folder / "model.safetensors")
    assert {name for name, value in after.items() if torch.equal(value, begun[name])} == GATE


def further(tiny: LanguageRun, folder: Path, teacher: Path | None = None, **changes: Any) -> ContinuedRun:
    training = {**FEW, **changes.pop("training", {})}
    settings = build(ContinueSettings, {"context": 16, "training": training, **changes}, "the test")
    return ContinuedRun(settings, tiny.train, tiny.validation, folder, tiny.folder, teacher)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return dict(ls.load_model(folder).state_dict())


def close(ours: Path, theirs: Path, tolerance: float) -> bool:
    others = weights(theirs)
    return all(torch.allclose(value, others[name], atol=tolerance) for name, value in weights(ours).items())


@pytest.fixture(scope="module")
def continued(tiny_ouro: LanguageRun, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = further(tiny_ouro, tmp_path_factory.mktemp("further") / "run")
    train_run(run, CPU)
    return run.folder


def test_it_begins_where_its_start_ended_and_learns(tiny_ouro: LanguageRun, continued: Path) -> None:
    before, after = (
        json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])["validation_loss"]
        for folder in (tiny_ouro.folder, continued)
    )
    assert sum(after) < sum(before)
    config, start = (json.loads((folder / "config.json").read_text()) for folder in (continued, tiny_ouro.folder))
    assert config.pop("run")["start_sha256"] == stored_sha256(tiny_ouro.folder)
    start.pop("run")
    assert config == start
    assert (continued / "tokenizer.json").read_bytes() == (tiny_ouro.folder / "tokenizer.json").read_bytes()
    assert not close(continued, tiny_ouro.folder, 1e-4)


@pytest.mark.parametrize("changes", [{"accumulate": 4}, {"checkpointing": True}], ids=str)
def test_parts_of_a_batch_and_loops_that_run_twice_give_the_same_weights(
    changes: dict[str, object], tiny_ouro: LanguageRun, continued: Path, tmp_path: Path
) -> None:
    train_run(further(tiny_ouro, tmp_path / "run", training=changes), CPU)
    assert close(tmp_path / "run", continued, 1e-5)


def test_interrupted_or_with_a_decoupled_gate_the_rest_is_bit_identical(
    tiny_ouro: LanguageRun, continued: Path, tmp_path: Path
) -> None:
    interrupt(further(tiny_ouro, tmp_path / "run"), 4)
    assert train_run(further(tiny_ouro, tmp_path / "run"), CPU).resumed_from == 3
    assert contents(tmp_path / "run") == contents(continued)
    train_run(further(tiny_ouro, tmp_path / "gated", objective={"name": "decoupled_gate"}), CPU)
    fixed, gated = weights(continued), weights(tmp_path / "gated")
    assert {name for name, value in fixed.items() if not torch.equal(value, gated[name])} == GATE


def test_a_teacher_is_followed(tiny_ouro: LanguageRun, continued: Path, tmp_path: Path) -> None:
    """From the start towards the further-trained model: KL(teacher || model) at every loop, and nothing but that."""
    run = further(tiny_ouro, tmp_path / "run", continued, targets="teacher", teacher_loops=3, training={"steps": 12})
    model, teacher = ls.load_model(tiny_ouro.folder), ls.load_model(continued)
    result = train_run(run, CPU)
    windows = run.batches()(0)
    losses = run.losses(model)(windows, CPU)
    tokens = torch.from_numpy(windows.tokens[:, :-1])
    with torch.no_grad():
        said, taught = model.loops(tokens).logits, teacher.loops(tokens).logits[2].log_softmax(-1)
        expected = F.kl_div(said.log_softmax(-1), taught.expand_as(said), reduction="none", log_target=True).sum(-1)
    assert torch.allclose(losses.cross_entropy, expected.flatten(1), atol=1e-4)
    assert result.metrics[-2]["loss"] < 0.7 * expected.mean().item()


def test_adapters_train_alone_and_merge(tiny_ouro: LanguageRun, tmp_path: Path) -> None:
    run = further(tiny_ouro, tmp_path / "run", adapters={"rank": 2, "alpha": 4}, training={"steps": 4})
    model = run.initial_model()
    tokens = torch.randint(300, (2, 12))
    with torch.no_grad():
        assert torch.equal(model.eval().loops(tokens).logits, ls.load_model(tiny_ouro.folder).loops(tokens).logits)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained
    assert all("lora_" in name or "early_exit_gate" in name for name in trained)
    train_run(run, CPU)
    before, after = weights(tiny_ouro.folder), weights(run.folder)
    assert list(before) == list(after)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed
    assert all(name.endswith("proj.weight") for name in changed)
    difference = after["model.layers.0.mlp.up_proj.weight"] - before["model.layers.0.mlp.up_proj.weight"]
    assert torch.linalg.matrix_rank(difference, rtol=1e-3) <= 2


def test_a_huginn_learns_too(tiny_ouro: LanguageRun, tmp_path: Path) -> None:
    start = shutil.copytree(GOLDEN / "huginn-tiny", tmp_path / "start")
    shutil.copy(tiny_ouro.folder / "tokenizer.json", start)
    config = json.loads((start / "config.json").read_text())
    (start / "config.json").write_text(json.dumps(config | {"eos_token_id": 0}))
    settings = build(ContinueSettings, {"context": 16, "training": FEW | {"steps": 3}}, "the test")
    run = ContinuedRun(settings, tiny_ouro.train, tiny_ouro.validation, tmp_path / "run", start)
    assert run.flops > 0
    with pytest.raises(ls.UserError, match=r"tokens that its model has not \(128\)"):
        train_run(run, CPU)
    tensors = load_file(start / "model.safetensors")
    name = "transformer.wte.weight"
    save_file(tensors | {name: tensors[name].repeat(3, 1)[:300].contiguous()}, start / "model.safetensors")
    (start / "config.json").write_text(json.dumps(config | {"eos_token_id": 0, "vocab_size": 300}))
    run = ContinuedRun(settings, tiny_ouro.train, tiny_ouro.validation, tmp_path / "wider", start)
    train_run(run, CPU)
    assert not close(run.folder, start, 1e-4)


def test_what_does_not_go_together_is_rejected(tiny_ouro: LanguageRun, tmp_path: Path) -> None:
    other = shutil.copytree(tiny_ouro.folder, tmp_path / "other")
    (other / "tokenizer.json").write_bytes((other / "tokenizer.json").read_bytes() + b"\n")
    cases: list[tuple[str, Path | None, dict[str, Any]]] = [
        ("go together; one is missing", None, {"targets": "teacher"}),
        ("has other tokens than", other, {"targets": "teacher"}),
        ("loops is 7, and .* has 3; leave it out", None, {"loops": 7}),
        ("context is 99999, and the model takes 64 tokens", None, {"context": 99_999}),
    ]
    for words, teacher, changes in cases:
        with pytest.raises(ls.UserError, match=words):
            further(tiny_ouro, tmp_path / "a", teacher, **changes)


def test_from_the_command_line(tiny_ouro: LanguageRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "heal.toml").write_text("context = 16\n[training]\nsteps = 2\nbatch_size = 2\nvalidation_sample = 2\n")
    words = ["pretrain", str(tmp_path / "heal.toml"), "--text", str(tiny_ouro.train[0])]
    words += ["--validation", str(tiny_ouro.validation[0]), "--out", str(tmp_path / "healed")]
    assert main([*words, "--teacher", str(tiny_ouro.folder)]) == 2
    assert "give it with --start" in capsys.readouterr().err
    assert main([*words, "--start", str(tiny_ouro.folder)]) == 0
    assert "Validation sample" in capsys.readouterr().out
    assert ls.load_model(tmp_path / "healed").num_loops == 3
    assert main([*words, "--start", str(tmp_path / "nothing")]) == 2
