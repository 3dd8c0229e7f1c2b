"""How do the questions of a benchmark become a recording? In one pass each; an interrupted recording goes on.

The context of a question runs once and its choices branch off from it. A prefix that the questions of a subject share
runs once for all of them. Every loop is read in this pass, only at the positions that predict a choice's tokens.

A recording of questions is like any other: its classes are the choices, its logits the scores that the metric compares
(for acc_norm, divided by the characters of a choice). A choice that a question lacks is -inf. `norms` keeps the
characters, to compute the other metric. Finished parts stay beside the recording until it is complete.

Shapes: N questions, T loops, C choices (as many as the question with most choices has), D width.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from string import ascii_uppercase
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from loopscope.config import digest, read_json, write_json
from loopscope.engine.logit_signals import check_finite
from loopscope.engine.requests import PrefixCache, Request, choice_scores, choices, decision_states, embed_requests
from loopscope.errors import UserError
from loopscope.models.checkpoint import load_model
from loopscope.models.checkpoint_folder import find_checkpoint
from loopscope.models.device import to_host
from loopscope.models.looped_model import LoopedModel
from loopscope.models.tokenizer import load_tokenizer, tokenization_sha256
from loopscope.progress import ProgressCallback, silent
from loopscope.questions import (
    Benchmark,
    EncodedQuestion,
    Question,
    Split,
    benchmark_named,
    encode_questions,
    load_questions,
    metric_scores,
)
from loopscope.readouts.readout import readouts_reading
from loopscope.readouts.replay import replayed
from loopscope.recording.recording_folder import (
    Arrays,
    Keep,
    check_repeatable,
    existing_recording,
    keep_part,
    kept_parts,
    resume_or_make,
    unfinished_folder,
)
from loopscope.scope import SCORE_OF_METRIC, STATE_WORDS
from loopscope.trajectory import Trajectory

BATCH_TOKENS = 8192
"""Tokens of a batch by default: enough to keep a machine busy."""
_KEEP_EVERY_SECONDS = 10.0
"""The seconds of work that an interruption may lose."""
_SHARE_DONE = "done.json"


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
    """Record every loop of a model on the questions of a benchmark, in one pass.

    If an identical recording exists, the function returns this recording. If a recording was interrupted, the function
    continues the recording.

    Parameters
    ----------
    checkpoint
        The folder of a language model, or its name on the Hub.
    benchmark
        "mmlu", "arc_easy", "arc_challenge", "openbookqa", "hellaswag" or "commonsense_qa".
    split
        "train", "validation" or "test".
    out
        The folder of the recording.
    data
        A folder with the benchmark's files (default: download them from the Hub).
    limit
        The maximum number of questions (default: all).
    shots
        The number of few-shot examples per question (default: the benchmark's own number).
    shard
        (k, n) takes every n-th question, beginning with question k, counted from 0 (default: all questions).
    hidden
        Whether to keep the pooled states in the recording (default: no).
    mean
        Whether to average the gate and the state over the tokens of the choices (default: no).
    device, dtype
        The device and the precision of the model, as in `load_model`.
    batch_tokens
        The number of tokens per batch (default: 8192).
    progress
        A function that LoopScope calls with the number of finished questions, the number of all questions, and a note.

    Returns
    -------
    Trajectory
        The recording, which is also written to `out`.

    Raises
    ------
    UserError
        If the model, the benchmark or its files cannot be found.

    Examples
    --------
    >>> questions = ls.record_benchmark(checkpoint, "openbookqa", "test", folder / "q", data=benchmarks, limit=4)
    >>> questions.num_examples
    4
    """
    which, out = benchmark_named(benchmark, shots), Path(out)
    questions = load_questions(which, split, data, limit)
    if shard is not None:
        if not 0 <= shard[0] < shard[1]:
            raise UserError(f"A part (k, n) is one of n, counted from 0, got {shard}.")
        questions = questions[shard[0] :: shard[1]]
    folder = find_checkpoint(checkpoint)
    model = load_model(folder, device, dtype)
    encoded = encode_questions(questions, load_tokenizer(folder), model.block_size)
    provenance = {
        "weights_sha256": model.weights_sha256,
        "precision": model.precision,
        "benchmark": benchmark,
        "metric": which.metric,
        "shots": which.shots,
        "questions_sha256": digest([[q.key, q.context, q.choices, q.label] for q in questions]),
        "tokenization_sha256": tokenization_sha256(row for each in encoded for row in (each.context, *each.choices)),
        "lm_eval": version("lm_eval"),
        "examples": len(questions),
        "limit": limit,
        "shard": None if shard is None else list(shard),
        "state": STATE_WORDS["mean_over_choices" if mean else "last_token"],
        "dtype": dtype,
        "keeps_hidden": hidden,
    }
    keep = Keep(hidden=hidden)

    def make(unfinished: Path) -> None:
        check_repeatable(model)
        cut = sum(tokens.cut > 0 for tokens in encoded)
        described = provenance | keep.provenance | {"cut": cut}
        requests = question_requests(questions, encoded, "acc", mean)
        parts = kept_parts(unfinished, {"split": split, "signals": keep.signals, **described})
        arrays = _score_in_parts(model, requests, parts, unfinished, keep, mean, batch_tokens, progress)
        _question_trajectory(which, questions, arrays, split, described).save(out)

    return resume_or_make(out, lambda: existing_recording(out, split, provenance, keep), make)


def share_recorded(out: Path) -> float:
    """The share of an unfinished recording in `out` whose parts are kept already."""
    counted = unfinished_folder(out) / _SHARE_DONE
    return float(read_json(float, counted, "unfinished recording")) if counted.is_file() else 0.0


def _score_in_parts(
    model: LoopedModel,
    requests: Sequence[Request],
    parts: list[Arrays],
    folder: Path,
    keep: Keep,
    mean: bool,
    batch_tokens: int,
    progress: ProgressCallback,
) -> Arrays:
    """Score all questions: load the parts that an earlier try kept in `folder`, and compute the others."""
    done = np.zeros(len(requests), dtype=bool)
    for part in parts:
        done[part["rows"]] = True
    prefix_cache = PrefixCache(model, next(model.parameters()).device)
    waiting: list[Arrays] = []
    saved = time.monotonic()
    progress(int(done.sum()), len(requests), "")
    for batch in question_batches(requests, batch_tokens):
        rows = batch[~done[batch]]
        if not len(rows):
            continue
        scores = score_all_loops(model, [requests[row] for row in rows], prefix_cache, mean)
        waiting.append({"rows": rows, **_recorded_arrays(scores, keep)})
        done[rows] = True
        progress(int(done.sum()), len(requests), "")
        if time.monotonic() - saved > _KEEP_EVERY_SECONDS:
            parts.append(_concatenate_questions(waiting))
            keep_part(parts[-1], folder)
            write_json(folder / _SHARE_DONE, float(done.mean()))
            waiting, saved = [], time.monotonic()
    whole = _concatenate_questions([*parts, *waiting])
    order = np.argsort(whole.pop("rows"))
    return {name: values[order] for name, values in whole.items()}


def _recorded_arrays(scores: "LoopScores", keep: Keep) -> Arrays:
    """The scores of a batch of questions as the arrays that a recording keeps."""
    arrays: Arrays = {"log_likelihoods": scores.log_likelihoods}
    if scores.gate_logits is not None:
        arrays["gate_logits"] = scores.gate_logits
    if keep.hidden:
        return arrays | {"hidden": scores.hidden}
    return arrays | {readout.name: replayed(readout, scores.hidden) for readout in readouts_reading("hidden")}


def _concatenate_questions(parts: Sequence[Arrays]) -> Arrays:
    """Concatenate the parts along the questions; choices that a question lacks are -inf."""
    most = max(part["log_likelihoods"].shape[2] for part in parts)
    for part in parts:
        part["log_likelihoods"] = _pad_choices(part["log_likelihoods"], most)
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def _pad_choices(log_likelihoods: NDArray[np.float64], width: int) -> NDArray[np.float64]:
    """[N, T, C] the log-likelihoods, padded with -inf to at least `width` choices."""
    missing = (0, max(0, width - log_likelihoods.shape[2]))
    return np.pad(log_likelihoods, ((0, 0), (0, 0), missing), constant_values=-np.inf)


def _question_trajectory(
    benchmark: Benchmark, questions: Sequence[Question], arrays: Arrays, split: str, provenance: dict[str, Any]
) -> Trajectory:
    """The recording of scored questions, with as many choices as the benchmark has in any split."""
    log_likelihoods = _pad_choices(arrays.pop("log_likelihoods"), benchmark.most_choices)
    norms = np.ones((len(questions), log_likelihoods.shape[2]), dtype=np.int64)
    for row, question in zip(norms, questions, strict=True):
        row[: len(question.norms)] = np.maximum(question.norms, 1)
    return Trajectory(
        logits=metric_scores(log_likelihoods, norms, benchmark.metric).astype(np.float32),
        labels=np.array([question.label for question in questions]),
        norms=norms,
        gate_logits=arrays.pop("gate_logits", None),
        hidden=arrays.pop("hidden", None),
        split=split,
        signals=arrays,
        examples=[f"{question.key}: {_question_text(question)}" for question in questions],
        provenance=provenance,
    )


def _question_text(question: Question) -> str:
    """The question as in its prompt, without few-shot examples; the choices follow unless the prompt lists them."""
    prompt, texts = question.context.rsplit("\n\n", 1)[-1], [choice.strip() for choice in question.choices]
    if texts == list(ascii_uppercase[: len(texts)]):
        return prompt
    listed = (f"{letter}. {text}" for letter, text in zip(ascii_uppercase, texts, strict=False))
    return "\n".join([prompt, *listed])


@dataclass(frozen=True)
class LoopScores:
    """Hold a model's scores of some questions at every loop."""

    log_likelihoods: NDArray[np.float64]  # [N, T, C]; -inf where a question has fewer choices
    gate_logits: NDArray[np.float32] | None  # [N, T]
    hidden: NDArray[np.float32]  # [N, T, D] the pooled states


@torch.inference_mode()
def score_all_loops(
    model: LoopedModel, requests: Sequence[Request], prefix_cache: PrefixCache | None = None, mean: bool = False
) -> LoopScores:
    """Score questions at every loop; `mean` averages gate and state over the choices' tokens, not the context's end."""
    device = next(model.parameters()).device
    prefix_cache = prefix_cache or PrefixCache(model, device)
    prefix_cache.evict_unused(requests)
    embedded = embed_requests(model, requests, device, prefix_cache)
    log_likelihoods, gate_logits, hidden = [], [], []
    for state in model.unroll(
        embedded, cache=lambda loop: prefix_cache.shared_prefix(requests, np.full(len(requests), loop))
    ):
        log_likelihoods.append(choice_scores(model, state, requests, divided=False)[0])
        pooled = decision_states(model, state, requests, mean)
        hidden.append(check_finite(to_host(pooled), "states"))
        gate_logit = model.halt(pooled)
        if gate_logit is not None:
            gate_logits.append(check_finite(to_host(gate_logit), "halt logits"))
    gates = np.stack(gate_logits, 1) if gate_logits else None
    return LoopScores(np.stack(log_likelihoods, 1), gates, np.stack(hidden, 1))


def question_batches(requests: Sequence[Request], tokens: int = BATCH_TOKENS) -> Iterator[NDArray[np.int64]]:
    """The indices of questions that run together: with one prefix, of about one length, at most `tokens` tokens."""
    prefixes = [request.prefix for request in requests]
    lengths = np.array([len(request.tokens) for request in requests])
    order = np.lexsort((lengths, np.unique(np.array(prefixes, dtype=object), return_inverse=True)[1]))
    start = 0
    for end in range(1, len(order) + 1):
        if end < len(order):
            apart = prefixes[order[start]] != prefixes[order[end]]
            if not apart and (end + 1 - start) * lengths[order[end]] <= tokens:
                continue
        yield order[start:end]
        start = end


def question_requests(
    questions: Sequence[Question], encoded: Sequence[EncodedQuestion], metric: str, mean: bool = False
) -> list[Request]:
    """One request per question, with its index as key and the metric's norms; `mean` as in `score_all_loops`."""
    requests = []
    for number, (question, tokens) in enumerate(zip(questions, encoded, strict=True)):
        norms = [max(norm, 1) for norm in question.norms] if metric == "acc_norm" else ()
        score = SCORE_OF_METRIC[metric]
        requests.append(choices(number, tokens.context, tokens.choices, norms, tokens.prefix, mean, score))
    return requests
