"""Study files: which runs they list, and what is wrong with one is said before anything is made."""

from itertools import product
from pathlib import Path

import pytest
from tiny_study import TINY, changed, one_run, planned

import loopscope as ls
from loopscope.config import plain
from loopscope.studies.study_file import expand_study


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("prior = [0.3]\nseed", "prior = [1.3]\nseed", "runs"),
        ('reference = { gate = "none", prior = 0.3 }', "reference = { prior = 0.2 }", "not among its runs with seed 0"),
        ("beta = [0.1, 0.5]", 'beta = [0.1]\nname = "../x"', "name"),
        ("beta = [0.1, 0.5]", 'beta = [0.1, 0.5]\nname = "x"', "lists the run 'x' twice"),
        ('prior = ["uniform"]', 'prior = ["final"]', "needs a prior over all loops"),
        ('prior = ["uniform"]', 'prior = ["uniform"]\nfit = true', "fits gates"),
        ("examples = 200, steps", "examples = 2000, steps", "gates.examples asks for 2,000 examples"),
        ("model.block_size=11", "model.block_size=7", "leaves no room"),
        ('gate = ["linear"]\nprior = [0.3]', 'gate = ["none"]\nprior = [0.3]', "lists the run"),
        ('settings = "demo-parity"', 'settings = "nowhere"', "There is no preset"),
        ('settings = "demo-parity"', 'settings = "demo-parity"\nunseen = true', "stored training examples"),
        ('gate = ["linear"]\n', 'gate = ["linear"]\nobjective = ["m:f"]\n', "prior and beta are of the built-in"),
        ('gate = ["none", "mlp"]\nprior = ["uniform"]', 'objective = ["final"]', "does not list 'final'"),
        ('gate = ["none", "mlp"]\nprior = ["uniform"]', 'objective = ["decoupled_gate", "m:f"]', "of its own"),
        ('gate = ["none", "mlp"]', 'objective = ["decoupled_gate"]', "act need model.gate = 'linear'"),
        ('gate = ["none", "mlp"]', 'objective = ["random_depth"]\ngate_weight = [0.5]', "without a list of objectives"),
        ('gate = ["none", "mlp"]', 'objective = ["gate_channels"]', "does not list 'gate_channels'"),
        ('prior = ["uniform"]', 'prior = ["unifrom"]', "there is no prior 'unifrom'"),
        ('gate = ["none", "mlp"]\nprior = ["uniform"]', 'objective = ["act"]\nprior = [0.3]', "act has no prior"),
        ('prior = ["uniform"]', 'prior = ["nowhere:f"]', "There is no module 'nowhere'"),
        ('gate = ["none", "mlp"]', "gate_weight = [1.5]", "expected a number <= 1"),
        ('gate = ["none", "mlp"]\nprior = ["uniform"]', 'objective = ["nowhere:f"]', "There is no module 'nowhere'"),
        ("gates = {", "guarantees = [{ max_drop = 2 }]\ngates = {", "max_drop: expected a number < 1"),
        ("gates = {", 'guarantees = [{ readout = "mood" }]\ngates = {', "no readout 'mood'"),
        ("gates = {", 'guarantees = [{ readout = "oracle" }]\ngates = {', "cannot be guaranteed"),
    ],
)
def test_a_bad_file_is_explained(tmp_path: Path, old: str, new: str, told: str) -> None:
    with pytest.raises(ls.UserError, match=told):
        planned(changed(tmp_path, old, new))


def test_the_lists_decide_what_a_run_is(tmp_path: Path) -> None:
    gated = '"training.validation_sample=60", "model.gate=linear", "objective.name=learned_gate",'
    mano, _ = expand_study(str(changed(tmp_path, '"training.validation_sample=60",', gated))).runs
    assert [run.settings.model.gate for run in mano] == ["none", "none", "linear", "linear"]
    for decided in ("training.seed=7", "objective=final"):
        with pytest.raises(ls.UserError, match="the lists of its runs decide this"):
            expand_study(str(TINY), [decided])
    final = changed(tmp_path, 'gate = ["none", "mlp"]\nprior = ["uniform"]', 'prior = ["final"]')
    (run,) = expand_study(str(final)).runs[1]
    assert (run.name, run.settings.objective.name) == ("parity-final-fixed-s0", "final")


def test_gates_that_are_trained_apart(tmp_path: Path) -> None:
    """They have names of their own, and never stand in for a reference whose gate is trained jointly."""
    entry = '[[parts.runs]]\n{}gate = ["linear"]\nprior = [0.3]\nseed = [0]\n'
    apart = entry.format('objective = ["decoupled_gate"]\n')
    ((_, joint, decoupled),) = expand_study(str(one_run(tmp_path, entry.format("") + apart))).runs
    assert joint.name == "mano-geometric0.3-linear-b0.1-s0"
    assert decoupled.name == "mano-geometric0.3-decoupled-linear-b0.1-s0"
    assert (joint.settings.objective.name, decoupled.settings.objective.name) == ("learned_gate", "decoupled_gate")
    study = one_run(tmp_path, apart)
    study.write_text(study.read_text().replace('reference = { gate = "none"', 'reference = { gate = "linear"'))
    with pytest.raises(ls.UserError, match="not among its runs with seed 0"):
        planned(study)


def test_the_channels_of_a_gate_are_lists(tmp_path: Path) -> None:
    """Every run once, under names that tell them apart; joint training and a decoupled gate keep theirs."""
    entry = """[[parts.runs]]
gate = ["none", "mlp"]
prior = [0.3]
gate_weight = [0, 0.25, 1]
gate_gradient = [0, 1]
"""
    study = one_run(tmp_path, entry)
    text = study.read_text()
    study.write_text(text[: text.index("[[parts.runs]]")] + entry)
    ((*runs,),) = expand_study(str(study)).runs
    assert [run.name.removeprefix("mano-geometric0.3-") for run in runs] == [
        "fixed-s0",
        "decoupled-mlp-b0.1-s0",
        *("mlp-w0-g1-b0.1-s0", "mlp-w0.25-g0-b0.1-s0", "mlp-w0.25-g1-b0.1-s0", "mlp-w1-g0-b0.1-s0", "mlp-b0.1-s0"),
    ]
    assert [run.settings.objective.channels for run in runs[1:]] == [*product((0, 0.25, 1), (0, 1))]
    assert len(planned(study).models) == 7
    study.write_text(
        study.read_text() + '\n[[parts.runs]]\nobjective = ["decoupled_gate"]\ngate = ["mlp"]\nprior = [0.3]\n'
    )
    with pytest.raises(ls.UserError, match=r"lists the run '.*decoupled-mlp-b0\.1-s0' twice"):
        planned(study)


def test_priors_of_one_s_own_and_act_have_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "priors_of_a_study.py").write_text("def late(loops, step, steps):\n    return [0.0, 0.25, 0.75]\n")
    monkeypatch.syspath_prepend(tmp_path)
    entry = """[[parts.runs]]
prior = [0.3, "priors_of_a_study:late", [0.5, 0.25, 0.25]]

[[parts.runs]]
objective = ["act"]
gate = ["linear", "mlp"]
beta = [0.01]
"""
    study = one_run(tmp_path, entry)
    text = study.read_text()
    study.write_text(text[: text.index("[[parts.runs]]")].replace("reference", "# reference") + entry)
    ((*runs,),) = expand_study(str(study)).runs
    assert [run.name for run in runs] == [
        *("mano-geometric0.3-fixed-s0", "mano-late-fixed-s0", "mano-weights0.5_0.25_0.25-fixed-s0"),
        *("mano-act-linear-b0.01-s0", "mano-act-mlp-b0.01-s0"),
    ]
    late, weights, act = (run.settings.objective for run in (*runs[1:3], runs[4]))
    assert (late.prior, weights.prior) == ("priors_of_a_study:late", (0.5, 0.25, 0.25))
    assert late.prior_sha256
    assert plain(act) == {"name": "act", "beta": 0.01}


@pytest.mark.parametrize("name", ["mano", "paper"])
def test_the_study_files_are_the_paper_s_variants(name: str) -> None:
    every = [run for runs in expand_study(name).runs for run in runs]
    runs = [run.settings for run in every]

    def variants(task: str, gate: str, prior: str, decoupled: bool = False) -> set[tuple[float, float, int]]:
        """Lambda (0 of a uniform prior), beta and seed of the runs."""
        found = set()
        for run in runs:
            objective, task_name = run.objective, type(run.task).__name__.lower()
            is_decoupled = objective.name == "decoupled_gate"
            if (task_name, run.model.gate, objective.prior, is_decoupled) == (task, gate, prior, decoupled):
                lam = objective.geometric_lambda if prior == "geometric" else 0
                found.add((lam, objective.beta, run.training.seed))
        return found

    for task, gate in product(("mano", "parity"), ("none", "linear", "mlp")):
        for prior, lam in (("uniform", 0), ("geometric", 0.3)):
            seeds = {(lam, 0.1, seed) for seed in range(3)}
            assert seeds <= variants(task, gate, prior)
            apart = seeds if name == "mano" and gate != "none" else set()
            assert variants(task, gate, prior, decoupled=True) == apart
    assert {lam for lam, _, _ in variants("mano", "none", "geometric")} == {0.2, 0.3, 0.5, 0.7}
    assert len({(run.settings.model.gate, run.settings.objective.prior) for run in every if run.of.fit}) == 6
    assert {run.model.loops for run in runs} == {6}
    if name == "mano":
        mano = [run for run in runs if run.task == runs[0].task]
        assert max(run.training.seed for run in mano[30:]) == 0  # three seeds of the main settings come first
        assert (len(mano), len(runs)) == (43, 73)
        return
    betas = {gate: {beta for _, beta, _ in variants("mano", gate, "uniform")} for gate in ("linear", "mlp")}
    assert betas == {"linear": {0.001, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5}, "mlp": {0.001, 0.01, 0.1, 0.2}}
    for gate, swept in (("linear", (0.01, 0.05, 0.1)), ("mlp", (0.05, 0.1))):
        pairs = {(lam, beta) for lam, beta, _ in variants("mano", gate, "geometric")}
        assert pairs == set(product((0.2, 0.3, 0.5, 0.7), swept))


def test_the_models_of_the_demo() -> None:
    ((*runs,),) = expand_study("demo").runs
    models = {run.name: run.settings for run in runs}
    assert list(models) == ["fixed-geometric", "fixed-uniform", "linear-gate", "mlp-gate", "decoupled-gate"]
    assert models["fixed-uniform"].objective.prior == "uniform"
    assert (models["linear-gate"].model.gate, models["linear-gate"].objective.beta) == ("linear", 0.1)
    task = models["fixed-geometric"].task
    assert task.space(task.levels[-1]) >= 10_000
    assert task.disjoint
    with pytest.raises(ls.UserError, match="stored training examples"):
        planned("demo", "task.train_examples=0")
