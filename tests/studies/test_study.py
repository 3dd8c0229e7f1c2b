"""Studies: planned by what makes what, run once, continued after any end, and the same whoever runs them."""

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path

import msgspec
import pytest

import loopscope as ls
from loopscope.cli import main
from loopscope.progress import silent
from loopscope.studies import Plan, make_plan, run_study
from loopscope.studies.step_runner import do_step
from loopscope.studies.steps import Analyse, Fit, Record, Step, Train, all_steps, to_be_done

TINY = Path(__file__).parent / "tiny.toml"


def changed(tmp_path: Path, old: str, new: str) -> Plan:
    """The tiny study with something else in its file."""
    text = TINY.read_text()
    assert old in text
    path = tmp_path / "changed.toml"
    path.write_text(text.replace(old, new))
    return make_plan(str(path), [])


def steps_of(plan: Plan) -> list[Step]:
    return all_steps(model.analysis for model in plan.models)


def keys(plan: Plan, kind: type[Step]) -> set[str]:
    return {step.key for step in steps_of(plan) if isinstance(step, kind)}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny study, run from the command line."""
    folder = tmp_path_factory.mktemp("study")
    assert main(["study", "run", str(TINY), "--out", str(folder / "tiny"), "--workers", "2"]) == 0
    return folder


def test_the_plan_has_every_step_once_and_in_order() -> None:
    steps = steps_of(make_plan(str(TINY), []))
    assert [sum(isinstance(step, kind) for step in steps) for kind in (Train, Record, Fit, Analyse)] == [6, 16, 4, 6]
    seen: set[str] = set()
    for step in steps:
        assert step.key not in seen
        assert all(need.key in seen for need in step.needs)
        seen.add(step.key)


@pytest.mark.parametrize("study", ["mano", "paper"])
def test_a_plan_names_every_run_in_80_columns(
    study: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["study", "plan", study, "--store", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    models = make_plan(study, []).models
    rows = {tuple(line.split()[:2]) for line in out.splitlines()}
    assert {(model.name, model.training.key[4:12]) for model in models if model.training} <= rows
    assert all(model.name in out.partition("measured against")[2] for model in models if model.analysis.is_reference)


def test_a_change_reaches_what_depends_on_it_and_nothing_else(tmp_path: Path) -> None:
    plan = make_plan(str(TINY), [])
    targets = changed(tmp_path, "targets = [0.2, 0.9]", "targets = [0.3]")
    assert keys(targets, Train | Record | Fit) == keys(plan, Train | Record | Fit)
    assert not keys(targets, Analyse) & keys(plan, Analyse)
    fits = changed(tmp_path, "steps = 20", "steps = 21")
    assert keys(fits, Train | Record) == keys(plan, Train | Record)
    assert not keys(fits, Fit) & keys(plan, Fit)
    assert len(keys(fits, Analyse) & keys(plan, Analyse)) == 4  # those without fitted gates
    betas = changed(tmp_path, "beta = [0.1, 0.5]", "beta = [0.1, 0.7]")
    assert len(keys(betas, Train) & keys(plan, Train)) == 5
    steps = changed(tmp_path, "training.steps=4", "training.steps=5")
    assert len(keys(steps, Train) & keys(plan, Train)) == 4
    assert not keys(make_plan(str(TINY), ["training.batch_size=7"]), Train) & keys(plan, Train)
    assert not keys(make_plan(str(TINY), [], "cpu, 2 threads"), Train) & keys(plan, Train)


def test_it_makes_results_and_products(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = finished / "tiny" / "report"
    results = json.loads((report / "results.json").read_bytes())
    names = [model["name"] for model in results["models"]]
    assert names[:2] == ["mano-geometric0.3-fixed-s0", "mano-geometric0.3-fixed-s1"]
    assert len(names) == 6
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


def test_runs_have_their_names(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = finished / "tiny" / "mano-geometric0.3-fixed-s0"
    assert ls.load_model(run).num_loops == 3
    assert (
        main(["compare", str(run.with_name("mano-geometric0.3-linear-b0.1-s0")), "gate", "margin", "--at", "0.1"]) == 0
    )
    assert "Compared on 150 test examples, of which" in " ".join(capsys.readouterr().out.split())
    validation, test = (str(run / "recordings" / split) for split in ("validation", "test"))
    gate = ["--gate", str(run / "gates" / "linear-ponder")]
    assert main(["evaluate", validation, test, *gate, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["readouts"][-1]["readout"] == "gate:linear-ponder"


def with_guarantees(tmp_path: Path, guarantees: str) -> Path:
    """One run of the tiny study, with these promises."""
    text = TINY.read_text()
    text = text[: text.index('[[parts.runs]]\ngate = ["linear"]')].replace("seed = [0, 1]", "seed = [0]")
    path = tmp_path / "promised.toml"
    path.write_text(text.replace("gates = {", f"guarantees = [{guarantees}]\ngates = {{"))
    return path


GATE = 'readout = "gate:linear-ponder", max_drop = 0.3, confidence = 0.8'


def test_promises_are_made_or_refused(finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    study = with_guarantees(
        tmp_path, f"{{ {GATE} }}, {{ max_drop = 0.01 }}, {{ max_drop = 0.4, in_expectation = true }}"
    )
    words = ["study", "run", str(study), "--out", str(tmp_path / "out"), "--store", str(finished / "store")]
    assert main([*words, "--workers", "1"]) == 0
    printed = capsys.readouterr().out
    assert "Certified policies" in printed
    assert "refused: " in printed
    (model,) = json.loads((tmp_path / "out" / "report" / "results.json").read_bytes())["models"]
    assert [each["guarantee"]["max_drop"] for each in model["certified"]] == [0.3, 0.4]
    assert all(each["held_out"]["guarantee"]["verdict"] for each in model["certified"])
    (sentence,) = model["refused"]
    assert "takes 299 tested examples, and there are 96" in sentence
    run = tmp_path / "out" / "mano-geometric0.3-fixed-s0"
    linked = [ls.ExitPolicy.load(run / name) for name in ("policy.json", "policy-2.json")]
    assert [policy.threshold for policy in linked] == [each["threshold"] for each in model["certified"]]
    assert (linked[0].readout, linked[0].model) == ("gate:linear-ponder", ls.load_model(run).weights_sha256)
    assert main(["evaluate", str(run / "recordings" / "test"), "--policy", str(run / "policy.json")]) == 0
    assert "Kept: " in capsys.readouterr().out


def test_a_changed_promise_repeats_the_analysis_only(finished: Path, tmp_path: Path) -> None:
    store, out = finished / "store", tmp_path / "out"
    names = []
    for guarantees in (f"{{ {GATE} }}", f"{{ {GATE}, loss = 'disagreement' }}", "{ max_drop = 0.01 }"):
        plan = make_plan(str(with_guarantees(tmp_path, guarantees)), [])
        (step,) = to_be_done([model.analysis for model in plan.models], store)
        assert isinstance(step, Analyse)
        do_step(step, store, "cpu")
        plan.link(store, out)
        (run,) = out.iterdir()
        names.append({path.name: path.readlink() for path in run.glob("policy*")})
    first, second, refused = names
    for found in (first, second):
        assert sorted(name.split("-")[0] for name in found) == ["policy.gate", "policy.json"]
    assert first["policy.json"] != second["policy.json"]
    assert refused == {}  # an old promise does not stay


def test_a_study_with_other_settings_takes_another_folder(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = finished / "tiny"
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}

    def refused(*words: object) -> str:
        capsys.readouterr()
        assert main([*map(str, words), "--out", str(out), "--store", str(finished / "store")]) == 2
        (sentence,) = capsys.readouterr().err.splitlines()
        assert sentence.endswith(f"; choose another --out, such as {finished / 'tiny-2'}.")
        return sentence

    for kind in ("run", "report"):
        sentence = refused("study", kind, TINY, "--set", "training.batch_size=7")
        assert "run 'mano-geometric0.3-fixed-s0' has other settings (training.batch_size)" in sentence
        assert "was made otherwise" in refused("study", kind, TINY, "--threads", 2)
    assert "holds another study, with 'mano-geometric0.3-fixed-s0'" in refused("demo")
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before
    # one that grows or shrinks, and is measured otherwise, keeps its folder
    changed(tmp_path, "targets = [0.2, 0.9]", "targets = [0.3]").check_links(out)
    changed(tmp_path, "beta = [0.1, 0.5]", "beta = [0.1, 0.5, 0.7]").check_links(out)
    make_plan(str(TINY), []).check_links(out)


def test_nothing_is_made_twice(finished: Path) -> None:
    plan, store = make_plan(str(TINY), []), finished / "store"
    assert to_be_done([model.analysis for model in plan.models], store) == []
    times = {path: path.stat().st_mtime_ns for path in store.rglob("*")}
    assert run_study(plan, store, silent) == 0
    assert {path: path.stat().st_mtime_ns for path in store.rglob("*")} == times


@pytest.mark.long
def test_killed_twice_it_ends_with_the_same_bytes(finished: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "loopscope.cli", "study", "run", str(TINY), "--out", str(tmp_path / "tiny")]
    for last in ("run-*/metrics.jsonl", "analysis-*"):
        with subprocess.Popen(
            [*command, "--workers", "2"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
        ) as process:
            while not list((tmp_path / "store").glob(last)):
                assert process.poll() is None, "it ended before it was killed"
                time.sleep(0.01)
            os.killpg(process.pid, signal.SIGKILL)
    assert not (tmp_path / "tiny" / "report").exists()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    for name in ("results.json", "tables.md"):
        through, killed = (folder / "tiny" / "report" / name for folder in (finished, tmp_path))
        assert through.read_bytes() == killed.read_bytes()


def test_who_makes_a_step_already_is_waited_for(finished: Path, tmp_path: Path) -> None:
    step = make_plan(str(TINY), []).models[-1].training
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
    plan, store = make_plan(str(TINY), []), tmp_path / "store"
    hindered = plan.models[3].training.folder(store)
    hindered.mkdir(parents=True)
    (hindered / "thesis.txt").write_text("mine")
    with pytest.raises(ls.UserError, match="One step of the study failed, and 3 that need.*not a run"):
        run_study(plan, store, silent, workers=2)
    assert (hindered / "thesis.txt").read_text() == "mine"
    assert [model.analysis.done(store) for model in plan.models] == [True, True, True, False, True, True]
    assert len(plan.results(store).models) == 5
    (hindered / "thesis.txt").unlink()
    assert run_study(plan, store, silent, workers=1) == 4


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("prior = [0.3]\nseed", "prior = [1.3]\nseed", "runs"),
        ('gate = ["linear"]', 'gate = ["deep"]', "gate"),
        ("title =", "titel =", "titel"),
        ('reference = { gate = "none", prior = 0.3 }', "reference = { prior = 0.2 }", "not among its runs with seed 0"),
        ("seed = [0, 1]\nfit", "seed = [1]\nfit", "not among its runs with seed 0"),
        ("beta = [0.1, 0.5]", "beta = []", "beta"),
        ("beta = [0.1, 0.5]", 'beta = [0.1]\nname = "../x"', "name"),
        ("beta = [0.1, 0.5]", 'beta = [0.1]\nname = "report"', "cannot be the name"),
        ('prior = ["uniform"]', 'prior = ["final"]', "needs a prior over all loops"),
        ('prior = ["uniform"]', 'prior = ["uniform"]\nfit = true', "fits gates"),
        ("examples = 200, steps", "examples = 2000, steps", "gates.examples asks for 2,000 examples"),
        ("model.block_size=11", "model.block_size=7", "leaves no room"),
        ('gate = ["linear"]\nprior = [0.3]', 'gate = ["none"]\nprior = [0.3]', "lists the run"),
        ('settings = "demo-parity"', 'settings = "nowhere"', "There is no preset"),
        ('settings = "demo-parity"', f'settings = "{"A" * 300}"', "There is no preset"),
        ('settings = "demo-parity"', 'settings = "demo-parity"\nunseen = true', "stored training examples"),
        ("beta = [0.1, 0.5]", 'beta = [0.1, 0.5]\nname = "x"', "names 2 runs"),
        ('gate = ["linear"]\n', 'gate = ["linear"]\nobjective = ["m:f"]\n', "prior and beta are of the built-in"),
        (
            'gate = ["none", "mlp"]\nprior = ["uniform"]',
            'objective = ["final"]',
            "does not list 'final': gate and prior",
        ),
        ('gate = ["none", "mlp"]\nprior = ["uniform"]', 'objective = ["decoupled_gate", "m:f"]', "of its own"),
        ('gate = ["none", "mlp"]', 'objective = ["decoupled_gate"]', "decoupled_gate need model.gate = 'linear'"),
        ('gate = ["none", "mlp"]\nprior = ["uniform"]', 'objective = ["nowhere:f"]', "There is no module 'nowhere'"),
        ("gates = {", "guarantees = [{ max_drop = 2 }]\ngates = {", "largest drop"),
        ("gates = {", "guarantees = [{ max_loss = 0.1 }]\ngates = {", "max_loss"),
        ("gates = {", 'guarantees = [{ readout = "mood" }]\ngates = {', "no readout 'mood'"),
    ],
)
def test_a_bad_file_is_explained(tmp_path: Path, old: str, new: str, told: str) -> None:
    with pytest.raises(ls.UserError, match=told):
        changed(tmp_path, old, new)


def test_what_is_asked_wrongly_is_explained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = ["--out", str(tmp_path / "x")]
    assert main(["study", "run", "nowhere.toml", *out]) == 2
    assert "There is no file nowhere.toml; give a TOML file, or one of: demo" in capsys.readouterr().err
    assert main(["study", "report", str(TINY), *out]) == 2
    assert "Nothing of this study is analysed yet" in capsys.readouterr().err
    assert main(["study", "run", "paper", *out]) == 2
    assert "start it anyway with --force" in capsys.readouterr().err
    assert main(["study", "run", str(TINY), *out, "--device", "foo"]) == 2
    assert "There is no device 'foo'" in capsys.readouterr().err
    own = tmp_path / "x" / "mano-geometric0.3-fixed-s0"
    own.mkdir(parents=True)
    (own / "config.json").write_text("{}")
    assert main(["study", "run", str(TINY), *out]) == 2
    assert "is a run of its own" in capsys.readouterr().err
    (own / "config.json").unlink()
    gate = tmp_path / "gate"
    gate.mkdir()
    (gate / "manifest.json").write_text("{}")
    assert main(["study", "run", str(TINY), "--out", str(gate)]) == 2
    assert "holds a run, a recording or a gate" in capsys.readouterr().err
    (tmp_path / "file").write_text("mine")
    assert main(["study", "run", str(TINY), *out, "--store", str(tmp_path / "file")]) == 2
    assert "is a file" in capsys.readouterr().err
    assert not (tmp_path / "store").exists()
    assert main(["study", "run", str(TINY), *out, "--address", "auto"]) == 2
    assert "add --engine ray" in capsys.readouterr().err


def test_the_lists_decide_what_a_run_is(tmp_path: Path) -> None:
    gated = '"training.validation_sample=60", "model.gate=linear", "objective.name=learned_gate",'
    plan = changed(tmp_path, '"training.validation_sample=60",', gated)
    assert [model.training.settings.model.gate for model in plan.models[:4]] == ["none", "none", "linear", "linear"]
    with pytest.raises(ls.UserError, match="the lists of its runs decide this"):
        make_plan(str(TINY), ["training.seed=7"])
    final = changed(tmp_path, 'gate = ["none", "mlp"]\nprior = ["uniform"]', 'prior = ["final"]')
    assert final.models[-1].name == "parity-final-fixed-s0"
    assert final.models[-1].training.settings.objective.name == "final"


CUSTOM = """
from pathlib import Path
Path(__file__).with_name("imported").touch()
def last_two(loops, weight=1.0):
    return loops.cross_entropy[-1] + weight * loops.cross_entropy[-2]
def gated(loops):
    return (loops.cross_entropy * loops.gate_logits.softmax(0)).sum(0)
"""


def custom_study(tmp_path: Path, runs: str) -> Path:
    """The first part of the tiny study: its reference, and these runs."""
    text = TINY.read_text().replace("seed = [0, 1]\nfit = true\nextrapolate = true", "seed = [0]")
    path = tmp_path / "custom.toml"
    path.write_text(text[: text.index('[[parts.runs]]\ngate = ["linear"]')] + runs)
    return path


def test_objectives_of_one_s_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    module = tmp_path / "study_losses.py"
    module.write_text(CUSTOM)
    entry = '[[parts.runs]]\nobjective = ["study_losses:{}"]\n{}\n'
    weighted = entry.format("last_two", 'set = ["objective.options.weight=0.5"]')
    study = custom_study(tmp_path, weighted + entry.format("gated", 'gate = ["linear"]\nfit = true'))
    plan = make_plan(str(study), [])
    names = ["mano-geometric0.3-fixed-s0", "mano-last_two-weight0.5-s0", "mano-gated-linear-s0"]
    assert [model.name for model in plan.models] == names
    assert keys(plan, Train) == keys(make_plan(str(study), []), Train)
    module.write_text(CUSTOM + "# another text\n")
    after = make_plan(str(study), [])
    assert [old.training.key == new.training.key for old, new in zip(plan.models, after.models, strict=True)] == [
        True,
        False,
        False,
    ]
    assert not (tmp_path / "imported").exists()  # planning reads and runs nothing
    out = ["--out", str(tmp_path / "out")]
    assert main(["study", "run", str(study), *out]) == 0
    results = json.loads((tmp_path / "out" / "report" / "results.json").read_bytes())
    labels = [model["label"] for model in results["models"]]
    assert labels == [
        "fixed prior, geometric 0.3",
        "study_losses:last_two, weight 0.5",
        "study_losses:gated, linear gate",
    ]
    assert all((tmp_path / "out" / name / "model.safetensors").exists() for name in names)
    with pytest.raises(ls.UserError, match="the lists of its runs decide this"):
        make_plan(str(study), ["objective=final"])
    (tmp_path / "imported").unlink()
    capsys.readouterr()
    assert main(["study", "run", str(study), *out]) == 0  # all of it is there
    assert not (tmp_path / "imported").exists()


def test_gates_that_are_trained_apart(tmp_path: Path) -> None:
    """They have names of their own, and never stand in for a reference whose gate is trained jointly."""
    entry = '[[parts.runs]]\n{}gate = ["linear"]\nprior = [0.3]\nseed = [0]\n'
    both = entry.format("") + entry.format('objective = ["decoupled_gate"]\n')
    plan = make_plan(str(custom_study(tmp_path, both)), [])
    joint, decoupled = plan.models[-2:]
    assert (joint.name, decoupled.name) == (
        "mano-geometric0.3-linear-b0.1-s0",
        "mano-geometric0.3-decoupled-linear-b0.1-s0",
    )
    assert decoupled.training is not None
    assert decoupled.training.settings.objective.name == "decoupled_gate"
    assert joint.training is not None
    assert joint.training.settings.objective == msgspec.structs.replace(
        decoupled.training.settings.objective, name="learned_gate"
    )
    text = custom_study(tmp_path, entry.format('objective = ["decoupled_gate"]\n')).read_text()
    study = tmp_path / "other.toml"
    study.write_text(
        text.replace('reference = { gate = "none", prior = 0.3 }', 'reference = { gate = "linear", prior = 0.3 }')
    )
    with pytest.raises(ls.UserError, match="not among its runs with seed 0"):
        make_plan(str(study), [])


def test_a_study_says_first_what_is_wrong_with_an_objective(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "wrong_losses.py").write_text("def missing(loops): return loops.nothing\n")
    study = custom_study(tmp_path, '[[parts.runs]]\nobjective = ["wrong_losses:missing"]\n')
    with pytest.raises(ls.UserError, match=r"has no attribute 'nothing' \(wrong_losses.py, line 1\)"):
        run_study(make_plan(str(study), []), tmp_path / "store", silent)
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize("name", ["mano", "paper"])
def test_the_study_files_are_the_paper_s_variants(name: str) -> None:
    plan = make_plan(name, [])
    runs = [model.training.settings for model in plan.models]

    def settings(task: str, gate: str, prior: str, decoupled: bool = False) -> set[tuple[float, float, int]]:
        sought = (task, gate, prior, decoupled)
        return {
            (run.objective.geometric_lambda if prior == "geometric" else 0, run.objective.beta, run.training.seed)
            for run in runs
            for objective in [run.objective]
            if (type(run.task).__name__.lower(), run.model.gate, objective.prior, objective.name == "decoupled_gate")
            == sought
        }

    for task in ("mano", "parity"):
        for gate in ("none", "linear", "mlp"):
            for prior, lam in (("uniform", 0), ("geometric", 0.3)):
                assert {(lam, 0.1, seed) for seed in range(3)} <= settings(task, gate, prior)
    assert {lam for lam, _, _ in settings("mano", "none", "geometric")} == {0.2, 0.3, 0.5, 0.7}
    hosts = {
        (run.model.gate, run.objective.prior) for run, m in zip(runs, plan.models, strict=True) if m.analysis.gates
    }
    assert len(hosts) == 6
    assert {run.model.loops for run in runs} == {6}
    if name == "mano":
        for task, gate in product(("mano", "parity"), ("linear", "mlp")):
            for prior, lam in (("uniform", 0), ("geometric", 0.3)):
                assert settings(task, gate, prior, decoupled=True) == {(lam, 0.1, seed) for seed in range(3)}
        mano = [run for run in runs if run.task == runs[0].task]
        seeds = [run.training.seed for run in mano]
        assert max(seeds[30:]) == 0  # three seeds of the main settings come before the variants
        assert (len(mano), len(runs)) == (43, 73)
    else:
        betas = {beta for _, beta, _ in settings("mano", "linear", "uniform")}
        assert betas == {0.001, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5}
        assert {beta for _, beta, _ in settings("mano", "mlp", "uniform")} == {0.001, 0.01, 0.1, 0.2}
        pairs = {(lam, beta) for lam, beta, _ in settings("mano", "linear", "geometric")}
        assert pairs == {(lam, beta) for lam in (0.2, 0.3, 0.5, 0.7) for beta in (0.01, 0.05, 0.1)}
        pairs = {(lam, beta) for lam, beta, _ in settings("mano", "mlp", "geometric")}
        assert pairs == {(lam, beta) for lam in (0.2, 0.3, 0.5, 0.7) for beta in (0.05, 0.1)}
