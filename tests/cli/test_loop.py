"""`loopscope loop`: from an ordinary checkpoint, or a GGUF file, to text at every depth; and what goes wrong."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmark_slices import byte_pairs
from conftest import tiny_text
from tiny_language import write_decoder, write_gguf

import loopscope as ls
from loopscope.errors import install_command

from .conftest import Command, run

THREE = ("--prelude", 2, "--core", 2, "--loops", 3)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("loop") / "llama"
    write_decoder(folder, tokenizer=byte_pairs(), eos_token_id=0)
    return folder


def test_from_a_checkpoint_to_text(llama: Path, tmp_path: Path, command: Command) -> None:
    looped, text = tmp_path / "looped", tmp_path / "text.txt"
    said = command("loop", llama, *THREE, "--gate", "linear", "--out", looped).out
    assert "all 6 layers (llama): 2 once, 2 in each of 3 loops, 2 at every exit." in said
    assert "Untrained" in said
    assert "Loop 1 is the original model" in said
    assert run("generate", looped, "A river", "--max-new-tokens", 5, "--readout", "margin", "--threshold", 0.5) == 0
    text.write_text("A river carries small stones to the sea. The wind helps it at times.")
    assert run("record", "text", looped, text, "--out", tmp_path / "recording") == 0
    assert ls.Trajectory.load(tmp_path / "recording").num_loops == 3
    assert run("selfcheck", looped, "--only", "contract", "--only", "replay") == 0


def test_what_was_made_is_said_as_json(llama: Path, tmp_path: Path, command: Command) -> None:
    dropped = ("--drop", 1, "--drop", "3-4")
    made = command.json("loop", llama, "--prelude", 1, "--core", 1, "--loops", 2, *dropped, "--out", tmp_path / "a")
    assert made["looping"]["dropped"] == [1, 3, 4]
    assert (made["coda"], made["original_layers"]) == (1, 6)
    more = ("--damping", 0.5, "--injection")
    assert "Loop 1 is not the original model" in command("loop", llama, *THREE, *more, "--out", tmp_path / "b").out
    assert "5 of 6 layers" in command("loop", llama, *THREE, *dropped[:2], "--out", tmp_path / "c").out


def test_what_goes_wrong_is_explained(llama: Path, tmp_path: Path, command: Command) -> None:
    out = ("--out", tmp_path / "out")
    assert "more than the 6 layers" in command.refused("loop", llama, "--prelude", 5, "--core", 2, "--loops", 3, *out)
    assert "damping" in command.refused("loop", llama, *THREE, "--damping", 0, *out)
    assert "no layer 9" in command.refused("loop", llama, *THREE, "--drop", 9, *out)
    assert "there already" in command.refused("loop", llama, *THREE, "--out", llama)
    assert "no config.json" in command.refused("loop", tmp_path, *THREE, *out)
    write_decoder(tmp_path / "mixtral", "mixtral")
    assert "of type 'mixtral'" in command.refused("loop", tmp_path / "mixtral", *THREE, *out)
    for wrong in (("--core", 0), ("--drop", "4-2"), ("--gate", "mlp")):
        assert wrong[0] in command.refused("loop", llama, *THREE, *wrong, *out)
    assert not (tmp_path / "out").exists()


HEAL = """
context = 16
[objective]
name = "decoupled_gate"
[training]
steps = 2
batch_size = 4
learning_rate = 1e-3
checkpointing = true
"""


@torch.inference_mode()
def test_it_is_trained_further(llama: Path, tmp_path: Path) -> None:
    """Its injection and its gate learn with the rest, whether all is trained or adapters are."""
    looped = tmp_path / "looped"
    assert run("loop", llama, *THREE, "--injection", "--gate", "linear", "--out", looped) == 0
    train, validation = tiny_text(tmp_path)
    (tmp_path / "heal.toml").write_text(HEAL)
    words = ("pretrain", tmp_path / "heal.toml", "--start", looped, "--text", train, "--validation", validation)
    tokens = torch.arange(3, 43)[None]
    for name, more in {"all": (), "adapters": ("--set", "adapters.rank=2")}.items():
        with torch.inference_mode(False):
            assert run(*words, "--out", tmp_path / name, *more) == 0
        model: Any = ls.load_model(tmp_path / name)
        assert model.model.injection.weight.any()
        assert model.gate.weight.any()
        assert not torch.equal(model.loops(tokens).logits, ls.load_model(looped).loops(tokens).logits)


@torch.inference_mode()
def test_gguf(llama: Path, tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its loop 1 is what transformers makes of the same file; a folder with one file is that file."""
    pytest.importorskip("gguf")
    pytest.importorskip("accelerate")
    from transformers import AutoModelForCausalLM

    (folder := tmp_path / "folder").mkdir()
    write_gguf(folder / "tiny.gguf", llama)
    assert run("loop", folder, *THREE, "--out", tmp_path / "looped") == 0
    tokens = torch.arange(3, 43)[None]
    original: Any = AutoModelForCausalLM.from_pretrained(folder, gguf_file="tiny.gguf", dtype=torch.float32)
    model = ls.load_model(tmp_path / "looped")
    assert (model.loops(tokens).logits[0] - original(tokens).logits).abs().max() < 1e-4
    assert run("generate", tmp_path / "looped", "A river", "--max-new-tokens", 2) == 0
    (folder / "other.gguf").write_bytes((folder / "tiny.gguf").read_bytes()[:5000])
    assert "2 GGUF files" in command.refused("loop", folder, *THREE, "--out", tmp_path / "b")
    assert "cannot be read" in command.refused("loop", folder / "other.gguf", *THREE, "--out", tmp_path / "b")
    monkeypatch.setitem(sys.modules, "gguf", None)
    wanted = command.refused("loop", folder / "tiny.gguf", *THREE, "--out", tmp_path / "b")
    assert install_command("gguf") in wanted
