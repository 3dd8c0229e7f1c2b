"""Running studies: continued after any end, nothing made twice, and what fails takes with it what needs it."""

import fcntl
import json
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch
from conftest import TINY as TINY_RUN
from tiny_study import TINY, finished, one_run, planned

import loopscope as ls
from loopscope.analysis.model_analysis import analyse_models, read_recordings
from loopscope.analysis.schema import Results
from loopscope.cli import main
from loopscope.config import read_json, to_json
from loopscope.progress import silent
from loopscope.studies.executors import StudyWork, do_step, run_study
from loopscope.studies.steps import Step, missing_steps

__all__ = ["finished"]


def test_it_makes_results_and_products(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = finished / "tiny" / "report"
    results = json.loads((report / "results.json").read_bytes())
    names = [model["name"] for model in results["models"]]
    assert names[:2] == ["mano-geometric0.3-fixed-s0", "mano-geometric0.3-fixed-s1"]
    assert [model["is_reference"] for model in results["models"]] == [True, True, False, False, False, False]
    readouts = [frontier["readout"] for frontier in results["models"][0]["frontiers"]]
    assert readouts[-2:] == ["gate:linear-ponder", "gate:linear-utility"]  # stoppers take a model with a verdict
    assert results["models"][0]["extrapolation"]["forced_accuracy_by_difficulty"]["levels"] == [3, 4]
    assert results["groups"][0]["names"] == names[:2]
    made = {path.stem for path in report.glob("*.png")}
    assert {"lambda_frontiers", "posthoc_fixed", "geometric_extrapolation", "main_exit_distributions"} <= made
    assert "teaser" not in made  # there is no MLP gate
    tables = (report / "tables.md").read_text()
    assert "the counterpart of the paper's table 2" in tables
    assert "1.38 ± 0.16" in tables
    assert main(["study", "status", str(TINY), "--out", str(finished / "tiny"), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["done"] == told["steps"] == 32
    assert set(told["models"].values()) == {"analysed"}


def test_the_last_training_does_not_wait_for_what_is_quick(tmp_path: Path) -> None:
    study = one_run(tmp_path)
    study.write_text(study.read_text().replace("seed = [0]", "seed = [0, 1]").replace("fit = true\n", ""))
    run_study(planned(study), tmp_path / "store", silent, workers=1)
    trained, recorded = (list((tmp_path / "store").glob(name)) for name in ("run-*/data.json", "recording-*/*.json"))
    assert len(trained) == 2
    assert max(path.stat().st_mtime_ns for path in trained) < min(path.stat().st_mtime_ns for path in recorded)


def test_one_product_leaves_the_report_alone(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["study", "report", str(TINY), "--out", str(finished / "tiny"), "--product"]
    before = {path: path.read_bytes() for path in (finished / "tiny" / "report").glob("*.[hjm]*")}
    assert main([*words, "gate_summary", "--product", "teaser"]) == 0
    out, err = capsys.readouterr()
    assert "3.58" not in out
    assert "linear gate, geometric 0.3" in out
    assert "teaser cannot be made" in err
    assert main([*words, "teaser"]) == 2
    assert main([*words, "tizer"]) == 2
    assert "no product 'tizer'" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in before} == before


def test_nothing_is_made_twice(finished: Path) -> None:
    plan, store = planned(TINY), finished / "store"
    assert missing_steps([model.analysis for model in plan.models], store) == []
    times = {path: path.stat().st_mtime_ns for path in store.rglob("*")}
    assert run_study(plan, store, silent) == 0
    assert {path: path.stat().st_mtime_ns for path in store.rglob("*")} == times


def test_who_makes_a_step_already_is_waited_for(finished: Path, tmp_path: Path) -> None:
    step = planned(TINY).models[-1].training
    locks = tmp_path / ".locks"
    locks.mkdir()
    with ThreadPoolExecutor() as pool:
        with (locks / step.key).open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            waiting = pool.submit(do_step, step, tmp_path, "cpu")
            with pytest.raises(TimeoutError):
                waiting.result(timeout=0.5)
            shutil.copytree(step.folder(finished / "store"), step.folder(tmp_path))
        waiting.result(timeout=60)
    weights = step.folder(tmp_path) / "model.safetensors"
    assert weights.read_bytes() == (step.folder(finished / "store") / "model.safetensors").read_bytes()


def test_what_fails_takes_with_it_only_what_needs_it(tmp_path: Path) -> None:
    whole, store = planned(TINY), tmp_path / "store"
    plan = replace(whole, models=whole.models[-2:])
    hindered = plan.models[0].training.folder(store)
    hindered.mkdir(parents=True)
    (hindered / "thesis.txt").write_text("mine")
    with pytest.raises(ls.UserError, match="One step of the study failed, and 3 that need.*not a run"):
        run_study(plan, store, silent, workers=1)
    assert (hindered / "thesis.txt").read_text() == "mine"
    assert [model.analysis.done(store) for model in plan.models] == [False, True]
    assert len(plan.results(store).models) == 1
    (hindered / "thesis.txt").unlink()
    assert len(missing_steps(plan.steps, store)) == 4


class Failing(Step, frozen=True):
    kind = "failing"
    is_large: bool

    def run(self, store: Path, device: torch.device) -> None:
        raise torch.OutOfMemoryError if self.is_large else RuntimeError("a bug")


def test_a_step_without_room_fails_alone_and_a_bug_ends_all(tmp_path: Path) -> None:
    step, bug = Failing(is_large=True), Failing(is_large=False)
    work = StudyWork([step, bug], tmp_path, ["cpu"], 1, silent)
    with pytest.raises(ls.UserError, match="not enough memory for it on cpu") as failed:
        do_step(step, tmp_path, "cpu")
    work.end(step, failed.value)  # noted, not raised: others go on
    with pytest.raises(ls.UserError, match="One step of the study failed"):
        work.check_failures()
    with pytest.raises(RuntimeError, match="a bug") as unknown:
        do_step(bug, tmp_path, "cpu")
    with pytest.raises(RuntimeError, match="a bug"):
        work.end(bug, unknown.value)


def test_what_is_asked_wrongly_is_explained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = ["--out", str(tmp_path / "x")]
    (tmp_path / "file").write_text("mine")
    for words, told in (
        (["run", "nowhere.toml", *out], "There is no file nowhere.toml; give a TOML file, or one of: channels, demo"),
        (["report", str(TINY), *out], "Nothing of this study is analysed yet"),
        (["run", "paper", *out], "start it anyway with --force"),
        (["run", str(TINY), *out, "--device", "foo"], "There is no device 'foo'"),
        (["run", str(TINY), *out, "--store", str(tmp_path / "file")], "is a file"),
        (["run", str(TINY), *out, "--address", "auto"], "--address needs --engine"),
    ):
        assert main(["study", *words]) == 2
        assert told in capsys.readouterr().err
    assert not (tmp_path / "store").exists()


CUSTOM = """
from pathlib import Path
Path(__file__).with_name("imported").touch()
def last_two(loops, weight=1.0):
    return loops.cross_entropy[-1] + weight * loops.cross_entropy[-2]
def gated(loops):
    return (loops.cross_entropy * loops.gate_logits.softmax(0)).sum(0)
def missing(loops):
    return loops.nothing
"""


def test_objectives_of_one_s_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    module, store = tmp_path / "study_losses.py", tmp_path / "store"
    module.write_text(CUSTOM)
    entry = '[[parts.runs]]\nobjective = ["study_losses:{}"]\n{}\n'
    weighted = entry.format("last_two", 'set = ["objective.options.weight=0.5"]')
    study = one_run(tmp_path, weighted + entry.format("gated", 'gate = ["linear"]'))
    plan = planned(study)
    names = ["mano-geometric0.3-fixed-s0", "mano-last_two-weight0.5-s0", "mano-gated-linear-s0"]
    assert [model.name for model in plan.models] == names
    module.write_text(CUSTOM + "# another text\n")
    after = planned(study)
    same = [old.training.key == new.training.key for old, new in zip(plan.models, after.models, strict=True)]
    assert same == [True, False, False]
    assert not (tmp_path / "imported").exists()  # planning reads and runs nothing
    some = replace(after, models=after.models[1:2])
    run_study(some, store, silent, workers=1)
    (model,) = some.results(store).models
    assert model.label == "study_losses:last_two, weight 0.5"
    (tmp_path / "imported").unlink()
    assert run_study(some, store, silent) == 0  # all of it is there
    assert not (tmp_path / "imported").exists()
    wrong = one_run(tmp_path, entry.format("missing", ""))
    with pytest.raises(ls.UserError, match=r"has no attribute 'nothing' \(study_losses.py, line 9\)"):
        run_study(planned(wrong), tmp_path / "other", silent)
    assert not (tmp_path / "other").exists()  # it is said before anything is made


REFERENCE = "fixed-geometric"
MODELS = [REFERENCE, "fixed-uniform", "linear-gate", "mlp-gate", "decoupled-gate"]


def demo_words(folder: Path) -> list[str]:
    return ["demo", "--out", str(folder), "--workers", "2", *(w for override in TINY_RUN for w in ("--set", override))]


def test_from_nothing_to_a_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "demo"
    assert main(demo_words(folder)) == 0
    out, err = capsys.readouterr()
    assert " steps of work, 0 s left." in err
    assert all(word in out for word in ("D@95", "to blame", "fixed prior, geometric 0.3", "MLP gate", "report.html"))
    results = read_json(Results, folder / "report" / "results.json", "results")
    assert [model.name for model in results.models] == MODELS
    assert all("record" in model.refused[0] for model in results.models)  # a guarantee: there are too few examples
    assert main(["diagnose", str(folder / "mlp-gate"), "--reference", str(folder / REFERENCE), "--unseen"]) == 0
    assert "No verdict: at full depth it is right in" in capsys.readouterr().out  # twelve steps are too few
    assert main(["diagnose", str(folder / "mlp-gate"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["trajectory_gap"] is None
    runs = [read_recordings(folder / name, unseen_only=True) for name in MODELS]
    again = analyse_models(runs, REFERENCE, [0.95, 0.98, 0.99])[0]  # the targets of the paper
    assert not any(model.refused for model in again.models)  # nobody asked
    unrefused = [msgspec.structs.replace(model, refused=[]) for model in results.models]
    assert to_json(again) == to_json(msgspec.structs.replace(results, models=unrefused))


@pytest.mark.long
@pytest.mark.parametrize("stop", [signal.SIGKILL, signal.SIGTERM])
def test_killed_it_leaves_no_worker_behind_and_continues(tmp_path: Path, stop: signal.Signals) -> None:
    folder = tmp_path / "demo"
    longer = ["--set", "training.steps=600", "--set", "training.checkpoint_every=20"]
    command = [sys.executable, "-m", "loopscope.cli", *demo_words(folder), *longer]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while not list(tmp_path.rglob("state.safetensors")):
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(stop)
    process.wait()
    time.sleep(3)
    saved = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("state.safetensors")}
    time.sleep(2)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("state.safetensors")} == saved, "a worker goes on"
    assert subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode == 0
    assert (folder / "report" / "report.html").is_file()
