"""How much faster is one pass than the usual ways of scoring? The same weights, the same questions, all loops.

The usual ways run on the same packed code, so that only what they repeat is told: a forward for every choice, in which
all loops are read; a forward for every choice and depth, as a harness needs that runs a model once for each depth; and,
where questions share their examples, a forward for every question.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from loopscope.analysis.timings import Machine, Spread
from loopscope.bench.measure import interleaved, spread
from loopscope.engine.prefix_cache import PrefixCache
from loopscope.engine.request_batch import log_likelihoods
from loopscope.engine.requests import Request
from loopscope.models import LoopedModel, load_model
from loopscope.models.device import upload
from loopscope.models.hub import find_checkpoint
from loopscope.models.layout import Layout, count_up
from loopscope.models.tokenizer import load_tokenizer
from loopscope.progress import ProgressCallback
from loopscope.questions import benchmark_named, encode_questions, load_questions
from loopscope.recording.choice_scoring import BATCH_TOKENS, question_batches, question_requests, score_all_loops

Likely = NDArray[np.float64]


class ScoringBench(msgspec.Struct, frozen=True):
    model: str
    benchmark: str
    questions: int
    shots: int
    context_tokens: float  # on average
    choice_tokens: float
    shared_tokens: float  # of the context, that other questions have, too
    machine: Machine
    milliseconds: Spread  # a question, in one pass
    per_choice: Spread  # times as long: a forward for every choice
    per_choice_and_depth: Spread
    per_question: Spread | None  # a forward for every question, where the examples are shared
    largest_difference: float  # of a log-likelihood, between one pass and a forward for every choice


def bench_scoring(
    checkpoint: str | Path,
    benchmark: str,
    data: Path | None,
    limit: int,
    rounds: int,
    progress: ProgressCallback,
    device: str | torch.device = "cpu",
    dtype: str | None = None,
) -> ScoringBench:
    folder = find_checkpoint(checkpoint)
    model, which = load_model(folder, device, dtype), benchmark_named(benchmark)
    questions = load_questions(which, "test", data, limit)
    encoded = encode_questions(questions, load_tokenizer(folder), model.block_size)
    requests = question_requests(questions, encoded, "acc")
    alone = [replace(request, shared=0) for request in requests]
    width = score_all_loops(model, requests[:1]).hidden.shape[2]
    shared = any(request.shared for request in requests)
    ways: dict[str, Callable[[], Any]] = {
        "one pass": partial(_one_pass, model, requests),
        "per choice": partial(_per_choice, model, requests, None),
        "per choice and depth": partial(_every_depth, model, requests),
    }
    if shared:
        ways["per question"] = partial(_one_pass, model, alone)
    seconds, machine = interleaved(ways, rounds, width, progress, next(model.parameters()))
    ours = seconds["one pass"]
    apart = np.abs(_one_pass(model, requests) - _per_choice(model, requests, None))
    return ScoringBench(
        model=str(checkpoint),
        benchmark=benchmark,
        questions=len(questions),
        shots=which.shots,
        context_tokens=float(np.mean([request.trunk for request in requests])),
        choice_tokens=float(np.mean([count for request in requests for count in request.scored])),
        shared_tokens=float(np.mean([request.shared for request in requests])),
        machine=machine,
        milliseconds=spread(1000 * ours / len(questions)),
        per_choice=spread(seconds["per choice"] / ours),
        per_choice_and_depth=spread(seconds["per choice and depth"] / ours),
        per_question=spread(seconds["per question"] / ours) if shared else None,
        largest_difference=float(apart.max()),
    )


def _one_pass(model: LoopedModel, requests: Sequence[Request]) -> Likely:
    """[choices of all questions, T] their log-likelihoods."""
    prefix_cache = PrefixCache(model, next(model.parameters()).device)
    found: dict[int, Likely] = {}
    for rows in question_batches(requests):
        scores = score_all_loops(model, [requests[row] for row in rows], prefix_cache).log_likelihoods
        for row, likely in zip(rows.tolist(), scores, strict=True):
            found[row] = likely[:, : len(requests[row].rows)].T
    return np.concatenate([found[row] for row in range(len(requests))])


@torch.inference_mode()
def _per_choice(model: LoopedModel, requests: Sequence[Request], depth: int | None) -> Likely:
    """The same from a forward for every choice: all loops are read, or (with `depth`) the last of so many."""
    rows, device = [row for request in requests for row in request.rows], next(model.parameters()).device
    scored = np.array([count for request in requests for count in request.scored])
    order = np.argsort([len(row) for row in rows], kind="stable")
    found = np.empty((len(rows), model.num_loops if depth is None else 1))
    start = 0
    for end in range(1, len(order) + 1):
        if end < len(order) and (end + 1 - start) * len(rows[order[end]]) <= BATCH_TOKENS:
            continue
        some = order[start:end]
        start = end
        lengths = np.array([len(rows[row]) - 1 for row in some])  # nothing is read at the last token
        counts, layout = scored[some], Layout.from_host(lengths, device)
        embedded = model.begin_packed(upload(np.concatenate([rows[row][:-1] for row in some]), device), layout)
        targets = upload(np.concatenate([rows[row][-scored[row] :] for row in some]), device)
        places = upload(count_up(layout.host_starts + lengths - counts, counts), device)
        owners = upload(np.repeat(np.arange(len(some)), counts), device)
        every = np.arange(len(places))
        for loop, state in enumerate(model.unroll(embedded, depth), start=1):
            if depth is None or loop == depth:
                likely = log_likelihoods(model, model.head_input(state)[places], every, targets)
                sums = likely.new_zeros(len(some)).index_add_(0, owners, likely)
                found[some, loop - 1 if depth is None else 0] = sums.cpu().numpy()
    return found


def _every_depth(model: LoopedModel, requests: Sequence[Request]) -> None:
    for depth in range(1, model.num_loops + 1):
        _per_choice(model, requests, depth)
