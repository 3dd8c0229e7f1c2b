"""How is text generated at adaptive depth? Prompts in, tokens out as they are ready, with the loops that each took.

Shapes: V vocabulary.
"""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sized
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from loopscope.arguments import as_count, as_number, as_token_row, check_kind, check_list
from loopscope.config import NonNegative, Settings
from loopscope.engine.decoder import CACHE_MODES, CacheMode, Decoder
from loopscope.engine.logit_stats import NO_ANSWER, check_answers, likeliest_classes
from loopscope.engine.request_batch import require_vocabulary
from loopscope.errors import UserError
from loopscope.exits import ExitPolicy
from loopscope.exits.exit_state import ExitState
from loopscope.exits.scope import Scope
from loopscope.models import LoopedModel
from loopscope.models.device import accumulator, upload

Integers = NDArray[np.int64]
_MOST = 2**63
MOST_ROWS = 1 << 16
"""Texts that are written at a time, where it is not known how many there are."""
Whole = Annotated[int, msgspec.Meta(ge=0, le=_MOST - 1)]


class Sampling(Settings, frozen=True, kw_only=True):
    """Temperature 0 takes the likeliest token."""

    temperature: NonNegative = 0.0
    top_k: Whole = 0  # 0: of all tokens
    top_p: float = 1.0
    seed: Whole = 0

    def __post_init__(self) -> None:
        for name in ("temperature", "top_p"):
            as_number(getattr(self, name), name)
        for name in ("top_k", "seed"):
            as_count(getattr(self, name), name, 0)
        if not (0 <= self.temperature < math.inf and 0 <= self.top_k < _MOST and 0 <= self.seed < _MOST):
            raise UserError("temperature, top_k and seed are numbers from 0 on, and below 2**63.")
        if not 0 < self.top_p <= 1:
            raise UserError("top_p is a number above 0 and up to 1.")


@dataclass(frozen=True, eq=False)
class Prompt:
    key: Any  # comes back with every token
    tokens: Integers
    forced: Integers | None = None  # what is said next, whatever the model would say: to see what it thinks of it


@dataclass(frozen=True, eq=False)
class Token:
    """One token as it comes."""

    key: Any
    token: int
    loops: int
    finish_reason: Literal["stop", "length"] | None  # why this is the last one
    logits: Tensor | None  # [V], where they were asked for


@dataclass
class GenerationStats:
    """What generating took."""

    tokens: int = 0
    loops: int = 0  # over all tokens
    token_loops: int = 0  # that were run: prompts, and what the cache needed, included
    cache_bytes: int = 0


@dataclass(eq=False)
class Completion:
    key: Any
    tokens: list[int] = field(default_factory=list)
    loops: list[int] = field(default_factory=list)
    finish_reason: str = ""


def stream(
    model: LoopedModel,
    prompts: Iterable[Prompt],
    policy: ExitPolicy | None = None,
    *,
    max_new_tokens: int = 128,
    stop: Collection[int] = (),
    stopping_criterion: Callable[[Any, int], bool] | None = None,
    cache: CacheMode = "full",
    sampling: Sampling | None = None,
    batch_size: int = 8,
    with_logits: bool = False,
    stats: GenerationStats | None = None,
) -> Iterator[Token]:
    """Tokens as they are ready. Without a policy every token goes through all loops.

    A text ends with a token in `stop`, or when `stopping_criterion(key, token)`, which is asked of every token, says
    so. A prompt that is finished gives its place to the next. Nothing of a row depends on its neighbours, not even what
    is drawn: a prompt has random numbers of its own.
    """
    check_kind(model, LoopedModel, "The model", "a LoopedModel, as load_model gives them")
    check_kind(policy, (ExitPolicy, type(None)), "The policy", "an ExitPolicy")
    check_kind(sampling, (Sampling, type(None)), "sampling", "a Sampling")
    check_list(prompts, "prompts", "a list of prompts")
    for name, value in (("max_new_tokens", max_new_tokens), ("batch_size", batch_size)):
        as_count(value, name)
    batch_size = min(batch_size, max(1, len(prompts)) if isinstance(prompts, Sized) else MOST_ROWS)
    stop = {as_count(token, "A token that ends a text", 0) for token in check_list(stop, "stop", "a list of tokens")}
    if cache not in CACHE_MODES:
        raise UserError(f"There is no cache '{cache}'; choose one of {', '.join(CACHE_MODES)}.")
    model.require_evaluation()
    model.require("causal", "Writing text")
    model.require("kv_cache", "Writing text")
    policy = policy or ExitPolicy("fixed", model.num_loops)
    tied = policy.model is not None or policy.gate is not None
    here = Scope(unit="tokens", cache=cache, precision=model.precision)
    policy.check(model.weights_sha256 if tied else None, model.num_loops, here)
    sampling, stats = sampling or Sampling(), stats or GenerationStats()
    decoder = Decoder(model, ExitState(policy, model.num_loops), batch_size, cache)
    waiting = enumerate(prompts)
    rows: dict[int, _Row] = {}
    while True:
        for row in sorted(set(range(batch_size)) - set(rows)):
            if (following := next(waiting, None)) is None:
                break
            number, prompt = following
            check_kind(prompt, Prompt, "What is continued", "a Prompt")
            rows[row] = _Row(prompt, token_budget(model, prompt, max_new_tokens), sampling, number)
            decoder.prefill(row, rows[row].tokens)
        if not rows:
            return
        exits, loops, logits = decoder.step()
        if not len(exits):
            continue
        require_vocabulary(model, logits)
        logits = logits.float()
        chosen = _choose(logits, [rows[row] for row in exits.tolist()], sampling)
        unfinished, generated = [], []
        for place, (row, took, token) in enumerate(zip(exits.tolist(), loops.tolist(), chosen, strict=True)):
            finish_reason = rows[row].add(token, stop)
            if stopping_criterion is not None and stopping_criterion(rows[row].prompt.key, token):
                finish_reason = "stop"
            stats.tokens, stats.loops = stats.tokens + 1, stats.loops + took
            stats.token_loops, stats.cache_bytes = decoder.token_loops, decoder.cache_bytes
            yield Token(rows[row].prompt.key, token, took, finish_reason, logits[place] if with_logits else None)
            if finish_reason is None:
                unfinished.append(row)
                generated.append(token)
            else:
                del rows[row]
        if unfinished:
            decoder.append(unfinished, generated)


def generate(
    model: LoopedModel, prompts: Iterable[Prompt], policy: ExitPolicy | None = None, **options: Any
) -> list[Completion]:
    """All continuations, in the order of the prompts; the options are those of `stream`."""
    given = list(check_list(prompts, "prompts", "a list of prompts"))
    for prompt in given:
        check_kind(prompt, Prompt, "What is continued", "a Prompt")
    numbered = [Prompt(number, prompt.tokens, prompt.forced) for number, prompt in enumerate(given)]
    texts = [Completion(prompt.key) for prompt in given]
    for token in stream(model, numbered, policy, **options):
        text = texts[token.key]
        text.tokens.append(token.token)
        text.loops.append(token.loops)
        text.finish_reason = token.finish_reason or ""
    return texts


class _Row:
    """A prompt that is being continued."""

    def __init__(self, prompt: Prompt, token_budget: int, sampling: Sampling, number: int) -> None:
        self.prompt, self.token_budget, self.generated = prompt, token_budget, 0
        self.tokens = np.asarray(prompt.tokens, dtype=np.int64)
        self.draws = np.random.Generator(np.random.Philox(key=[sampling.seed, number]))

    def add(self, token: int, stop: Collection[int]) -> Literal["stop", "length"] | None:
        self.generated += 1
        if token in stop and self.prompt.forced is None:
            return "stop"
        return "length" if self.generated == self.token_budget else None


def token_budget(model: LoopedModel, prompt: Prompt, most: int) -> int:
    """How many tokens may follow a prompt; one that the model cannot take is refused."""
    given = [as_token_row(prompt.tokens, "A prompt")]
    if prompt.forced is not None:
        given.append(as_token_row(prompt.forced, "What is forced after a prompt"))
    if any(part.min() < 0 or part.max() >= model.vocab_size for part in given):
        raise UserError(f"A prompt has a token outside the model's vocabulary (0..{model.vocab_size - 1}).")
    if prompt.forced is not None:
        model.check_length(sum(map(len, given)))
        return len(prompt.forced)
    model.check_length(len(given[0]) + 1)
    return min(most, model.block_size - len(given[0]))


def _choose(logits: Tensor, rows: list[_Row], sampling: Sampling) -> list[int]:
    """The next token of every row, from its logits [n, V]."""
    if sampling.temperature == 0:
        picked = likeliest_classes(logits)
    else:
        ordered, tokens = (logits.to(accumulator(logits.device)) / sampling.temperature).sort(
            dim=-1, descending=True, stable=True
        )
        shares = ordered.softmax(-1)
        if sampling.top_k:
            shares[:, sampling.top_k :] = 0
        shares.masked_fill_(shares.cumsum(-1) - shares >= sampling.top_p * shares.sum(-1, keepdim=True), 0.0)
        drawn = upload(torch.tensor([row.draws.random() for row in rows], dtype=shares.dtype), logits.device)
        reached = shares.cumsum(-1) > (drawn * shares.sum(-1))[:, None]
        picked = tokens.gather(1, reached.int().argmax(-1, keepdim=True))[:, 0]
        largest = logits.gather(1, tokens[:, :1])[:, 0]  # or a NaN, which is sorted to the front
        picked = picked.masked_fill(~largest.isfinite(), NO_ANSWER)
    chosen = check_answers(picked.cpu().numpy()).tolist()
    forced = (None if row.prompt.forced is None else int(row.prompt.forced[row.generated]) for row in rows)
    return [token if other is None else other for token, other in zip(chosen, forced, strict=True)]
