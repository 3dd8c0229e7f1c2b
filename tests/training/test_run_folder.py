"""Whose is a run's folder? Another run's, somebody's own and altered files are rejected with a sentence."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import GATED, tiny_settings
from safetensors.torch import load_file, save_file

import loopscope as ls
from loopscope.files import is_scratch
from loopscope.training.gate_fitting import write_gate
from loopscope.training.language_run import LanguageRun
from loopscope.training.run_folder import read_run_settings
from loopscope.training.task_run import train
from loopscope.training.training_loop import TrainingRun, train_run


def flip(file: Path, place: int = -5) -> None:
    """Changes one bit."""
    content = bytearray(file.read_bytes())
    content[place] ^= 64
    file.write_bytes(content)


def change(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new, 1))


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file() and not is_scratch(path)}


def interrupt(run: TrainingRun, after: int) -> None:
    """Trains so many steps of a run."""

    def stop(done: int, _total: int, _note: str) -> None:
        if done == after:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train_run(run, torch.device("cpu"), stop)
    assert not (run.folder / "model.safetensors").exists()


def copied(folder: Path, place: Path) -> Path:
    return Path(shutil.copytree(folder, place / "copy", ignore=shutil.ignore_patterns("recordings")))


ALTERED: list[tuple[str, Callable[[Path], None]]] = [
    ("metrics.jsonl", lambda file: change(file, '"loss": ', '"loss": 1')),
    ("data.json", lambda file: change(file, "600", "601")),
    ("config.json", lambda file: change(file, '"block_size": 11', '"block_size": 10')),
]


def test_what_is_no_finished_run_is_left_alone(tmp_path: Path, gated_run: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(ls.UserError, match="not a run"):
        train(tiny_settings(), tmp_path)
    (tmp_path / "config.json").write_bytes((gated_run / "config.json").read_bytes())
    with pytest.raises(ls.UserError, match="not finished"):
        ls.load_model(tmp_path)


@pytest.mark.parametrize(("name", "alter"), [*ALTERED, ("model.safetensors", flip), ("hashes.json", flip)])
def test_a_finished_run_that_was_altered_is_rejected(
    name: str, alter: Callable[[Path], None], gated_run: Path, tmp_path: Path
) -> None:
    folder = copied(gated_run, tmp_path)
    ls.load_model(folder)
    alter(folder / name)
    with pytest.raises(ls.UserError, match=rf"{name} (was altered|is not a readable)"):
        ls.load_model(folder)
    with pytest.raises(ls.UserError, match=rf"{name} (was altered|is not a readable)|other settings \(block_size\)"):
        train(tiny_settings(*GATED), folder)


def test_files_that_contradict_each_other_are_named_without_hashes_too(gated_run: Path, tmp_path: Path) -> None:
    assert read_run_settings(gated_run) == tiny_settings(*GATED)
    folder = copied(gated_run, tmp_path)
    (folder / "hashes.json").unlink()
    for content in (b"junk\n", b"", b'{"step": 12, "loss": 1.0}\n', b"[" * 100_000 + b"\n"):
        (folder / "metrics.jsonl").write_bytes(content)
        with pytest.raises(ls.UserError, match=r"metrics\.jsonl was altered"):
            train(tiny_settings(*GATED), folder)
    change(folder / "config.json", '"block_size": 11', '"block_size": 10')
    with pytest.raises(ls.UserError, match="contradicts itself"):
        read_run_settings(folder)


def test_a_tokenizer_that_was_altered_is_rejected(tiny_ouro: LanguageRun, tmp_path: Path) -> None:
    folder = copied(tiny_ouro.folder, tmp_path)
    change(folder / "tokenizer.json", "endoftext", "endofbook")
    with pytest.raises(ls.UserError, match=r"tokenizer\.json was altered"):
        ls.load_model(folder)


def test_weights_without_hashes_and_other_gates_are_taken_as_they_are(gated_run: Path, tmp_path: Path) -> None:
    alone = tmp_path / "alone"
    alone.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copy(gated_run / name, alone)
    assert ls.load_model(alone).weights_sha256 == ls.load_model(gated_run).weights_sha256
    write_gate(ls.FittedGate(torch.ones(16).numpy(), torch.zeros(()).numpy()), gated_run, tmp_path / "other")
    assert ls.load_model(tmp_path / "other").weights_sha256 != ls.load_model(gated_run).weights_sha256


def test_weights_that_are_not_finite_are_rejected(gated_run: Path, tmp_path: Path) -> None:
    folder = copied(gated_run, tmp_path)
    (folder / "hashes.json").unlink()
    weights = load_file(folder / "model.safetensors")
    for value, dtype in ((1e18, "float16"), (-float("inf"), "float32"), (float("nan"), "bfloat16")):
        ls.load_model(folder)
        weights["gate.net.weight"].view(-1)[3] = value
        save_file(weights, folder / "model.safetensors")
        with pytest.raises(ls.UserError, match=r"gate\.net\.weight.*not finite"):
            ls.load_model(folder, dtype=dtype)
        weights["gate.net.weight"].view(-1)[3] = 1.0
        save_file(weights, folder / "model.safetensors")
