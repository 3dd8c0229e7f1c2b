"""Plans of studies: by what makes what, with names in a folder that no other study takes over."""

import json
import re
from pathlib import Path

import pytest
from pretended_device import pretended_device
from tiny_study import GATE, TINY, changed, finished, one_run, planned, timed_runs

import loopscope as ls
from loopscope.cli import main
from loopscope.studies.executors import do_step
from loopscope.studies.plan import Plan
from loopscope.studies.steps import Analyse, Certify, Fit, Record, Step, TimeTask, Train, Transfer, missing_steps

__all__ = ["finished"]


def keys(plan: Plan, kind: type[Step]) -> set[str]:
    return {step.key for step in plan.steps if isinstance(step, kind)}


def test_a_plan_has_every_step_once_and_in_order() -> None:
    steps = planned(TINY).steps
    assert [sum(isinstance(step, kind) for step in steps) for kind in (Train, Record, Fit, Analyse)] == [6, 16, 4, 6]
    for plan in (planned(TINY), planned("ouro")):
        seen: set[str] = set()
        for step in plan.steps:
            assert step.key not in seen
            assert seen >= {need.key for need in step.needs}
            seen.add(step.key)


@pytest.mark.parametrize("study", ["mano", "paper"])
def test_a_plan_names_every_run_in_80_columns(
    study: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["study", "plan", study, "--store", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    models = planned(study).models
    rows = {tuple(line.split()[:2]) for line in out.splitlines()}
    assert {(model.name, model.training.key[4:12]) for model in models if model.training} <= rows
    assert all(model.name in out.partition("measured against")[2] for model in models if model.analysis.is_reference)


def test_the_time_of_a_study_is_that_of_gpus_where_no_cpu_trains_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def said(study: str | Path, *words: str) -> str:
        assert main(["study", "plan", str(study), "--store", str(tmp_path), *words]) == 0
        return " ".join(capsys.readouterr().out.split())

    whole = "5,160,000 training steps are to be done: 36.5 EFLOP"
    assert f"{whole}, about 254 GPU hours at 40 TFLOP/s." in said("paper", "--tflops", "40")
    assert f"{whole}, about 81 to 254 GPU hours at 125 to 40 TFLOP/s, which is an estimate" in said("paper")
    training = json.loads(said("paper", "--tflops", "80", "--json"))["training"]
    assert training["steps"] == 129 * 40_000
    assert training["flop"] == pytest.approx(111 * 0.261e18 + 18 * 0.4205e18, rel=1e-3)
    assert training["gpu_hours"] == pytest.approx(training["flop"] / 80e12 / 3600)
    assert "of this machine's CPU" in said(TINY)
    with pretended_device():
        measured = said(TINY, "--device", "cuda:0", "--set", "training.bf16=false")
    assert re.search(r"GPU hours at the \S+ TFLOP/s measured on cuda:0", measured)


def test_a_change_reaches_what_depends_on_it_and_nothing_else(tmp_path: Path) -> None:
    plan = planned(TINY)
    targets = planned(changed(tmp_path, "targets = [0.2, 0.9]", "targets = [0.3]"))
    assert keys(targets, Train | Record | Fit) == keys(plan, Train | Record | Fit)
    assert not keys(targets, Analyse) & keys(plan, Analyse)
    fits = planned(changed(tmp_path, "steps = 20", "steps = 21"))
    assert keys(fits, Train | Record) == keys(plan, Train | Record)
    assert not keys(fits, Fit) & keys(plan, Fit)
    assert len(keys(fits, Analyse) & keys(plan, Analyse)) == 4  # those without fitted gates
    betas = planned(changed(tmp_path, "beta = [0.1, 0.5]", "beta = [0.1, 0.7]"))
    assert len(keys(betas, Train) & keys(plan, Train)) == 5
    steps = planned(changed(tmp_path, "training.steps=4", "training.steps=5"))
    assert len(keys(steps, Train) & keys(plan, Train)) == 4
    assert not keys(planned(TINY, "training.batch_size=7"), Train) & keys(plan, Train)
    assert not keys(planned(TINY, arithmetic="cpu, 2 threads"), Train) & keys(plan, Train)


def test_runs_are_timed_by_how_they_were_trained(tmp_path: Path) -> None:
    plan, text = planned(timed_runs(tmp_path)), timed_runs(tmp_path).read_text()
    timings = [model.timing for model in plan.models]
    assert [timing and timing.of for timing in timings] == [model.training for model in plan.models]  # of both seeds
    untimed = changed(tmp_path, 'latency = [{ gate = "none", prior = 0.3 }]\n', "", text)
    assert keys(plan, Step) - keys(plan, TimeTask) == keys(planned(untimed), Step)
    gated = changed(tmp_path, 'latency = [{ gate = "none"', 'latency = [{ gate = "mlp"', text)
    with pytest.raises(ls.UserError, match="gate = 'mlp', prior = 0.3, and no run of the part is trained so"):
        planned(gated)


def test_guarantees_are_made_or_refused_and_a_changed_one_is_certified_anew(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store, run = finished / "store", tmp_path / "out" / "mano-geometric0.3-fixed-s0"
    linked = finished / "tiny" / run.name  # the folder of the whole study
    validation, test = (str(linked / "recordings" / split) for split in ("validation", "test"))
    assert main(["sweep", validation, test, "--fitted", str(linked / "gates" / "linear-ponder"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["readouts"][-1]["readout"] == "gate:linear-ponder"

    def certified(guarantees: str) -> tuple[list[str], dict[str, Path]]:
        """The steps that this takes, and the files that lead to its policies."""
        plan = planned(one_run(tmp_path, "", guarantees))
        steps = missing_steps([model.analysis for model in plan.models], store)
        for step in steps:
            do_step(step, store, "cpu")
        plan.link(store, tmp_path / "out")
        (model,) = plan.results(store).models
        results.append(model)
        policies.extend(plan.models[0].analysis.policies)
        return [step.kind for step in steps], {path.name: path.readlink() for path in run.glob("policy*")}

    results: list[object] = []
    policies: list[Certify] = []
    several = f"{{ {GATE} }}, {{ max_drop = 0.01 }}, {{ max_drop = 0.4, in_expectation = true }}"
    steps, files = certified(several)
    assert steps == ["policy", "policy", "policy", "analysis"]
    assert sorted(name.split("-")[0] for name in files) == ["policy", "policy.gate", "policy.json"]
    model = results[0]
    assert [each.guarantee.max_drop for each in model.certified] == [0.3, 0.4]
    assert all(each.held_out.guarantee.verdict for each in model.certified)
    (sentence,) = model.refused
    assert "takes 299 tested examples, and there are 96" in sentence
    loaded = [ls.ExitPolicy.load(run / name) for name in ("policy.json", "policy-2.json")]
    assert [policy.threshold for policy in loaded] == [each.threshold for each in model.certified]
    assert (loaded[0].readout, loaded[0].model) == ("gate:linear-ponder", ls.load_model(run).weights_sha256)
    assert main(["check", str(run / "recordings" / "test"), "--policy", str(run / "policy.json")]) == 0
    assert "Kept: " in capsys.readouterr().out
    steps, other = certified(f"{{ {GATE}, loss = 'disagreement' }}")
    assert steps == ["policy", "analysis"]
    assert files["policy.json"] != other["policy.json"]
    assert "policy-2.json" not in other
    steps, refused = certified("{ max_drop = 0.01 }")
    assert steps == ["analysis"]  # the refusal is there already
    assert refused == {}  # an old guarantee does not stay
    file = policies[0].folder(store) / "policy.json"
    file.write_bytes(file.read_bytes().replace(b"gap", b"gab"))
    with pytest.raises(ls.UserError, match="does not have the hash of its manifest"):
        policies[0].result(store)


def test_a_study_with_other_settings_takes_another_folder(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = finished / "tiny"
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}

    def refused(*words: object) -> str:
        capsys.readouterr()
        assert main([*map(str, words), "--out", str(out), "--store", str(finished / "store")]) == 2
        (sentence,) = capsys.readouterr().err.splitlines()
        assert sentence.endswith("; choose another --out.")
        return sentence

    for kind in ("run", "report"):
        sentence = refused("study", kind, TINY, "--set", "training.batch_size=7")
        assert "run 'mano-geometric0.3-fixed-s0' has other settings (training.batch_size)" in sentence
    assert "was made otherwise" in refused("study", "run", TINY, "--threads", 2)
    assert "holds another study, with 'mano-geometric0.3-fixed-s0'" in refused("demo")
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before
    # one that grows or shrinks, and is measured otherwise, keeps its folder
    planned(changed(tmp_path, "targets = [0.2, 0.9]", "targets = [0.3]")).check_folder(out)
    planned(changed(tmp_path, "beta = [0.1, 0.5]", "beta = [0.1, 0.5, 0.7]")).check_folder(out)
    planned(TINY).check_folder(out)
    own = tmp_path / "x" / "mano-geometric0.3-fixed-s0"
    own.mkdir(parents=True)
    (own / "config.json").write_text("{}")
    with pytest.raises(ls.UserError, match="is a run of its own"):
        planned(TINY).check_folder(tmp_path / "x")


def test_rules_are_transferred_between_the_runs_that_a_study_lists(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A step a run, which reads recordings and gates alone; what was refused is said in the table."""
    store, listed = finished / "store", ["mano-geometric0.3-fixed-s0", "mano-geometric0.3-fixed-s1"]
    others = [*listed, "parity-uniform-fixed-s0"]

    def study(*names: str) -> Path:
        return changed(tmp_path, 'title = "Tiny"', f'title = "Tiny"\ntransfer = {json.dumps(names)}')

    plan = planned(study(*others))
    steps = missing_steps([step for model in plan.models for step in model.goals], store)
    assert [step.kind for step in steps] == ["transfer"] * 3
    assert not any(isinstance(need, Analyse) for step in steps for need in step.needs)
    assert plan.results(store).transfer == []
    for step in steps[:2]:
        do_step(step, store, "cpu")
    found = plan.results(store).transfer
    assert {(each.fitted_on, each.stops) for each in found} == {(a, b) for a in listed for b in others}
    readouts = {each.readout for each in found if each.fitted_on == listed[0]}
    assert {"gate:linear-ponder", "gate:linear-utility"} < readouts
    refused = {each.refused for each in found if each.stops == others[-1] and each.readout.startswith("gate:")}
    assert all("keeps none; record it with --hidden" in sentence or "No verdict" in sentence for sentence in refused)
    assert len(missing_steps([step for model in plan.models for step in model.goals], store)) == 1
    assert not keys(planned(study(*listed)), Transfer) & keys(plan, Transfer)  # onto others
    assert keys(planned(study("mano-*-fixed-*", others[-1])), Transfer) == keys(plan, Transfer)
    words = ("--out", str(finished / "tiny"), "--store", str(store), "--product", "transfer")
    assert main(["study", "report", str(study(*others)), *words]) == 0
    assert "Rules across trajectories" in capsys.readouterr().out
    for names, sentence in (([*listed, "nothing"], "transfers 'nothing'"), (listed[:1], "list two runs or more")):
        with pytest.raises(ls.UserError, match=sentence):
            planned(study(*names))
