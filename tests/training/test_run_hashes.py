"""What a run wrote and somebody altered is refused with a sentence that names it, at every moment of the run."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import GATED, tiny_settings
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import loopscope as ls
from loopscope.models.checkpoint import first_not_finite
from loopscope.training import loop, train
from loopscope.training.gate_fitting import write_back
from loopscope.training.language_run import LanguageRun

CPU = torch.device("cpu")


def flip(file: Path, place: int = -5) -> None:
    """Changes one bit."""
    content = bytearray(file.read_bytes())
    content[place] ^= 64
    file.write_bytes(content)


def change(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new, 1))


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that ended right after it had saved its state."""
    folder, save = tmp_path_factory.mktemp("interrupted") / "run", loop.save_state

    def save_and_end(*given: object) -> None:
        save(*given)  # type: ignore[arg-type]
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(loop, "save_state", save_and_end)
        train(tiny_settings(*GATED), folder, CPU)
    return folder


def copied(folder: Path, place: Path) -> Path:
    return Path(shutil.copytree(folder, place / "copy", ignore=shutil.ignore_patterns("recordings")))


ALTERED: list[tuple[str, Callable[[Path], None]]] = [
    ("metrics.jsonl", lambda file: change(file, '"loss": ', '"loss": 1')),
    ("data.json", lambda file: change(file, "600", "601")),
    ("config.json", lambda file: change(file, '"block_size": 11', '"block_size": 10')),
]


@pytest.mark.parametrize(
    ("name", "alter"), [*ALTERED, ("state.safetensors", flip), ("state.safetensors", lambda file: flip(file, 60))]
)
def test_a_run_does_not_resume_from_what_was_altered(
    name: str, alter: Callable[[Path], None], interrupted: Path, tmp_path: Path
) -> None:
    folder = copied(interrupted, tmp_path)
    alter(folder / name)
    with pytest.raises(ls.UserError, match=rf"{name} (was altered|cannot be read)"):
        train(tiny_settings(*GATED), folder, CPU)


def test_a_state_that_lost_its_hash_is_refused(interrupted: Path, tmp_path: Path) -> None:
    folder = copied(interrupted, tmp_path)
    with safe_open(folder / "state.safetensors", "pt") as file:
        step = file.metadata()["step"]
    save_file(load_file(folder / "state.safetensors"), folder / "state.safetensors", {"step": step})
    with pytest.raises(ls.UserError, match="has no hash"):
        train(tiny_settings(*GATED), folder, CPU)


def test_killed_between_hashes_and_weights_it_ends_as_if_nothing_had_been(
    interrupted: Path, gated_run: Path, tmp_path: Path
) -> None:
    folder = copied(interrupted, tmp_path)
    (folder / "hashes.json").write_text('{"files": {"model.safetensors": "of a try that was killed"}, "digest": ""}')
    train(tiny_settings(*GATED), folder, CPU)
    written = {file.name: file.read_bytes() for file in folder.iterdir()}
    assert written == {file.name: file.read_bytes() for file in gated_run.iterdir() if file.is_file()}
    assert set(json.loads(written["hashes.json"])["files"]) == {*written} - {"hashes.json"}


@pytest.mark.parametrize(("name", "alter"), [*ALTERED, ("model.safetensors", flip), ("hashes.json", flip)])
def test_a_finished_run_that_was_altered_is_refused(
    name: str, alter: Callable[[Path], None], gated_run: Path, tmp_path: Path
) -> None:
    folder = copied(gated_run, tmp_path)
    ls.load_model(folder)
    alter(folder / name)
    for use in (lambda: ls.load_model(folder), lambda: train(tiny_settings(*GATED), folder, CPU)):
        with pytest.raises(ls.UserError, match=rf"{name} (was altered|is not a readable)"):
            use()


def test_a_tokenizer_that_was_altered_is_refused(tiny_ouro: LanguageRun, tmp_path: Path) -> None:
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
    width = ls.load_model(gated_run).loops(torch.zeros(1, 2, dtype=torch.int64)).hidden.shape[-1]
    write_back(ls.FittedGate(torch.ones(width).numpy(), torch.zeros(()).numpy()), gated_run, tmp_path / "other")
    assert ls.load_model(tmp_path / "other").weights_sha256 != ls.load_model(gated_run).weights_sha256


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_one_number_that_is_not_finite_is_found(wrong: float, dtype: torch.dtype) -> None:
    tensors = {"nothing": torch.zeros(0), "good": torch.zeros((), dtype=dtype), "bad": torch.ones(3, 500, dtype=dtype)}
    assert first_not_finite(tensors) is None
    tensors["bad"][1, 77] = wrong
    assert first_not_finite(tensors) == "bad"


def test_weights_that_are_not_finite_are_refused(gated_run: Path, tmp_path: Path) -> None:
    folder = copied(gated_run, tmp_path)
    (folder / "hashes.json").unlink()
    weights = load_file(folder / "model.safetensors")
    weights["gate.weight" if "gate.weight" in weights else next(iter(weights))].view(-1)[3] = 1e18
    save_file(weights, folder / "model.safetensors")
    ls.load_model(folder)
    with pytest.raises(ls.UserError, match="not finite in float16"):
        ls.load_model(folder, dtype="float16")


def test_training_does_not_end_with_weights_that_are_not_finite(tmp_path: Path) -> None:
    with pytest.raises(ls.UserError, match="no longer finite"):
        train(tiny_settings("training.learning_rate=1e18", "training.clip_norm=1e18"), tmp_path / "run", CPU)
    assert not (tmp_path / "run" / "model.safetensors").exists()
