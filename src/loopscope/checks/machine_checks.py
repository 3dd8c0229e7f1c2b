"""Does a model compute correctly on this machine? Six kinds of checks; each check has a verdict.

- contract: rows do not depend on their order, their neighbours or the loops of other rows (`check_model`);
- precision: low precision at every loop, against float32;
- batch: rows of different lengths together, against each row alone;
- cache: text generated token by token with a KV cache, against one plain forward pass over the same text;
- replay: exit policies live, in generation and in the engine, against their replay on the outputs of a plain pass;
- speed: fixed depths against full depth, interleaved in every round.

The checks compare predictions by the Kullback-Leibler divergence, in nats, and report its maximum. `selfcheck` loads
one model after the other, and keeps only the outputs of each.

Shapes: B rows, N decisions, T loops, P positions that are compared, V vocabulary, D width.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from loopscope.bench.measure import interleaved, timed
from loopscope.checks.model_contract import CHECK_KINDS, Check, CheckKind, contract_checks
from loopscope.engine.decoder import CACHE_MODES
from loopscope.engine.generation import Prompt, generate, stream
from loopscope.engine.logit_signals import kl_divergence
from loopscope.engine.replay_agreement import close_calls
from loopscope.engine.requests import Request
from loopscope.engine.scheduler import in_order, run
from loopscope.errors import UserError
from loopscope.models.looped_model import LoopedModel
from loopscope.policy import ExitPolicy
from loopscope.progress import ProgressCallback, silent
from loopscope.readouts.signals import margin
from loopscope.trajectory import Trajectory

Array = NDArray[Any]
Load = Callable[[str], LoopedModel]
Outputs = dict[str, Array]
"""A model's outputs at P positions: logits [T, P, V], hidden [T, P, D] and, if it has a gate, gate_logits [T, P]."""
DIVERGENCE = {"float32": 1e-5, "float16": 1e-2, "bfloat16": 5e-2}
"""The largest divergence allowed in each precision; the precision check limits the mean divergence from float32."""
HALTING = {"float32": 1e-3, "float16": 2e-2, "bfloat16": 2e-1}
"""The largest difference of halt logits allowed; the precision check limits the mean difference from float32."""
CLOSE = {"float32": 1e-4, "float16": 1e-2, "bfloat16": 1e-1}
"""If a signal is this close to its threshold (relative), the live run may decide otherwise than the replay."""
DIFFERING = {"float32": 0.0, "float16": 0.02, "bfloat16": 0.1}
"""The share of all other decisions that may differ from the replay."""
_DECISIONS = 8
"""Decisions of every row that the engine makes."""
LOW = ("bfloat16", "float16")
TEXT = """\
The miller's daughter kept three clocks in the kitchen, and none of them agreed. The oldest had come with the house; it
lost a quarter of an hour between breakfast and supper, and was forgiven for it. The second was brass, a gift from an
uncle at sea, and it ran so fast that on some evenings it struck twelve while the bread was still rising. The third had
no hands at all, but it ticked louder than the others, and so it was the one that everybody believed.
"""
_MAX_LOGITS = 1 << 26
"""Logits that a plain pass may hold in memory at a time."""
_ROWS, _MAX_PROMPT, _MAX_NEW = 4, 48, 12


@dataclass(frozen=True)
class TokenSample:
    """Hold the rows of tokens that every machine check runs on."""

    rows: list[Array]  # of different lengths
    new: int  # tokens to generate after each row
    places: int  # positions that are compared, counted from the end of a row

    @classmethod
    def of(cls, model: LoopedModel, text: Array | None) -> "TokenSample":
        new = max(1, min(_MAX_NEW, model.block_size // 4))
        longest = max(1, min(_MAX_PROMPT, model.block_size - new))
        rng = np.random.default_rng(0)
        lengths = np.maximum(1, np.linspace(longest, 1, _ROWS).astype(np.int64))
        if text is None:
            rows = [rng.integers(0, model.vocab_size, length) for length in lengths]
        else:
            if len(text) < longest:
                raise UserError(f"The text has {len(text)} tokens; to be checked by it takes {longest} at least.")
            if text.min() < 0 or text.max() >= model.vocab_size:
                raise UserError("The text has tokens that the model does not know; is the tokenizer the model's own?")
            starts = np.linspace(0, len(text) - longest, _ROWS).astype(np.int64)
            rows = [text[start : start + length] for start, length in zip(starts, lengths, strict=True)]
        held = _MAX_LOGITS // (model.num_loops * model.vocab_size * _ROWS)
        return cls([np.asarray(row, dtype=np.int64) for row in rows], new, max(1, min(longest, held)))

    @property
    def prompts(self) -> list[Prompt]:
        return [Prompt(key, row) for key, row in enumerate(self.rows)]


@torch.inference_mode()
def plain_pass(model: LoopedModel, rows: Sequence[Array], places: int) -> Outputs:
    """Run one plain pass over all rows; return the outputs of each row's last `places` positions at every loop."""
    device = next(model.parameters()).device
    tokens = torch.nn.utils.rnn.pad_sequence([torch.from_numpy(row) for row in rows], batch_first=True)
    lengths = torch.tensor([len(row) for row in rows])
    place = torch.arange(tokens.shape[1])
    read = (place >= (lengths - places)[:, None])[place < lengths[:, None]].nonzero()[:, 0].to(device)
    found: dict[str, list[Array]] = {}
    for state in model.unroll(model.begin(tokens.to(device), lengths.to(device))):
        pooled, head_input = (values.index_select(0, read) for values in model.read(state))
        by_source = {"logits": model.predict(head_input), "hidden": pooled, "gate_logits": model.halt(pooled)}
        for name, output in by_source.items():
            if output is not None:
                found.setdefault(name, []).append(output.float().cpu().numpy())
    return {name: np.stack(by_loop) for name, by_loop in found.items()}


def _concatenate_outputs(parts: Sequence[Outputs]) -> Outputs:
    """Concatenate the outputs of several passes along their positions."""
    return {name: np.concatenate([part[name] for part in parts], 1) for name in parts[0]}


def divergence(reference: Array, other: Array) -> Array:
    """[...] KL(reference || other) of logits [..., V]; infinite where a logit is NaN or infinite."""
    flat = (torch.from_numpy(logits).flatten(0, -2) for logits in (reference, other))
    values = kl_divergence(*flat).numpy().reshape(reference.shape[:-1])
    return np.where(np.isfinite(values), values, np.inf)


class SelfCheck(msgspec.Struct, frozen=True):
    """Hold the results of `selfcheck` for one model on one machine."""

    model: str
    dtype: str
    device: str
    num_loops: int
    tokens: str  # the source of the tokens
    checks: list[Check]

    @property
    def failed(self) -> list[Check]:
        return [check for check in self.checks if check.passed is False]

    @property
    def sentence(self) -> str:
        """Return the verdict over all checks as one sentence."""
        judged = sum(check.passed is not None for check in self.checks)
        if not judged:
            return "Nothing of this has a limit: it is shown, not judged."
        verdict = f"{len(self.failed)} of {judged:,} checks failed" if self.failed else f"All {judged:,} checks passed"
        shown = len(self.checks) - judged
        return verdict + (f"; {shown:,} more have no limit and are shown only." if shown else ".")


@contextmanager
def _restore_threads_after() -> Iterator[None]:
    """Restore PyTorch's number of threads afterwards."""
    threads = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@_restore_threads_after()
def selfcheck(
    name: str,
    load: Load,
    text: Array | None = None,
    *,
    dtype: str = "float32",
    kinds: Sequence[CheckKind] = CHECK_KINDS,
    rounds: int = 3,
    source: str = "the text",
    progress: ProgressCallback = silent,
) -> SelfCheck:
    """Check a model on this machine: `load(precision)` loads it, `text` holds tokens from `source` (default: random).

    The precision check tries every precision, but has a limit for `dtype` only; all other checks run in `dtype`.
    """
    checks: list[Check] = []
    reference: Outputs | None = None
    sample: TokenSample | None = None
    others = [kind for kind in kinds if kind != "precision"]
    precisions = ["float32", *LOW] if "precision" in kinds else []
    stages = len(precisions) + len(others)
    depth, device, stage = 0, "", count(1)
    for precision in dict.fromkeys([*precisions, *([dtype] if others else [])]):
        model = load(precision)
        if sample is None:
            sample = TokenSample.of(model, text)
            torch.set_num_threads(_faster_threads(model, sample))
        depth, device = model.num_loops, str(next(model.parameters()).device)
        if precision in precisions:
            try:
                outputs = plain_pass(model, sample.rows, sample.places)
            except RuntimeError as error:
                if precision == "float32":
                    raise
                reason = str(error).splitlines()[0]
                checks.append(Check("precision", precision, None, "", None, None, f"not available here: {reason}"))
                outputs = None
            if reference is None:
                reference = outputs
            elif outputs is not None:
                checks += precision_checks(precision, reference, outputs, judged=precision == dtype)
            progress(next(stage), stages, precision)
        if precision == dtype:
            for kind in others:
                if model.causal or kind in ("contract", "batch"):
                    checks += MACHINE_CHECKS[kind](model, sample, dtype, rounds)
                else:
                    checks.append(Check(kind, "not checked", None, "", None, None, "the model looks ahead"))
                progress(next(stage), stages, kind)
        del model
    checks.sort(key=lambda check: CHECK_KINDS.index(check.kind))
    return SelfCheck(name, dtype, device, depth, "random tokens" if text is None else source, checks)


def _faster_threads(model: LoopedModel, sample: TokenSample) -> int:
    """All threads, or one thread if that is faster: a small model spends longer on its threads than on computing."""
    seconds = {}
    for threads in (torch.get_num_threads(), 1):
        torch.set_num_threads(threads)
        seconds[threads] = min(timed(lambda: plain_pass(model, sample.rows[:1], 1)) for _ in range(3))
    return min(seconds, key=lambda threads: seconds[threads])


def _check_contract(model: LoopedModel, sample: TokenSample, dtype: str, rounds: int) -> Iterator[Check]:
    """Yield the checks of the model contract; the first that fails is the last one."""
    try:
        yield from contract_checks(model)
    except UserError as error:
        yield Check("contract", "the model contract", None, "", None, False, str(error))


def _same_token_note(logits: Array, other: Array) -> str:
    """The share of decisions with the same likeliest token, as the note of a check."""
    return f"same token: {100 * float((logits.argmax(-1) == other.argmax(-1)).mean()):.1f} %"


def _check_limit(kind: CheckKind, what: str, measured: float, unit: str, limit: float | None, note: str = "") -> Check:
    """Make a check of a measured value, which passes if the value is at most the limit."""
    note = note if np.isfinite(measured) else "it says what is no number"
    return Check(kind, what, measured, unit, limit, None if limit is None else bool(measured <= limit), note)


def precision_checks(precision: str, reference: Outputs, outputs: Outputs, judged: bool) -> Iterator[Check]:
    """Compare the outputs in this precision with float32's; only a `judged` precision has a limit."""
    limits = (DIVERGENCE[precision], HALTING[precision]) if judged else (None, None)
    for loop, (right, low) in enumerate(zip(reference["logits"], outputs["logits"], strict=True), start=1):
        note = _same_token_note(right, low)
        mean = float(divergence(right, low).mean())
        yield _check_limit("precision", f"{precision}, loop {loop}", mean, "nats (mean)", limits[0], note)
    if "gate_logits" in reference:
        apart = np.abs(reference["gate_logits"] - outputs["gate_logits"])
        note = f"at most {apart.max():.2g}"
        yield _check_limit("precision", f"{precision}, halt logits", float(apart.mean()), "(mean)", limits[1], note)


def _check_batches(model: LoopedModel, sample: TokenSample, dtype: str, rounds: int) -> Iterator[Check]:
    """Compare rows that run in one batch with each row alone."""
    together = plain_pass(model, sample.rows, sample.places)
    alone = _concatenate_outputs([plain_pass(model, [row], sample.places) for row in sample.rows])
    worst = float(divergence(alone["logits"], together["logits"]).max())
    yield _check_limit("batch", "predictions at every loop", worst, "nats (max)", DIVERGENCE[dtype])
    if "gate_logits" in together:
        apart = float(np.abs(alone["gate_logits"] - together["gate_logits"]).max())
        yield _check_limit("batch", "halt logits", apart, "(max)", HALTING[dtype])


def _check_caches(model: LoopedModel, sample: TokenSample, dtype: str, rounds: int) -> Iterator[Check]:
    """Compare generated text in every cache mode with a plain pass at full depth, where only `latest` may differ."""
    for cache in CACHE_MODES:
        options: dict[str, Any] = {"max_new_tokens": sample.new, "cache": cache, "batch_size": len(sample.rows) - 1}
        tokens = sorted(stream(model, sample.prompts, with_logits=True, **options), key=lambda token: token.key)
        texts = [[token.token for token in tokens if token.key == key] for key in range(len(sample.rows))]
        logits = np.stack([token.logits.cpu().numpy() for token in tokens if token.logits is not None])
        plain = _outputs_of_texts(model, sample, texts)["logits"][-1]
        values = divergence(plain, logits)
        limit = None if cache == "latest" else DIVERGENCE[dtype]
        note = f"{_same_token_note(plain, logits)} of {len(logits)}"
        note += "; equality is not required" if limit is None else ""
        yield _check_limit("cache", f"cache '{cache}'", float(values.max()), "nats (max)", limit, note)


def _outputs_of_texts(model: LoopedModel, sample: TokenSample, texts: Sequence[Sequence[int]]) -> Outputs:
    """Run a plain pass over prompts and generated texts; return the outputs that predicted the generated tokens."""
    whole = [np.array([*row, *text[:-1]], dtype=np.int64) for row, text in zip(sample.rows, texts, strict=True)]
    return _concatenate_outputs([plain_pass(model, [row], len(text)) for row, text in zip(whole, texts, strict=True)])


def _check_replay(model: LoopedModel, sample: TokenSample, dtype: str, rounds: int) -> Iterator[Check]:
    """Compare exit policies in the engine and in generation with their replay on the outputs of a plain pass."""
    if model.num_loops == 1:
        return
    known = _as_trajectory(plain_pass(model, sample.rows, _DECISIONS))
    prefixes = [row[:end] for row in sample.rows for end in range(max(1, len(row) + 1 - _DECISIONS), len(row) + 1)]
    for readout in ("gate", "margin", "hidden_change"):
        if readout == "gate" and known.gate_logits is None:
            continue
        policy = _half_exiting_policy(readout, known)
        requests = (Request(key, (row,)) for key, row in enumerate(prefixes))
        answers = list(in_order(run(model, requests, policy, 5)))
        loops, tokens = (np.array([getattr(each, name) for each in answers]) for name in ("loop", "prediction"))
        yield _check_exit(f"engine, {readout}", policy, known, loops, tokens, dtype)
        texts = generate(model, sample.prompts, policy, max_new_tokens=sample.new, cache="full", batch_size=3)
        outputs = _outputs_of_texts(model, sample, [text.tokens for text in texts])
        loops = np.concatenate([text.loops for text in texts])
        tokens = np.concatenate([text.tokens for text in texts])
        yield _check_exit(f"generation, {readout}", policy, _as_trajectory(outputs), loops, tokens, dtype)


def _as_trajectory(outputs: Outputs) -> Trajectory:
    """The outputs of a plain pass as a recording, to replay a policy on."""
    by_decision: dict[str, Any] = {name: values.swapaxes(0, 1) for name, values in outputs.items()}
    return Trajectory(**by_decision)


def _half_exiting_policy(readout: str, trajectory: Trajectory) -> ExitPolicy:
    """A policy under which about half of the early-exit decisions exit; its threshold lies between two values."""
    values = ExitPolicy(readout, 0.0).values(trajectory)[:, :-1]
    found = np.unique(values[np.isfinite(values)])
    middle = max(1, len(found) // 2)
    return ExitPolicy(readout, float(found[middle - 1 : middle + 1].mean()))


def _check_exit(
    what: str, policy: ExitPolicy, trajectory: Trajectory, loops: Array, tokens: Array, dtype: str
) -> Check:
    """Count the decisions that differ from the replay, without those whose signal is too close to the threshold."""
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
    return _check_limit("replay", what, count, f"of {len(loops)} differ", int(DIFFERING[dtype] * len(loops)), note)


def _check_speed(model: LoopedModel, sample: TokenSample, dtype: str, rounds: int) -> Iterator[Check]:
    """Time fixed depths against full depth, on texts of one length, so that every loop costs the same."""
    full = model.num_loops
    if full == 1:
        return
    depths = range(1, full + 1) if full <= 8 else sorted({1, full // 4, full // 2, full})
    rows = [sample.rows[0]] * 4
    prompts = [Prompt(key, row) for key, row in enumerate(rows)]
    requests = [Request(key, (row,)) for key, row in enumerate(rows)]

    def reading(depth: int) -> None:
        list(run(model, requests, ExitPolicy("fixed", depth), len(rows)))

    def writing(depth: int) -> None:
        generate(model, prompts, ExitPolicy("fixed", depth), max_new_tokens=sample.new, batch_size=len(rows))

    for name, way, tokens in (("reading", reading, len(rows[0])), ("writing", writing, sample.new)):
        ways = {str(depth): partial(way, depth) for depth in depths}
        seconds, _ = interleaved(ways, rounds, 256, silent, next(model.parameters()))
        for depth in depths:
            least, ideal = seconds[str(depth)].min(), model.ideal_speedup(depth)  # other work only makes a run slower
            faster = float(seconds[str(full)].min() / least)
            note = f"realised {faster / ideal:.2f} of {ideal:.3g}; {len(rows) * tokens / least:,.0f} tokens/s"
            limit, passed = (1.0, faster >= 1.0) if 2 * depth <= full else (None, None)
            yield Check("speed", f"{name}, {depth} of {full} loops", faster, "x", limit, passed, note)


MACHINE_CHECKS: dict[CheckKind, Callable[[LoopedModel, TokenSample, str, int], Iterator[Check]]] = {
    "contract": _check_contract,
    "batch": _check_batches,
    "cache": _check_caches,
    "replay": _check_replay,
    "speed": _check_speed,
}
