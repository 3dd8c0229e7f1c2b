"""`loopscope calibrate` and its policy file: made, checked, run; and what is refused."""

import json
from pathlib import Path

import numpy as np
import pytest

import loopscope as ls
from cli.conftest import GUARANTEE, Command, crafted, read_json, recording_of, run
from loopscope.models.checkpoint import weights_sha256

MILD = ("--max-drop", 0.3, "--confidence", 0.8)


def test_from_a_recording_to_a_guarantee_and_to_answers(mine: Path, tmp_path: Path, command: Command) -> None:
    file, examples = tmp_path / "policy.json", tmp_path / "examples.txt"
    out, err = command("calibrate", recording_of(mine, "validation"), *GUARANTEE, "--out", file)
    assert f"{file}: With probability 80 % over the calibration draw, exiting early costs at most 10 % accuracy" in out
    assert all(words in out for words in ("margin at ", "of 96 examples", "(at most 0.2)", "loops to expect"))
    assert "add --unseen" in err
    assert "add --distinct" in err
    recorded = ls.Trajectory.load(recording_of(mine, "test"))
    loops = ls.ExitPolicy.load(file).exit_loops(recorded)
    assert len(set(loops)) > 1
    out = command("check", recording_of(mine, "test"), "--policy", file).out
    assert f"{loops.mean():.3f} [" in out
    assert "150 held-out examples are wrong where full depth is right" in out
    held = command.json("check", recording_of(mine, "test"), "--policy", file)
    early, last = recorded.correct[np.arange(150), loops - 1], recorded.correct[:, -1]
    (risk,) = held["guarantee"]["risks"]
    assert held["average_loops"]["value"] == pytest.approx(loops.mean())
    assert held["drop"]["value"] == pytest.approx(last.mean() - early.mean())
    assert risk["loss"] == pytest.approx((last & ~early).mean())
    assert risk["low"] < risk["loss"] < risk["high"]
    assert held["guarantee"]["verdict"] == ("kept" if risk["loss"] <= 0.1 else "not refuted")
    assert recorded.examples is not None
    examples.write_text("\n".join(recorded.examples))
    out, err = command("answer", mine, examples, "--policy", file)
    assert [json.loads(line)["loop"] for line in out.splitlines()] == loops.tolist()
    assert f"150 examples under margin at {read_json(file)['threshold']:.6g}" in err


def test_without_a_grid_a_fifth_is_set_aside(mine: Path, tmp_path: Path, command: Command) -> None:
    words = ("calibrate", recording_of(mine, "validation"), *MILD, "--json")
    printed = command.json(*words, "--out", tmp_path / "a.json")
    assert printed == read_json(tmp_path / "a.json")
    assert printed["scope"]["model"] == weights_sha256(mine)
    guarantee = printed["certificate"]["guarantee"]
    assert (guarantee["tested"]["examples"], guarantee["grid"]["examples"]) == (96, 24)
    assert {"fixed", "gate", "margin", "kl"} <= set(guarantee["candidates"])
    assert "oracle" not in guarantee["candidates"]
    assert run(*words, "--out", tmp_path / "same.json") == 0
    assert (tmp_path / "same.json").read_bytes() == (tmp_path / "a.json").read_bytes()
    assert run(*words, "--out", tmp_path / "b.json", "--seed", 1) == 0
    assert read_json(tmp_path / "b.json")["certificate"]["guarantee"]["grid"]["sha256"] != guarantee["grid"]["sha256"]


@pytest.mark.parametrize(
    ("words", "guaranteed", "held_out"),
    [
        (("--in-expectation",), "On average over calibration draws, exiting early costs at most 30 %", "Kept: "),
        (("--confidence", 0.8, "--per-difficulty"), "observed loss, difficulty 2", "loss at difficulty 1"),
        (("--confidence", 0.8, "--unseen", "--distinct"), "for inputs that training did not have", "held-out examples"),
        (("--confidence", 0.8, "--loss", "disagreement"), "changes at most 30 % of the answers", "held-out examples"),
    ],
)
def test_each_kind_of_guarantee_is_said_and_checked(
    words: tuple[object, ...], guaranteed: str, held_out: str, mine: Path, tmp_path: Path, command: Command
) -> None:
    file = tmp_path / "policy.json"
    out, err = command("calibrate", recording_of(mine, "validation"), "--max-drop", 0.3, *words, "--out", file)
    assert guaranteed in out
    assert ("copies" in err) == ("--distinct" not in words)
    assert held_out in command("check", recording_of(mine, "test"), "--policy", file, code=None).out


def test_without_labels_answers_are_compared(tmp_path: Path, command: Command) -> None:
    bare, held_out, file = tmp_path / "bare", tmp_path / "held-out", tmp_path / "policy.json"
    crafted(True, "validation", labels=None).save(bare)
    crafted(False, "test", labels=None).save(held_out)
    words = ("calibrate", bare, "--max-drop", 0.05, "--out", file)
    assert "has no labels" in command.refused(*words, "--loss", "gap")
    assert not file.exists()
    assert run(*words, "--loss", "disagreement") == 0
    assert (
        "Broken: 100.00 % of 400 held-out examples differ from full depth"
        in command("check", held_out, "--policy", file, code=1).out
    )


def test_sequences_are_counted_not_their_tokens(texts: Path, command: Command) -> None:
    words = ("calibrate", texts / "validation", "--readout", "margin", "--out", texts / "policy.json")
    sentence = command.refused(*words, "--max-drop", 0.05)
    assert "takes 59 tested sequences, and there are 16; record 74 in all" in sentence
    other = (*words[:-1], texts / "other.json", "--max-drop", 0.2, "--bound", "hoeffding_bentkus")
    out = command(*other).out
    assert "on average over sequences" in out
    assert "0.00 % of the answers, on average over 16 sequences, p = 0.028 (at most 0.05)" in out
    assert "Hoeffding-Bentkus" in out
    assert "with the cache 'full'. All means are over sequences." in " ".join(out.split())
    out = command(*words, "--max-drop", 0.2).out
    assert "0.00 % of the answers, on average over 16 sequences, p ≤ 0.05" in out
    assert "betting, which ends where p is small enough: 0.05" in out
    assert "next tokens of a text, with the cache 'full'" in out
    held = command.json("check", texts / "test", "--policy", texts / "policy.json", code=1)
    (risk,) = held["guarantee"]["risks"]
    assert (held["examples"], held["sequences"], risk["units"], risk["loss"]) == (400, 20, 20, pytest.approx(1))


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--max-drop", 0.01, "--confidence", 0.95), "takes 299 tested examples, and there are 96; record 374 in all"),
        (("--max-drop", 0.01, "--in-expectation"), "takes 99 tested examples, and there are 96; record 124 in all"),
        (("--max-drop", 0.06, "--per-difficulty"), "takes 49 tested examples of difficulty 2, and there are 47"),
        (("--max-drop", 0.004, "--confidence", 0.2, "--readout", "margin"), "so no number of them would prove it"),
        ((*MILD, "--readout", "gate:mine"), "give the fitted gate with --fitted"),
        ((*MILD, "--grid", "nowhere"), "There is no folder"),
        (("--max-drop", 0.3, "--confidence", 1), "--confidence: '1' is not a number between 0 and 1, such as 0.95"),
        (("--max-drop", 0.3, "--seed", -1), "not a whole number"),
    ],
)
def test_what_cannot_be_guaranteed_is_one_sentence_and_no_file(
    words: tuple[object, ...], sentence: str, mine: Path, tmp_path: Path, command: Command
) -> None:
    found = command.refused("calibrate", recording_of(mine, "validation"), *words, "--out", tmp_path / "policy.json")
    assert sentence in found, found
    assert list(tmp_path.iterdir()) == []
