"""How much of the saved loops becomes saved time? Rows of a task, and questions of a benchmark, under a policy.

The realised fraction is (time at full depth / adaptive time) / (T / average exit loop): 1 means that every saved loop
was saved time. Full depth is the same engine with a fixed depth of T, at its own fastest batch size. Signals at every
loop and the draining of the queue are included. Beside it stands the waiting batch, in which all rows run until the
slowest of them exits. The questions of a benchmark have no batch size of their own: full depth is the first of their
policies, with the same batches.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
import torch

from loopscope.analysis.schema import Latency, Machine, PolicyLatency, Spread
from loopscope.bench.measure import fastest_batch, interleaved, spread
from loopscope.engine.exit_decision import ExitDecision
from loopscope.engine.replay_agreement import Agreement, compare_with_replay
from loopscope.engine.requests import Request, task_requests
from loopscope.engine.scheduler import run
from loopscope.errors import UserError
from loopscope.frontier import choose, curve
from loopscope.models.checkpoint import load_model
from loopscope.models.checkpoint_folder import find_checkpoint
from loopscope.models.custom_model import register_model
from loopscope.models.device import upload
from loopscope.models.looped_model import LoopedModel
from loopscope.models.packing import Layout
from loopscope.models.tokenizer import load_tokenizer
from loopscope.policy import ExitPolicy
from loopscope.progress import ProgressCallback, silent
from loopscope.questions import benchmark_named, encode_questions, load_questions
from loopscope.readouts.replay import gate_readout
from loopscope.recording.question_recording import BATCH_TOKENS, question_requests
from loopscope.recording.recording_folder import Keep
from loopscope.recording.task_recording import record_model
from loopscope.recording_paths import ANALYSED, find_recordings
from loopscope.scope import scope_of
from loopscope.tasks import Examples
from loopscope.threshold_grids import fine_grid
from loopscope.training.run_folder import read_run_settings, task_of_run
from loopscope.training.settings import read_settings
from loopscope.training.task_run import initial_model
from loopscope.trajectory import Trajectory

PAPER_REALISED = 0.29
"""The paper's table 5.6 (b): top1 saves 6.0 / 1.26 of the loops and runs 1.36 times as fast."""
_SIZES = (64, 256, 1024)
"""Batch sizes; full depth and each policy are timed at their fastest one."""
_QUESTION_ROUNDS, _TASK_ROUNDS = 3, 5


class ExitTiming(msgspec.Struct, frozen=True):
    """The time of one policy against full depth; ratios are taken within a round."""

    readout: str
    threshold: float | None
    max_drop: float | None  # guaranteed
    accuracy: float | None  # None: random weights
    average_loops: float
    token_loops: float  # the average over tokens: longer examples take more loops
    milliseconds: Spread  # an example
    speedup: Spread
    realised: Spread
    waiting_realised: Spread | None
    batch_size: int
    agreement: Agreement


class ExitBench(msgspec.Struct, frozen=True):
    """The timings of policies on one model, with the machine."""

    model: str
    examples: int
    num_loops: int
    machine: Machine
    full_batch_size: int
    full_accuracy: float | None
    full_milliseconds: Spread
    paper_realised: float
    policies: list[ExitTiming]


@dataclass(frozen=True)
class BenchedModel:
    """A model whose exits are timed: its policies, its examples and their recording."""

    name: str
    model: LoopedModel
    examples: Examples
    recorded: Trajectory
    policies: list[ExitPolicy]
    trained: bool


def trained_model(
    folder: Path,
    readouts: Sequence[str] | None = None,
    policies: Sequence[ExitPolicy] = (),
    device: str | torch.device = "cpu",
    recordings: Sequence[Trajectory] = (),
    custom_tasks: Sequence[str] = (),
) -> BenchedModel:
    """A finished run to time: `policies`, and readouts whose thresholds validation chose.

    `recordings` are those of validation and test (default: the ones in the run's folder).
    """
    task = task_of_run(folder, read_run_settings(folder), custom_tasks)
    validation, test = recordings or (Trajectory.load(find_recordings(folder) / split) for split in ANALYSED)
    examples = task.split("test", test.num_examples)
    if not np.array_equal(examples.labels, test.required_labels):
        raise UserError(f"The recording of {folder} is not one of the first {test.num_examples:,} test examples.")
    names = [gate_readout(test)] if test.gate_logits is not None else ["top1", "margin", "kl", "hidden_change"]
    names = list(readouts or ([] if policies else names))
    chosen = [choose(name, validation) for name in dict.fromkeys(names)]
    model = load_model(folder, device)
    model.set_depth(test.num_loops)
    return BenchedModel(folder.name, model, examples, test, [*policies, *chosen], trained=True)


def random_model(
    source: str,
    overrides: list[str],
    count: int,
    loops: float,
    readouts: Sequence[str],
    device: str | torch.device = "cpu",
) -> BenchedModel:
    """A model with random weights to time, with thresholds that give about `loops` average loops."""
    settings = read_settings(source, overrides)
    if settings.model.is_custom:
        register_model(str(settings.model.name))  # the user's settings name it
    model = initial_model(settings).eval().requires_grad_(False).to(device)
    examples = settings.generator.split("test", count)
    recorded = record_model(model, examples.tokens, examples.lengths, examples.labels, keep=Keep(hidden=True))
    policies = []
    for readout in dict.fromkeys(readouts):
        thresholds = fine_grid(readout, recorded)
        _, average = curve(readout, thresholds, recorded)
        policies.append(ExitPolicy(readout, float(thresholds[np.abs(average - loops).argmin()])))
    return BenchedModel(f"{source}, random weights", model, examples, recorded, policies, trained=False)


def bench_exits(
    benched: BenchedModel, rounds: int, batch_size: int | None, waiting: bool, progress: ProgressCallback
) -> ExitBench:
    """Time policies against full depth in interleaved rounds, with or without waiting for the slowest row."""
    model, requests = benched.model, list(task_requests(benched.examples))
    never = ExitPolicy("fixed", model.num_loops)

    def drain(policy: ExitPolicy, size: int, some: Sequence[Request] = requests) -> None:
        deque(run(model, some, policy, size), maxlen=0)

    weights = next(model.parameters())
    full_size = fastest_batch(partial(drain, never, some=requests[: max(_SIZES)]), _SIZES, weights.device)
    sizes = [batch_size or fastest_batch(partial(drain, policy), _SIZES, weights.device) for policy in benched.policies]
    ways = {"full depth": partial(drain, never, full_size)}
    for place, (policy, size) in enumerate(zip(benched.policies, sizes, strict=True)):
        ways[f"{place + 1}: {policy}"] = partial(drain, policy, size)
        if waiting:
            ways[f"{place + 1}: {policy}, waiting"] = partial(wait_for_slowest, model, policy, requests, size)
    seconds, machine = interleaved(ways, rounds, weights.shape[-1], progress, weights)
    full, count = seconds["full depth"], len(requests)
    timings = []
    for place, (policy, size) in enumerate(zip(benched.policies, sizes, strict=True)):
        loops = policy.exit_loops(benched.recorded)
        ideal = model.num_loops / float(loops.mean())
        took, waited = seconds[f"{place + 1}: {policy}"], seconds.get(f"{place + 1}: {policy}, waiting")
        agreement = compare_with_replay(run(model, requests, policy, size), policy, benched.recorded)
        timings.append(
            ExitTiming(
                readout=policy.readout,
                threshold=policy.threshold,
                max_drop=None if policy.guarantee is None else policy.guarantee.max_drop,
                accuracy=agreement.accuracy if benched.trained else None,
                average_loops=float(loops.mean()),
                token_loops=float(np.average(loops, weights=benched.examples.lengths)),
                milliseconds=spread(1000 * took / count),
                speedup=spread(full / took),
                realised=spread(full / took / ideal),
                waiting_realised=None if waited is None else spread(full / waited / ideal),
                batch_size=size,
                agreement=agreement,
            )
        )
    return ExitBench(
        model=benched.name,
        examples=count,
        num_loops=model.num_loops,
        machine=machine,
        full_batch_size=full_size,
        full_accuracy=float(benched.recorded.correct[:, -1].mean()) if benched.trained else None,
        full_milliseconds=spread(1000 * full / count),
        paper_realised=PAPER_REALISED,
        policies=timings,
    )


def time_task(
    run: Path,
    validation: Trajectory,
    test: Trajectory,
    device: str | torch.device = "cpu",
    custom_tasks: Sequence[str] = (),
) -> Latency:
    """Time the final loop and the usual readouts of a finished run on its task, at thresholds that validation chose."""
    benched = trained_model(run, device=device, recordings=(validation, test), custom_tasks=custom_tasks)
    bench = bench_exits(benched, _TASK_ROUNDS, batch_size=None, waiting=False, progress=silent)
    full, depth = float(test.correct[:, -1].mean()), bench.num_loops
    policies = [PolicyLatency("fixed", depth, full, depth, bench.full_milliseconds, Spread(1.0, 1.0, 1.0), 0)]
    for timing in bench.policies:
        agreement = timing.agreement
        policies.append(
            PolicyLatency(
                readout=timing.readout,
                threshold=timing.threshold,
                accuracy=agreement.accuracy,
                average_loops=timing.average_loops,
                milliseconds=timing.milliseconds,
                speedup=timing.speedup,
                differing=agreement.differing,
            )
        )
    return Latency(bench.model, None, bench.examples, depth, bench.machine, policies)


@torch.inference_mode()
def wait_for_slowest(model: LoopedModel, policy: ExitPolicy, requests: Sequence[Request], batch_size: int) -> None:
    """Run batches the usual way: each one runs until its last row exits, then the next batch starts."""
    for start in range(0, len(requests), batch_size):
        rows = sorted((request.rows[0] for request in requests[start : start + batch_size]), key=len)
        device, lengths = next(model.parameters()).device, np.array([len(row) for row in rows])
        embedded = model.begin_packed(upload(np.concatenate(rows), device), Layout(lengths, device))
        last = upload(lengths - 1, device)
        decision = ExitDecision(model, policy, on_device=False)
        decision.admit(np.arange(len(rows)))
        done = np.zeros(len(rows), dtype=bool)
        for loop, state in enumerate(model.unroll(embedded), start=1):
            pooled = partial(model.pooled, state, last)
            logits = model.predict(pooled()) if decision.reads_logits else None
            done |= decision.exits(np.full(len(rows), loop), logits, pooled)
            if done.all():
                break


def time_benchmark(
    checkpoint: str | Path,
    benchmark: str,
    policies: Sequence[ExitPolicy],
    recorded: Trajectory,
    *,
    data: Path | None = None,
    limit: int | None = None,
    questions: int = 100,
    device: str | torch.device = "cpu",
    dtype: str | None = None,
) -> Latency:
    """Time policies on `questions` of a benchmark, evenly spread over its test recording."""
    which = benchmark_named(benchmark, recorded.provenance.get("shots"))
    every = load_questions(which, "test", data, limit)
    if [question.label for question in every] != recorded.required_labels.tolist():
        raise UserError(f"The recording is not of the same questions of {which.title}; record them again.")
    rows = np.unique(np.linspace(0, len(every) - 1, questions).round().astype(np.int64))
    folder = find_checkpoint(checkpoint)
    model = load_model(folder, device, dtype)
    chosen = [every[row] for row in rows]
    mean = scope_of(recorded).state == "mean_over_choices"
    encoded = encode_questions(chosen, load_tokenizer(folder), model.block_size)
    requests = question_requests(chosen, encoded, which.metric, mean)

    def drain(policy: ExitPolicy) -> None:
        deque(run(model, requests, policy, batch_tokens=BATCH_TOKENS, mean=mean), maxlen=0)

    ways = {f"{number}: {policy}": partial(drain, policy) for number, policy in enumerate(policies)}
    weights = next(model.parameters())
    seconds, machine = interleaved(ways, _QUESTION_ROUNDS, weights.shape[-1], silent, weights)
    full, some = next(iter(seconds.values())), recorded.take(rows)
    timings = []
    for policy, took in zip(policies, seconds.values(), strict=True):
        answers = run(model, requests, policy, batch_tokens=BATCH_TOKENS, mean=mean)
        agreement = compare_with_replay(answers, policy, some)
        timings.append(
            PolicyLatency(
                readout=policy.readout,
                threshold=policy.threshold,
                accuracy=agreement.accuracy,
                average_loops=agreement.average_loops,
                milliseconds=spread(1000 * took / len(rows)),
                speedup=spread(full / took),
                differing=agreement.differing,
            )
        )
    overhead = model.embed_cost + model.head_cost
    return Latency(folder.name, benchmark, len(rows), model.num_loops, machine, timings, overhead)
