"""`loopscope record`: a task, a text, a benchmark, and what each of them does not take."""

import json
from pathlib import Path

import pytest
from benchmark_slices import DATA

from cli.conftest import refusal, run
from loopscope.cli import main
from loopscope.trajectory import Trajectory


def test_a_recording_is_summed_up(recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("record", "task", recorded, "--split", "test", "--json") == 0
    summary = json.loads(capsys.readouterr().out)
    assert list(summary) == ["recording", "split", "examples", "loops", "accuracy"]
    assert (summary["examples"], summary["loops"]) == (150, 3)
    assert run("record", "task", recorded, "--split", "test") == 0
    assert "150 test examples, 3 loops" in capsys.readouterr().out


def test_a_text_is_summed_up(checkpoint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text(f"The sun is in {name}.<|endoftext|>The sea is not.")
    words = ("record", "text", checkpoint, tmp_path / "a.txt", tmp_path / "b.txt", "--out", tmp_path / "out")
    assert run(*words, "--json") == 0
    summary = json.loads(capsys.readouterr().out)
    assert list(summary) == [
        *("recording", "split", "tokens", "documents", "loops"),
        *("loss", "accuracy", "agreement"),
    ]
    assert (summary["split"], summary["documents"], summary["loops"]) == ("validation", 4, 4)
    assert run(*words) == 0
    table = capsys.readouterr().out
    assert all(word in table for word in ("loss", "accuracy", "agreement", "100.0 %"))


def test_a_benchmark_is_recorded_and_evaluated(
    checkpoint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for split in ("validation", "test"):
        where = ("--data", DATA, "--split", split, "--limit", 12, "--out", tmp_path / split)
        assert run("record", "benchmark", checkpoint, "openbookqa", *where, "--json") == 0
        summary = json.loads(capsys.readouterr().out)
        assert list(summary) == ["recording", "split", "questions", "metric", "loops", "acc", "acc_norm"]
        assert summary["metric"] == "acc_norm"
        assert len(summary["acc"]) == len(summary["acc_norm"]) == 4
        recording = Trajectory.load(tmp_path / split)
        assert summary["acc_norm"] == recording.correct.mean(axis=0).tolist()
    assert run("evaluate", tmp_path / "validation", tmp_path / "test") == 0
    assert "hidden_cosine" in capsys.readouterr().out


def test_what_cannot_be_recorded(checkpoint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("benchmark", checkpoint, "mmlu", "--split", "train", "--data", DATA, "--out", tmp_path / "out")
    assert "MMLU has no training questions" in refusal(capsys, "record", *words)
    assert not (tmp_path / "out").exists()
    assert "with --out" in refusal(capsys, "record", "text", "nowhere", __file__)


@pytest.mark.parametrize(
    ("words", "missing"), [(("task", "nowhere"), "--split"), (("live", "nowhere", __file__), "--recording, --out")]
)
def test_what_is_required_stands_in_no_brackets(
    words: tuple[str, ...], missing: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["record", *words]) == 2
    assert capsys.readouterr().err == f"loopscope: Missing: {missing}; see loopscope record {words[0]} --help.\n"
    with pytest.raises(SystemExit):
        main(["record", words[0], "--help"])
    usage = capsys.readouterr().out.partition("\n\n")[0]
    assert all(option in usage and f"[{option}" not in usage for option in missing.split(", "))


def test_a_recording_that_was_there_is_said_to(
    checkpoint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.txt").write_text("The sun is a star. " * 3)
    for there in (False, True):
        assert run("record", "text", checkpoint, tmp_path / "a.txt", "--out", tmp_path / "out") == 0
        assert ("was there already, made with the same settings" in capsys.readouterr().err) == there
