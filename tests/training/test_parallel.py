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
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import GATED, TINY, tiny_language_run, tiny_settings

import loopscope as ls
from loopscope.training import RunSettings, check_memory, read_settings, train
from loopscope.training.loop import train_run
from loopscope.training.parallel import Workers, join_workers
from loopscope.writing import only_writer

CPU = torch.device("cpu")
PACKAGE = Path(ls.__file__).parent
LONGER = [*GATED, "training.steps=100", "training.checkpoint_every=4", "training.validate_every=50"]


def torchrun(folder: Path, *overrides: str, workers: int = 2) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(workers)]
    command += ["-m", "loopscope.cli", "train", "demo", "--out", str(folder), "--threads", "1", "--json"]
    command += [word for override in (*TINY, *overrides) for word in ("--set", override)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def finished(process: "subprocess.Popen[str]") -> dict[str, Any]:
    """What the first worker printed, and it alone."""
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert "Warning" not in err
    return json.loads(out)


def settings() -> RunSettings:
    return read_settings("demo", [*TINY, *LONGER])


def entries(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def assert_same_curve(folder: Path, other: Path) -> None:
    """Every number of both logs agrees, but for the order in which floats were added."""
    for entry, expected in zip(entries(folder), entries(other), strict=True):
        assert entry.keys() == expected.keys()
        for key, value in entry.items():
            assert value == pytest.approx(expected[key], rel=1e-3, abs=1e-5), (entry["step"], key)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("alone") / "run"
    train(settings(), folder, CPU)
    return folder


@pytest.fixture(scope="module")
def by_two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("by-two") / "run"
    printed = finished(torchrun(folder, *LONGER))
    assert printed["resumed_from"] == 0
    assert printed["validation_loss"] == entries(folder)[-1]["validation_loss"]
    return folder


def test_two_workers_walk_the_curve_of_one(by_two: Path, alone: Path) -> None:
    assert_same_curve(by_two, alone)
    assert contents(by_two).keys() == contents(alone).keys()
    for file in ("config.json", "data.json"):
        assert (by_two / file).read_bytes() == (alone / file).read_bytes()


def test_a_killed_worker_ends_the_others_and_the_run_goes_on(by_two: Path, alone: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    kill_one(torchrun(folder, *LONGER), folder)
    shutil.copytree(folder, tmp_path / "copy")
    assert finished(torchrun(folder, *LONGER))["resumed_from"] > 0
    assert contents(folder) == contents(by_two)
    assert train(settings(), tmp_path / "copy", CPU).resumed_from > 0
    assert_same_curve(tmp_path / "copy", alone)


@pytest.mark.long
def test_four_workers_resume_bit_identically(alone: Path, tmp_path: Path) -> None:
    """With more than two, the order in which the gradients are added shows."""
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    finished(torchrun(whole, *LONGER, workers=4))
    kill_one(torchrun(cut, *LONGER, workers=4), cut)
    assert finished(torchrun(cut, *LONGER, workers=4))["resumed_from"] > 0
    assert contents(cut) == contents(whole)
    assert_same_curve(whole, alone)


def kill_one(process: "subprocess.Popen[str]", folder: Path) -> None:
    """Kills one worker once there is a state to resume from."""
    while not (folder / "state.safetensors").exists():
        assert process.poll() is None, "the run ended before it could be killed"
        time.sleep(0.001)
    (worker, *_) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(int(worker), signal.SIGKILL)
    process.communicate(timeout=120)
    assert process.returncode != 0
    assert not (folder / "model.safetensors").exists()


def test_two_workers_go_on_with_a_run_that_one_began(alone: Path, tmp_path: Path) -> None:
    def stop(done: int, total: int, note: str) -> None:
        if done == 50:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(settings(), tmp_path / "run", CPU, stop)
    assert finished(torchrun(tmp_path / "run", *LONGER))["resumed_from"] == 48
    assert_same_curve(tmp_path / "run", alone)


def test_a_batch_that_does_not_divide_is_refused(tmp_path: Path) -> None:
    words = "A batch of 15 rows does not divide among 2 workers"
    assert words in refusal(torchrun(tmp_path / "run", "training.batch_size=15"))
    assert not (tmp_path / "run").exists()
    with pytest.raises(ls.UserError, match=words):
        check_memory(tiny_settings("training.batch_size=15"), CPU, Workers(0, 2))


def test_what_only_the_first_worker_meets_ends_all(tmp_path: Path) -> None:
    train(tiny_settings(), tmp_path / "run", CPU)
    (tmp_path / "run" / "model.safetensors").unlink()
    with only_writer(tmp_path / "run"):
        assert "Another process is writing" in refusal(torchrun(tmp_path / "run"))


def refusal(process: "subprocess.Popen[str]") -> str:
    """The one sentence of a run that was refused; the rest is torchrun's."""
    out, err = process.communicate(timeout=120)
    assert process.returncode != 0
    assert out == ""
    assert not our_frames(err), "a traceback of ours"
    assert "exitcode  : 2 " in err
    (sentence,) = (line for line in err.splitlines() if line.startswith("loopscope: "))
    return sentence


def our_frames(err: str) -> list[str]:
    """What tracebacks say of files of the package. torchrun always ends a failed run with one of its own."""
    return [line for line in err.splitlines() if f'File "{PACKAGE}{os.sep}' in line]


def test_a_traceback_of_ours_is_told_from_that_of_torchrun() -> None:
    with pytest.raises(ls.UserError) as caught:
        read_settings("demo", ["training.nothing=1"])
    assert our_frames("".join(traceback.format_exception(caught.value)))
    assert not our_frames(f'  File "{PACKAGE.parent}/torch/distributed/run.py", line 1, in main\nloopscope.cli FAILED')


def test_without_torchrun_a_worker_is_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")  # as other launchers and clusters set it
    with join_workers("cpu") as workers:
        assert workers == Workers()
    module, value = torch.nn.Linear(2, 2), torch.ones(3)
    assert workers.is_main
    assert workers.replicated(module) is module
    assert workers.mean(value) is value
    with pytest.raises(KeyError), workers.together():
        raise KeyError


@pytest.mark.long
@pytest.mark.parametrize(
    "objective",
    [
        ["objective.name=fixed_prior"],  # which leaves Ouro's gate without gradients
        ["objective.name=decoupled_gate"],
        ["objective.name=random_depth", "objective.truncated=1"],  # some steps leave its embedding without
    ],
)
def test_two_workers_on_text_where_not_all_weights_have_gradients(objective: list[str], tmp_path: Path) -> None:
    run = tiny_language_run(tmp_path, *objective)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += [
        "-m",
        "loopscope.cli",
        "pretrain",
        str(tmp_path / "tiny.toml"),
        "--out",
        str(tmp_path / "two"),
        "--json",
    ]
    command += ["--text", str(run.train[0]), "--validation", str(run.validation[0]), "--threads", "1"]
    command += [word for override in objective for word in ("--set", override)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # DDP may warn of what some steps use
    assert done.returncode == 0, done.stderr
    train_run(run, CPU)
    assert_same_curve(tmp_path / "two", run.folder)
