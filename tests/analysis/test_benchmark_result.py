"""Questions: the metric that was not scored, and the subjects, from what a recording keeps."""

import numpy as np
import pytest
from conftest import answers

import loopscope as ls
from loopscope.analysis.benchmarks import by_subject, metric_accuracies


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


def test_a_choice_that_is_not_there_is_never_chosen() -> None:
    few = [[-4.0, -5.0, -np.inf]]
    for metric in ("acc", "acc_norm"):
        assert metric_accuracies(recording(metric, few, [[1, 1, 0]])) == {"acc": [1.0], "acc_norm": [1.0]}


def test_without_lengths_only_the_scored_metric_is_known() -> None:
    one = answers("mmlu", "test", rows=20, norms=None)
    assert list(metric_accuracies(one)) == ["acc"]
    assert metric_accuracies(one)["acc"] == pytest.approx(one.correct.mean(axis=0))


def test_subjects_are_in_the_keys() -> None:
    found = by_subject(answers("mmlu", "test", rows=10, subjects=3))
    assert {name: rows.sum() for name, rows in found.items()} == {"s0": 4, "s1": 3, "s2": 3}
    assert found["s1"][[1, 4, 7]].all()
    assert by_subject(answers("arc_easy", "test", rows=10)) == {}
    assert by_subject(answers("mmlu", "test", rows=10, subjects=3, examples=None)) == {}
