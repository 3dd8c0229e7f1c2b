"""How close to full depth does text stay, and how much faster does it come? Policies and caches on the same text.

Every way continues the same beginnings with the text that really follows, so that all of them meet the same tokens:
the predictions of full depth on the same beginning are the measure.
"""

from collections.abc import Sequence
from functools import partial

import msgspec
import numpy as np
import torch
from torch import Tensor

from loopscope.bench.measure import Machine, Spread, interleaved, spread
from loopscope.engine.decoding import Cache
from loopscope.engine.generation import Prompt, Work, stream
from loopscope.exits import ExitPolicy
from loopscope.models import LoopedModel
from loopscope.progress import Advance

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
    realised: Spread  # share of the ideal speed-up, T by the average loops
    tokens_per_second: Spread
    run_loops: float  # loops that were run for a token of text, those for the memory included
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
    caches: Sequence[Cache],
    batch_size: int,
    rounds: int,
    progress: Advance,
) -> GenerationBench:
    """`prompts` are forced to the text that follows them."""
    said = sum(len(prompt.forced) for prompt in prompts if prompt.forced is not None)
    reference, _ = _predictions(model, prompts, None, "all", batch_size)
    combined = [(policy, cache) for policy in policies for cache in caches]
    ways = {"full depth": partial(_run, model, prompts, None, "all", batch_size)}
    for place, (policy, cache) in enumerate(combined):
        ways[f"{place}: {policy}, {cache}"] = partial(_run, model, prompts, policy, cache, batch_size)
    seconds, machine = interleaved(ways, rounds, _WIDTH, progress)
    full = seconds["full depth"]
    timings = []
    for place, (policy, cache) in enumerate(combined):
        took = seconds[f"{place}: {policy}, {cache}"]
        logits, work = _predictions(model, prompts, policy, cache, batch_size)
        average = work.loops / work.tokens
        timings.append(
            GenerationTiming(
                readout=policy.readout,
                threshold=policy.threshold,
                max_drop=None if policy.promise is None else policy.promise.max_drop,
                cache=cache,
                average_loops=average,
                agreement=float((logits.argmax(-1) == reference.argmax(-1)).double().mean()),
                kl=_kl(reference, logits),
                speedup=spread(full / took),
                realised=spread(full / took / (model.num_loops / average)),
                tokens_per_second=spread(said / took),
                run_loops=work.token_loops / (said + sum(len(prompt.tokens) for prompt in prompts)),
                cache_bytes=work.cache_bytes,
            )
        )
    return GenerationBench(
        model=name,
        prompts=len(prompts),
        prompt_tokens=int(np.mean([len(prompt.tokens) for prompt in prompts])),
        new_tokens=said,
        batch_size=batch_size,
        num_loops=model.num_loops,
        machine=machine,
        full_tokens_per_second=spread(said / full),
        ways=timings,
    )


def _run(
    model: LoopedModel, prompts: Sequence[Prompt], policy: ExitPolicy | None, cache: Cache, batch_size: int
) -> None:
    for _ in stream(model, prompts, policy, cache=cache, batch_size=batch_size):
        pass


def _predictions(
    model: LoopedModel, prompts: Sequence[Prompt], policy: ExitPolicy | None, cache: Cache, batch_size: int
) -> tuple[Tensor, Work]:
    """[tokens of all prompts in order, V], and the work that it was."""
    work = Work()
    found: dict[object, list[Tensor]] = {prompt.key: [] for prompt in prompts}
    for token in stream(model, prompts, policy, cache=cache, batch_size=batch_size, with_logits=True, work=work):
        assert token.logits is not None
        found[token.key].append(token.logits)
    return torch.stack([logits for prompt in prompts for logits in found[prompt.key]]), work


def _kl(reference: Tensor, logits: Tensor) -> float:
    p, q = (values.double().log_softmax(-1) for values in (reference, logits))
    return float((p.exp() * (p - q)).sum(-1).mean())
