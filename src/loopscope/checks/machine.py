"""What is checked, and when is it good enough? Five kinds of checks, each line with its verdict.

Predictions are compared by the Kullback-Leibler divergence, in nats, at the place where it is largest.

Shapes: N decisions, T loops.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

from loopscope.bench.measure import interleaved, spread
from loopscope.checks.check import Check, CheckKind
from loopscope.checks.sample import Array, PlainOutputs, TokenSample, divergence, read
from loopscope.engine import Prompt, Request, generate, in_order, run, stream
from loopscope.engine.agreement import close_calls
from loopscope.engine.decoder import CACHE_MODES
from loopscope.exits import ExitPolicy
from loopscope.exits.signals import margin
from loopscope.models import LoopedModel
from loopscope.progress import silent
from loopscope.trajectory import Trajectory

DIVERGENCE = {"float32": 1e-5, "float16": 1e-2, "bfloat16": 5e-2}
"""The largest divergence of two ways that should say the same, in this precision; on average, against float32."""
HALTING = {"float32": 1e-3, "float16": 2e-2, "bfloat16": 2e-1}
"""The same of halt logits: the largest difference, and against float32 the average one."""
CLOSE = {"float32": 1e-4, "float16": 1e-2, "bfloat16": 1e-1}
"""A signal that comes so close to its threshold (relative) may be decided either way."""
DIFFERING = {"float32": 0.0, "float16": 0.02, "bfloat16": 0.1}
"""The share of the other decisions that may differ from the replay."""
_DECISIONS = 8
"""Of every row, in the engine."""


def _judged(kind: CheckKind, what: str, measured: float, unit: str, limit: float | None, note: str = "") -> Check:
    note = note if np.isfinite(measured) else "it says what is no number"
    return Check(kind, what, measured, unit, limit, None if limit is None else bool(measured <= limit), note)


def precision_checks(precision: str, reference: PlainOutputs, outputs: PlainOutputs, judged: bool) -> Iterator[Check]:
    """What nobody asked for is told, not judged."""
    limits = (DIVERGENCE[precision], HALTING[precision]) if judged else (None, None)
    for loop, (right, low) in enumerate(zip(reference.logits, outputs.logits, strict=True), start=1):
        same = float((right.argmax(-1) == low.argmax(-1)).mean())
        note = f"same token: {100 * same:.1f} %"
        mean = float(divergence(right, low).mean())
        yield _judged("precision", f"{precision}, loop {loop}", mean, "nats (mean)", limits[0], note)
    if reference.gate_logits is not None and outputs.gate_logits is not None:
        apart = np.abs(reference.gate_logits - outputs.gate_logits)
        note = f"at most {apart.max():.2g}"
        yield _judged("precision", f"{precision}, halt logits", float(apart.mean()), "(mean)", limits[1], note)


def _batch(model: LoopedModel, sample: TokenSample, dtype: str, rounds: int) -> Iterator[Check]:
    together = sample.read(model)
    alone = [read(model, [row], sample.places) for row in sample.rows]
    logits = np.concatenate([outputs.logits for outputs in alone], 1)
    worst = float(divergence(logits, together.logits).max())
    yield _judged("batch", "predictions at every loop", worst, "nats (max)", DIVERGENCE[dtype])
    if together.gate_logits is not None:
        gate_logits = np.concatenate([outputs.gate_logits for outputs in alone if outputs.gate_logits is not None], 1)
        apart = float(np.abs(gate_logits - together.gate_logits).max())
        yield _judged("batch", "halt logits", apart, "(max)", HALTING[dtype])


def _cache(model: LoopedModel, sample: TokenSample, dtype: str, rounds: int) -> Iterator[Check]:
    """At full depth no token exits early, so that all that is cached of it is its own; `latest` keeps one loop."""
    for cache in CACHE_MODES:
        outputs: dict[int, list[Array]] = {key: [] for key in range(len(sample.rows))}
        texts: dict[int, list[int]] = {key: [] for key in outputs}
        options: dict[str, Any] = {"max_new_tokens": sample.new, "cache": cache, "batch_size": len(outputs) - 1}
        for token in stream(model, sample.prompts, with_logits=True, **options):
            assert token.logits is not None
            outputs[token.key].append(token.logits.cpu().numpy())
            texts[token.key].append(token.token)
        plain = _continued(model, sample, texts)
        logits = np.concatenate([np.stack(outputs[key]) for key in outputs])
        values = divergence(plain.logits[-1], logits)
        same = float((plain.logits[-1].argmax(-1) == logits.argmax(-1)).mean())
        limit = None if cache == "latest" else DIVERGENCE[dtype]
        note = f"same token: {100 * same:.1f} % of {len(logits)}"
        note += "; promises no equality" if limit is None else ""
        yield _judged("cache", f"cache '{cache}'", float(values.max()), "nats (max)", limit, note)


def _continued(model: LoopedModel, sample: TokenSample, texts: dict[int, list[int]]) -> PlainOutputs:
    """A plain pass over prompts and what followed, at the places where it was predicted."""
    parts = [
        read(model, [np.concatenate((row, np.array(texts[key][:-1], dtype=np.int64)))], len(texts[key]))
        for key, row in enumerate(sample.rows)
    ]
    gate_logits = (
        None if parts[0].gate_logits is None else np.concatenate([np.asarray(part.gate_logits) for part in parts], 1)
    )
    return PlainOutputs(
        np.concatenate([part.logits for part in parts], 1),
        np.concatenate([part.hidden for part in parts], 1),
        gate_logits,
    )


def _replay(model: LoopedModel, sample: TokenSample, dtype: str, rounds: int) -> Iterator[Check]:
    if model.num_loops == 1:
        return
    known = _trajectory(read(model, sample.rows, _DECISIONS))
    prefixes = [row[:end] for row in sample.rows for end in range(max(1, len(row) + 1 - _DECISIONS), len(row) + 1)]
    for readout in ("gate", "margin", "hidden_change"):
        if readout == "gate" and known.gate_logits is None:
            continue
        policy = _halfway(readout, known)
        requests = (Request(key, (row,)) for key, row in enumerate(prefixes))
        answers = list(in_order(run(model, policy, requests, 5)))
        loops, tokens = (np.array([getattr(each, name) for each in answers]) for name in ("loop", "prediction"))
        yield _compared(f"engine, {readout}", policy, known, loops, tokens, dtype)
        texts = generate(model, sample.prompts, policy, max_new_tokens=sample.new, cache="full", batch_size=3)
        outputs = _continued(model, sample, {text.key: text.tokens for text in texts})
        loops = np.concatenate([text.loops for text in texts])
        tokens = np.concatenate([text.tokens for text in texts])
        yield _compared(f"generation, {readout}", policy, _trajectory(outputs), loops, tokens, dtype)


def _trajectory(outputs: PlainOutputs) -> Trajectory:
    logits, hidden = outputs.logits.swapaxes(0, 1), outputs.hidden.swapaxes(0, 1)
    return Trajectory(
        logits=logits, hidden=hidden, gate_logits=None if outputs.gate_logits is None else outputs.gate_logits.T
    )


def _halfway(readout: str, trajectory: Trajectory) -> ExitPolicy:
    """About half of what could exit early does; the threshold lies between two values."""
    values = ExitPolicy(readout, 0.0).values(trajectory)[:, :-1]
    found = np.unique(values[np.isfinite(values)])
    middle = max(1, len(found) // 2)
    return ExitPolicy(readout, float(found[middle - 1 : middle + 1].mean()))


def _compared(what: str, policy: ExitPolicy, trajectory: Trajectory, loops: Array, tokens: Array, dtype: str) -> Check:
    """How many decisions differ from the replay, those apart whose signal comes close to the threshold."""
    replayed = policy.exit_loops(trajectory)
    unsure = close_calls(policy, trajectory, np.maximum(loops, replayed), CLOSE[dtype])
    assert trajectory.logits is not None
    logits_at_exit = trajectory.logits[np.arange(len(loops)), replayed - 1]
    tied = margin(logits_at_exit) <= CLOSE[dtype] * np.abs(logits_at_exit).max(axis=1)
    differing = (loops != replayed) | ((tokens != logits_at_exit.argmax(-1)) & ~tied)
    note = f"at {policy.threshold:.3g}: {loops.mean():.2f} loops" + (
        f"; {unsure.sum()} too close to tell" if unsure.any() else ""
    )
    count = int((differing & ~unsure).sum())
    return _judged("replay", what, count, f"of {len(loops)} differ", int(DIFFERING[dtype] * len(loops)), note)


def _speed(model: LoopedModel, sample: TokenSample, dtype: str, rounds: int) -> Iterator[Check]:
    """Texts of one length, so that every depth has the same work a loop."""
    full = model.num_loops
    if full == 1:
        return
    depths = range(1, full + 1) if full <= 8 else sorted({1, full // 4, full // 2, full})
    rows = [sample.rows[0]] * 4
    prompts = [Prompt(key, row) for key, row in enumerate(rows)]
    requests = [Request(key, (row,)) for key, row in enumerate(rows)]

    def reading(depth: int) -> None:
        list(run(model, ExitPolicy("fixed", depth), requests, len(rows)))

    def writing(depth: int) -> None:
        generate(model, prompts, ExitPolicy("fixed", depth), max_new_tokens=sample.new, batch_size=len(rows))

    for name, way, count in (("reading", reading, len(rows[0])), ("writing", writing, sample.new)):
        ways = {str(depth): partial(way, depth) for depth in depths}
        seconds, _ = interleaved(ways, rounds, 256, silent, next(model.parameters()))
        for depth in depths:
            took, ideal = seconds[str(depth)], model.ideal_speedup(depth)
            faster, rate = spread(seconds[str(full)] / took), spread(len(rows) * count / took)
            note = f"realised {faster.median / ideal:.2f} of {ideal:.3g}; {rate.median:,.0f} tokens/s"
            judged = 2 * depth <= full
            yield Check(
                "speed",
                f"{name}, {depth} of {full} loops",
                faster.median,
                "x",
                1.0 if judged else None,
                faster.median >= 1.0 if judged else None,
                note,
            )


MACHINE_CHECKS: dict[CheckKind, Callable[[LoopedModel, TokenSample, str, int], Iterator[Check]]] = {
    "batch": _batch,
    "cache": _cache,
    "replay": _replay,
    "speed": _speed,
}
