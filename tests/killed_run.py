"""A training run in a process of its own, killed in the middle: how tests of resuming begin."""

import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path


def train_words(folder: Path, overrides: Iterable[str]) -> list[str]:
    changes = [word for override in overrides for word in ("--set", override)]
    return ["train", "demo", "--out", str(folder), "--threads", "1", *changes]


def start_run(folder: Path, overrides: Iterable[str]) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-m", "loopscope.cli", *train_words(folder, overrides)]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def kill_after_first_checkpoint(folder: Path, overrides: Iterable[str]) -> None:
    """Leaves a run that has state to resume from, and is not finished."""
    process = start_run(folder, overrides)
    while not (folder / "state.safetensors").exists():
        assert process.poll() is None, "the run ended before it could be killed"
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert not (folder / "model.safetensors").exists()
