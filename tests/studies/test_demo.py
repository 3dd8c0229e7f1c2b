"""The demo: from nothing to a report, interrupted and continued."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest
from conftest import TINY

from loopscope.analysis.model_analysis import analyse_models, read_recordings
from loopscope.analysis.schema import Results
from loopscope.cli import main
from loopscope.config import read_json, to_json

REFERENCE = "fixed-geometric"
MODELS = [REFERENCE, "fixed-uniform", "linear-gate", "mlp-gate", "decoupled-gate"]


def words(folder: Path) -> list[str]:
    return ["demo", "--out", str(folder), "--workers", "2", *(w for override in TINY for w in ("--set", override))]


def test_from_nothing_to_a_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "demo"
    assert main(words(folder)) == 0
    out, err = capsys.readouterr()
    assert " steps of work, 0 s left." in err
    assert all(word in out for word in ("D@95", "to blame", "fixed prior, geometric 0.3", "MLP gate", "report.html"))
    results = read_json(Results, folder / "report" / "results.json", "results")
    assert [model.name for model in results.models] == MODELS
    assert all("record" in model.refused[0] for model in results.models)  # a guarantee: there are too few examples
    assert main(["diagnose", str(folder / "mlp-gate"), "--reference", str(folder / REFERENCE), "--unseen"]) == 0
    assert "No verdict: at full depth it is right in" in capsys.readouterr().out  # twelve steps are too few
    assert main(["diagnose", str(folder / "mlp-gate"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["trajectory_gap"] is None
    runs = [read_recordings(folder / name, unseen_only=True) for name in MODELS]
    again = analyse_models(runs, REFERENCE, [0.95, 0.98, 0.99])[0]  # the targets of the paper
    assert not any(model.refused for model in again.models)  # nobody asked
    unrefused = [msgspec.structs.replace(model, refused=[]) for model in results.models]
    assert to_json(again) == to_json(msgspec.structs.replace(results, models=unrefused))


@pytest.mark.long
@pytest.mark.parametrize("stop", [signal.SIGKILL, signal.SIGTERM])
def test_killed_it_leaves_no_worker_behind_and_continues(tmp_path: Path, stop: signal.Signals) -> None:
    folder = tmp_path / "demo"
    longer = ["--set", "training.steps=600", "--set", "training.checkpoint_every=20"]
    command = [sys.executable, "-m", "loopscope.cli", *words(folder), *longer]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while not list(tmp_path.rglob("state.safetensors")):
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(stop)
    process.wait()
    time.sleep(3)
    saved = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("state.safetensors")}
    time.sleep(2)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("state.safetensors")} == saved, "a worker goes on"
    assert subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode == 0
    assert (folder / "report" / "report.html").is_file()
