"""Policy files: which model they are for, and what is refused of one that was altered."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

import loopscope as ls
from cli.conftest import read_json, recording_of, refusal, run
from loopscope.cli.inputs import policies_by_model
from loopscope.scope import Scope


def test_on_another_model_it_is_refused(
    mine: Path, foreign: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for words in (
        ("report", mine, "--policy", foreign, "--out", tmp_path / "report"),
        ("bench", "exits", mine, "--policy", foreign, "--rounds", 1),
    ):
        assert "calibrated for another model" in refusal(capsys, *words)
    assert not (tmp_path / "report").exists()


def test_on_any_model_it_promises_nothing(
    mine: Path, foreign: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "examples.txt").write_text("+ 1 2\n")
    assert run("evaluate", recording_of(mine, "test"), "--policy", foreign, "--any-model") == 0
    assert "The policy promises nothing here." in capsys.readouterr().out
    assert run("run", mine, tmp_path / "examples.txt", "--policy", foreign, "--any-model") == 0
    assert len(capsys.readouterr().out.splitlines()) == 1
    words = ("report", mine, "--policy", foreign, "--any-model", "--out", tmp_path, "--product", "certified", "--json")
    assert run(*words) == 0
    assert "promise" not in str(json.loads(capsys.readouterr().out)[0]["rows"])


def test_an_altered_file_is_refused(
    mine: Path, policy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, data = tmp_path / "policy.json", read_json(policy)
    file.write_text(json.dumps(data))  # written otherwise, it is the same
    assert ls.ExitPolicy.load(file) == ls.ExitPolicy.load(policy)
    certificate, promise = data["certificate"], data["certificate"]["guarantee"]
    for changes, sentence in (
        ({"tresholds": 1}, "unknown key `tresholds`"),
        ({"schema_version": 99}, "has the policy schema 99"),
        ({"threshold": "low"}, "threshold"),
        ({"readout": "mood", "certificate": None}, "the readout 'mood', which is not installed"),
        ({"certificate": {"guarantee": promise}}, "certificate"),
        ({"certificate": certificate | {"guarantee": promise | {"max_drop": 1.5}}}, "max_drop"),
        ({"certificate": certificate | {"mood": 1}}, "unknown key `mood`"),
    ):
        file.write_text(json.dumps(data | changes))
        assert sentence in refusal(capsys, "evaluate", recording_of(mine, "test"), "--policy", file)
    file.write_bytes(policy.read_bytes()[:-20])
    assert "not a readable policy" in refusal(capsys, "evaluate", recording_of(mine, "test"), "--policy", file)


def test_of_several_models_each_has_its_own(tmp_path: Path) -> None:
    for name, model in (("first", "a"), ("second", "b"), ("everybody", None)):
        ls.ExitPolicy("margin", 1.0, scope=Scope(model=model)).save(tmp_path / name)
    paths = [tmp_path / name for name in ("second", "first", "everybody")]
    found = policies_by_model(paths, ["a", "b"])
    assert [[policy.model for policy in policies] for policies in found] == [["a", None], ["b", None]]
    assert [len(policies) for policies in policies_by_model(paths, ["a"], any_model=True)] == [3]
    with pytest.raises(ls.UserError, match="second was calibrated for another model"):
        policies_by_model(paths, ["a"])


def test_a_policy_without_a_model_is_said_to_be_one(
    mine: Path, checkpoint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recording = ls.Trajectory.load(recording_of(mine, "validation"))
    replace(recording, provenance={}).save(tmp_path / "bare")
    words = ("--max-drop", 0.6, "--confidence", 0.5, "--out", tmp_path / "policy.json")
    assert run("calibrate", tmp_path / "bare", *words) == 0
    assert "This promise says nothing: full depth is right in" in capsys.readouterr().err
    for words in (("evaluate", tmp_path / "bare"), ("generate", checkpoint, "Once")):  # nothing but the refusal
        assert run(*words, "--policy", tmp_path / "policy.json") == 2
        assert len(capsys.readouterr().err.splitlines()) == 1
    (tmp_path / "examples.txt").write_text("+ 1 2\n")
    assert run("run", mine, tmp_path / "examples.txt", "--policy", tmp_path / "policy.json") == 0
    assert "does not say which model it was calibrated for" in capsys.readouterr().err
