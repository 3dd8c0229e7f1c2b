"""Killed at any moment, a run continues and ends bit-identical to one that ran through, from nothing altered."""

import json
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import GATED, TINY, tiny_settings
from killed_run import kill_after_first_checkpoint, start_run
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from test_run_folder import ALTERED, contents, copied, flip

import loopscope as ls
from loopscope.training import training_loop
from loopscope.training.task_run import train
from loopscope.training.training_loop import steps_done

LONGER = ["training.steps=60", "training.checkpoint_every=7", "training.log_every=5", "training.validate_every=50"]
RUN = [*TINY, *GATED, *LONGER]


def test_killed_once(tmp_path: Path) -> None:
    kill_after_first_checkpoint(tmp_path / "cut", RUN)
    assert 0 < steps_done(tmp_path / "cut") < 60
    for name in ("cut", "whole"):
        train("demo", tmp_path / name, overrides=RUN)
    assert contents(tmp_path / "cut") == contents(tmp_path / "whole")


@pytest.mark.long
def test_ten_kills_at_random_moments(tmp_path: Path) -> None:
    """The moments are spread over start-up, training and writing; the seed is printed where it fails."""
    longer = [*RUN, "training.steps=400"]
    train("demo", tmp_path / "whole", overrides=longer)
    seed = random.randrange(10**6)
    rng = random.Random(seed)
    folder, kills = tmp_path / "run", 0
    while kills < 10:
        process = start_run(folder, longer)
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
    train("demo", folder, overrides=longer)
    assert contents(folder) == contents(tmp_path / "whole"), f"seed {seed}"


def progress(folder: Path) -> int:
    try:
        return (folder / "state.safetensors").stat().st_mtime_ns
    except FileNotFoundError:
        return 0


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that ended right after it had saved its state."""
    folder, save = tmp_path_factory.mktemp("interrupted") / "run", training_loop.save_state

    def save_and_end(*given: object) -> None:
        save(*given)  # type: ignore[arg-type]
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(training_loop, "save_state", save_and_end)
        train(tiny_settings(*GATED), folder)
    return folder


@pytest.mark.parametrize(
    ("name", "alter"),
    [
        *ALTERED,
        ("state.safetensors", flip),
        ("state.safetensors", lambda file: flip(file, 60)),
        ("state.safetensors", lambda file: file.write_bytes(b"junk")),
    ],
)
def test_a_run_does_not_resume_from_what_was_altered(
    name: str, alter: Callable[[Path], None], interrupted: Path, tmp_path: Path
) -> None:
    folder = copied(interrupted, tmp_path)
    alter(folder / name)
    with pytest.raises(ls.UserError, match=rf"{name} (was altered|cannot be read)|other settings \(block_size\)"):
        train(tiny_settings(*GATED), folder)


@pytest.mark.parametrize("metadata", [{"step": "4"}, {}, None])
def test_a_state_that_lost_its_hash_is_rejected(
    metadata: dict[str, str] | None, interrupted: Path, tmp_path: Path
) -> None:
    folder = copied(interrupted, tmp_path)
    with safe_open(folder / "state.safetensors", "pt") as file:
        assert file.metadata()["step"] == "4"
    save_file(load_file(folder / "state.safetensors"), folder / "state.safetensors", metadata)
    with pytest.raises(ls.UserError, match=r"state\.safetensors (was altered|cannot be read)"):
        train(tiny_settings(*GATED), folder)


def test_killed_between_hashes_and_weights_it_ends_as_if_nothing_had_been(
    interrupted: Path, gated_run: Path, tmp_path: Path
) -> None:
    folder = copied(interrupted, tmp_path)
    (folder / "hashes.json").write_text('{"files": {"model.safetensors": "of a try that was killed"}, "digest": ""}')
    train(tiny_settings(*GATED), folder)
    written = contents(folder)
    assert written == contents(gated_run)
    assert set(json.loads(written["hashes.json"])["files"]) == {*written} - {"hashes.json"}


def test_killed_before_its_first_step_it_begins_again(gated_run: Path, tmp_path: Path) -> None:
    """Without data and metrics, and without even a whole configuration."""
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    (tmp_path / "a" / ".partial-abc").write_text("half a config")
    (tmp_path / "b" / "config.json").write_bytes((gated_run / "config.json").read_bytes())
    for name in ("a", "b"):
        train(tiny_settings(*GATED), tmp_path / name)
        assert contents(tmp_path / name) == contents(gated_run)
