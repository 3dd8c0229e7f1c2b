"""Lossless text: is it what full depth says, whatever was drafted, and is no work of a draft done twice?"""

from typing import Any

import numpy as np
import pytest
import torch
from conftest import GOLDEN
from scipy.stats import chisquare
from test_generation import prompts, same
from tiny_language import MODELS, tiny_ouro

import loopscope as ls
from loopscope.engine import draft_length
from loopscope.engine.draft_length import MOST_TOKENS, DraftLength
from loopscope.engine.generation import GenerationStats, Prompt, generate, stream
from loopscope.engine.sampling import Draft, Sampling
from loopscope.models.looped_model import LoopedModel
from loopscope.scope import Scope

POLICIES = [ls.ExitPolicy("fixed", 1), ls.ExitPolicy("top1", 0.075), ls.ExitPolicy("hidden_cosine", 0.3)]


@pytest.fixture(scope="module")
def model() -> LoopedModel:
    """At the first loop it says what it says at the last one about every other time."""
    return tiny_ouro(num_hidden_layers=2)


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafting pays whatever comes of it."""
    monkeypatch.setattr(draft_length, "_TOGETHER", (0.01, 0.01))


@pytest.mark.parametrize("name", [*MODELS, "huginn"])
@pytest.mark.usefixtures("eager")
def test_it_is_full_depths_text_token_for_token(name: str) -> None:
    model = ls.load_model(GOLDEN / "huginn-tiny") if name == "huginn" else MODELS[name]()
    whole = generate(model, prompts(3), max_new_tokens=12)
    stats = GenerationStats()
    late = ls.ExitPolicy("fixed", model.num_loops - 1)
    for policy, batch_size in ((POLICIES[0], 1), (late, 3), (POLICIES[1], 2)):
        texts = generate(
            model, prompts(3), policy, max_new_tokens=12, lossless=True, batch_size=batch_size, stats=stats
        )
        for text, full in zip(texts, whole, strict=True):
            assert (text.tokens, text.finish_reason) == (full.tokens, full.finish_reason)
            assert text.accepted == sum(loops < model.num_loops for loops in text.loops) <= text.drafted
    assert 0 < stats.accepted <= stats.drafted
    assert stats.accepted < stats.drafted or name == "transformer"  # whose loops agree


def test_nothing_of_a_draft_is_run_twice(model: LoopedModel) -> None:
    """All loops of every token that stays, and of one that is taken back those that it went through."""
    stats, per_text = GenerationStats(), {"drafted": 0, "accepted": 0}
    texts = generate(model, prompts(), POLICIES[0], max_new_tokens=24, lossless=True, stats=stats)
    for text in texts:
        per_text = {name: count + getattr(text, name) for name, count in per_text.items()}
    assert per_text == {"drafted": stats.drafted, "accepted": stats.accepted}
    tokens = sum(len(prompt.tokens) for prompt in prompts()) + sum(len(text.tokens) - 1 for text in texts)
    refused = stats.drafted - stats.accepted
    assert 4 * tokens < stats.token_loops <= 4 * (tokens + refused)
    assert (stats.tokens, stats.drafted > 0) == (5 * 24, True)


def test_where_all_drafts_stand_only_the_loops_of_full_depth_run() -> None:
    """One loop is all that it needs, so that the first says what the last one says."""
    model = tiny_ouro(num_hidden_layers=1)
    for name, weight in model.named_parameters():
        if "layernorm_2" in name:
            weight *= 1e-4
    stats = GenerationStats()
    texts = generate(model, prompts(), POLICIES[0], max_new_tokens=24, lossless=True, stats=stats)
    assert stats.accepted == stats.drafted > 5 * 12
    tokens = sum(len(prompt.tokens) for prompt in prompts()) + 5 * 23
    assert stats.token_loops == 4 * tokens
    assert all(
        text.tokens == full.tokens
        for text, full in zip(texts, generate(model, prompts(), max_new_tokens=24), strict=True)
    )


@pytest.mark.parametrize(
    ("sampling", "stop"),
    [
        (Sampling(temperature=1.0), [9]),
        (Sampling(temperature=1.4, top_k=12), []),
        (Sampling(temperature=0.9, top_p=0.7), [9]),
    ],
    ids=str,
)
@torch.inference_mode()
def test_drawn_text_has_the_probabilities_of_full_depth(sampling: Sampling, stop: list[int]) -> None:
    """Of the second and third token after one prompt, which are a draft and what comes after it."""
    model, draws, row = tiny_ouro(sure=3.0, vocab_size=12), 1200, np.array([7])
    stats = GenerationStats()
    texts = generate(
        model,
        [Prompt(0, row)] * draws,
        POLICIES[0],
        max_new_tokens=4,
        sampling=sampling,
        batch_size=draws,
        lossless=True,
        stats=stats,
        stop=stop,
    )
    assert draws / 10 < stats.accepted < stats.drafted - draws / 10
    said = np.array([text.tokens + [-1] * (4 - len(text.tokens)) for text in texts])
    assert all((text.tokens[-1] in stop) == (text.finish_reason == "stop") for text in texts)
    for place in (0, 1, 2):
        befores, counts = np.unique(said[:, :place], axis=0, return_counts=True) if place else (said[:1, :0], [draws])
        for before in befores[np.argsort(counts)[-2:]]:
            if place and before[-1] in (-1, *stop):
                continue
            there = (said[:, :place] == before).all(1)
            found = np.bincount(said[there, place], minlength=12)
            expected = found.sum() * probabilities(model, np.append(row, before), sampling)
            assert found[expected == 0].sum() == 0
            assert chisquare(found[expected > 0], expected[expected > 0]).pvalue > 1e-3


def probabilities(model: LoopedModel, row: np.ndarray[Any, Any], sampling: Sampling) -> np.ndarray[Any, Any]:
    """[V] of the next token at full depth, written out."""
    logits = model.loops(torch.from_numpy(row)[None]).logits[-1, 0, -1].double().numpy() / sampling.temperature
    shares = np.exp(logits - logits.max())
    ranked = np.argsort(-shares, kind="stable")
    shares[ranked[sampling.top_k or len(shares) :]] = 0
    shares /= shares.sum()
    reached = shares[ranked].cumsum() - shares[ranked] >= sampling.top_p
    shares[ranked[reached]] = 0
    return shares / shares.sum()


def test_it_ends_where_full_depth_ends(model: LoopedModel) -> None:
    """At a token, at a criterion that sees every token once and in order, and at the last that there is room for."""
    whole = generate(model, prompts(), max_new_tokens=14)
    stop, seen = whole[0].tokens[6], []

    def criterion(key: Any, token: int) -> bool:
        seen.append((key, token))
        return token == stop

    for options in ({"stop": [stop]}, {"stopping_criterion": criterion}):
        short = generate(model, prompts(), max_new_tokens=14, **options)
        asked, seen = seen, []
        stats = GenerationStats()
        texts = generate(model, prompts(), POLICIES[0], max_new_tokens=14, lossless=True, stats=stats, **options)
        assert [text.tokens for text in texts] == [text.tokens for text in short]
        assert [text.finish_reason for text in texts] == [text.finish_reason for text in short]
        assert sorted(seen) == sorted(asked)
        assert sum(text.drafted for text in texts) == stats.drafted
    for room in (1, 2, 3):
        texts = generate(model, prompts(), POLICIES[0], max_new_tokens=room, lossless=True)
        assert [text.tokens for text in texts] == [text.tokens[:room] for text in whole]
    long = [Prompt(0, np.ones(250, dtype=np.int64))]
    assert same_tokens(generate(model, long, POLICIES[0], lossless=True), generate(model, long))


def same_tokens(ours: Any, theirs: Any) -> bool:
    return [each.tokens for each in ours] == [each.tokens for each in theirs]


def test_logits_are_full_depths(model: LoopedModel) -> None:
    expected = list(stream(model, prompts(1), max_new_tokens=12, with_logits=True))
    found = list(stream(model, prompts(1), POLICIES[0], max_new_tokens=12, with_logits=True, lossless=True))
    for ours, full in zip(found, expected, strict=True):
        assert ours.logits is not None
        assert full.logits is not None
        assert torch.allclose(ours.logits, full.logits, atol=5e-5)


def test_how_many_are_drafted_follows_how_many_stand(model: LoopedModel) -> None:
    length = DraftLength(model)
    first = length.tokens
    drafts = [Draft(0, 1, None)] * (MOST_TOKENS - 1)
    for _ in range(10):
        length.update(drafts, len(drafts))
    assert length.tokens == MOST_TOKENS > first > 1
    for _ in range(60):
        length.update(drafts, 0)
        if length.tokens == 1:
            break
    assert length.tokens == 1
    tried = []
    for _ in range(40):
        length.update([], 0)
        tried.append(length.tokens)
    assert 2 in tried  # it is tried again
    by_loop = {}
    for loop in (1, 2, 3):
        by_loop[loop] = DraftLength(model)
        for _ in range(60):
            by_loop[loop].update([Draft(0, loop, None)] * 10, 9)
    assert by_loop[1].tokens >= by_loop[2].tokens > by_loop[3].tokens  # late drafts save less


def test_tokens_are_asked_up_to_the_loop_at_which_that_pays(
    model: LoopedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    early, late = DraftLength(model, reads_logits=True), DraftLength(model, reads_logits=True)
    for _ in range(40):
        early.update([Draft(0, 1, None)] * 3, 3, early.ask_until)  # the others exit at no loop
        late.update([Draft(0, 2, None)] * 3, 3, late.ask_until)
    assert (early.ask_until, late.ask_until) == (1, 2)
    assert DraftLength(model, first_exit=3).ask_until == 3  # nobody exits before
    cheap = DraftLength(model, reads_logits=True)
    monkeypatch.setattr(type(model), "head_cost", 4.0)
    dear = DraftLength(model, reads_logits=True)
    assert cheap.ask_until > dear.ask_until == 1  # a head is as dear as the loops that a later exit puts off


def test_of_a_single_loop_it_is_full_depth() -> None:
    single = tiny_ouro(total_ut_steps=1)
    texts = generate(single, prompts(1), ls.ExitPolicy("margin", 0.5), max_new_tokens=30, lossless=True)
    assert same_tokens(texts, generate(single, prompts(1), max_new_tokens=30))


def test_drafts_may_come_from_a_policy_for_another_cache(model: LoopedModel) -> None:
    """The text is full depth's, whatever that promises of text with its own cache."""
    policy = ls.ExitPolicy("top1", 0.075, scope=Scope(unit="tokens", cache="propagate"))
    full = generate(model, prompts(2), max_new_tokens=4)
    ours = generate(model, prompts(2), policy, max_new_tokens=4, lossless=True)
    assert [text.tokens for text in ours] == [text.tokens for text in full]


def test_policies_of_all_prompts_are_looked_at_before_the_first_token(model: LoopedModel) -> None:
    foreign = ls.ExitPolicy("top1", 0.5, scope=Scope(model="a" * 64))
    asked = [Prompt(0, np.array([1])), Prompt(1, np.array([1]), policy=foreign)]
    with pytest.raises(ls.UserError, match="calibrated for another model"):
        next(stream(model, asked, batch_size=1))
    assert next(stream(model, iter(asked), batch_size=1)).key == 0  # nobody knows what is to come


def test_prompts_with_policies_of_their_own_run_together(model: LoopedModel) -> None:
    """As each would alone, whatever the others do; lossless or not."""
    own = [ls.ExitPolicy("fixed", 2), POLICIES[1], None, POLICIES[2], ls.ExitPolicy("gate", 0.6)]
    asked = [Prompt(each.key, each.tokens, policy=policy) for each, policy in zip(prompts(), own, strict=True)]
    usual = ls.ExitPolicy("kl", 0.07)
    for lossless in (False, True):
        together = generate(model, asked, usual, max_new_tokens=9, batch_size=2, lossless=lossless)
        alone = [
            generate(model, [prompt], policy or usual, max_new_tokens=9, lossless=lossless)[0]
            for prompt, policy in zip(prompts(), own, strict=True)
        ]
        assert same(together, alone)


def test_asking_in_vain_is_given_up(model: LoopedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """A policy that reads logits and lets nobody exit takes a head at every loop; now and then it is tried again."""
    read: list[int] = []
    predict = type(model).predict
    monkeypatch.setattr(type(model), "predict", lambda self, given: (read.append(len(given)), predict(self, given))[1])
    for policy, most in ((ls.ExitPolicy("margin", 1e9), 140), (ls.ExitPolicy("hidden_cosine", -2.0), 60)):
        read.clear()
        stats = GenerationStats()
        generate(model, prompts(1), policy, max_new_tokens=60, lossless=True, stats=stats)
        assert stats.drafted == 0
        assert 60 <= sum(read) <= most
        assert 1 <= stats.drafting_cost / stats.tokens < 2
        assert (stats.drafting_cost > stats.tokens) is (policy.readout == "margin")
