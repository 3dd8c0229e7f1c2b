"""What tests of several verbs share: a command as a user types it, and runs, recordings, policies and checkpoints."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from _pytest.capture import CaptureResult
from benchmark_slices import byte_pairs
from conftest import TINY
from tiny_language import write_ouro

import loopscope as ls
from loopscope.cli import main

GUARANTEE = ("--max-drop", 0.1, "--confidence", 0.8, "--readout", "margin")


def run(*words: object) -> int:
    return main([str(word) for word in words])


def settings(*overrides: str) -> list[str]:
    return [word for override in (*TINY, *overrides) for word in ("--set", override)]


def recording_of(run: Path, split: str) -> Path:
    return run / "recordings" / split


def read_json(file: Path) -> Any:
    return json.loads(file.read_bytes())


class Command:
    """Runs a command as a user types it, and gives what it prints: alone, without what was printed before."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, *words: object, code: int | None = 0) -> CaptureResult[str]:
        """What is printed if the exit code is this one; None: if a guarantee is kept (0) or broken (1)."""
        self._capsys.readouterr()
        assert run(*words) in ((0, 1) if code is None else (code,)), (words, self._capsys.readouterr())
        return self._capsys.readouterr()

    def json(self, *words: object, code: int = 0) -> Any:
        return json.loads(self(*words, "--json", code=code).out)

    def refused(self, *words: object) -> str:
        """The one sentence with which a command ends."""
        out, err = self(*words, code=2)
        assert out == ""
        assert "Device: " not in err  # nothing is announced that is then refused
        sentence = err.splitlines()[-1]
        assert sentence.startswith("loopscope: ")
        assert sentence.endswith(".")
        return sentence


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(capsys)


def crafted(early_is_right: bool, split: str, **changes: object) -> ls.Trajectory:
    """400 examples whose margins are random: full depth is right, the two loops before it always or never."""
    rng = np.random.default_rng(len(split))
    labels = rng.integers(0, 2, 400)
    early = labels if early_is_right else 1 - labels
    logits = np.zeros((400, 3, 2))
    answers = np.stack((early, early, labels), axis=1)[:, :, None]
    np.put_along_axis(logits, answers, rng.uniform(0.1, 1, (400, 3, 1)), axis=2)
    fields = {"logits": logits, "labels": labels, "provenance": {"weights_sha256": "a" * 64}}
    return ls.Trajectory(**{**fields, **changes}, split=split)  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables are not wrapped."""
    monkeypatch.setenv("COLUMNS", "300")


@pytest.fixture(scope="session")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run without a gate, trained and recorded through the command line."""
    folder = tmp_path_factory.mktemp("cli") / "run"
    assert run("train", "demo", "--out", folder, *settings()) == 0
    for split in ("validation", "test"):
        assert run("record", "task", folder, "--split", split) == 0
    return folder


@pytest.fixture(scope="session")
def mine(gated_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with a gate and three recordings."""
    folder = tmp_path_factory.mktemp("calibrate") / "mine"
    shutil.copytree(gated_run, folder, ignore=shutil.ignore_patterns("recordings"))
    for split in ("train", "validation", "test"):
        assert run("record", "task", folder, "--split", split) == 0
    return folder


@pytest.fixture(scope="session")
def policy(mine: Path) -> Path:
    """Thresholds from the train split, tested on all of validation: some examples exit early, some do not."""
    validation, train, out = recording_of(mine, "validation"), recording_of(mine, "train"), mine / "mine.json"
    assert run("calibrate", validation, *GUARANTEE, "--grid", train, "--out", out) == 0
    return out


@pytest.fixture(scope="session")
def foreign(policy: Path) -> Path:
    """The same for another model."""
    mine, out = ls.ExitPolicy.load(policy), policy.with_name("foreign.json")
    replace(mine, scope=msgspec.structs.replace(mine.scope, model="0" * 64)).save(out)
    return out


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A small Ouro with random weights and a tokenizer."""
    return str(write_ouro(tmp_path_factory.mktemp("models") / "ouro", byte_pairs()))


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """Two recordings of 20 sequences, 20 tokens each."""
    for split, right in (("validation", True), ("test", False)):
        crafted(right, split, sequences=np.arange(400) // 20).save(tmp_path / split)
    return tmp_path
