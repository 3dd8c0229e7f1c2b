"""Results: do they say what the analyses say, group seeds, and hold nothing of the machine?"""

import json
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
from conftest import random_trajectory

import loopscope as ls
from loopscope.analysis import difficulty_ordering
from loopscope.analysis.labels import model_label
from loopscope.analysis.model_analysis import ModelRecordings, analyse_models, read_recordings
from loopscope.analysis.schema import Results
from loopscope.reproduction.products import PRODUCTS

RUN = {
    "task": {"name": "mano"},
    "objective": {"name": "fixed_prior", "prior": "geometric", "geometric_lambda": 0.3, "beta": 0.1},
    "model": {"gate": "none"},
    "training": {"seed": 0, "steps": 5},
}


def source(name: str, seed: int, **changes: object) -> ModelRecordings:
    return ModelRecordings(
        name,
        random_trajectory(seed=10 + seed, split="validation", **changes),
        random_trajectory(seed=20 + seed, split="test", **changes),
    )


def seeded(seed: int) -> dict[str, object]:
    return {"run": {**RUN, "training": {"seed": seed, "steps": 5}}}


@pytest.fixture(scope="module")
def results() -> Results:
    sources = [source("a", 0, gate_logits=None), source("b", 1)]
    return analyse_models(sources, "a", [0.6, 0.9])[0]


def test_results_say_what_the_analyses_say(results: Results) -> None:
    test = source("b", 1).test
    model = results.models[1]
    assert model.forced_accuracy == pytest.approx(test.correct.mean(axis=0))
    assert model.forced_cross_entropy == pytest.approx(test.cross_entropy.mean(axis=0))
    frontier = next(frontier for frontier in model.frontiers if frontier.readout == "margin")
    expected = ls.sweep("margin", source("b", 1).validation, test)
    curve = dict(zip(expected.thresholds, zip(expected.accuracy, expected.average_loops, strict=True), strict=True))
    shown = zip(frontier.accuracy, frontier.average_loops, strict=True)
    assert dict(zip(frontier.thresholds, shown, strict=True)).items() <= curve.items()
    assert {expected.select().policy.threshold, expected.threshold_at(0.6)} <= set(frontier.thresholds)
    assert frontier.depth_at == {"0.6": expected.depth_at(0.6), "0.9": expected.depth_at(0.9)}
    assert frontier.selected.accuracy == expected.select().accuracy
    assert model.ordering["margin"] == difficulty_ordering("margin", test)
    assert model.exit_distribution is not None
    assert results.models[0].exit_distribution is None
    assert results.models[0].is_reference
    paper = ls.sweep("margin", source("b", 1).validation, test, grid="paper")
    (beside,) = [each for each in model.paper_grid.frontiers if each.readout == "margin"]
    assert (beside.accuracy, beside.depth_at["0.6"]) == (paper.accuracy.tolist(), paper.depth_at(0.6))
    assert results.models[0].diagnosis.trajectory_gap is None
    assert results.models[1].diagnosis.trajectory_gap is not None


def test_the_same_recordings_give_the_same_bytes(results: Results) -> None:
    again = analyse_models([source("a", 0, gate_logits=None), source("b", 1)], "a", [0.6, 0.9])[0]
    assert msgspec.json.encode(again) == msgspec.json.encode(results)


def test_results_are_json_that_reads_back(results: Results) -> None:
    data = json.loads(msgspec.json.encode(results), parse_constant=lambda word: pytest.fail(word))
    assert data["schema_version"] == 8
    assert data["models"][1]["signals"]["kl"]["values"][0][0] is None  # no convergence at loop 1


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


def test_results_read_back_as_their_own_type(results: Results) -> None:
    assert msgspec.json.decode(msgspec.json.encode(results), type=Results).models[1].name == "b"


def test_labels_are_the_paper_s_words() -> None:
    assert model_label({"run": RUN}, "x") == "fixed prior, geometric 0.3"
    gate = {**RUN, "model": {"gate": "mlp"}, "objective": {**RUN["objective"], "prior": "uniform"}}
    assert model_label({"run": gate}, "x") == "MLP gate, uniform, β 0.1"
    assert model_label({}, "my recording") == "my recording"
    assert model_label({"run": {"id": 3}}, "foreign") == "foreign"


def test_a_folder_with_two_recordings_is_enough(tmp_path: Path) -> None:
    for split in ("validation", "test"):
        random_trajectory(seed=len(split), split=split, seen=np.arange(200) % 4 == 0).save(tmp_path / "mine" / split)
    assert read_recordings(tmp_path / "mine").test.num_examples == 200
    assert read_recordings(tmp_path / "mine", unseen_only=True).test.num_examples == 150


def test_what_is_missing_is_explained(tmp_path: Path, results: Results) -> None:
    with pytest.raises(ls.UserError, match="There is no folder"):
        read_recordings(tmp_path / "nowhere")
    random_trajectory(split="validation").save(tmp_path / "half" / "validation")
    with pytest.raises(ls.UserError, match="no recording 'test'"):
        read_recordings(tmp_path / "half")
    random_trajectory(split="test", seed=1, seen=np.ones(200, bool)).save(tmp_path / "half" / "test")
    with pytest.raises(ls.UserError, match="does not say"):
        read_recordings(tmp_path / "half", unseen_only=True)
    with pytest.raises(ls.UserError, match="not among the runs"):
        analyse_models([source("a", 0)], "z", [0.9])[0]
    with pytest.raises(ls.UserError, match="same name"):
        analyse_models([source("a", 0), source("a", 1)], None, [0.9])[0]


def test_a_recording_of_predictions_alone_still_reports() -> None:
    def bare(trajectory: ls.Trajectory) -> ls.Trajectory:
        return ls.Trajectory(
            logits=None, labels=trajectory.labels, predictions=trajectory.predicted, split=trajectory.split
        )

    whole = source("a", 0)
    results = analyse_models([ModelRecordings("a", bare(whole.validation), bare(whole.test))], None, [0.9])[0]
    assert results.models[0].forced_cross_entropy is None
    assert results.models[0].ordering == {}
    stoppers = ["stopper:classifier", "stopper:induction"]
    assert [frontier.readout for frontier in results.models[0].frontiers] == ["fixed", "patience", "oracle", *stoppers]


def test_a_stopper_of_the_user_does_not_take_the_name_of_one_that_is_learned_here() -> None:
    given = source("a", 0)
    stopper = ls.fit_stopper(random_trajectory(7, rows=200), kind="classifier")
    with pytest.raises(ls.UserError, match="another name than 'induction'"):
        analyse_models([replace(given, gates={"induction": stopper})], None, [0.9])
