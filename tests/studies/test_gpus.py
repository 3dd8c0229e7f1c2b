"""A study on several GPUs of one machine, pretended ones: each does one step at a time, and none changes a result."""

import json
import os
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from pretended_device import pretended_device
from tiny_study import one_run, planned, timed_runs

import loopscope
from loopscope.cli import main
from loopscope.models.device import cores
from loopscope.progress import silent
from loopscope.studies.executors import StudyWork, _worker_devices, do_step
from loopscope.studies.steps import Train

WORKER = """
import json, os, time
from pretended_device import pretended_device
here = pretended_device(2)
here.__enter__()
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
"""What a worker begins with: two GPUs, and a note of every step, where it was done and when."""


@pytest.fixture
def notes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The file of the notes; there are two GPUs here, and in every process that is started."""
    (tmp_path / "worker").mkdir()
    (tmp_path / "worker" / "sitecustomize.py").write_text(WORKER)
    places = [tmp_path / "worker", Path(__file__).parents[1], Path(loopscope.__file__).parents[1]]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, places)))
    monkeypatch.setenv("NOTES", str(tmp_path / "notes"))
    with pretended_device(2):
        yield tmp_path / "notes"


def assert_in_turn(notes: list[dict[str, Any]]) -> None:
    """Each began after the one before had ended."""
    spans = sorted((note["began"], note["ended"]) for note in notes)
    assert all(first[1] <= second[0] for first, second in pairwise(spans))


def test_every_gpu_has_a_worker_and_cores_do_the_rest(tmp_path: Path) -> None:
    steps = planned(timed_runs(tmp_path)).steps
    training = [step for step in steps if isinstance(step, Train)]

    def places(devices: list[str], *given: object, workers: int | None = None) -> list[str]:
        return _worker_devices(list(given), StudyWork([], tmp_path, devices, 1, silent), workers)

    two = ["cuda:0", "cuda:1"]
    assert places([*two, "cuda:2"], *training) == two  # two runs keep two GPUs busy, and no core
    assert places(two, *steps, workers=3) == [*two, "cpu", "cpu", "cpu"]
    assert places(["cpu"], *steps) == ["cpu"] * min(cores(), len(steps))
    assert places(["cpu"], *steps, workers=3) == ["cpu"] * 3
    assert places(["mps"], *steps, workers=1) == ["mps", "cpu"]


@pytest.mark.long
def test_two_gpus_share_a_study_and_one_alone_trains_the_same(notes: Path, tmp_path: Path) -> None:
    study, store, alone = timed_runs(tmp_path), tmp_path / "store", tmp_path / "alone"
    words = ["--out", str(tmp_path / "out"), "--store", str(store), "--set", "training.bf16=false", "--workers", "1"]
    assert main(["study", "run", str(study), *words, "--devices", "cuda:0,cuda:1"]) == 0
    told = [json.loads(line) for line in notes.read_text().splitlines()]
    timings, others = ([note for note in told if (note["kind"] == "timing") is timed] for timed in (True, False))
    assert {note["device"] for note in told if note["kind"] == "run"} == {"cuda:0", "cuda:1"}
    assert {note["device"] for note in told if note["kind"] in ("gate", "analysis")} == {"cpu"}
    assert [note["device"] for note in timings] == ["cuda:0"] * 2
    assert max(note["ended"] for note in others) <= min(note["began"] for note in timings)
    for device in ("cuda:0", "cuda:1", "cpu"):
        assert_in_turn([note for note in told if note["device"] == device])
    report = tmp_path / "out" / "report"
    latency = json.loads((report / "results.json").read_bytes())["latency"]
    assert [bench["machine"]["device"] for bench in latency] == ["cuda:0"] * 2
    assert [way["readout"] for way in latency[0]["policies"]] == ["fixed", "top1", "margin", "kl", "hidden_change"]
    assert "the counterpart of the paper's table 4b" in (report / "tables.md").read_text()
    alone.mkdir()
    for step in planned(study, "training.bf16=false", arithmetic="cuda, 1 threads").steps:
        if isinstance(step, Train):  # under the keys of what both GPUs made
            do_step(step, alone, "cuda:1")
            weights = [step.folder(place) / "model.safetensors" for place in (store, alone)]
            assert weights[0].read_bytes() == weights[1].read_bytes()


def test_gpus_are_named_once_and_are_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["study", "run", str(one_run(tmp_path)), "--out", str(tmp_path / "x"), "--devices"]
    with pretended_device(2):
        for devices, told in (
            (["cuda:0,cpu"], "not a list of different CUDA devices"),
            (["cuda:0,cuda:0"], "not a list of different CUDA devices"),
            (["cuda:0", "--device", "cuda"], "--devices excludes --device"),
            (["cuda:0", "--engine", "ray"], "--devices excludes --engine"),
        ):
            assert main([*words, *devices]) == 2
            assert told in capsys.readouterr().err
