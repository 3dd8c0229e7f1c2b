"""The demo: from nothing to a report, interrupted and continued, and nothing done twice."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import TINY

import loopscope as ls
from loopscope.cli import main
from loopscope.studies import make_plan

REFERENCE = "fixed-geometric"
MODELS = [REFERENCE, "fixed-uniform", "linear-gate", "mlp-gate", "decoupled-gate"]


def words(folder: Path) -> list[str]:
    return ["demo", "--out", str(folder), "--workers", "2", *(w for override in TINY for w in ("--set", override))]


def contents(folder: Path) -> dict[Path, bytes]:
    """Every file but the PDFs, which carry the time of their making."""
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file() and path.suffix != ".pdf"}


def test_from_nothing_to_a_report_and_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "demo"
    assert main(words(folder)) == 0
    out, err = capsys.readouterr()
    assert " steps of work, 0 s left." in err
    assert all(word in out for word in ("D@95", "to blame", "fixed prior, geometric 0.3", "MLP gate", "report.html"))
    first = contents(tmp_path)
    times = {path: path.stat().st_mtime_ns for path in first if path.suffix == ".safetensors"}
    assert main([*words(folder), "--json"]) == 0
    results = json.loads(capsys.readouterr().out)
    assert [model["name"] for model in results["models"]] == MODELS
    assert contents(tmp_path) == first
    assert {path: path.stat().st_mtime_ns for path in times} == times
    capsys.readouterr()
    assert main(["diagnose", str(folder / "mlp-gate"), "--reference", str(folder / REFERENCE), "--unseen"]) == 0
    assert "No verdict: at full depth it is right in" in capsys.readouterr().out  # twelve steps are too few
    assert main(["diagnose", str(folder / "mlp-gate"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["trajectory_gap"] is None
    runs = [str(folder / name) for name in MODELS]
    targets = [word for target in ("0.95", "0.98", "0.99") for word in ("--at", target)]  # as in the paper
    assert (
        main(["report", *runs, "--out", str(tmp_path / "again"), "--unseen", "--reference", REFERENCE, *targets]) == 0
    )
    again = json.loads((tmp_path / "again" / "results.json").read_bytes())
    for model in results["models"]:
        assert "record" in model.pop("refused")[0]  # a promise: there are too few examples
    assert all(model.pop("refused") == [] for model in again["models"])  # nobody asked
    assert again == results


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


def test_a_demo_that_could_not_count_unseen_examples_does_not_start() -> None:
    with pytest.raises(ls.UserError, match="stored training examples"):
        make_plan("demo", ["task.train_examples=0"])


def test_the_models_of_the_demo() -> None:
    models = {model.name: model.training.settings for model in make_plan("demo", []).models}
    assert list(models) == MODELS
    assert models["fixed-uniform"].objective.prior == "uniform"
    assert (models["linear-gate"].model.gate, models["linear-gate"].objective.beta) == ("linear", 0.1)
    task = models[REFERENCE].task
    assert task.space(task.levels[-1]) >= 10_000
    assert task.disjoint
