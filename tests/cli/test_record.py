"""`loopscope record`: a task, a text, a benchmark, and what each of them does not take."""

from functools import partialmethod
from pathlib import Path

import pytest
from benchmark_slices import DATA

from cli.conftest import Command
from loopscope.models.looped_model import LoopedModel
from loopscope.trajectory import Trajectory


def test_a_recording_is_summed_up(recorded: Path, command: Command) -> None:
    summary = command.json("record", "task", recorded, "--split", "test")
    assert list(summary) == ["recording", "split", "examples", "loops", "accuracy"]
    assert (summary["examples"], summary["loops"]) == (150, 3)
    assert "150 test examples, 3 loops" in command("record", "task", recorded, "--split", "test").out


def test_a_text_is_summed_up(checkpoint: str, tmp_path: Path, command: Command) -> None:
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text(f"The sun is in {name}.<|endoftext|>The sea is not.")
    words = ("record", "text", checkpoint, tmp_path / "a.txt", tmp_path / "b.txt", "--out", tmp_path / "out")
    summary = command.json(*words)
    assert list(summary) == [
        *("recording", "split", "tokens", "documents", "loops"),
        *("loss", "accuracy", "agreement"),
    ]
    assert (summary["split"], summary["documents"], summary["loops"]) == ("validation", 4, 4)
    table = command(*words).out
    assert all(word in table for word in ("loss", "accuracy", "agreement", "100.0 %"))


def test_a_compiled_model_writes_and_records_the_same(
    checkpoint: str, tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LoopedModel, "compile", partialmethod(LoopedModel.compile, backend="eager"))
    written = ("generate", checkpoint, "The sun", "--max-new-tokens", "4")
    assert command.json(*written, "--compile") == command.json(*written)
    (tmp_path / "a.txt").write_text("The sun is here.<|endoftext|>The sea is not.", encoding="utf-8")
    recorded = ("record", "text", checkpoint, tmp_path / "a.txt", "--out")
    compiled = command.json(*recorded, tmp_path / "compiled", "--compile")
    assert compiled["loss"] == pytest.approx(command.json(*recorded, tmp_path / "own")["loss"])


def test_a_benchmark_is_recorded_and_evaluated(checkpoint: str, tmp_path: Path, command: Command) -> None:
    for split in ("validation", "test"):
        where = ("--data", DATA, "--split", split, "--limit", 12, "--out", tmp_path / split)
        summary = command.json("record", "benchmark", checkpoint, "openbookqa", *where)
        assert list(summary) == ["recording", "split", "questions", "metric", "loops", "acc", "acc_norm"]
        assert summary["metric"] == "acc_norm"
        assert len(summary["acc"]) == len(summary["acc_norm"]) == 4
        recording = Trajectory.load(tmp_path / split)
        assert summary["acc_norm"] == recording.correct.mean(axis=0).tolist()
    assert "hidden_cosine" in command("sweep", tmp_path / "validation", tmp_path / "test").out


def test_what_cannot_be_recorded(checkpoint: str, tmp_path: Path, command: Command) -> None:
    words = ("benchmark", checkpoint, "mmlu", "--split", "train", "--data", DATA, "--out", tmp_path / "out")
    assert "MMLU has no training questions" in command.refused("record", *words)
    assert not (tmp_path / "out").exists()
    assert "with --out" in command.refused("record", "text", "nowhere", __file__)


def test_a_recording_that_was_there_is_said_to(checkpoint: str, tmp_path: Path, command: Command) -> None:
    (tmp_path / "a.txt").write_text("The sun is a star. " * 3)
    for there in (False, True):
        assert (
            "was there already, made with the same settings"
            in command("record", "text", checkpoint, tmp_path / "a.txt", "--out", tmp_path / "out").err
        ) == there
