"""`loopscope gate`: fitted gates fitted, evaluated, run, written back; and what goes wrong."""

import json
import shutil
from pathlib import Path

import pytest
from conftest import GOLDEN

import loopscope as ls
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


def test_from_the_recording_to_answers(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    gate, lines = tmp_path / "gates" / "mine", tmp_path / "examples.txt"
    lines.write_text("+ 1 2\n* 2 + 0 1\n")
    fit = ["gate", "fit", str(run / "recordings" / "train"), "--out", str(gate), "--kind", "mlp", "--steps", "30"]
    assert main([*fit, "--json"]) == 0
    fitted = json.loads(capsys.readouterr().out)["settings"]
    assert (fitted["kind"], fitted["prior"], fitted["beta"]) == ("mlp", "geometric", 0.1)
    validation, test = (str(run / "recordings" / split) for split in ("validation", "test"))
    assert main(["evaluate", validation, test, "--gate", str(gate), "--readout", "gate:mine"]) == 0
    assert "gate:mine" in capsys.readouterr().out
    assert main(["compare", str(run), "gate:mine", "gate", "--gate", str(gate), "--at", "0.1"]) == 0
    assert "gate:mine - gate " in capsys.readouterr().out
    assert main(["run", str(run), str(lines), "--gate", str(gate)]) == 0
    out, err = capsys.readouterr()
    assert len(out.splitlines()) == 2
    assert "under gate:mine at" in err
    ls.ExitPolicy("gate:mine", 0.0, FittedGate.load(gate)).save(tmp_path / "policy.json")
    assert main(["run", str(run), str(lines), "--policy", str(tmp_path / "policy.json")]) == 0
    assert all(json.loads(line)["loop"] == 1 for line in capsys.readouterr().out.splitlines())


def test_it_is_written_into_its_own_model(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    gate, new = tmp_path / "linear", tmp_path / "new"
    assert main(["gate", "fit", str(run / "recordings" / "train"), "--out", str(gate), "--steps", "30"]) == 0
    assert main(["gate", "write", str(gate), str(run), "--out", str(new)]) == 0
    assert main(["record", "task", str(new), "--split", "test"]) == 0
    fitted = ls.attach(ls.Trajectory.load(run / "recordings" / "test"), {"x": FittedGate.load(gate)})
    own = ls.Trajectory.load(new / "recordings" / "test")
    assert ls.signal("gate", own) == pytest.approx(ls.signal("gate:x", fitted), abs=1e-5)
    capsys.readouterr()
    assert main(["gate", "write", str(gate), str(GOLDEN / "ouro-tiny"), "--out", str(tmp_path / "ouro")]) == 2
    assert "another model" in capsys.readouterr().err
    assert not (tmp_path / "ouro").exists()


def test_what_goes_wrong_is_explained(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def fails(*words: str) -> str:
        capsys.readouterr()
        assert main(list(words)) == 2
        error = capsys.readouterr().err
        assert "Traceback" not in error
        return error.splitlines()[-1]

    recordings = run / "recordings"
    assert "must not be fitted on the test split" in fails("gate", "fit", str(recordings / "test"), "--out", "x")
    beta = fails("gate", "fit", str(recordings / "train"), "--out", str(tmp_path / "x"), "--beta", "-1")
    assert "the gate: beta" in beta
    assert "There is no folder" in fails("gate", "fit", str(tmp_path / "none"), "--out", "x")
    ponder = fails("gate", "fit", str(recordings / "train"), "--out", str(tmp_path / "x"), "--pairing", "ouro")
    assert "pairing is of the objective 'utility'" in ponder
    validation = tmp_path / "on-validation"
    assert main(["gate", "fit", str(recordings / "validation"), "--out", str(validation), "--steps", "2"]) == 0
    assert "is there already" in fails("gate", "fit", str(recordings / "train"), "--out", str(validation))
    pair = [str(recordings / "validation"), str(recordings / "test")]
    assert "must be chosen on another" in fails("evaluate", *pair, "--gate", str(validation))
    assert "There is no folder" in fails("gate", "write", str(tmp_path / "none"), str(run), "--out", "x")
    assert "There is no file no.json" in fails("run", str(run), str(run / "config.json"), "--policy", "no.json")
