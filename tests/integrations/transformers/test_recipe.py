"""Does the recipe run from its texts to an exit policy, and go on where it was?"""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from conftest import tiny_language_run

import loopscope as ls
from loopscope.training.training_loop import train_run

FOLDER = Path(__file__).parents[3] / "recipes" / "fine_tuning"


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.long
def test_the_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    run = tiny_language_run(tmp_path, "model.max_position_embeddings=128")
    train_run(run, torch.device("cpu"))
    monkeypatch.setattr(sys, "argv", ["make_sums", "--out", str(tmp_path / "sums")])
    script("make_sums").main()
    words = [str(run.folder), "--texts", str(tmp_path / "sums"), "--out", str(tmp_path / "tuned"), "--max-drop", "0.2"]
    printed = []
    for _ in range(2):
        monkeypatch.setattr(sys, "argv", ["fine_tune", *words, "--steps", "40"])
        capsys.readouterr()
        script("fine_tune").main()
        printed.append([line for line in capsys.readouterr().out.splitlines() if not line.startswith("{")])
    assert printed[0] == printed[1]
    assert printed[0][0].startswith("before: next tokens of the test text")
    policy = ls.ExitPolicy.load(tmp_path / "tuned" / "policy.json")
    assert policy.model == ls.load_model(tmp_path / "tuned" / "model").weights_sha256
