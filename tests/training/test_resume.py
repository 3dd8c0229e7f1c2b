"""Killed with SIGKILL at any moment, a run continues and ends bit-identical to one that ran through."""

import random
import signal
import time
from pathlib import Path

import pytest
from conftest import GATED, TINY
from killed_run import kill_after_first_checkpoint, start_run

LONGER = ["training.steps=400", "training.checkpoint_every=7", "training.log_every=5", "training.validate_every=50"]
RUN = [*TINY, *GATED, *LONGER]


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    assert start_run(folder, RUN).wait() == 0
    return folder


def test_one_kill(undisturbed: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    kill_after_first_checkpoint(folder, RUN)
    assert start_run(folder, RUN).wait() == 0
    assert contents(folder) == contents(undisturbed)


@pytest.mark.long
def test_ten_kills_at_random_moments(undisturbed: Path, tmp_path: Path) -> None:
    """The moments are spread over start-up, training and writing; the seed is printed where it fails."""
    seed = random.randrange(10**6)
    rng = random.Random(seed)
    folder = tmp_path / "run"
    kills = 0
    while kills < 10:
        process = start_run(folder, RUN)
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
    assert start_run(folder, RUN).wait() == 0
    assert contents(folder) == contents(undisturbed), f"seed {seed}"


def progress(folder: Path) -> int:
    state = folder / "state.safetensors"
    try:
        return state.stat().st_mtime_ns
    except FileNotFoundError:
        return 0
