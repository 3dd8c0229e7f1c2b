"""Measure all loops of a benchmark in one pass, against the usual ways.

python -m benchmarks.scoring runs/small-ouro --benchmark arc_challenge --data DIR --limit 16
python -m benchmarks.scoring ByteDance/Ouro-1.4B --benchmark mmlu --limit 100

The usual ways run on the same packed code, so that only what they repeat is told: a forward for every choice, in which
all loops are read; a forward for every choice and depth, as a harness needs that runs a model once for each depth; and,
where questions share their examples, a forward for every question.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.command import print_measured, run_benchmark
from loopscope.analysis.schema import Machine, Spread
from loopscope.bench.measure import interleaved, spread
from loopscope.cli.inputs import device_of, find_model
from loopscope.cli.options import Parser, add_shared, option
from loopscope.cli.output import working
from loopscope.engine.requests import PrefixCache, Request, log_likelihoods
from loopscope.models.checkpoint import load_model
from loopscope.models.checkpoint_folder import find_checkpoint
from loopscope.models.device import upload
from loopscope.models.looped_model import LoopedModel
from loopscope.models.packing import Layout, count_up
from loopscope.models.tokenizer import load_tokenizer
from loopscope.progress import ProgressCallback
from loopscope.questions import BENCHMARKS, benchmark_named, check_data, encode_questions, load_questions
from loopscope.recording.question_recording import BATCH_TOKENS, question_batches, question_requests, score_all_loops

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
        counts, layout = scored[some], Layout(lengths, device)
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


def define(parser: Parser) -> None:
    add_shared(parser, "model")
    scored = f"benchmark to score: {', '.join(BENCHMARKS)}"
    option(parser, "--benchmark NAME", scored, choices=list(BENCHMARKS), default="arc_challenge")
    option(parser, "--limit N", "questions to score", default=16)
    add_shared(parser, "--data DIR", "--device NAME", "--dtype NAME", "--rounds N", "--threads N", "--json")


def execute(options: argparse.Namespace) -> None:
    check_data(benchmark_named(options.benchmark), "test", options.data)
    find_model(options.model, text=True)
    device, questions = device_of(options), (options.model, options.benchmark, options.data, options.limit)
    with working(options, "measuring") as advance:
        result = bench_scoring(*questions, options.rounds, advance, device, options.dtype)
    rows = [
        ["one pass, ms per question", str(result.milliseconds)],
        ["a forward for every choice", f"{result.per_choice} times as long"],
        ["a forward for every choice and depth", f"{result.per_choice_and_depth} times as long"],
    ]
    if result.per_question is not None:
        rows.append(["a forward for every question", f"{result.per_question} times as long"])
    rows.append(["largest difference of a log-likelihood", f"{result.largest_difference:.1e}"])
    shared = f", {result.shared_tokens:.0f} of them shared" if result.shared_tokens else ""
    title = (
        f"{result.model}, {result.benchmark}, {result.shots} shots: {result.questions} questions, contexts of "
        f"{result.context_tokens:.0f} tokens{shared}, choices of {result.choice_tokens:.1f}."
    )
    print_measured(result, title, ["", "median [quartiles]"], rows, options.json)


def main(words: Sequence[str] | None = None) -> int:
    return run_benchmark("scoring", __doc__, define, execute, words)


if __name__ == "__main__":
    sys.exit(main())
