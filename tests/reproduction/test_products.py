"""Products: made where their models are there, with the paper's numbers beside, and all of them in the docs."""

from pathlib import Path

import pytest
from conftest import random_trajectory

import loopscope as ls
from loopscope.analysis.model_analysis import ModelRecordings, analyse_models
from loopscope.analysis.schema import Results
from loopscope.report.products import OVERVIEW
from loopscope.reproduction.products import OURO, PAPER, PRODUCTS
from loopscope.reproduction.published import published
from loopscope.reproduction.variants import TaskVariants

DOCS = Path(__file__).parents[2] / "docs"


def settings(gate: str, prior: object, beta: float, seed: int, task: str) -> dict[str, object]:
    geometric = {"prior": "geometric", "geometric_lambda": prior}
    objective = {"prior": "uniform", "geometric_lambda": 0.3} if prior == "uniform" else geometric
    name = "fixed_prior" if gate == "none" else "learned_gate"
    return {
        "task": {"name": task},
        "model": {"gate": gate},
        "objective": {"name": name, "beta": beta, **objective},
        "training": {"seed": seed},
    }


def source(
    gate: str, prior: object, beta: float = 0.1, seed: int = 0, task: str = "mano", **changes: object
) -> ModelRecordings:
    provenance = {"run": settings(gate, prior, beta, seed, task)}
    number = 100 * seed + int(1000 * beta) + len(gate) + len(str(prior))
    more = {"gate_logits": None} if gate == "none" else {}
    validation, test = (
        random_trajectory(seed=number + k, split=split, provenance=provenance, rows=60, **{**more, **changes})
        for k, split in ((0, "validation"), (5000, "test"))
    )
    return ModelRecordings(f"{task}-{gate}-{prior}-{beta}-{seed}", validation, test, test if gate == "none" else None)


@pytest.fixture(scope="module")
def results() -> Results:
    sources = [
        source(gate, prior, seed=seed, task=task)
        for task in ("mano", "parity")
        for gate in ("none", "linear", "mlp")
        for prior in ("uniform", 0.3)
        for seed in (0, 1)
    ]
    sources += [source("linear", "uniform", beta=0.5), source("none", 0.7)]
    return analyse_models(sources, None, [0.5, 0.9])[0]


def test_all_products_are_made_of_a_whole_study(results: Results) -> None:
    made = {product.name for product in PRODUCTS.make(results, ["paper", "overview"])}
    fitted = {"posthoc_main", "posthoc_summary", "posthoc_gaps", "posthoc_fixed", "posthoc_linear", "posthoc_mlp"}
    assert made == set(PRODUCTS.recipes) - set(OURO) - fitted - {
        "certified"
    }  # those need checkpoints, gates and promises


def test_the_paper_s_numbers_stand_beside_ours(results: Results) -> None:
    (gates,) = PRODUCTS.make(results, ["gate_summary"])
    assert gates.table is not None
    assert gates.paper == "table 2"
    rows = {(row[0], row[1]): row for row in gates.table.rows}
    mlp = rows["MLP gate, geometric 0.3, β 0.1 (2 seeds)", "gate"]
    assert mlp[-3:] == ["3.58 ± 0.36", "N/A", "N/A"]
    assert "(2 of 2)" in mlp[2]
    assert "[" in mlp[2]
    assert rows["fixed prior, geometric 0.7 (1 seed)", "margin"][-3:] == ["", "", ""]
    (parity,) = PRODUCTS.make(results, ["parity_summary"])
    assert parity.table is not None
    assert parity.table.rows[0][-3:] == ["top1", "99.6 ± 0.7 %", "1.30 ± 0.17"]


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


def test_one_model_gives_what_it_can() -> None:
    alone = analyse_models([source("linear", 0.3)], None, [0.9])[0]
    names = [product.name for product in PRODUCTS.make(alone, ["paper"])]
    shown = {"headline", "diagnosis", "gate_summary", "main_forced_exits", "main_exit_distributions", "paired"}
    assert set(names) == shown | {"all_forced_exits", "all_exit_distributions", "depths", "forced"}


def test_names_are_checked() -> None:
    assert PRODUCTS.names(["overview", "teaser", "headline"]) == [*OVERVIEW.recipes, "teaser"]
    with pytest.raises(ls.UserError, match="no product 'tizer'"):
        PRODUCTS.names(["tizer"])


def test_every_table_and_figure_of_the_paper_is_in_the_docs() -> None:
    page = (DOCS / "paper.md").read_text()
    for each in (*published().tables, *published().figures):
        assert f"`{each.label}`" in page
    for name, recipe in (PAPER | OURO).items():
        assert f"`{name}`" in page
        for label in filter(None, [recipe.label]):
            (row,) = [line for line in page.splitlines() if f"`{label}`" in line]
            assert f"`{name}`" in row
