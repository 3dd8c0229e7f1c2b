"""`loopscope fit` and `insert`: gates fitted, swept, run, written into a checkpoint; and what goes wrong."""

import json
import shutil
from pathlib import Path

import pytest
from conftest import GOLDEN

import loopscope as ls
from cli.conftest import Command
from loopscope.cli import main
from loopscope.learned.fitted_gate import FittedGate


@pytest.fixture
def run(gated_run: Path, tmp_path: Path) -> Path:
    """A run with its recordings."""
    run = tmp_path / "run"
    shutil.copytree(gated_run, run)
    for split in ("train", "validation", "test"):
        assert main(["record", "task", str(run), "--split", split, "--hidden"]) == 0
    return run


def test_from_the_recording_to_answers(run: Path, tmp_path: Path, command: Command) -> None:
    gate, lines = tmp_path / "gates" / "mine", tmp_path / "examples.txt"
    lines.write_text("+ 1 2\n* 2 + 0 1\n")
    fit = ["fit", str(run / "recordings" / "train"), "--out", str(gate), "--kind", "mlp", "--steps", "30"]
    fitted = command.json(*fit)["settings"]
    assert (fitted["kind"], fitted["prior"], fitted["beta"]) == ("mlp", "geometric", 0.1)
    validation, test = (str(run / "recordings" / split) for split in ("validation", "test"))
    assert "gate:mine" in command("sweep", validation, test, "--fitted", gate, "--readout", "gate:mine").out
    assert "gate:mine - gate " in command("compare", run, "gate:mine", "gate", "--fitted", gate, "--at", "0.1").out
    out, err = command("answer", run, lines, "--fitted", gate)
    assert len(out.splitlines()) == 2
    assert "under gate:mine at" in err
    ls.ExitPolicy("gate:mine", 0.0, FittedGate.load(gate)).save(tmp_path / "policy.json")
    assert all(
        json.loads(line)["loop"] == 1
        for line in command("answer", run, lines, "--policy", tmp_path / "policy.json").out.splitlines()
    )


def test_it_is_written_into_its_own_model(run: Path, tmp_path: Path, command: Command) -> None:
    gate, new = tmp_path / "linear", tmp_path / "new"
    assert main(["fit", str(run / "recordings" / "train"), "--out", str(gate), "--steps", "30"]) == 0
    assert main(["insert", str(gate), str(run), "--out", str(new)]) == 0
    assert main(["record", "task", str(new), "--split", "test"]) == 0
    fitted = ls.attach(ls.Trajectory.load(run / "recordings" / "test"), {"x": FittedGate.load(gate)})
    own = ls.Trajectory.load(new / "recordings" / "test")
    assert ls.signal("gate", own) == pytest.approx(ls.signal("gate:x", fitted), abs=1e-5)
    assert "another model" in command.refused("insert", gate, GOLDEN / "ouro-tiny", "--out", tmp_path / "ouro")
    assert not (tmp_path / "ouro").exists()


def test_what_goes_wrong_is_explained(run: Path, tmp_path: Path, command: Command) -> None:
    train, validation, test = (str(run / "recordings" / split) for split in ("train", "validation", "test"))
    new, there = str(tmp_path / "x"), str(tmp_path / "on-validation")
    assert main(["fit", validation, "--out", there, "--steps", "2"]) == 0
    for words, sentence in (
        (("fit", train, "--out", new, "--beta", "-1"), "the gate: beta"),
        (("fit", train, "--out", new, "--pairing", "ouro"), "pairing is of the objective 'utility'"),
        (("fit", train, "--out", new, "--kind", "induction", "--beta", "1"), "--beta is not for --kind"),
        (("fit", train, "--out", there), "is there already"),
        (("insert", str(tmp_path / "none"), str(run), "--out", new), "There is no folder"),
        (("sweep", validation, test, "--fitted", there), "choose its threshold, and evaluate it, on other data"),
    ):
        assert sentence in command.refused(*words)
