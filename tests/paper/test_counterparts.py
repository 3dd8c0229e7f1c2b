"""Products: made where their models are there, with the paper's numbers beside, and all of them in the docs."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import random_trajectory
from msgspec.structs import replace
from pages import figure_of, table_of

import loopscope as ls
from loopscope.analysis.gaps import Gap
from loopscope.analysis.model_analysis import ModelRecordings, analyse_models
from loopscope.analysis.results import assemble_results
from loopscope.analysis.schema import FrontierResult, Latency, Machine, ModelResult, PolicyLatency, Results, Spread
from loopscope.paper.counterparts import OURO, PAPER, PRODUCTS
from loopscope.paper.published import published
from loopscope.paper.trained_tables import TaskVariants
from loopscope.report.products import OVERVIEW

GAP = Gap("kl", "kl", 0.5, 0.5, 2, 1, 1, 0.9, 1.1, 1, 1, 1, 60, 60)
DOCS = Path(__file__).parents[2] / "docs"


def run_of(gate: str, prior: Any, beta: float, seed: int, task: str, objective: str = "") -> tuple[str, dict[str, Any]]:
    """The name of a group of runs, and what the recordings of one of them say of it."""
    name = objective or ("fixed_prior" if gate == "none" else "learned_gate")
    shape = {"prior": "uniform" if prior == "uniform" else "geometric"}
    shape["geometric_lambda"] = 0.3 if prior == "uniform" else prior
    parts = {"task": {"name": task}, "model": {"gate": gate}, "training": {"seed": seed}}
    run = {**parts, "objective": {"name": name, "beta": beta, **shape}}
    return f"{task}-{name}-{gate}-{prior}-{beta}", {"run": run}


def source(gate: str, prior: Any, beta: float = 0.1, seed: int = 0, **changes: object) -> ModelRecordings:
    group, provenance = run_of(gate, prior, beta, seed, "mano")
    fields: dict[str, Any] = {"rows": 60, "provenance": provenance} | ({"gate_logits": None} if gate == "none" else {})
    places = ((9, "validation"), (5009, "test"))
    number = 100 * seed + int(1000 * beta)
    validation, test = (random_trajectory(number + k, split=split, **{**fields, **changes}) for k, split in places)
    return ModelRecordings(f"{group}-{seed}", validation, test, test if gate == "none" else None)


def fitted(frontiers: list[FrontierResult]) -> list[FrontierResult]:
    """With gates that were fitted to the trajectory, which do as its margin does."""
    (margin,) = [frontier for frontier in frontiers if frontier.readout == "margin"]
    return [*frontiers, *(replace(margin, readout=f"gate:{kind}-utility") for kind in ("linear", "mlp"))]


def timed(kind: str, seed: int, **loops: float) -> Latency:
    """A run of the geometric prior, timed where half of the saved loops is saved time; the others are not."""

    def way(readout: str, average: float, speedup: float) -> PolicyLatency:
        spread = Spread(speedup, speedup - 0.1, speedup + 0.1)
        return PolicyLatency(readout, None, 0.9, average, Spread(0.06 / speedup, 0.01, 0.07), spread, 0)

    ways = [way("fixed", 4.0, 1.0), *(way(name, average, 0.5 * 4 / average) for name, average in loops.items())]
    group, _ = run_of(kind, 0.3, 0.1, seed, "mano")
    return Latency(f"{group}-{seed}", None, 60, 4, Machine(1, 5, 8, Spread(1.0, 1.0, 1.0), [1.0]), ways)


@pytest.fixture(scope="module")
def results() -> Results:
    """A whole study, of which a model with a gate and one without are analysed; the others are called otherwise."""
    sources = [source("none", 0.3, rows=120), source("mlp", 0.3)]  # enough for a stopper
    made = analyse_models(sources, None, [0.5, 0.9])[0]

    def variant(
        gate: str, prior: Any, seed: int = 0, task: str = "mano", beta: float = 0.1, **more: str
    ) -> ModelResult:
        known = made.models[gate != "none"]
        group, provenance = run_of(gate, prior, beta, seed, task, **more)
        grid = replace(known.paper_grid, frontiers=fitted(known.paper_grid.frontiers))
        names = {"name": f"{group}-{seed}", "group": group, "provenance": provenance}
        return replace(known, **names, frontiers=fitted(known.frontiers), paper_grid=grid)

    models = [
        variant(gate, prior, seed, task)
        for task in ("mano", "parity")
        for gate in ("none", "linear", "mlp")
        for prior in ("uniform", 0.3)
        for seed in (0, 1)
    ]
    models += [variant("linear", "uniform", beta=0.5), variant("none", 0.7)]
    models += [variant("mlp", 0.3, objective=objective) for objective in ("decoupled_gate", "gate_channels")]
    models[-1].provenance["run"]["objective"]["gate_weight"] = 0.5
    models[-1] = replace(models[-1], diagnosis=dataclasses.replace(models[-1].diagnosis, trajectory_gap=GAP))
    latency = [
        timed("none", 0, top1=1.2, margin=1.5),
        timed("none", 1, top1=1.4, margin=1.5),
        timed("mlp", 0, gate=2.0),
    ]
    return assemble_results(models, made.targets, latency)


def test_all_products_are_made_of_a_whole_study(results: Results) -> None:
    made = {product.name for product in PRODUCTS.make(results, ["paper", "overview"])}
    assert made == set(PRODUCTS.recipes) - set(OURO) - {"posthoc_gaps", "certified", "transfer", "gate_stages"}
    assert PRODUCTS.names(["overview", "teaser", "headline"]) == [*OVERVIEW.recipes, "decoupled_gate", "teaser"]


def test_the_paper_s_numbers_stand_beside_ours(results: Results) -> None:
    (gates,) = PRODUCTS.make(results, ["gate_summary"])
    assert gates.paper == "table 2"
    rows = {(row[0], row[1]): row for row in table_of(PRODUCTS, results, "gate_summary").rows}
    mlp = rows["MLP gate, geometric 0.3, β 0.1 (2 seeds)", "gate"]
    assert mlp[-3:] == ["3.58 ± 0.36", "N/A", "N/A"]
    assert "(2 of 2)" in mlp[2]
    assert "[" in mlp[2]
    assert rows["fixed prior, geometric 0.7 (1 seed)", "margin"][-3:] == ["", "", ""]
    assert table_of(PRODUCTS, results, "parity_summary").rows[0][-3:] == ["top1", "99.6 ± 0.7 %", "1.30 ± 0.17"]


def test_times_of_trained_runs_stand_beside_the_paper_s(results: Results) -> None:
    (product,) = PRODUCTS.make(results, ["mano_latency"])
    assert product.paper == "table 4b"
    rows = {(row[1], row[2]): row[3:] for row in table_of(PRODUCTS, results, "mano_latency").rows}
    fixed, gate = "fixed prior, geometric 0.3 (2 seeds)", "MLP gate, geometric 0.3, β 0.1 (1 seed)"
    assert list(rows) == [*((fixed, name) for name in ("fixed", "top1", "margin")), (gate, "fixed"), (gate, "gate")]
    over = ["90.0 ± 0.0 %", "1.30 ± 0.14 (2 of 2)", "0.036 [0.01, 0.07]"]
    speedup = "1.55 ± 0.17 (2 of 2); 1.67 [1.57, 1.77]"
    assert rows[fixed, "top1"] == [*over, speedup, "50 %", "100.0 % at 1.26, 0.049 ms, 1.36"]
    assert rows[gate, "gate"][1:] == [
        "2.00",
        "0.06 [0.01, 0.07]",
        "1 [0.9, 1.1]",
        "50 %",
        "75.4 % at 1.59, 0.053 ms, 1.24",
    ]
    assert rows[gate, "fixed"][-1].startswith("76.1 % at 6.00")


def test_the_best_beta_is_validation_s_choice_on_the_seeds_that_all_have() -> None:
    good = [[9.0, 9.0, 9.0, 9.0]] * 60  # exits at once
    late = [[-9.0, -9.0, -9.0, 9.0]] * 60
    sources = [
        source("linear", 0.3, beta=0.1, seed=0, gate_logits=late),
        source("linear", 0.3, beta=0.1, seed=1, gate_logits=good),
        source("linear", 0.3, beta=0.5, seed=0, gate_logits=good),
    ]
    chosen = TaskVariants(analyse_models(sources, None, [0.2])[0], "mano")
    best = chosen.best("linear", 0.3)
    assert best is not None
    assert best.beta == 0.5
    assert chosen.best("mlp", 0.3) is None


def test_a_decoupled_gate_stands_beside_the_joint_one_the_fitted_one_and_the_fixed_prior() -> None:
    def recorded(gate: str, task: str, seed: int, objective: str, beta: float = 0.1, **more: Any) -> ModelRecordings:
        """Right from loop 2 on, but for one example in ten."""
        made = []
        for split in ("validation", "test"):
            labels = np.random.default_rng([seed, len(split)]).integers(0, 5, 60)
            answers = np.where(np.arange(4) > 0, labels[:, None], labels[:, None] + 1)
            answers[:6] = labels[:6, None] + 1
            group, provenance = run_of(gate, 0.3, beta, seed, task, objective)
            made.append(ls.Trajectory(labels=labels, predictions=answers, split=split, provenance=provenance, **more))
        return ModelRecordings(f"{group}-{seed}", *made)

    def opens(loop: int) -> dict[str, Any]:
        """At loop 1 or at this one, whatever the threshold; its CDF stays what it is in between."""
        return {"gate_logits": np.tile([-9.0, *(9.0 if each >= loop else -1e3 for each in (2, 3, 4))], (60, 1))}

    fitted = {f"gate:{kind}": np.tile([0.0, *after], (60, 1)) for kind, after in (("a", [0, 1, 1]), ("b", [0, 0, 1]))}
    sources = []
    for task, seed in (("mano", 0), ("mano", 1), ("parity", 0)):
        sources.append(recorded("linear", task, seed, "decoupled_gate", **opens(2)))
        sources.append(recorded("linear", task, seed, "learned_gate", **opens(3 + seed)))
        sources.append(recorded("none", task, seed, "fixed_prior", signals=fitted))
    sources.append(recorded("linear", "mano", 0, "learned_gate", beta=0.5, **opens(2)))
    sources.append(recorded("mlp", "mano", 0, "decoupled_gate", **opens(2)))  # no joint gate of its kind: no row
    results = analyse_models(sources, None, [0.85, 0.99])[0]
    own, gate, fixed = "its own gate", "linear gate, geometric 0.3, β", "fixed prior, geometric 0.3"
    assert table_of(PRODUCTS, results, "decoupled_gate").rows == [
        ["mano", f"decoupled {gate} 0.1 (2 seeds)", own, "2.00 ± 0.00 (2 of 2)", "N/A", ""],
        ["mano", f"{gate} 0.1 (2 seeds)", own, "3.50 ± 0.71 (2 of 2)", "N/A", "1.50 ± 0.71 (2 of 2)"],
        ["mano", f"{gate} 0.5 (1 seed)", own, "2.00", "N/A", "0.00"],
        ["mano", f"{fixed} (2 seeds)", "best single readout", "2.00 ± 0.00 (2 of 2)", "N/A", "0.00 ± 0.00 (2 of 2)"],
        ["mano", f"{fixed} (2 seeds)", "best fitted gate", "3.00 ± 0.00 (2 of 2)", "N/A", "1.00 ± 0.00 (2 of 2)"],
        ["parity", f"decoupled {gate} 0.1 (1 seed)", own, "2.00", "N/A", ""],
        ["parity", f"{gate} 0.1 (1 seed)", own, "3.00", "N/A", "1.00"],
        ["parity", f"{fixed} (1 seed)", "best single readout", "2.00", "N/A", "0.00"],
        ["parity", f"{fixed} (1 seed)", "best fitted gate", "3.00", "N/A", "1.00"],
    ]


def test_ouro_s_stages_stand_on_one_trajectory(results: Results) -> None:
    """A joint gate, a gate fitted afterwards to the same runs, and the decoupled gate that both are compared with."""
    rows = table_of(PRODUCTS, results, "gate_stages").rows
    joint, decoupled = "MLP gate, geometric 0.3, β 0.1 (2 seeds)", "decoupled MLP gate, geometric 0.3, β 0.1 (1 seed)"
    fixed = "fixed prior, geometric 0.3 (2 seeds)"
    assert [row[1:3] for row in rows] == [
        [joint, "its own gate"],
        [joint, "best fitted gate"],
        [decoupled, "its own gate"],
        [fixed, "best fitted gate"],
        [fixed, "best single readout"],
    ]
    assert rows[2][-1] == ""
    assert rows[0][-1] == "0.00"  # in these results a joint run and a decoupled one are the same recordings
    assert rows[0][3] != rows[1][3]


def test_panels_of_gates_say_whose_oracle_and_fixed_depth_they_show(results: Results) -> None:
    def notes(name: str) -> list[str]:
        """What each panel says in its corner."""
        panels = [each for each in figure_of(PRODUCTS, results, name)["vconcat"][0]["concat"] if "title" in each]
        rows = [[row for layer in each["layer"] for row in layer.get("data", {}).get("values", [])] for each in panels]
        return [" ".join(row["text"] for row in reversed(found) if "text" in row) for found in rows]

    fixed = [f"fixed, oracle, readouts: fixed prior, {prior}" for prior in ("uniform", "geometric 0.3")]
    for name in ("gate_comparison", "linear_gate_comparison", "mlp_gate_comparison", "parity_frontiers", "teaser"):
        found = notes(name)
        assert found
        assert all(any(text.startswith(each) for each in fixed) for text in found)
    for name in ("posthoc_main", "posthoc_fixed", "posthoc_linear", "posthoc_mlp"):
        assert all(text.startswith("fixed, oracle: this trajectory") for text in notes(name))


def test_one_model_gives_what_it_can() -> None:
    alone = analyse_models([source("linear", 0.3)], None, [0.9])[0]
    names = [product.name for product in PRODUCTS.make(alone, ["paper"])]
    shown = {"headline", "diagnosis", "gate_summary", "main_forced_exits", "main_exit_distributions", "paired"}
    assert set(names) == shown | {"all_forced_exits", "all_exit_distributions", "depths", "forced"}


def test_every_table_and_figure_of_the_paper_is_in_the_docs() -> None:
    page = (DOCS / "how-to" / "paper.md").read_text()
    for each in (*published().tables, *published().figures):
        (row,) = [line for line in page.splitlines() if f"`{each.label}`" in line]
        assert all(f"`{name}`" in row for name in each.products)
        assert set(each.products) <= set(PAPER | OURO)
    assert all(f"`{name}`" in page for name in PAPER | OURO)


def test_only_what_stands_beside_the_paper_s_numbers_is_on_its_grid(results: Results) -> None:
    names = [*PAPER, "headline", "depths"]
    notes = {product.name: product.note for product in PRODUCTS.make(results, names)}
    on_grid = {name for name, note in notes.items() if note.endswith("hundredths of a loop.")}
    assert {"fixed_prior_summary", "gate_summary", "teaser", "parity_frontiers"} <= on_grid
    assert not on_grid & {"decoupled_gate", "main_signals", "uniform_ordering", "headline", "depths"}
