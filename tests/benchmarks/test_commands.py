"""The benchmarks from the command line: what each measures, what it prints, and what it rejects."""

import json
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from benchmark_slices import DATA, byte_pairs
from conftest import random_trajectory, tiny_settings
from tiny_language import write_ouro

from benchmarks import drift, growth, guarantees, recording, scoring, sweep, training
from benchmarks.training import _positions, useful_flops
from loopscope.tasks import Examples

SMALL = ("demo", "--set", "task.train_examples=500", "--set", "training.batch_size=32", "--set", "model.width=16")


def run(benchmark: ModuleType, *words: object) -> int:
    code: int = benchmark.main([str(word) for word in words])
    return code


def test_arithmetic_by_hand() -> None:
    """Two rows, 1-2-3 and 1-2: three states, since the second is the beginning of the first."""
    settings = tiny_settings("model.loops=2")  # one layer of width 16, vocabulary 8
    tokens, lengths = np.array([[1, 2, 3], [1, 2, 0]]), np.array([3, 2])
    batch = Examples(tokens, lengths, np.array([0, 1]), np.array([1, 1]))
    width, states = 16, 3
    one_layer = 2 * 12 * width**2 * states + 4 * width * (1 + 2 + 3)
    last_layer = 2 * 2 * width**2 * states + 2 * 10 * width**2 * 2 + 4 * width * (3 + 2)
    head = 2 * 2 * 2 * width * 8
    assert useful_flops(settings, batch, _positions(batch)) == 3 * (one_layer + last_layer + head)


def test_speeds_are_measured(gated_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for benchmark, words in (
        (training, (*SMALL, "--steps", 2)),
        (recording, (gated_run, "--examples", 50)),
        (sweep, ("--examples", 300)),
    ):
        assert run(benchmark, *words, "--rounds", 1, "--json") == 0
        result = json.loads(capsys.readouterr().out)
        if benchmark is training:
            assert 0 < result["states_a_token"] < 1
            assert result["padding"] == pytest.approx(25 / result["mean_length"])
        elif benchmark is recording:
            assert result["signals_ratio"]["median"] > 0
        else:
            assert len(result["readouts"]) == 8
        assert run(benchmark, *words, "--rounds", 1) == 0
        assert "GFLOP/s" in capsys.readouterr().out


def test_scoring_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint = write_ouro(tmp_path / "ouro", byte_pairs())
    assert run(scoring, checkpoint, "--benchmark", "mmlu", "--data", DATA, "--limit", 6, "--rounds", 1, "--json") == 0
    measured = json.loads(capsys.readouterr().out)
    assert measured["largest_difference"] < 1e-3
    assert measured["shared_tokens"] > 100
    assert all(measured[name]["median"] > 0 for name in ("per_choice", "per_choice_and_depth", "per_question"))


def test_growth_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    few = ("--examples", 1000, "--loops", 3, "--classes", 8)
    assert run(growth, *few, "--stage", "calibrate", "--json") == 0
    (stage,) = json.loads(capsys.readouterr().out)["stages"]
    assert (stage["stage"], stage["examples"]) == ("calibrate", 1000)
    assert stage["seconds"] > 0
    for split in ("validation", "test"):
        growth.simulate(tmp_path / split, split, 1000, 3, 8)
    for name, make in growth.STAGES.items():
        made = make(tmp_path, 1000, 3, 8)()
        assert name != "diagnose" or made.room_left is not None
    assert (tmp_path / "report" / "report.html").is_file()


def test_guarantees_are_measured_and_drawn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    calm = guarantees.populations("calm")
    monkeypatch.setattr(guarantees, "populations", lambda: calm)
    monkeypatch.setattr(guarantees, "SIZES", (50, 100))
    random_trajectory(rows=300, split="test").save(tmp_path / "mine" / "recordings" / "test")
    few = ("--calibrations", 2, "--examples", 50, "--population", "calm")
    figure = ("--figure", tmp_path / "figure.png")
    assert run(guarantees, tmp_path / "mine", *few, *figure, "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert {price["population"] for price in result["price"]} == {"calm", "mine"}
    assert (tmp_path / "figure.png").is_file()


@pytest.mark.parametrize(
    ("benchmark", "words", "sentence"),
    [
        (recording, ("nowhere",), "There is no folder nowhere"),
        (sweep, ("--classes", 1), "at least two classes"),
        (training, ("deom",), "did you mean 'demo'?"),
        (scoring, ("x", "--benchmark", "mmlo"), "did you mean 'mmlu'?"),
        (drift, ("nowhere",), "There is no folder nowhere"),
        (drift, ("--alpha", 2), "--alpha: '2' is not a number above 0 and up to 1"),
        (drift, ("--length", 1000), "streams that are longer"),
        (guarantees, ("--population", "clam"), "did you mean 'calm'?"),
        (guarantees, ("--figure", "guarantees.pdf"), "ends in .png"),
        (growth, ("--examples", 10), "from 1,000 examples and 6 classes on"),
        (growth, ("--stage", "lode"), "did you mean 'load'?"),
        (guarantees, ("a", "a"), "Two of the recordings are of one run"),
    ],
)
def test_what_cannot_be_measured_is_one_sentence(
    benchmark: ModuleType,
    words: tuple[object, ...],
    sentence: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    random_trajectory(rows=20, split="test").save(tmp_path / "a")
    assert run(benchmark, *words) == 2
    err = capsys.readouterr().err
    assert err.startswith("loopscope: ")
    assert sentence in err
