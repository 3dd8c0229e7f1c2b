"""`loopscope sweep`: readouts are swept, and a policy's guarantee is checked on held-out examples."""

from pathlib import Path

import numpy as np
import pytest
from conftest import random_trajectory

from cli.conftest import Command, crafted, recording_of, run


def test_readouts_are_swept(recorded: Path, command: Command) -> None:
    recordings = recorded / "recordings"
    summary = command.json("record", "task", recorded, "--split", "test")
    table = command("sweep", recordings / "validation", recordings / "test").out
    assert table.startswith("No verdict: ")  # trained for a moment
    assert all(name in table for name in ("fixed", "margin", "hidden_cosine", "oracle"))
    assert "gate" not in table
    assert "oracle: exits at the first right loop, which takes the labels (one point, no D@X)." in table
    cells = next(line.split() for line in table.splitlines() if line.lstrip().startswith("oracle"))
    assert (len(cells), cells[1]) == (5, "-")  # its name, no threshold, its accuracy in percent, and its loops
    result = command.json("sweep", recordings / "validation", recordings / "test", "--at", "0.4")
    fixed = result["readouts"][0]
    assert fixed["readout"] == "fixed"
    assert fixed["accuracy"] == pytest.approx(summary["accuracy"])
    assert set(fixed["depth_at"]) == {"0.4"}


def test_what_does_not_name_its_model_is_noted(tmp_path: Path, command: Command) -> None:
    for name, provenance in (("mine", {"weights_sha256": "a" * 64}), ("bare", {})):
        for seed, split in enumerate(("validation", "test")):
            random_trajectory(seed, split=split, provenance=provenance).save(tmp_path / name / split)
        words = ("--max-drop", 0.5, "--confidence", 0.5, "--out", tmp_path / f"{name}.json")
        assert ("does not name its model" in command("calibrate", tmp_path / name, *words).err) == (name == "bare")
    for words, noted in (
        (("check", "mine", "--policy", tmp_path / "mine.json"), False),
        (("check", "mine", "--policy", tmp_path / "bare.json"), True),
        (("check", "mine", "--policy", tmp_path / "bare.json", "--any-model"), False),
        (("sweep", "mine", "--readout", "margin"), False),
        (("sweep", "bare/validation", tmp_path / "mine/test", "--readout", "margin"), True),
    ):
        said = command(words[0], tmp_path / words[1], *words[2:], code=None).err
        assert ("Not all of these say which model they are of" in said) == noted, words


def test_of_few_sequences_the_risk_is_uncertain(texts: Path, command: Command) -> None:
    file = texts / "policy.json"
    command("calibrate", texts / "validation", "--readout", "margin", "--max-drop", 0.2, "--out", file)
    (risk,) = command.json("check", texts / "test", "--policy", file, code=1)["guarantee"]["risks"]
    assert risk["low"] == pytest.approx(0.83, abs=0.01)  # all of 20 are lost: as Clopper-Pearson's
    out = command("check", texts / "test", "--policy", file, code=1).out
    assert "on 400 held-out tokens of 20 sequences; all means are over sequences; [ ]: 95 % intervals" in out
    assert "Broken: on average over 20 held-out sequences, 100.00 % of the answers are wrong where full depth" in out
    out = command("sweep", texts).out
    assert out.startswith("400 test tokens of 20 sequences; means over tokens. D@X: least average loops")
    assert "In D@full-1, X is 99 %, 1 point below full depth on validation data." in out
    out = command("compare", texts, "entropy", "margin").out
    assert out.startswith("Which of the two is better cannot be told from 400 test tokens of 20 sequences; it takes 30")


def test_a_sweep_takes_two_recordings_or_one_with_a_policy(mine: Path, policy: Path, command: Command) -> None:
    both = (recording_of(mine, "validation"), recording_of(mine, "test"))
    assert "or two recordings" in command.refused("sweep", *[recording_of(mine, "test")] * 3)
    assert "is more than this takes" in command.refused("check", *both, "--policy", policy)
    assert "no option --readout" in command.refused(
        "check", recording_of(mine, "test"), "--policy", policy, "--readout", "margin"
    )


def test_a_monitor_plays_the_recording_as_a_stream(tmp_path: Path, command: Command) -> None:
    crafted(True, "validation").save(tmp_path / "validation")
    crafted(True, "test", difficulty=np.arange(400)).save(tmp_path / "like")
    crafted(False, "test").save(tmp_path / "unlike")
    file = tmp_path / "policy.json"
    command("calibrate", tmp_path / "validation", "--max-drop", 0.05, "--readout", "margin", "--out", file)
    out = command("monitor", tmp_path / "like", "--policy", file).out
    assert "at most 1 % of monitors would ever give an alarm, where the guarantee is true (which it is with 95 %" in out
    assert "on examples in random order" in out
    assert "No alarm in 400 examples (400 audited), which is no proof that nothing has changed." in out
    out = command("monitor", tmp_path / "unlike", "--policy", file, "--alpha", 0.001, "--audit", 0.5, code=1).out
    assert "in random order: audited answers lose 100.00 % on average, and at most 5 % was guaranteed." in out
    out = command("monitor", tmp_path / "unlike", "--policy", file, "--stream", code=1).out
    assert "on examples as they arrived" in out
    assert "since about example 1 audited answers lose 100.00 % on average, and at most 5 % was guaranteed." in out
    result = command.json("monitor", tmp_path / "unlike", "--policy", file, code=1)
    assert (result["alarm"], result["examples"], result["audited"], result["alpha"]) == (True, 400, 400, 0.01)
    (alarm,) = result["alarms"]
    assert (alarm["test"], alarm["direction"], alarm["observed"]) == ("risk", "higher", 1)
    assert 2 < alarm["example"] < 10
    assert run("monitor", tmp_path / "unlike", "--policy", file, "--audit", 0) == 0
    average = tmp_path / "average.json"
    wanted = ("--max-drop", 0.05, "--readout", "margin", "--in-expectation")
    command("calibrate", tmp_path / "validation", *wanted, "--out", average)
    out = command("monitor", tmp_path / "unlike", "--policy", average).out
    assert "by their exits, which alone are watched: the guarantee is one on average over calibrations" in out
    assert "No alarm in 400 examples (exits alone are watched)" in out
    assert "risk" not in out.split("alarm at", 1)[1]
    refused = command.refused("monitor", tmp_path / "unlike", "--policy", average, "--audit", 1)
    assert "Losses cannot show a change then; watch the exits alone" in refused


def test_what_cannot_be_monitored_is_refused(mine: Path, policy: Path, command: Command) -> None:
    test = recording_of(mine, "test")
    assert "Missing: --policy" in command.refused("monitor", test)
    assert "no option --audit" in command.refused("check", test, "--policy", policy, "--audit", 0.5)
    watch = ("monitor", test, "--policy")
    assert "--audit: '-1' is not a number from 0 to 1" in command.refused(*watch, policy, "--audit", -1)
    assert "guarantees nothing" in command.refused(*watch, policy, "--any-model")
