"""Results: do they say what the analyses say, group seeds, and hold nothing of the machine?"""

import json
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
from conftest import answers, random_trajectory
from pages import source

import loopscope as ls
from loopscope.analysis.benchmark_results import metric_accuracies, rows_by_subject
from loopscope.analysis.difficulty import difficulty_ordering
from loopscope.analysis.model_analysis import ModelRecordings, analyse_models, read_recordings
from loopscope.analysis.results import model_label
from loopscope.analysis.schema import Results


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


def test_results_are_json_that_reads_back(results: Results) -> None:
    data = json.loads(msgspec.json.encode(results), parse_constant=lambda word: pytest.fail(word))
    assert data["schema_version"] == 8
    assert data["models"][1]["signals"]["kl"]["values"][0][0] is None  # no convergence at loop 1
    assert msgspec.json.decode(msgspec.json.encode(results), type=Results).models[1].name == "b"


def test_the_same_recordings_give_the_same_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loopscope.analysis.diagnosis.with_stoppers", lambda *recordings: recordings)
    first, again = (analyse_models([source("a", 0)], "a", [0.6])[0] for _ in range(2))
    assert msgspec.json.encode(first) == msgspec.json.encode(again)


def test_a_folder_with_two_recordings_is_enough_and_what_is_missing_is_explained(tmp_path: Path) -> None:
    for split in ("validation", "test"):
        random_trajectory(seed=len(split), split=split, seen=np.arange(200) % 4 == 0).save(tmp_path / "mine" / split)
    assert read_recordings(tmp_path / "mine").test.num_examples == 200
    assert read_recordings(tmp_path / "mine", unseen_only=True).test.num_examples == 150
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


def recording(metric: str, logits: list[list[float]], norms: list[list[int]], **more: object) -> ls.Trajectory:
    scores = np.array(logits)[:, None, :]
    return ls.Trajectory(logits=scores, labels=[0] * len(logits), norms=norms, provenance={"metric": metric}, **more)


def test_both_metrics_are_known_whichever_was_scored() -> None:
    likely, lengths = [[-8.0, -6.0, -9.0], [-2.0, -6.0, -9.0]], [[8, 2, 3], [1, 6, 9]]
    assert metric_accuracies(recording("acc", likely, lengths)) == {"acc": [0.5], "acc_norm": [0.5]}
    assert metric_accuracies(recording("acc", likely[:1], lengths[:1])) == {"acc": [0.0], "acc_norm": [1.0]}
    assert metric_accuracies(recording("acc", likely[1:], lengths[1:])) == {"acc": [1.0], "acc_norm": [0.0]}
    assert metric_accuracies(recording("acc_norm", [[-1.0, -3.0, -3.0]], [[9, 1, 1]])) == {
        "acc": [0.0],
        "acc_norm": [1.0],
    }

    for metric in ("acc", "acc_norm"):  # a choice that is not there is never chosen
        few = recording(metric, [[-4.0, -5.0, -np.inf]], [[1, 1, 0]])
        assert metric_accuracies(few) == {"acc": [1.0], "acc_norm": [1.0]}
    one = answers("mmlu", "test", rows=20, norms=None)
    assert list(metric_accuracies(one)) == ["acc"]
    assert metric_accuracies(one)["acc"] == pytest.approx(one.correct.mean(axis=0))


def test_subjects_are_in_the_keys() -> None:
    found = rows_by_subject(answers("mmlu", "test", rows=10, subjects=3))
    assert {name: rows.sum() for name, rows in found.items()} == {"s0": 4, "s1": 3, "s2": 3}
    assert found["s1"][[1, 4, 7]].all()
    assert rows_by_subject(answers("arc_easy", "test", rows=10)) == {}
    assert rows_by_subject(answers("mmlu", "test", rows=10, subjects=3, examples=None)) == {}


FIXED = {"name": "fixed_prior", "prior": "geometric", "geometric_lambda": 0.3, "beta": 0.1}
RUN = {"task": {"name": "mano"}, "model": {"gate": "none"}, "objective": FIXED, "training": {"seed": 3}}


@pytest.mark.parametrize(
    "run",
    [
        None,
        "a text",
        [RUN],
        {key: {} for key in RUN},
        dict.fromkeys(RUN, 3),
        RUN | {"objective": FIXED | {"geometric_lambda": "0.3"}},
        RUN | {"objective": {"name": "mine:own", "options": 3}},
        RUN | {"training": {"seed": [3]}},
    ],
)
def test_a_run_of_another_shape_is_not_read(run: object) -> None:
    """What it is called in a report is the folder's name then."""
    assert model_label({"run": RUN}, "mine") == "fixed prior, geometric 0.3"
    assert model_label({"run": run}, "mine") == "mine"
    made = [source(name, seed, provenance={"run": run}) for seed, name in enumerate(("a", "b"))]
    assert [model.label for model in analyse_models(made, None, [0.6])[0].models] == ["a", "b"]
