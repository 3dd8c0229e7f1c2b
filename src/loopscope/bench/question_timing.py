"""How much of the saved loops becomes saved time on a benchmark? Its questions live through the engine, interleaved.

The first policy is what the others are compared with: full depth, with the same engine and the same batches. What a
question's signals cost at every loop, and the draining of the queue, is included.
"""

from collections import deque
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch

from loopscope.analysis.schema import QuestionBench, QuestionTiming
from loopscope.bench.measure import interleaved, spread
from loopscope.engine.scheduler import compare_with_replay, run
from loopscope.errors import UserError
from loopscope.models.checkpoint import load_model
from loopscope.models.checkpoint_folder import find_checkpoint
from loopscope.models.tokenizer import load_tokenizer
from loopscope.policy import ExitPolicy
from loopscope.progress import ProgressCallback, silent
from loopscope.questions import benchmark_named, encode_questions, load_questions
from loopscope.recording.question_recording import BATCH_TOKENS, question_requests
from loopscope.scope import scope_of
from loopscope.trajectory import Trajectory

ROUNDS = 3


def time_benchmark(
    checkpoint: str | Path,
    benchmark: str,
    policies: Sequence[ExitPolicy],
    recorded: Trajectory,
    *,
    data: Path | None = None,
    limit: int | None = None,
    questions: int = 100,
    rounds: int = ROUNDS,
    device: str | torch.device = "cpu",
    dtype: str | None = None,
    progress: ProgressCallback = silent,
) -> QuestionBench:
    """Times these policies on `questions` of those in `recorded`, the recording of the test split (evenly spread)."""
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
        deque(run(model, policy, requests, batch_tokens=BATCH_TOKENS, mean=mean), maxlen=0)

    ways = {f"{number}: {policy}": partial(drain, policy) for number, policy in enumerate(policies)}
    weights = next(model.parameters())
    seconds, machine = interleaved(ways, rounds, weights.shape[-1], progress, weights)
    full, some = next(iter(seconds.values())), recorded.take(rows)
    timings = []
    for policy, took in zip(policies, seconds.values(), strict=True):
        answers = run(model, policy, requests, batch_tokens=BATCH_TOKENS, mean=mean)
        agreement = compare_with_replay(answers, policy, some)
        timings.append(
            QuestionTiming(
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
    return QuestionBench(folder.name, benchmark, len(rows), model.num_loops, machine, timings, overhead)
