"""How close to full depth does text stay, and how much faster does it come? Policies and caches on the same text.

Every way continues the same beginnings with the text that really follows, so that all of them meet the same tokens:
the predictions of full depth on the same beginning are the measure.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import msgspec
import numpy as np
import torch
from torch import Tensor

from loopscope.analysis.timings import Machine, Spread
from loopscope.bench.measure import interleaved, spread
from loopscope.engine.decoder import CacheMode
from loopscope.engine.generation import GenerationStats, Prompt, stream
from loopscope.engine.logit_stats import kl_divergence
from loopscope.exits import ExitPolicy
from loopscope.models import LoopedModel
from loopscope.progress import ProgressCallback

_WIDTH = 512
"""Of the matrix products that tell what the machine could do."""


class GenerationTiming(msgspec.Struct, frozen=True):
    """One policy with one cache. Ratios are taken within a round."""

    readout: str
    threshold: float | None
    max_drop: float | None  # promised
    cache: str
    average_loops: float  # of a token
    agreement: float  # share of tokens whose likeliest next one is full depth's
    kl: float  # of full depth's prediction against this one's, on average
    speedup: Spread  # tokens a second, against full depth
    realised: Spread  # share of the ideal speed-up: T by the average loops, prelude and coda included
    tokens_per_second: Spread
    run_loops: float  # loops that were run for a token of text, those for the cache included
    cache_bytes: int


class GenerationBench(msgspec.Struct, frozen=True):
    model: str
    prompts: int
    prompt_tokens: int
    new_tokens: int
    batch_size: int
    num_loops: int
    machine: Machine
    full_tokens_per_second: Spread
    ways: list[GenerationTiming]


def bench_generation(
    name: str,
    model: LoopedModel,
    prompts: Sequence[Prompt],
    policies: Sequence[ExitPolicy],
    caches: Sequence[CacheMode],
    batch_size: int,
    rounds: int,
    progress: ProgressCallback,
) -> GenerationBench:
    """`prompts` are forced to the text that follows them."""
    new_tokens = sum(len(prompt.forced) for prompt in prompts if prompt.forced is not None)
    reference, _ = _predictions(model, prompts, None, "full", batch_size)
    combined = [(_for_cache(policy, cache), cache) for policy in policies for cache in caches]
    ways = {"full depth": partial(_run, model, prompts, None, "full", batch_size)}
    for place, (policy, cache) in enumerate(combined):
        ways[f"{place}: {policy}, {cache}"] = partial(_run, model, prompts, policy, cache, batch_size)
    seconds, machine = interleaved(ways, rounds, _WIDTH, progress, next(model.parameters()))
    full = seconds["full depth"]
    timings = []
    for place, (policy, cache) in enumerate(combined):
        took = seconds[f"{place}: {policy}, {cache}"]
        logits, stats = _predictions(model, prompts, policy, cache, batch_size)
        average = stats.loops / stats.tokens
        timings.append(
            GenerationTiming(
                readout=policy.readout,
                threshold=policy.threshold,
                max_drop=None if policy.guarantee is None else policy.guarantee.max_drop,
                cache=cache,
                average_loops=average,
                agreement=float((logits.argmax(-1) == reference.argmax(-1)).double().mean()),
                kl=float(kl_divergence(reference, logits).mean()),
                speedup=spread(full / took),
                realised=spread(full / took / model.ideal_speedup(average)),
                tokens_per_second=spread(new_tokens / took),
                run_loops=stats.token_loops / (new_tokens + sum(len(prompt.tokens) for prompt in prompts)),
                cache_bytes=stats.cache_bytes,
            )
        )
    return GenerationBench(
        model=name,
        prompts=len(prompts),
        prompt_tokens=int(np.mean([len(prompt.tokens) for prompt in prompts])),
        new_tokens=new_tokens,
        batch_size=batch_size,
        num_loops=model.num_loops,
        machine=machine,
        full_tokens_per_second=spread(new_tokens / full),
        ways=timings,
    )


def _for_cache(policy: ExitPolicy, cache: CacheMode) -> ExitPolicy:
    """To be measured with another cache than it was calibrated for, a policy leaves its promise behind."""
    if policy.scope.cache in (None, cache):
        return policy
    return replace(policy, guarantee=None, scope=msgspec.structs.replace(policy.scope, cache=None))


def _run(
    model: LoopedModel, prompts: Sequence[Prompt], policy: ExitPolicy | None, cache: CacheMode, batch_size: int
) -> None:
    for _ in stream(model, prompts, policy, cache=cache, batch_size=batch_size):
        pass


def _predictions(
    model: LoopedModel, prompts: Sequence[Prompt], policy: ExitPolicy | None, cache: CacheMode, batch_size: int
) -> tuple[Tensor, GenerationStats]:
    """[tokens of all prompts in order, V], and the work that it was."""
    stats = GenerationStats()
    found: dict[object, list[Tensor]] = {prompt.key: [] for prompt in prompts}
    for token in stream(model, prompts, policy, cache=cache, batch_size=batch_size, with_logits=True, stats=stats):
        assert token.logits is not None
        found[token.key].append(token.logits)
    return torch.stack([logits for prompt in prompts for logits in found[prompt.key]]), stats
