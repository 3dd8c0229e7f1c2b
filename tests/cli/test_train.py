"""`loopscope train` from the command line."""

import json
from pathlib import Path

import pytest
from conftest import GATED

from cli.conftest import run, settings


def test_train_shows_loss_and_accuracy_of_every_loop(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("train", "demo", "--out", tmp_path / "run", *settings(*GATED)) == 0
    out, err = capsys.readouterr()
    assert all(word in out for word in ("loop", "loss", "accuracy"))
    assert "12/12" in err
    assert run("train", "demo", "--out", tmp_path / "run", "--json", *settings(*GATED)) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["resumed_from"] == 12
    assert len(result["validation_accuracy"]) == len(result["validation_loss"]) == 3
