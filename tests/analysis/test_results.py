"""Several models together: labels tell them apart, seeds are a group, and those that reach the target are averaged."""

import pytest
from conftest import random_trajectory

from loopscope.analysis.model_analysis import ModelRecordings, analyse_models
from loopscope.analysis.results import model_label, over_seeds
from loopscope.paper.counterparts import PRODUCTS

RUN = {
    "task": {"name": "mano"},
    "objective": {"name": "fixed_prior", "prior": "geometric", "geometric_lambda": 0.3, "beta": 0.1},
    "model": {"gate": "none"},
    "training": {"seed": 0, "steps": 5},
}


def source(name: str, seed: int, **changes: object) -> ModelRecordings:
    recordings = (
        random_trajectory(seed=10 * k + seed, split=split, **changes) for k, split in ((1, "validation"), (2, "test"))
    )
    return ModelRecordings(name, *recordings)


def seeded(seed: int) -> dict[str, object]:
    return {"run": {**RUN, "training": {"seed": seed, "steps": 5}}}


@pytest.fixture(autouse=True)
def unlearned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without learned stoppers, which take longest."""
    monkeypatch.setattr("loopscope.analysis.diagnosis.with_stoppers", lambda *recordings: recordings)


def test_mean_and_sample_deviation_over_those_that_reach_it() -> None:
    summary = over_seeds([4.0, 5.0, None])
    assert summary.mean == 4.5
    assert summary.deviation == pytest.approx(0.7071, abs=1e-4)  # the sample's, as in the paper's 4.50 ± 0.71
    assert str(summary) == "4.50 ± 0.71 (2 of 3)"
    assert str(over_seeds([1.384])) == "1.38"
    assert str(over_seeds([1.384, None])) == "1.38 (1 of 2)"
    assert str(over_seeds([None, None, None])) == "N/A"
    assert str(over_seeds([-0.01, 0.0, 0.004])) == "0.00 ± 0.01 (3 of 3)"  # nothing has no sign


def test_labels_are_the_paper_s_words() -> None:
    assert model_label({"run": RUN}, "x") == "fixed prior, geometric 0.3"
    gate = {**RUN, "model": {"gate": "mlp"}, "objective": {**RUN["objective"], "prior": "uniform"}}
    assert model_label({"run": gate}, "x") == "MLP gate, uniform, β 0.1"
    assert model_label({}, "my recording") == "my recording"
    assert model_label({"run": {"id": 3}}, "foreign") == "foreign"


def test_seeds_of_one_setting_are_a_group() -> None:
    sources = [source(f"s{seed}", seed, provenance=seeded(seed)) for seed in range(3)]
    results = analyse_models([*sources, source("other", 3)], None, [0.6, 0.7])[0]
    assert [group.names for group in results.groups] == [["s0", "s1", "s2"], ["other"]]
    summary = results.groups[0].depth_at["fixed"]["0.6"]
    assert (summary.reached, summary.seeds) == (3, 3)
    margin = results.groups[0].depth_at["margin"]
    assert margin["0.6"].mean < margin["0.7"].mean
    assert len({model.label for model in results.models}) == 4
    assert results.models[1].label == "mano: fixed prior, geometric 0.3, seed 1"
    (depths,) = PRODUCTS.make(results, ["depths"])
    assert depths.table is not None
    assert any("(3 of 3)" in cell for row in depths.table.rows for cell in row)


def test_a_seed_that_lacks_something_counts_as_not_reaching_it() -> None:
    sources = [
        source("whole", 0, provenance=seeded(0)),
        source("poor", 1, provenance=seeded(1), hidden=None, difficulty=None),
    ]
    group = analyse_models(sources, None, [0.6])[0].groups[0]
    assert (group.depth_at["hidden_change"]["0.6"].reached, group.depth_at["hidden_change"]["0.6"].seeds) == (1, 2)
    assert group.ordering["margin"].seeds == 2
