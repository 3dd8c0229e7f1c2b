"""Killed with SIGKILL at any moment, a run continues and ends bit-identical to one that ran through."""

import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import GATED, TINY

LONGER = ["training.steps=400", "training.checkpoint_every=7", "training.log_every=5", "training.validate_every=50"]


def start(folder: Path) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-m", "loopscope.cli", "train", "demo", "--out", str(folder), "--threads", "1"]
    command += [word for override in (*TINY, *GATED, *LONGER) for word in ("--set", override)]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    assert start(folder).wait() == 0
    return folder


def test_one_kill(undisturbed: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    process = start(folder)
    while not (folder / "state.safetensors").exists():
        assert process.poll() is None, "the run ended before it could be killed"
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert not (folder / "model.safetensors").exists()
    assert start(folder).wait() == 0
    assert contents(folder) == contents(undisturbed)


@pytest.mark.long
def test_ten_kills_at_random_moments(undisturbed: Path, tmp_path: Path) -> None:
    """The moments are spread over start-up, training and writing; the seed is printed where it fails."""
    seed = random.randrange(10**6)
    rng = random.Random(seed)
    folder = tmp_path / "run"
    kills = 0
    while kills < 10:
        process = start(folder)
        if rng.random() < 0.3:  # while it starts
            time.sleep(rng.uniform(0, 3))
        else:  # while it trains: some moments after its first progress
            before = progress(folder)
            while process.poll() is None and progress(folder) == before:
                time.sleep(0.002)
            time.sleep(rng.uniform(0, 0.15))
        process.send_signal(signal.SIGKILL)
        kills += process.wait() == -signal.SIGKILL
        assert not (folder / "model.safetensors").exists(), f"seed {seed}: finished after {kills} kills; make it longer"
    assert start(folder).wait() == 0
    assert contents(folder) == contents(undisturbed), f"seed {seed}"


def progress(folder: Path) -> int:
    state = folder / "state.safetensors"
    try:
        return state.stat().st_mtime_ns
    except FileNotFoundError:
        return 0
