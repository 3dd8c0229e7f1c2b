"""How close to full depth does text stay, and how much faster does it come? Policies and caches on the same text.

Every way continues the same beginnings with the text that really follows, so that all of them meet the same tokens:
the predictions of full depth on the same beginning are the measure. Lossless text, which is full depth's own, cannot be
told what to say: it writes as many tokens freely, and those are compared with full depth's.

Prompts and writing are told apart: a way's prompts take what it takes until every text has its first token, its writing
what the tokens after it take on top. Where a prompt goes through all loops whatever its first token needs (the caches
`propagate` and `latest`), its prompts are full depth's. With the cache `full` it goes deep later, while text is
written. So exits save time in writing, and next to none of what prompts take; `realised_after_prompts` counts it so.

The plain way to write text is a measure, too: rows padded on the left, a cache that is concatenated, every loop of all.
It is what public implementations of looped models do, with the weights of the model at hand: its own projections, norms
and rotary angles, PyTorch's own linear layers (rows of a padded batch are no packed tokens, of which our layers know a
faster product) and fused attention, one forward pass of the whole batch a token, the likeliest token of each row.

Shapes, of the plain way: B rows, M new tokens, N all of them so far, H heads, K head width, D width, V vocabulary.
"""

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, islice
from typing import Any

import msgspec
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from loopscope.analysis.schema import Machine, Spread
from loopscope.bench.measure import Seconds, interleaved, spread
from loopscope.engine.decoder import CacheMode
from loopscope.engine.generation import GenerationStats, Prompt, Token, stream
from loopscope.engine.logit_signals import kl_divergence
from loopscope.errors import UserError
from loopscope.models.decoder_layers import Attention
from loopscope.models.looped_llama import LoopedLlama
from loopscope.models.looped_model import LoopedModel
from loopscope.models.ouro import Ouro
from loopscope.policy import ExitPolicy
from loopscope.progress import ProgressCallback

_WIDTH = 512
"""The width of the matrix products that measure the machine's speed."""


class Drafts(msgspec.Struct, frozen=True):
    """The drafts of lossless text: how many were made, and how many were accepted."""

    drafted: int
    accepted: int
    differing: int  # tokens that full depth did not write


class GenerationTiming(msgspec.Struct, frozen=True):
    """The time of text under one policy and cache, or lossless, against full depth in the same round."""

    readout: str
    threshold: float | None
    max_drop: float | None  # guaranteed
    cache: str
    average_loops: float | None  # of a token; None: lossless, where every token goes through all of them in the end
    agreement: float  # share of tokens whose likeliest next one is full depth's
    kl: float  # of full depth's prediction against this one's, on average
    speedup: Spread  # tokens a second
    realised: Spread | None  # share of the ideal speed-up: T by the average loops, prelude and coda included
    realised_after_prompts: Spread | None  # the same, where prompts take what they take at full depth: all their loops
    prompt_speedup: Spread
    writing_speedup: Spread
    writing_loops: float  # that were run for a token that was written, those for the cache included
    realised_of_run: Spread  # share of what those allow; what prompts made up for while text was written is not in them
    tokens_per_second: Spread
    run_loops: float  # loops that were run for a token of text, those for the cache included
    cache_bytes: int
    drafts: Drafts | None = None  # None: not lossless


class PlainTiming(msgspec.Struct, frozen=True):
    """The time of text at full depth against padded generation; a ratio above 1 means LoopScope is faster."""

    speedup: Spread
    prompt_speedup: Spread
    writing_speedup: Spread
    differing: int  # tokens of all


class GenerationBench(msgspec.Struct, frozen=True):
    """The timings of text from one model, with the machine."""

    model: str
    prompts: int
    prompt_tokens: int
    new_tokens: int
    batch_size: int
    num_loops: int
    machine: Machine
    full_tokens_per_second: Spread
    ways: list[GenerationTiming]
    plain: PlainTiming | None = None


@dataclass(frozen=True)
class Way:
    """One way to write the text that is timed: a policy with a cache, or lossless."""

    policy: ExitPolicy | None
    cache: CacheMode = "full"
    lossless: bool = False

    def __str__(self) -> str:
        return f"{self.policy or 'full depth'}, {'lossless' if self.lossless else f'cache {self.cache}'}"


@dataclass(frozen=True)
class _TimedText:
    """The text to time: a model, its prompts, the tokens after each prompt, and the batch size."""

    model: LoopedModel
    prompts: Sequence[Prompt]
    new_tokens: int
    batch_size: int

    def first(self) -> "_TimedText":
        """The same texts up to their first token."""
        cut = [replace(prompt, forced=None if prompt.forced is None else prompt.forced[:1]) for prompt in self.prompts]
        return replace(self, prompts=cut, new_tokens=1)

    def free(self) -> "_TimedText":
        """The same texts with tokens that the model chooses."""
        return replace(self, prompts=[replace(prompt, forced=None) for prompt in self.prompts])

    def run(self, way: Way, with_logits: bool = False) -> tuple[list[Token], GenerationStats]:
        """Write all texts; return their tokens in order, and the time and work."""
        stats = GenerationStats()
        tokens = stream(
            self.model,
            self.free().prompts if way.lossless else self.prompts,
            way.policy,
            max_new_tokens=self.new_tokens,
            cache=way.cache,
            lossless=way.lossless,
            batch_size=self.batch_size,
            with_logits=with_logits,
            stats=stats,
        )
        return sorted(tokens, key=lambda token: token.key), stats


def bench_generation(
    name: str,
    model: LoopedModel,
    prompts: Sequence[Prompt],
    ways: Sequence[Way],
    batch_size: int,
    rounds: int,
    progress: ProgressCallback,
    plain: bool = False,
) -> GenerationBench:
    """Time ways to write the text that follows each prompt; all prompts have one length."""
    counts = [0 if prompt.forced is None else len(prompt.forced) for prompt in prompts]
    text, full = _TimedText(model, prompts, counts[0], batch_size), Way(None)
    timed = {"full depth": full} | {f"{place}: {way}": way for place, way in enumerate(ways)}
    calls: dict[str, Callable[[], object]] = {}
    for title, way in timed.items():
        through = way if way.cache == "full" else full  # the other caches take prompts through all loops
        calls[f"{title}, prompts"] = partial(text.first().run, through)
        calls[title] = partial(text.run, way)
    unpacked = copy.deepcopy(model) if plain else model  # a copy has plain matrices
    if plain:
        for title, count in (("plain, prompts", 1), ("plain", text.new_tokens)):
            calls[title] = partial(plain_text, unpacked, prompts, count, batch_size)
    seconds, machine = interleaved(calls, rounds, _WIDTH, progress, next(model.parameters()))
    freely = text.free().run(full)[0] if plain or any(way.lossless for way in ways) else []
    base = _TimedWay(seconds, "full depth", text, full)
    timings = [_TimedWay(seconds, f"{place}: {way}", text, way).timing(base, freely) for place, way in enumerate(ways)]
    beside = None
    if plain:
        whole, first = seconds["plain"], seconds["plain, prompts"]
        beside = PlainTiming(
            speedup=spread(whole / base.seconds),
            prompt_speedup=spread(first / base.prompt_seconds),
            writing_speedup=spread((whole - first) / base.writing_seconds),
            differing=_differing_tokens(chain(*plain_text(unpacked, prompts, text.new_tokens, batch_size)), freely),
        )
    return GenerationBench(
        model=name,
        prompts=len(prompts),
        prompt_tokens=int(np.mean([len(prompt.tokens) for prompt in prompts])),
        new_tokens=sum(counts),
        batch_size=batch_size,
        num_loops=model.num_loops,
        machine=machine,
        full_tokens_per_second=spread(sum(counts) / base.seconds),
        ways=timings,
        plain=beside,
    )


class _TimedWay:
    """The time and the work that one way took."""

    def __init__(self, seconds: dict[str, Seconds], title: str, text: _TimedText, way: Way) -> None:
        self.text, self.way = text, way
        self.seconds, self.prompt_seconds = seconds[title], seconds[f"{title}, prompts"]
        self.tokens, self.stats = text.run(way, with_logits=not way.lossless)

    @property
    def logits(self) -> Tensor:
        """[tokens, V]"""
        return torch.stack([token.logits for token in self.tokens if token.logits is not None])

    @property
    def writing_seconds(self) -> Seconds:
        """At least a thousandth of all: on a busy machine the prompts alone may take longer than all of it."""
        return np.maximum(self.seconds - self.prompt_seconds, 1e-3 * self.seconds)

    @property
    def writing_loops(self) -> float:
        """The loops of a written token, later catch-up included and prompts left out."""
        written = self.stats.tokens - len(self.text.prompts)  # the last one of a text goes through none
        return (self.stats.token_loops - self.stats.prompt_loops) / max(1, written)

    def _ideal_seconds(self, full: "_TimedWay", average: float) -> Seconds:
        """The time of full depth's prompts, and of its writing at the ideal speed-up."""
        return full.prompt_seconds + full.writing_seconds / self.text.model.ideal_speedup(average)

    def timing(self, full: "_TimedWay", freely: Sequence[Token]) -> GenerationTiming:
        """Against `full` depth; `freely` are the tokens that full depth writes, which lossless text should write."""
        model, policy = self.text.model, self.way.policy or ExitPolicy("fixed", self.text.model.num_loops)
        tokens = self.stats.tokens
        average = None if self.way.lossless else self.stats.loops / tokens
        agreement, kl, drafts = 1.0, 0.0, None
        if self.way.lossless:
            differing = _differing_tokens((token.token for token in self.tokens), freely)
            drafts = Drafts(self.stats.drafted, self.stats.accepted, differing)
            agreement = 1 - differing / tokens
        else:
            logits, reference = self.logits, full.logits
            agreement = float((logits.argmax(-1) == reference.argmax(-1)).double().mean())
            kl = float(kl_divergence(reference, logits).mean())
        speedup, writing = full.seconds / self.seconds, full.writing_seconds / self.writing_seconds
        overhead = model.embed_cost + model.head_cost
        allowed = (full.writing_loops + overhead) / (self.writing_loops + overhead)
        return GenerationTiming(
            readout=policy.readout,
            threshold=policy.threshold,
            max_drop=None if policy.guarantee is None else policy.guarantee.max_drop,
            cache="lossless" if self.way.lossless else self.way.cache,
            average_loops=average,
            agreement=agreement,
            kl=kl,
            speedup=spread(speedup),
            realised=None if average is None else spread(speedup / model.ideal_speedup(average)),
            realised_after_prompts=None
            if average is None
            else spread(self._ideal_seconds(full, average) / self.seconds),
            prompt_speedup=spread(full.prompt_seconds / self.prompt_seconds),
            writing_speedup=spread(writing),
            writing_loops=self.writing_loops,
            realised_of_run=spread(writing / allowed),
            tokens_per_second=spread(tokens / self.seconds),
            run_loops=self.stats.token_loops / (tokens + sum(len(prompt.tokens) for prompt in self.text.prompts)),
            cache_bytes=self.stats.cache_bytes,
            drafts=drafts,
        )


def _differing_tokens(ours: Iterable[int], theirs: Sequence[Token]) -> int:
    """The number of tokens that differ between texts, compared in order."""
    return sum(mine != token.token for mine, token in zip(ours, theirs, strict=True))


def ways_of(policies: Sequence[ExitPolicy], caches: Sequence[CacheMode], lossless: bool) -> list[Way]:
    """Every policy with every cache, and lossless text.

    To be measured with another cache than it was calibrated for, a policy leaves its guarantee behind.
    """
    ways = [Way(_policy_for_cache(policy, cache), cache) for policy in policies for cache in caches]
    if lossless:
        ways += [Way(_policy_for_cache(policy, "full"), "full", lossless=True) for policy in policies]
    return ways


def _policy_for_cache(policy: ExitPolicy, cache: CacheMode) -> ExitPolicy:
    """The policy for text with this cache; for another cache than its own it loses certificate and cache."""
    if policy.scope.cache in (None, cache):
        return policy
    return replace(policy, certificate=None, scope=msgspec.structs.replace(policy.scope, cache=None))


@torch.inference_mode()
def plain_text(model: LoopedModel, prompts: Sequence[Prompt], new_tokens: int, batch_size: int) -> list[list[int]]:
    """Write text the plain way, by padded generation at full depth: `new_tokens` tokens after every prompt."""
    if not isinstance(model, Ouro | LoopedLlama):
        raise UserError(
            f"The plain way to write text knows Ouro and looped Llamas, not {type(model).__name__}; leave out --plain."
        )
    device = model.model.embed_tokens.weight.device
    texts: list[list[int]] = []
    for start in range(0, len(prompts), batch_size):
        rows = [torch.from_numpy(prompt.tokens) for prompt in prompts[start : start + batch_size]]
        tokens = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_side="left").to(device)
        first = torch.tensor([tokens.shape[1] - len(row) for row in rows], device=device)
        run, written = _PaddedForward(model, first), []
        for _ in range(new_tokens):
            tokens = run(tokens).argmax(-1, keepdim=True)
            written.append(tokens)
        texts += torch.cat(written, 1).tolist()
    return texts


class _PaddedForward:
    """Forward passes of padded generation, each with the cache that earlier passes left."""

    def __init__(self, model: Ouro | LoopedLlama, first: Tensor) -> None:
        self.model, self.first = model, first  # [B] where every row begins
        self.padded = bool(first.any())
        self.cache: dict[tuple[str, int], tuple[Tensor, Tensor]] = {}
        self.seen = 0

    def __call__(self, tokens: Tensor) -> Tensor:
        """[B, V] after the last of tokens [B, M]."""
        model, new = self.model, tokens.shape[1]
        places = torch.arange(self.seen, self.seen + new, device=tokens.device)
        positions = (places - self.first[:, None]).clamp(min=0)
        self.angles = model.config.rotary.angles(positions, model.model.embed_tokens.weight.dtype, self.seen + new)
        self.mask = None  # [B, 1, M, N] what new tokens see; None: all before them
        if self.padded:
            every = torch.arange(self.seen + new, device=tokens.device)
            inside = (every >= self.first[:, None, None]) | (every == places[:, None])  # padding sees itself: no NaN
            self.mask = (inside & (every <= places[:, None]))[:, None]
        hidden = model.model.embed_tokens(tokens)
        hidden = self._ouro(hidden) if isinstance(model, Ouro) else self._looped_llama(model, hidden)
        self.seen += new
        return model.lm_head(hidden[:, -1:])[:, 0]

    def _ouro(self, hidden: Tensor) -> Tensor:
        for loop in range(1, self.model.num_loops + 1):
            hidden = self.model.model.norm(self._through(self.model.model.layers, hidden, loop))
        return hidden

    def _looped_llama(self, model: LoopedLlama, hidden: Tensor) -> Tensor:
        looping, layers = model.config.looping, model.model.layers
        inner = looping.prelude + looping.core
        embedded = hidden = self._through(islice(layers, looping.prelude), hidden, 0)
        for loop in range(1, model.num_loops + 1):
            before = hidden
            if model.model.injection is not None:
                hidden = hidden + model.model.injection(embedded)
            hidden = self._through(islice(layers, looping.prelude, inner), hidden, loop)
            if looping.damping != 1:
                hidden = before + looping.damping * (hidden - before)
        return model.model.norm(self._through(islice(layers, inner, None), hidden, 0))

    def _through(self, layers: Iterable[Any], hidden: Tensor, loop: int) -> Tensor:
        for layer in layers:
            attended = self._attention(layer.self_attn, layer.input_layernorm(hidden), loop)
            hidden = hidden + layer.input_layernorm_2(attended)
            hidden = hidden + layer.post_attention_layernorm_2(layer.mlp(layer.post_attention_layernorm(hidden)))
        return hidden

    def _attention(self, own: Attention, hidden: Tensor, loop: int) -> Tensor:
        rows, new, _ = hidden.shape
        query, key, value = (
            projection(hidden).view(rows, new, -1, own.head_width)
            for projection in (own.q_proj, own.k_proj, own.v_proj)
        )
        if own.query_key_norm:
            query, key = own.q_norm(query), own.k_norm(key)
        cos, sin = (each[:, None] for each in self.angles)
        query, key, value = (each.transpose(1, 2) for each in (query, key, value))
        query, key = (own.rotary.apply_rotary(each, (cos, sin)) for each in (query, key))
        if (before := self.cache.get((own.layer_name, loop))) is not None:
            key, value = torch.cat((before[0], key), 2), torch.cat((before[1], value), 2)
        self.cache[own.layer_name, loop] = (key, value)
        grouped = key.shape[1] != query.shape[1]
        causal = self.mask is None and new > 1
        attended = F.scaled_dot_product_attention(
            query, key, value, attn_mask=self.mask, is_causal=causal, enable_gqa=grouped
        )
        return own.o_proj(attended.transpose(1, 2).reshape(rows, new, -1))
