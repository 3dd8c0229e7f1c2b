"""Are acc and acc_norm lm_eval's, question by question?"""

from pathlib import Path

import numpy as np
import pytest
from benchmark_slices import DATA

from loopscope.questions import BENCHMARKS, correct, metric_scores, norms_of
from loopscope.questions.lm_eval_tasks import _questions, _task, templates_compiled_once


@pytest.mark.parametrize("name", BENCHMARKS)
def test_metrics_are_those_of_lm_evals_task(name: str, tmp_path: Path) -> None:
    benchmark = BENCHMARKS[name]
    subject = "anatomy" if name == "mmlu" else None
    with templates_compiled_once():
        task = _task(benchmark, subject, benchmark.dataset_split("test"), DATA, tmp_path)
        questions = list(_questions(benchmark, subject, task))
    documents = [request.doc for request in task.instances if request.idx == 0]
    norms, labels = norms_of(questions), np.array([question.label for question in questions])
    present = np.arange(norms.shape[1]) < np.array([[len(question.choices)] for question in questions])
    draws = np.random.default_rng(0).normal(-20, 8, (len(questions), 3, norms.shape[1]))
    draws[:, 1] = np.round(draws[:, 1] / 8)  # many ties
    draws[:, 2] = draws[:, 2].round() * norms  # ties per character
    likelihoods = np.where(present[:, None], draws, -np.inf)
    ours = {metric: correct(likelihoods, norms, labels, metric) for metric in ("acc", "acc_norm")}
    for row, (document, question) in enumerate(zip(documents, questions, strict=True)):
        for loop in range(3):
            results = [(value, False) for value in likelihoods[row, loop, : len(question.choices)].tolist()]
            wanted = task.process_results(document, results)
            assert benchmark.metric in wanted
            assert {metric: float(ours[metric][row, loop]) for metric in wanted} == wanted


def test_an_absent_choice_never_wins_and_an_empty_one_is_last() -> None:
    norms = np.array([[4, 2, 1], [0, 2, 3]])
    likelihoods = np.array([[[-8.0, -2.0, -np.inf]], [[-1.0, -9.0, -9.0]]])
    np.testing.assert_array_equal(
        metric_scores(likelihoods, norms, "acc_norm"), [[[-2, -1, -np.inf]], [[-np.inf, -4.5, -3]]]
    )
    assert correct(likelihoods, norms, np.array([1, 2]), "acc_norm").all()
