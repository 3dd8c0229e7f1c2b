"""Are the scores lm_eval's? Its own Hugging Face model, one forward a request, on the same weights, at every loop."""

import logging
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from benchmark_slices import DATA, asked, byte_pairs
from tiny_language import tiny_ouro
from torch import Tensor, nn

from loopscope.models.looped_model import LoopedModel
from loopscope.questions import (
    BENCHMARKS,
    Benchmark,
    _lm_eval_task,
    _split_documents,
    encode_questions,
    metric_scores,
    templates_compiled_once,
)
from loopscope.recording.question_recording import question_batches, question_requests, score_all_loops


def count(benchmark: Benchmark, every: bool) -> int | None:
    """Questions of a subject; long prompts take their time."""
    return None if every else 2 if benchmark.shots < 10 else 1


class AtDepth(nn.Module):
    """A looped model, cut off after `depth` loops, as lm_eval takes a model that is in memory already."""

    device = torch.device("cpu")

    def __init__(self, looped: LoopedModel) -> None:
        super().__init__()
        self.looped, self.depth, self.forwards = looped, 0, 0
        self.config = SimpleNamespace(max_position_embeddings=looped.block_size, model_type="ouro")
        self._said: dict[bytes, Tensor] = {}  # so that four depths take the time of one

    def tie_weights(self) -> None: ...

    def forward(self, tokens: Tensor) -> Any:
        self.forwards += 1
        name = tokens.numpy().tobytes()
        if name not in self._said:
            self._said[name] = self.looped.loops(tokens).logits
        return SimpleNamespace(logits=self._said[name][self.depth - 1])


def lm_eval_tasks(benchmark: Benchmark, folder: Path, every: bool) -> Iterator[tuple[Any, list[list[Any]]]]:
    """lm_eval's tasks, and of each the requests of its first documents in the test split."""
    whole = benchmark.dataset_split("test")
    for subject in ("anatomy", "global_facts") if benchmark.subjects else (None,):
        with templates_compiled_once():
            task = _lm_eval_task(benchmark, subject, whole, DATA, folder)
        documents = [list(group) for _, group in groupby(task.instances, key=lambda request: request.doc_id)]
        if benchmark.validation_share is not None:
            documents = [documents[row] for row in _split_documents(len(documents), benchmark.validation_share, "test")]
        yield task, documents[: count(benchmark, every)]


@pytest.fixture(scope="module")
def reference() -> Any:
    """lm_eval's Hugging Face model with a small Ouro in it."""
    logging.disable(logging.WARNING)  # that many arguments are ignored
    from lm_eval.models.huggingface import HFLM

    looped = tiny_ouro(vocab_size=len(byte_pairs()), max_position_embeddings=8192)
    lm = HFLM(AtDepth(looped), tokenizer=byte_pairs(), backend="causal", batch_size=1, logits_cache=False)
    logging.disable(logging.NOTSET)
    return lm


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.long)])
@pytest.mark.parametrize("name", BENCHMARKS)
def test_log_likelihoods_and_metrics_are_lm_evals(name: str, every: bool, reference: Any, tmp_path: Path) -> None:
    benchmark, wrapped = BENCHMARKS[name], reference.model
    wrapped._said.clear()
    expected, judged = [], []
    for task, documents in lm_eval_tasks(benchmark, tmp_path, every):
        for requests in documents:
            told = []
            wrapped._said.clear()
            for wrapped.depth in range(1, 5):
                wrapped.forwards = 0
                told.append(reference.loglikelihood(requests, disable_tqdm=True))
                assert wrapped.forwards == len(requests)
            expected.append([[value for value, _ in loop] for loop in told])
            judged.append([task.process_results(requests[0].doc, loop) for loop in told])
    subjects = (None, "anatomy", "global_facts")
    questions = [
        q for subject in subjects for q in [q for q in asked(name) if q.subject == subject][: count(benchmark, every)]
    ]
    assert len(questions) == len(expected)
    encoded = encode_questions(questions, byte_pairs())
    assert any(tokens.prefix for tokens in encoded) == bool(benchmark.subjects)
    requests = question_requests(questions, encoded, "acc")
    most = max(len(question.choices) for question in questions)
    ours = np.full((len(questions), 4, most), -np.inf)
    for rows in question_batches(requests, 8192):
        said = score_all_loops(wrapped.looped, [requests[row] for row in rows]).log_likelihoods
        ours[rows, :, : said.shape[2]] = said
    for question, scores, theirs in zip(questions, ours, expected, strict=True):
        assert scores[:, : len(question.choices)] == pytest.approx(np.array(theirs), abs=1e-3)
    norms = np.ones((len(questions), most), dtype=np.int64)
    for row, question in zip(norms, questions, strict=True):
        row[: len(question.norms)] = question.norms
    labels = np.array([question.label for question in questions])
    for metric in ("acc", "acc_norm"):
        right = metric_scores(ours, norms, metric).argmax(-1) == labels[:, None]  # type: ignore[arg-type]
        if metric in judged[0][0]:
            assert right.tolist() == [[bool(loop[metric]) for loop in loops] for loops in judged]
    assert benchmark.metric in judged[0][0]
