"""Text with exits, whose tokens draft their successors before they exit: is it the same text in fewer steps?"""

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from test_generation import prompts, same
from tiny_language import MODELS, draft_exits, outspoken, tiny_ouro

import loopscope as ls
from loopscope.engine.decoder import CacheMode, Decoder
from loopscope.engine.draft_spacing import DraftGain
from loopscope.engine.generation import Completion, GenerationStats, Prompt, generate, stream
from loopscope.engine.sampling import Sampling
from loopscope.models.looped_model import LoopedModel

POLICIES = [
    ls.ExitPolicy("top1", 0.075),
    ls.ExitPolicy("margin", 0.05),
    ls.ExitPolicy("kl", 0.07),
    ls.ExitPolicy("gate", 0.6),
    ls.ExitPolicy("fixed", 2),
]
COUNTS = Counter[str]


@pytest.fixture(scope="module")
def model() -> LoopedModel:
    return tiny_ouro(num_hidden_layers=2)


def written(
    monkeypatch: pytest.MonkeyPatch, drafting: bool, model: LoopedModel, asked: list[Prompt], **options: Any
) -> tuple[list[Completion], COUNTS]:
    """The texts, and what was counted: steps, drafts, and exits that were held until their turn came."""
    with monkeypatch.context() as patched:
        drafts, counts, due = draft_exits(patched, drafting), Counter(), Decoder._due_exits

        def counted(self: Decoder, *given: Any) -> Any:
            counts["steps"] += 1
            before = {*self._held}
            out = due(self, *given)
            counts["held"] += len({*self._held} - before)
            return out

        patched.setattr(Decoder, "_due_exits", counted)
        texts = generate(model, asked, **options)
    return texts, counts + Counter(drafts=sum(drafts))


@pytest.mark.parametrize("name", [*MODELS])
@pytest.mark.parametrize("cache", ["full", "propagate", "latest"])
def test_it_is_the_same_text_with_drafts_and_without(
    name: str, cache: CacheMode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows under several policies beside each other; where a head attends, and with one place for all, none drafts."""
    model = MODELS[name]()
    if isinstance(getattr(model, "gate", None), type(None)):
        policies = [policy for policy in POLICIES if policy.readout != "gate"]
    else:
        policies = POLICIES
    asked = [replace(each, policy=policies[place % len(policies)]) for place, each in enumerate(prompts(7))]
    for batch_size in (1, 3):
        texts = [
            written(monkeypatch, drafting, model, asked, max_new_tokens=14, cache=cache, batch_size=batch_size)
            for drafting in (False, True)
        ]
        assert same(texts[0][0], texts[1][0])
        assert texts[0][1]["drafts"] == 0
        assert (texts[1][1]["drafts"] > 0) == (cache != "latest" and not model.head_attends)


@pytest.mark.parametrize("cache", ["full", "propagate"])
def test_drafts_that_stand_save_steps(cache: CacheMode, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next token is the same by every loop, and exits differ: some drafts exit before the token they come after."""
    model = outspoken(total_ut_steps=4)
    for parameter, weight in model.named_parameters():
        if "layernorm_2" in parameter:
            weight *= 0.2
    (policy,) = [ls.ExitPolicy("margin", 1.2)]
    for batch_size in (1, 4):
        alone, drafted = (
            written(
                monkeypatch, drafting, model, prompts(4), policy=policy, cache=cache, max_new_tokens=40,
                batch_size=batch_size,
            )
            for drafting in (False, True)
        )  # fmt: skip
        assert same(alone[0], drafted[0])
        assert len({loops for text in alone[0] for loops in text.loops}) > 2
        assert drafted[1]["held"] > 10
        assert drafted[1]["steps"] < 0.9 * alone[1]["steps"]


@pytest.mark.parametrize("cache", ["full", "propagate"])
def test_forced_and_drawn_texts_and_stops(
    model: LoopedModel, cache: CacheMode, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = np.random.default_rng(0)
    free = prompts(6)
    usual = generate(model, free, POLICIES[0], max_new_tokens=20, cache=cache)
    forced = [
        Prompt(each.key, each.tokens, np.where(draw.random(20) < 0.7, text.tokens, draw.integers(0, 50, 20)))
        for each, text in zip(free, usual, strict=True)
    ]
    ends = {usual[0].tokens[5], usual[2].tokens[9]}
    options: list[tuple[list[Prompt], dict[str, Any]]] = [
        (forced, {}),
        (free, {"stop": ends, "max_new_tokens": 20}),
        (free, {"sampling": Sampling(temperature=0.7, seed=1), "max_new_tokens": 20}),
        ([Prompt(0, np.ones(245, dtype=np.int64))], {"max_new_tokens": 40}),  # up to the end of the block
    ]
    for asked, given in options:
        alone, drafted = (
            written(monkeypatch, drafting, model, asked, policy=POLICIES[0], cache=cache, batch_size=2, **given)
            for drafting in (False, True)
        )
        assert same(alone[0], drafted[0])
        assert drafted[1]["drafts"] > 5


def test_tokens_of_a_row_in_flight_and_their_logits(model: LoopedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """A draft that exits early keeps its logits till its turn comes."""
    logits = []
    for drafting in (False, True):
        with monkeypatch.context() as patched:
            draft_exits(patched, drafting)
            out = list(stream(model, prompts(3), POLICIES[1], max_new_tokens=12, with_logits=True))
        by_text = sorted(out, key=lambda token: token.key)
        logits.append(torch.stack([token.logits for token in by_text if token.logits is not None]))
    assert logits[0].shape == (36, 50)
    assert torch.allclose(*logits, atol=5e-5)


def test_only_tokens_of_wrong_drafts_run_in_vain(model: LoopedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    stats = [GenerationStats(), GenerationStats()]
    for drafting in (False, True):
        with monkeypatch.context() as patched:
            drafts = draft_exits(patched, drafting)
            generate(model, prompts(3), POLICIES[0], max_new_tokens=30, cache="propagate", stats=stats[drafting])
    assert stats[0].token_loops <= stats[1].token_loops <= stats[0].token_loops + model.num_loops * sum(drafts)


def test_drafts_begin_where_they_pay() -> None:
    """By what a step with more tokens takes, how often drafts stand, and how deep tokens go."""

    def gain(more: float, standing: float, loops: int) -> DraftGain:
        made = DraftGain(tiny_ouro())
        for tokens in range(1, 65):
            made.see(1, tokens, False, tokens, (0.0, 1 + more * (tokens - 1), 1.1 + more * (tokens - 1)))
        begun = np.where(np.random.default_rng(0).random(400) < standing, 1, loops)
        made.count(begun, np.full(400, loops))
        return made

    assert gain(0.02, 0.8, 2).pays(1)
    assert gain(0.02, 0.8, 2).pays(8)
    assert not gain(1.0, 0.8, 2).pays(1)  # every token costs as much as the first
    assert not gain(0.02, 0.0, 2).pays(1)
    assert not gain(0.02, 0.8, 1).pays(1)  # they exit at once
    long = DraftGain(tiny_ouro())
    long.see(1, 65, False, 1, (0.0, 1.0, 2.0))  # with a prompt among them: not worth knowing
    assert long._seconds.estimate(1, 4, 4) == DraftGain(tiny_ouro())._seconds.estimate(1, 4, 4)
