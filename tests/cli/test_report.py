"""`loopscope report`: a page that opens, says how it was made, and shows policies."""

import html
import io
import json
import re
import shlex
from pathlib import Path

import numpy as np
import pytest
from conftest import random_trajectory

import loopscope as ls
from cli.conftest import Command, crafted, read_json, recording_of, run


def test_a_report_opens_and_says_how_to_make_it_again(
    recorded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    opened: list[str] = []
    monkeypatch.setattr("webbrowser.open", lambda address: bool(opened.append(address)))  # as if there were none
    out = tmp_path / "a study run's"
    assert "No browser could be started here" in command("report", recorded, "--out", out, "--at", 0.5, "--open").err
    assert opened == [(out / "report.html").resolve().as_uri()]
    page = html.unescape((out / "report.html").read_text())
    (shown,) = set(re.findall(r"<code>(loopscope report .* --product depths)</code>", page))
    assert "Depth to accuracy" in command(*shlex.split(shown)[1:]).out
    (table,) = command.json("report", recorded, "--out", out, "--product", "depths")
    assert table["name"] == "depths"
    assert {len(row) for row in table["rows"]} == {len(table["columns"])}
    assert "leave one of them out" in command.refused("report", recorded, "--out", out, "--product", "depths", "--open")


def test_a_report_shows_it(mine: Path, policy: Path, tmp_path: Path, command: Command) -> None:
    (tmp_path / "results.json").write_text('{"schema_version": 1, "models": [{"name": "other", "group": 3}]}')
    (tmp_path / "notes.txt").write_text("beside a report they may lie")
    said = command("report", mine, "--policy", policy, "--out", tmp_path)
    assert "Certified policies" in said.out
    assert f"{tmp_path} held a report on other; this one, on {mine.name}, takes its place." in said.err
    (model,) = json.loads((tmp_path / "results.json").read_bytes())["models"]
    (certified,) = model["certified"]
    assert certified["guarantee"] == read_json(policy)["certificate"]["guarantee"]
    assert certified["threshold"] == read_json(policy)["threshold"]
    assert certified["held_out"] == command.json("check", recording_of(mine, "test"), "--policy", policy)
    assert "accuracy lost ≤ 10 %, 80 % sure" in (tmp_path / "tables.md").read_text()


def test_a_report_on_unseen_examples_breaks_no_guarantee_for_all(tmp_path: Path, command: Command) -> None:
    seen, easy = np.arange(400) % 10 > 0, crafted(True, "test").logits
    logits = np.where(seen[:, None, None], easy, crafted(False, "test").logits)  # one in ten is new, and lost
    for split, rows in (("validation", slice(None)), ("test", slice(None, None, -1))):
        fields = {"logits": logits[rows], "labels": easy[rows, -1].argmax(-1), "seen": seen[rows]}
        crafted(True, split, **fields, examples=[f"{split} {row}" for row in range(400)]).save(tmp_path / split)
    file = tmp_path / "policy.json"
    words = ("--max-drop", 0.15, "--readout", "margin", "--out", file)
    assert run("calibrate", tmp_path / "validation", *words) == 0
    command("check", tmp_path / "test", "--policy", file)
    words = ("--policy", file, "--unseen", "--product", "certified", "--out", tmp_path)
    assert "broken" not in command("report", tmp_path, *words).out


@pytest.mark.parametrize("kind", ["status", "report", "run"])
def test_a_folder_of_another_study_is_named(kind: str, gated_run: Path, tmp_path: Path, command: Command) -> None:
    (tmp_path / "another" / "somebody").mkdir(parents=True)
    (tmp_path / "another" / "somebody" / "config.json").symlink_to(gated_run / "config.json")
    said = command.refused("study", kind, "demo", "--out", tmp_path / "another")
    assert "holds another study, with 'somebody'; choose another --out" in said


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_whoever_waits_at_a_terminal_sees_how_far_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed, split in enumerate(("validation", "test")):
        random_trajectory(seed, rows=60, split=split).save(tmp_path / "mine" / split)
    for words, kind, seen in (
        (("diagnose", tmp_path / "mine"), Terminal, ("diagnosing", "3/3")),
        (("diagnose", tmp_path / "mine"), io.StringIO, ()),
        (("diagnose", tmp_path / "mine", "--json"), Terminal, ()),
        (("report", tmp_path / "mine", "--product", "headline", "--out", tmp_path), Terminal, ("analysing", "1/1")),
    ):
        screen = kind()
        monkeypatch.setattr("sys.stderr", screen)
        assert run(*words) == 0
        assert [word for word in seen if word not in screen.getvalue()] == []
        assert bool(screen.getvalue()) == bool(seen)


def test_rules_of_one_run_are_replayed_on_another(tmp_path: Path, command: Command) -> None:
    """With a gate that was fitted to the states of one of them, and on states of another width."""
    gate = ls.FittedGate(weight=np.ones(2), bias=np.array(-1.0), provenance={"weights_sha256": "a" * 64})
    gate.save(tmp_path / "own")
    for name, width, seed in (("a", 2, 0), ("b", 2, 10), ("wide", 3, 20)):
        for place, split in enumerate(("validation", "test")):
            states = np.random.default_rng(seed).normal(size=(90, 4, width))
            fields = {"hidden": states, "provenance": {"weights_sha256": name[0] * 64}}
            made = random_trajectory(seed + place, rows=90, split=split, gate_logits=None, **fields)
            made.save(tmp_path / name / split)
    runs, words = [tmp_path / name for name in ("a", "b", "wide")], ("--at", 0.3, "--out", tmp_path / "out")
    crossed = (*runs, "--transfer", "--fitted", tmp_path / "own", *words)
    (table,) = command.json("report", *crossed, "--product", "transfer")
    rows = {(row[0], row[1], row[2]): row[3:] for row in table["rows"]}
    assert len(rows) == 3 * 3 + 3
    assert rows["a", "wide", "gate:own"][0] == "rejected: The gate reads states of width 2, and these have 3."
    assert "[" in rows["a", "itself", "gate:own"][0]
    assert "[" in rows["a", "b", "gate:own"][1]
    command("report", *crossed)
    held = json.loads((tmp_path / "out" / "results.json").read_bytes())["transfer"]
    assert len(held) == len(rows)
    assert "Rules across trajectories" in (tmp_path / "out" / "tables.md").read_text()
    assert "--transfer" in html.unescape((tmp_path / "out" / "report.html").read_text())
    assert "give two runs or more" in command.refused("report", runs[0], "--transfer", *words)
    sentence = command.refused("report", *runs[1:], "--fitted", tmp_path / "own", *words)
    assert "was fitted to none of these models" in sentence
