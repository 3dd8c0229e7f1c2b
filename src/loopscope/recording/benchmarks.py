"""How does a benchmark become a recording? Its questions in one pass each, kept on the way, so that nothing runs twice.

A recording of questions is like any other: its classes are the choices, its logits the scores that the metric compares
(by the characters of a choice for acc_norm), and a choice that a question does not have is -inf. `norms` keeps the
characters, so that the other metric can be told, too. What is done is kept beside the recording until it is whole.

Shapes: N questions, T loops, C choices of the question of the benchmark that has most.
"""

import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from string import ascii_uppercase
from typing import Any

import numpy as np
import torch

from loopscope.arguments import as_count, as_path
from loopscope.config import digest, read_json
from loopscope.engine.prefix_cache import PrefixCache
from loopscope.errors import UserError
from loopscope.exits.readouts import readouts_reading
from loopscope.exits.recorded_signals import replayed
from loopscope.exits.scope import STATE_WORDS
from loopscope.models import LoopedModel, load_model
from loopscope.models.hub import find_checkpoint
from loopscope.models.tokenizer import load_tokenizer
from loopscope.progress import ProgressCallback, silent
from loopscope.questions import (
    Benchmark,
    Question,
    Split,
    benchmark_named,
    encode_questions,
    load_questions,
    metric_scores,
    norms_of,
)
from loopscope.recording.choice_scoring import (
    BATCH_TOKENS,
    LoopScores,
    question_batches,
    question_requests,
    score_all_loops,
)
from loopscope.recording.tasks import Keep, existing_recording
from loopscope.recording.unfinished import Arrays, keep_part, kept_parts, unfinished_folder
from loopscope.trajectory import Trajectory
from loopscope.writing import discard, only_writer, remove_leftovers, write_json

_EVERY = 10.0
"""Seconds of work that may be lost."""
_COUNTED = "done.json"


def record_benchmark(
    checkpoint: str | Path,
    benchmark: str,
    split: Split,
    out: Path,
    *,
    data: Path | None = None,
    limit: int | None = None,
    shots: int | None = None,
    shard: tuple[int, int] | None = None,
    hidden: bool = False,
    mean: bool = False,
    device: str | torch.device = "cpu",
    dtype: str | None = None,
    batch_tokens: int = BATCH_TOKENS,
    progress: ProgressCallback = silent,
) -> Trajectory:
    """Records a split of a benchmark; an identical recording is used again, one that was interrupted goes on.

    `shots` are few-shot examples, in place of the benchmark's own number. `shard` (k, n) takes every n-th question,
    from the k-th on.
    """
    out, data = as_path(out, "out"), None if data is None else as_path(data, "data")
    for name, value in (("limit", limit), ("batch_tokens", batch_tokens)):
        if value is not None:
            as_count(value, name)
    which = benchmark_named(benchmark, shots)
    questions = load_questions(which, split, data, limit)
    if shard is not None:
        if not _is_part(shard):
            raise UserError(f"A part (k, n) is one of n, counted from 0, got {shard!r:.60}.")
        questions = questions[shard[0] :: shard[1]]
    if not questions:
        raise UserError(f"No question of {which.title} is left to be scored; ask for more.")
    folder = find_checkpoint(checkpoint)
    model = load_model(folder, device, dtype)
    provenance = {
        "weights_sha256": model.weights_sha256,
        "precision": model.precision,
        "benchmark": benchmark,
        "metric": which.metric,
        "shots": which.shots,
        "questions_sha256": digest([[q.key, q.context, q.choices, q.label] for q in questions]),
        "lm_eval": version("lm_eval"),
        "examples": len(questions),
        "limit": limit,
        "shard": None if shard is None else list(shard),
        "state": STATE_WORDS["mean_over_choices" if mean else "last_token"],
        "dtype": dtype,
        "keeps_hidden": hidden,
    }
    unfinished, keep = unfinished_folder(out), Keep(hidden=hidden)
    remove_leftovers(unfinished)
    if (found := existing_recording(out, split, provenance, keep)) is not None and not unfinished.exists():
        return found
    with only_writer(unfinished):
        if found is not None:
            discard(unfinished)  # left by a process that was killed after all was written
            return found
        encoded = encode_questions(questions, load_tokenizer(folder), model.block_size)
        provenance |= {**keep.provenance, "cut": sum(tokens.cut > 0 for tokens in encoded)}
        requests = question_requests(questions, encoded, "acc", mean)
        description = {"split": split, "signals": keep.signals, **provenance}
        arrays = _collect(model, requests, unfinished, description, hidden, mean, batch_tokens, progress)
        _trajectory(which, questions, arrays, split, provenance).save(out)
        discard(unfinished)
    return Trajectory.load(out)


def _is_part(given: Any) -> bool:
    pair = isinstance(given, Sequence) and len(given) == 2 and all(isinstance(each, int) for each in given)
    return pair and 0 <= given[0] < given[1]


def share_recorded(out: Path) -> float:
    """How much of the recording that is being made in `out` is kept already."""
    counted = unfinished_folder(out) / _COUNTED
    return float(read_json(float, counted, "unfinished recording")) if counted.is_file() else 0.0


def _collect(
    model: LoopedModel,
    requests: Sequence[Any],
    folder: Path,
    description: dict[str, Any],
    hidden: bool,
    mean: bool,
    tokens: int,
    progress: ProgressCallback,
) -> Arrays:
    """Everything of all questions: what `folder` has of an earlier try, and the rest."""
    parts = kept_parts(folder, description)
    done = np.zeros(len(requests), dtype=bool)
    for part in parts:
        done[part["rows"]] = True
    prefix_cache = PrefixCache(model, next(model.parameters()).device)
    waiting: list[Arrays] = []
    saved = time.monotonic()
    progress(int(done.sum()), len(requests), "")
    for batch in question_batches(requests, tokens):
        rows = batch[~done[batch]]
        if not len(rows):
            continue
        scores = score_all_loops(model, [requests[row] for row in rows], prefix_cache, mean)
        waiting.append({"rows": rows, **_arrays(scores, hidden)})
        done[rows] = True
        progress(int(done.sum()), len(requests), "")
        if time.monotonic() - saved > _EVERY:
            parts.append(_joined(waiting))
            keep_part(parts[-1], folder)
            write_json(folder / _COUNTED, float(done.mean()))
            waiting, saved = [], time.monotonic()
    whole = _joined([*parts, *waiting])
    order = np.argsort(whole.pop("rows"))
    return {name: values[order] for name, values in whole.items()}


def _arrays(scores: LoopScores, hidden: bool) -> Arrays:
    arrays: Arrays = {"log_likelihoods": scores.log_likelihoods}
    if scores.gate_logits is not None:
        arrays["gate_logits"] = scores.gate_logits
    if hidden:
        return arrays | {"hidden": scores.hidden}
    return arrays | {each.name: replayed(each, scores.hidden) for each in readouts_reading("hidden")}


def _joined(parts: Sequence[Arrays]) -> Arrays:
    """One after the other; questions with fewer choices than others lack the last ones."""
    most = max(part["log_likelihoods"].shape[2] for part in parts)
    for part in parts:
        missing = most - part["log_likelihoods"].shape[2]
        part["log_likelihoods"] = np.pad(
            part["log_likelihoods"], ((0, 0), (0, 0), (0, missing)), constant_values=-np.inf
        )
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def _trajectory(
    benchmark: Benchmark, questions: Sequence[Question], arrays: Arrays, split: str, provenance: dict[str, Any]
) -> Trajectory:
    norms, likely = np.maximum(norms_of(questions), 1), arrays.pop("log_likelihoods")
    missing = (0, max(0, benchmark.most_choices - norms.shape[1]))  # every split and part has as many as the benchmark
    norms = np.pad(norms, ((0, 0), missing), constant_values=1)
    likely = np.pad(likely, ((0, 0), (0, 0), missing), constant_values=-np.inf)
    return Trajectory(
        logits=metric_scores(likely, norms, benchmark.metric).astype(np.float32),
        labels=np.array([question.label for question in questions]),
        norms=norms,
        gate_logits=arrays.pop("gate_logits", None),
        hidden=arrays.pop("hidden", None),
        split=split,
        signals=arrays,
        examples=[f"{question.key}: {question_text(question)}" for question in questions],
        provenance=provenance,
    )


def question_text(question: Question) -> str:
    """The end of the prompt, after its examples, and the choices, unless it lists them itself."""
    prompt, choices = question.context.rsplit("\n\n", 1)[-1], [choice.strip() for choice in question.choices]
    if choices == list(ascii_uppercase[: len(choices)]):
        return prompt
    return "\n".join(
        [prompt, *(f"{letter}. {choice}" for letter, choice in zip(ascii_uppercase, choices, strict=False))]
    )
