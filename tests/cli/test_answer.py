"""`loopscope answer`: examples in, answers out, and what cannot be run."""

import io
import json
import shutil
from pathlib import Path

import pytest
from conftest import tiny_settings

from cli.conftest import Command, run
from loopscope.frontier import choose
from loopscope.trajectory import Trajectory

TASK = tiny_settings().task


def lines(text: str) -> list[dict[str, object]]:
    return [json.loads(line) for line in text.splitlines()]


def test_a_file_of_examples_is_answered_as_the_recording_says(recorded: Path, tmp_path: Path, command: Command) -> None:
    test = Trajectory.load(recorded / "recordings" / "test")
    policy = choose("entropy", Trajectory.load(recorded / "recordings" / "validation"))
    loops = policy.exit_loops(test)
    assert test.examples is not None
    file = tmp_path / "examples.txt"
    file.write_text("\n\n".join(test.examples) + "\n", encoding="utf-8")
    out, err = command("answer", recorded, file, "--readout", "entropy", "--batch-size", 16)
    answers = lines(out)
    assert [answer["example"] for answer in answers] == list(test.examples)
    assert [answer["line"] for answer in answers] == list(range(1, 2 * len(test.examples), 2))
    assert [answer["loop"] for answer in answers] == loops.tolist()
    assert [answer["answer"] for answer in answers] == [test.predicted[row, at - 1] for row, at in enumerate(loops)]
    assert [answer["right"] for answer in answers] == [test.correct[row, at - 1] for row, at in enumerate(loops)]
    assert f"150 examples under entropy at {policy.threshold:.6g}" in err
    assert f"{loops.mean():.2f} loops" in err


def test_from_standard_input_to_a_file(
    recorded: Path, tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("+ 1 2\n* 2 + 1 1\n"))
    out = tmp_path / "answers.jsonl"
    words = ("answer", recorded, "-", "--readout", "fixed", "--threshold", 2, "--out", out)
    assert run(*words) == 0
    assert [answer["loop"] for answer in lines(out.read_text())] == [2, 2]
    assert "is there already" in command.refused(*words)


def test_a_policy_that_cannot_run_leaves_no_file(recorded: Path, tmp_path: Path, command: Command) -> None:
    (tmp_path / "examples.txt").write_text("+ 1 2\n")
    words = ("answer", recorded, tmp_path / "examples.txt", "--readout", "gate", "--threshold", 0.5)
    assert "no gate" in command.refused(*words, "--out", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_bad_line_is_named_and_what_came_before_is_kept(recorded: Path, tmp_path: Path, command: Command) -> None:
    good = "\n".join(TASK.text(TASK.split("test")))
    (tmp_path / "examples.txt").write_text(f"{good}\n" * 8 + "+ 1\n")
    out, err = command("answer", recorded, tmp_path / "examples.txt", "--threshold", 0.5, code=2)
    assert "line 1201: '+ 1' is not an expression" in err
    assert len(lines(out)) == 1200
    (tmp_path / "examples.txt").write_text("+ 1 + 1 + 1 + 1 + 1 1\n")
    said = command.refused("answer", recorded, tmp_path / "examples.txt", "--threshold", 0.5)
    assert "line 1: it makes 13 tokens, and the model's block size is 11" in said


def test_bytes_that_are_no_text(recorded: Path, tmp_path: Path, command: Command) -> None:
    (tmp_path / "examples.txt").write_bytes(b"\xef\xbb\xbf+ 1 0\n\xff\xfe\n")  # a byte-order mark, then rubbish
    out = tmp_path / "answers.jsonl"
    words = ("answer", recorded, tmp_path / "examples.txt", "--threshold", 0.5, "--out", out)
    assert "line 2" in command(*words, code=2).err
    assert len(lines(out.read_text())) == 1


def test_a_line_without_end_is_no_example(recorded: Path, command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `cat /dev/zero` makes one: only its beginning is read at a time."""
    with Path("/dev/zero").open(encoding="utf-8") as zeros:
        monkeypatch.setattr("sys.stdin", zeros)
        assert "line 1: '\\u0000\\u0000" in command("answer", recorded, "-", "--threshold", 0.5, code=2).err


def test_without_a_recording_a_threshold_is_asked_for(gated_run: Path, tmp_path: Path, command: Command) -> None:
    (tmp_path / "examples.txt").write_text("+ 1 2\n")
    said = command.refused("answer", gated_run, tmp_path / "examples.txt")
    assert f"loopscope record task {gated_run} --split validation" in said


def test_a_run_answers_deeper_than_it_was_trained_as_its_recording_says(
    recorded: Path, tmp_path: Path, command: Command
) -> None:
    run = Path(shutil.copytree(recorded, tmp_path / "run"))
    for split in ("validation", "test"):
        summary = command.json("record", "task", run, "--split", split, "--loops", 5)
        assert summary["recording"] == str(run / "recordings" / "5-loops" / split)
        assert (summary["loops"], len(summary["accuracy"])) == (5, 5)
    assert "5 loops (trained with 3)" in command("record", "task", run, "--split", "test", "--loops", 5).out
    validation, test = (Trajectory.load(run / "recordings" / "5-loops" / split) for split in ("validation", "test"))
    assert test.examples is not None
    (file := tmp_path / "examples.txt").write_text("\n".join(test.examples), encoding="utf-8")
    policy = choose("hidden_change", validation)
    out, err = command("answer", run, file, "--readout", "hidden_change", "--loops", 5)
    assert [answer["loop"] for answer in lines(out)] == policy.exit_loops(test).tolist()
    assert f"hidden_change at {policy.threshold:.6g}" in err
    assert "No verdict: at loop " in command("diagnose", run / "recordings" / "5-loops").out  # of a model at chance
    guaranteed = ("calibrate", run / "recordings" / "5-loops" / "validation", "--max-drop", 0.9, "--readout", "margin")
    command(*guaranteed, "--out", tmp_path / "policy.json")
    given = ("answer", run, file, "--policy", tmp_path / "policy.json")
    assert "calibrated for 5 loops, and here full depth is 3" in command.refused(*given)
    assert len(lines(command(*given, "--loops", 5).out)) == len(test.examples)
    for words, said in (
        (("--loops", 4), "recordings/4-loops (did you mean "),
        (("--readout", "fixed", "--threshold", 4), "A fixed depth of 4 is beyond the 3 loops here"),
    ):
        assert said in command.refused("answer", run, file, *words)
    shutil.rmtree(run / "recordings" / "validation")
    shutil.move(run / "recordings" / "5-loops" / "validation", run / "recordings" / "validation")
    assert "has 5 loops, and here 3 are run; give --loops 5, or a threshold" in command.refused("answer", run, file)
