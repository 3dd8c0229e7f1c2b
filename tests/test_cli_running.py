"""`loopscope run` and `loopscope bench` from the command line."""

import io
import json
from pathlib import Path

import pytest
from conftest import tiny_settings
from test_cli import recorded, run  # noqa: F401 - a fixture

from loopscope.exits.sweep import choose
from loopscope.recording import record
from loopscope.trajectory import Trajectory

TASK = tiny_settings().task


def lines(text: str) -> list[dict[str, object]]:
    return [json.loads(line) for line in text.splitlines()]


def test_a_file_of_examples_is_answered_as_the_recording_says(
    recorded: Path,  # noqa: F811
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    test = Trajectory.load(recorded / "recordings" / "test")
    policy = choose("entropy", Trajectory.load(recorded / "recordings" / "validation"))
    loops = policy.exit_loops(test)
    assert test.examples is not None
    file = tmp_path / "examples.txt"
    file.write_text("\n\n".join(test.examples) + "\n", encoding="utf-8")
    assert run("run", recorded, file, "--readout", "entropy", "--batch-size", 16) == 0
    out, err = capsys.readouterr()
    answers = lines(out)
    assert [answer["example"] for answer in answers] == list(test.examples)
    assert [answer["line"] for answer in answers] == list(range(1, 2 * len(test.examples), 2))
    assert [answer["loop"] for answer in answers] == loops.tolist()
    assert [answer["answer"] for answer in answers] == [test.predicted[row, at - 1] for row, at in enumerate(loops)]
    assert [answer["right"] for answer in answers] == [test.correct[row, at - 1] for row, at in enumerate(loops)]
    assert f"150 examples under entropy at {policy.threshold:.6g}" in err
    assert f"{loops.mean():.2f} loops" in err


def test_from_standard_input_to_a_file(
    recorded: Path,  # noqa: F811
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("+ 1 2\n* 2 + 1 1\n"))
    out = tmp_path / "answers.jsonl"
    words = ("run", recorded, "-", "--readout", "fixed", "--threshold", 2, "--out", out)
    assert run(*words) == 0
    assert [answer["loop"] for answer in lines(out.read_text())] == [2, 2]
    assert run(*words) == 2
    assert "is there already" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--readout", "gate", "--threshold", 0.5), "no gate"),
        (("--readout", "oracle"), "needs the labels"),
        (("--readout", "best"), "no readout 'best'"),
        (("--readout", "fixed", "--threshold", 9), "beyond the model's 3 loops"),
    ],
)
def test_a_policy_that_cannot_run_is_refused(
    words: tuple[object, ...],
    message: str,
    recorded: Path,  # noqa: F811
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "examples.txt").write_text("+ 1 2\n")
    assert run("run", recorded, tmp_path / "examples.txt", *words) == 2
    assert message in capsys.readouterr().err


def test_a_bad_line_is_named_and_what_came_before_is_kept(
    recorded: Path,  # noqa: F811
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    good = "\n".join(TASK.text(TASK.split("test")))
    (tmp_path / "examples.txt").write_text(f"{good}\n" * 8 + "+ 1\n")
    assert run("run", recorded, tmp_path / "examples.txt", "--threshold", 0.5) == 2
    out, err = capsys.readouterr()
    assert "line 1201: '+ 1' is not an expression" in err
    assert len(lines(out)) == 1200
    (tmp_path / "examples.txt").write_text("+ 1 + 1 + 1 + 1 + 1 1\n")
    assert run("run", recorded, tmp_path / "examples.txt", "--threshold", 0.5) == 2
    assert "line 1: it makes 13 tokens, and the model's block size is 11" in capsys.readouterr().err
    assert run("run", recorded, tmp_path / "missing.txt") == 2
    assert "There is no file" in capsys.readouterr().err


def test_bytes_that_are_no_text(
    recorded: Path,  # noqa: F811
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "examples.txt").write_bytes(b"\xef\xbb\xbf+ 1 0\n\xff\xfe\n")  # a byte-order mark, then rubbish
    out = tmp_path / "answers.jsonl"
    words = ("run", recorded, tmp_path / "examples.txt", "--threshold", 0.5, "--out", out)
    assert run(*words) == 2
    assert "line 2" in capsys.readouterr().err
    assert len(lines(out.read_text())) == 1


def test_a_run_that_fails_leaves_no_file(
    recorded: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    (tmp_path / "examples.txt").write_text("+ 1 0\n")
    assert (
        run(
            "run", recorded, tmp_path / "examples.txt", "--readout", "gate", "--threshold", 0.5, "--out", tmp_path / "o"
        )
        == 2
    )
    assert not (tmp_path / "o").exists()


def test_without_a_recording_a_threshold_is_asked_for(
    gated_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "examples.txt").write_text("+ 1 2\n")
    assert run("run", gated_run, tmp_path / "examples.txt") == 2
    assert "loopscope record" in capsys.readouterr().err


def test_bench_exits_of_a_run(recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:  # noqa: F811
    assert run("bench", "exits", recorded, "--rounds", 2, "--waiting", "--json") == 0
    (result,) = json.loads(capsys.readouterr().out)
    assert result["examples"] == 150
    assert [policy["readout"] for policy in result["policies"]] == ["top1", "margin", "kl", "hidden_change"]
    for policy in result["policies"]:
        assert policy["agreement"]["differing"] == 0
        assert policy["accuracy"] == policy["agreement"]["replayed_accuracy"]
        ideal = 3 / policy["average_loops"]
        assert policy["realised"]["median"] == pytest.approx(policy["speedup"]["median"] / ideal)
        assert policy["waiting_realised"]["median"] > 0
    assert result["machine"]["gigaflops"]["median"] > 0
    assert run("bench", "exits", recorded, "--rounds", 1, "--readout", "margin") == 0
    table = capsys.readouterr().out
    assert all(word in table for word in ("final loop", "margin", "realised", "0.29")), table


def test_bench_exits_of_a_gate(gated_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for split in ("validation", "test"):
        record(gated_run, split, gated_run / "recordings" / split)
    assert run("bench", "exits", gated_run, "--rounds", 1, "--json") == 0
    (result,) = json.loads(capsys.readouterr().out)
    assert [policy["readout"] for policy in result["policies"]] == ["gate"]


def test_bench_exits_at_random(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--settings", "demo", "--set", "model.width=16", "--examples", 200, "--rounds", 1, "--batch-size", 16)
    assert (
        run("bench", "exits", *words, "--readout", "margin", "--readout", "kl", "--loops", 2.5, "--waiting", "--json")
        == 0
    )
    (result,) = json.loads(capsys.readouterr().out)
    for policy in result["policies"]:
        assert policy["average_loops"] == pytest.approx(2.5, abs=0.1)
        assert policy["accuracy"] is None
        assert policy["waiting_realised"] is not None
        assert policy["agreement"]["differing"] == 0


def test_bench_exits_of_a_random_gate(capsys: pytest.CaptureFixture[str]) -> None:
    gated = (
        "--set",
        "model.gate=linear",
        "--set",
        "objective.name=learned_gate",
        "--readout",
        "gate",
        "--readout",
        "gate",
    )
    words = ("--settings", "demo", "--set", "model.width=16", *gated, "--examples", 100, "--rounds", 1, "--loops", 2)
    assert run("bench", "exits", *words, "--json") == 0
    (result,) = json.loads(capsys.readouterr().out)
    assert [policy["readout"] for policy in result["policies"]] == ["gate"]


def test_the_other_benches(recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:  # noqa: F811
    small = ("--set", "task.train_examples=500", "--set", "training.batch_size=32", "--set", "model.width=16")
    assert run("bench", "train", "demo", *small, "--steps", 2, "--rounds", 2, "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert 0 < result["states_a_token"] < 1
    assert result["padding"] == pytest.approx(25 / result["mean_length"])
    assert run("bench", "record", recorded, "--rounds", 2, "--json") == 0
    assert json.loads(capsys.readouterr().out)["signals_ratio"]["median"] > 1
    assert run("bench", "sweep", "--examples", 300, "--rounds", 2, "--json") == 0
    assert len(json.loads(capsys.readouterr().out)["readouts"]) == 8
    for words in (("train", "demo", *small), ("record", recorded), ("sweep", "--examples", 300)):
        assert run("bench", *words, "--rounds", 1) == 0
        assert "GFLOP/s" in capsys.readouterr().out


@pytest.mark.parametrize("words", [("exits", "nowhere"), ("record", "nowhere"), ("sweep", "--classes", 1)])
def test_benches_refuse_what_they_cannot_measure(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert run("bench", *words) == 2
    assert capsys.readouterr().err.startswith("loopscope: ")
