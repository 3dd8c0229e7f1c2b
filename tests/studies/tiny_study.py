"""What the tests of studies share: a tiny study, its plan, a store in which it is finished, and notes of its steps."""

import json
import os
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import loopscope
from loopscope.cli import main
from loopscope.studies.plan import Plan, make_plan
from loopscope.studies.study_file import expand_study

TINY = Path(__file__).parent / "tiny.toml"
GATE = 'readout = "gate:linear-ponder", max_drop = 0.3, confidence = 0.8'


_NOTING = """
import json, os, time
from loopscope.bench import exit_timing
from loopscope.studies import executors
exit_timing._SIZES, exit_timing._TASK_ROUNDS = (64,), 1
do_step = executors.do_step
def noted(step, store, device):
    began = time.monotonic()
    do_step(step, store, device)
    told = {"kind": step.kind, "device": device, "began": began, "ended": time.monotonic()}
    with open(os.environ["NOTES"], "a") as notes:
        notes.write(json.dumps(told) + "\\n")
executors.do_step = noted
"""


def planned(source: str | Path, *overrides: str, arithmetic: str = "", **changes: object) -> Plan:
    return make_plan(expand_study(str(source), overrides, changes), arithmetic)


def changed(folder: Path, old: str, new: str, text: str = TINY.read_text()) -> Path:
    """The tiny study with something else in its file."""
    assert old in text
    path = folder / "changed.toml"
    path.write_text(text.replace(old, new))
    return path


def one_run(folder: Path, runs: str = "", guarantees: str = "") -> Path:
    """The reference of the tiny study's first part, which gates are fitted to; with other runs, or guarantees."""
    text = TINY.read_text().replace("seed = [0, 1]", "seed = [0]").replace("extrapolate = true\n", "")
    text = text[: text.index('[[parts.runs]]\ngate = ["linear"]')] + runs
    path = folder / "one.toml"
    path.write_text(text.replace("gates = {", f"guarantees = [{guarantees}]\ngates = {{"))
    return path


def timed_runs(folder: Path) -> Path:
    """The same reference with two seeds; the exits of both are timed."""
    path = one_run(folder)
    text = path.read_text().replace("seed = [0]", "seed = [0, 1]").replace("training.steps=12", "training.steps=4")
    path.write_text(text.replace("gates = {", 'latency = [{ gate = "none", prior = 0.3 }]\ngates = {'))
    return path


def note_steps(folder: Path, monkeypatch: pytest.MonkeyPatch, before: str = "") -> Path:
    """The file in which all processes that are started from here on note their steps; they run `before` first."""
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(before + _NOTING)
    places = [folder, Path(__file__).parents[1], Path(loopscope.__file__).parents[1]]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, places)))
    monkeypatch.setenv("NOTES", str(folder / "notes"))
    return folder / "notes"


def read_notes(path: Path) -> list[dict[str, Any]]:
    """What was done where and when; what is timed, was timed alone."""
    notes: list[dict[str, Any]] = [json.loads(line) for line in path.read_text().splitlines()]
    assert_in_turn([note for note in notes if note["kind"] == "timing"])
    others = [note["ended"] for note in notes if note["kind"] != "timing"]
    assert max(others) <= min(note["began"] for note in notes if note["kind"] == "timing")
    return notes


def assert_in_turn(notes: list[dict[str, Any]]) -> None:
    """Each began after the one before had ended."""
    spans = sorted((note["began"], note["ended"]) for note in notes)
    assert all(first[1] <= second[0] for first, second in pairwise(spans))


_MADE: list[Path] = []


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the tiny study, run from the command line by two workers; once for all files that ask for it."""
    if not _MADE:
        _MADE.append(tmp_path_factory.mktemp("study"))
        assert main(["study", "run", str(TINY), "--out", str(_MADE[0] / "tiny"), "--workers", "2"]) == 0
    return _MADE[0]
