"""Several workers train one run: do they walk the curve of one process, and do they end together?

Every `torchrun` here is a real one.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import TINY, tiny_language_run, tiny_settings
from test_run_folder import contents

import loopscope as ls
from loopscope.files import only_writer
from loopscope.training.parallel import Workers, join_workers
from loopscope.training.task_run import train
from loopscope.training.training_loop import train_run

CPU = torch.device("cpu")
PACKAGE = Path(ls.__file__).parent
LONGER = ["training.steps=60", "training.checkpoint_every=4", "training.validate_every=30"]
LONGER += ["model.gate=linear", "objective=losses_of_two:gated"]
CUSTOM = "def gated(loops): return (loops.cross_entropy * loops.gate_logits.softmax(0)).sum(0)\n"


def torchrun(*words: str, overrides: list[str], workers: int = 2) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(workers)]
    command += ["-m", "loopscope.cli", *words, "--threads", "1", "--json"]
    command += [word for override in overrides for word in ("--set", override)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def train_by(folder: Path, *overrides: str, workers: int = 2) -> "subprocess.Popen[str]":
    return torchrun("train", "demo", "--out", str(folder), overrides=[*TINY, *overrides], workers=workers)


def finished(process: "subprocess.Popen[str]") -> dict[str, Any]:
    """What the first worker printed, and it alone."""
    out, err = process.communicate(timeout=240)
    assert process.returncode == 0, err
    return json.loads(out)


def entries(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def assert_same_curve(folder: Path, other: Path) -> None:
    """Every number of both logs agrees, but for the order in which floats were added."""
    for entry, expected in zip(entries(folder), entries(other), strict=True):
        assert entry.keys() == expected.keys()
        for key, value in entry.items():
            assert value == pytest.approx(expected[key], rel=1e-3, abs=1e-5), (entry["step"], key)


def kill_one(process: "subprocess.Popen[str]", folder: Path) -> None:
    """Kills one worker once there is a state to resume from."""
    while not (folder / "state.safetensors").exists():
        assert process.poll() is None, "the run ended before it could be killed"
        time.sleep(0.001)
    (worker, *_) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(int(worker), signal.SIGKILL)
    process.communicate(timeout=240)
    assert process.returncode != 0
    assert not (folder / "model.safetensors").exists()


@pytest.mark.parametrize("workers", [2, pytest.param(4, marks=pytest.mark.long)])
def test_workers_walk_the_curve_of_one_and_a_killed_one_ends_the_others(
    workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a function of the user's; with more than two, the order in which the gradients are added shows."""
    (tmp_path / "losses_of_two.py").write_text(CUSTOM)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    whole, cut, alone = tmp_path / "whole", tmp_path / "cut", tmp_path / "alone"
    train(tiny_settings(*LONGER), alone)
    printed = finished(train_by(whole, *LONGER, workers=workers))
    assert (printed["resumed_from"], printed["validation_loss"]) == (0, entries(whole)[-1]["validation_loss"])
    assert_same_curve(whole, alone)
    assert contents(whole).keys() == contents(alone).keys()
    for file in ("config.json", "data.json"):
        assert (whole / file).read_bytes() == (alone / file).read_bytes()
    kill_one(train_by(cut, *LONGER, workers=workers), cut)
    shutil.copytree(cut, tmp_path / "copy")
    assert train(tiny_settings(*LONGER), tmp_path / "copy").resumed_from > 0  # one goes on with what several began
    assert_same_curve(tmp_path / "copy", alone)
    assert finished(train_by(cut, *LONGER, workers=workers))["resumed_from"] > 0
    assert contents(cut) == contents(whole)


def test_what_only_the_first_worker_meets_ends_all(tmp_path: Path) -> None:
    """With one sentence; a traceback is torchrun's."""
    with only_writer(tmp_path / "run"):
        process = train_by(tmp_path / "run")
        out, err = process.communicate(timeout=240)
    assert process.returncode != 0
    assert out == ""
    assert f'File "{PACKAGE}{os.sep}' not in err, "a traceback of ours"
    assert "exitcode  : 2 " in err
    (sentence,) = (line for line in err.splitlines() if line.startswith("loopscope: "))
    assert "Another process is writing" in sentence


def test_without_torchrun_a_worker_is_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")  # as other launchers and clusters set it
    with join_workers("cpu") as workers:
        assert workers == Workers()
    with pytest.raises(KeyError), workers.together():
        raise KeyError
    with pytest.raises(ls.UserError, match="A batch of 15 rows does not divide among 2 workers"):
        train(tiny_settings("training.batch_size=15"), tmp_path / "run", CPU, workers=Workers(0, 2))
    assert not (tmp_path / "run").exists()


@pytest.mark.long
@pytest.mark.parametrize("objective", ["fixed_prior", "decoupled_gate", '{name="random_depth", truncated=1}'])
def test_two_workers_on_text_where_not_all_weights_have_gradients(objective: str, tmp_path: Path) -> None:
    """The fixed prior leaves Ouro's gate without, a truncated depth in some steps its embedding."""
    run = tiny_language_run(tmp_path, f"objective={objective}")
    words = ["pretrain", str(tmp_path / "tiny.toml"), "--out", str(tmp_path / "two"), "--text", str(run.train[0])]
    finished(torchrun(*words, "--validation", str(run.validation[0]), overrides=[f"objective={objective}"]))
    train_run(run, CPU)
    assert_same_curve(tmp_path / "two", run.folder)
