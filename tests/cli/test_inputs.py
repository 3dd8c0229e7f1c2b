"""Policy files: which model they are for, and what is refused of one that was altered."""

from dataclasses import replace
from pathlib import Path

import pytest

import loopscope as ls
from cli.conftest import Command, recording_of
from loopscope.cli.inputs import policies_by_model
from loopscope.scope import Scope


def test_on_any_model_it_guarantees_nothing(mine: Path, foreign: Path, tmp_path: Path, command: Command) -> None:
    (tmp_path / "examples.txt").write_text("+ 1 2\n")
    assert (
        "The policy guarantees nothing here."
        in command("check", recording_of(mine, "test"), "--policy", foreign, "--any-model").out
    )
    out, _ = command("answer", mine, tmp_path / "examples.txt", "--policy", foreign, "--any-model")
    assert len(out.splitlines()) == 1
    words = ("report", mine, "--policy", foreign, "--any-model", "--out", tmp_path, "--product", "certified", "--json")
    assert "guarantee" not in str(command.json(*words)[0]["rows"])


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
    mine: Path, checkpoint: str, tmp_path: Path, command: Command
) -> None:
    recording = ls.Trajectory.load(recording_of(mine, "validation"))
    replace(recording, provenance={}).save(tmp_path / "bare")
    words = ("--max-drop", 0.6, "--confidence", 0.5, "--out", tmp_path / "policy.json")
    assert "This guarantee says nothing: full depth is right in" in command("calibrate", tmp_path / "bare", *words).err
    for words in (("sweep", tmp_path / "bare"), ("generate", checkpoint, "Once")):  # nothing but the Command
        assert len(command.refused(*words, "--policy", tmp_path / "policy.json").splitlines()) == 1
    (tmp_path / "examples.txt").write_text("+ 1 2\n")
    assert (
        "does not say which model it was calibrated for"
        in command("answer", mine, tmp_path / "examples.txt", "--policy", tmp_path / "policy.json").err
    )
