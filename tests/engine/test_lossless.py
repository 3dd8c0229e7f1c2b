"""Lossless text: is it what full depth says, whatever was drafted, and is no work of a draft done twice?"""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from conftest import GOLDEN
from scipy.stats import chisquare
from test_generation import prompts, same
from tiny_language import MODELS, draft_at, tiny_ouro

import loopscope as ls
from loopscope.engine.draft_spacing import DraftSpacing, Spacing
from loopscope.engine.generation import GenerationStats, Prompt, generate, stream
from loopscope.engine.sampling import Sampling
from loopscope.engine.wavefront import Wavefront
from loopscope.models.looped_model import LoopedModel, LoopState
from loopscope.scope import Scope

POLICIES = [ls.ExitPolicy("fixed", 1), ls.ExitPolicy("top1", 0.075), ls.ExitPolicy("hidden_cosine", 0.3)]
Spaced = Callable[[Spacing], None]


@pytest.fixture(scope="module")
def model() -> LoopedModel:
    """At the first loop it says what it says at the last one about every other time."""
    return tiny_ouro(num_hidden_layers=2)


@pytest.fixture
def spaced(monkeypatch: pytest.MonkeyPatch) -> Spaced:
    """Drafts with this spacing, whether it pays or not."""

    draft_at(Spacing(1), monkeypatch)
    return partial(draft_at, monkeypatch=monkeypatch)


def agreeing() -> LoopedModel:
    """One loop is all that it needs, so that the first says what the last one says."""
    model = tiny_ouro(num_hidden_layers=1)
    for name, weight in model.named_parameters():
        if "layernorm_2" in name:
            weight *= 1e-4
    return model


def every_spacing(model: LoopedModel) -> list[Spacing]:
    divisors = [loops for loops in range(1, model.num_loops) if model.num_loops % loops == 0]
    early = [] if model.head_attends else [Spacing(loops, early=True) for loops in divisors[:1]]
    return [Spacing(loops) for loops in divisors] + early


@pytest.mark.parametrize("name", [*MODELS, "huginn"])
def test_it_is_full_depths_text_token_for_token(name: str, spaced: Spaced) -> None:
    """Rows of different lengths, one by one and together, drafted by a depth, by the logits and by the states."""
    model = ls.load_model(GOLDEN / "huginn-tiny") if name == "huginn" else MODELS[name]()
    whole = generate(model, prompts(4), max_new_tokens=12)
    stats = GenerationStats()
    late = ls.ExitPolicy("fixed", model.num_loops - 1)
    for spacing in every_spacing(model):
        spaced(spacing)
        for policy, batch_size in ((POLICIES[0], 1), (late, 3), (POLICIES[1], 2), (POLICIES[2], 3)):
            texts = generate(
                model, prompts(4), policy, max_new_tokens=12, lossless=True, batch_size=batch_size, stats=stats
            )
            assert same(texts, whole)
            assert all(text.accepted <= text.drafted for text in texts)
    assert 0 < stats.accepted < stats.drafted


def test_the_spacing_may_change_at_any_time(model: LoopedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens in flight then are at other loops than those at which the next are read."""
    draw = np.random.default_rng(0)

    def choose(self: DraftSpacing, rows: int, first: int, every_loop: bool) -> Spacing:
        self.current = (Spacing(1), Spacing(1, early=True), Spacing(2), self.full_depth)[draw.integers(0, 4)]
        return self.current

    monkeypatch.setattr(DraftSpacing, "choose", choose)
    own = [POLICIES[0], ls.ExitPolicy("fixed", 3), ls.ExitPolicy("fixed", 2), None, POLICIES[0]]
    asked = [Prompt(each.key, each.tokens, policy=policy) for each, policy in zip(prompts(), own, strict=True)]
    whole, stats = generate(model, prompts(), max_new_tokens=40), GenerationStats()
    texts = generate(model, asked, POLICIES[0], max_new_tokens=40, lossless=True, batch_size=3, stats=stats)
    assert same(texts, whole)
    assert stats.accepted > 10


def test_long_prompts_run_in_parts(spaced: Spaced, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside the tokens in flight of other rows; a head that attends reads a prompt in parts, too."""
    monkeypatch.setattr("loopscope.engine.decoder._CHUNK", 16)
    draw = np.random.default_rng(0)
    asked = [Prompt(key, draw.integers(0, 50, length)) for key, length in enumerate((3, 70, 33, 16))]
    for name in ("ouro", "coda", "looped llama"):
        model, most = MODELS[name](), []
        step = model.step

        def counted(state: LoopState, step: Any = step, most: list[int] = most) -> LoopState:
            most.append(len(state.hidden))
            return step(state)

        whole = generate(model, asked, max_new_tokens=9)
        monkeypatch.setattr(model, "step", counted)
        assert same(generate(model, asked, POLICIES[0], max_new_tokens=9, lossless=True, batch_size=2), whole)
        assert max(most) <= 16


def test_no_more_tokens_are_in_flight_than_there_are_loops(spaced: Spaced, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a row; and the head reads the newest and the oldest of them, or with early replacement all."""
    model = agreeing()
    tokens: list[int] = []
    read: list[int] = []
    step, predict = model.step, type(model).predict

    def counted(state: LoopState) -> LoopState:
        tokens.append(len(state.hidden))
        return step(state)

    monkeypatch.setattr(model, "step", counted)
    monkeypatch.setattr(type(model), "predict", lambda self, given: (read.append(len(given)), predict(self, given))[1])
    (prompt,) = [Prompt(0, np.array([7]))]
    for spacing, in_flight, most in ((Spacing(1), 4, 2), (Spacing(1, early=True), 4, 4), (Spacing(2), 2, 2)):
        spaced(spacing)
        tokens.clear()
        read.clear()
        generate(model, [prompt], POLICIES[0], max_new_tokens=40, lossless=True)
        assert (max(tokens), max(read)) == (in_flight, most)


def test_nothing_of_a_draft_is_run_twice(model: LoopedModel, spaced: Spaced) -> None:
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


def test_where_all_drafts_stand_only_the_loops_of_full_depth_run(spaced: Spaced) -> None:
    model, stats = agreeing(), GenerationStats()
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
@pytest.mark.parametrize("spacing", [Spacing(1), Spacing(1, early=True), Spacing(2)], ids=str)
@torch.inference_mode()
def test_drawn_text_has_the_probabilities_of_full_depth(
    sampling: Sampling, stop: list[int], spacing: Spacing, spaced: Spaced
) -> None:
    """Of the second and third token after one prompt, which are a draft and what comes after it."""
    spaced(spacing)
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


def test_it_ends_where_full_depth_ends(model: LoopedModel, spaced: Spaced) -> None:
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


def test_logits_are_full_depths(model: LoopedModel, spaced: Spaced) -> None:
    expected = list(stream(model, prompts(1), max_new_tokens=12, with_logits=True))
    found = list(stream(model, prompts(1), POLICIES[0], max_new_tokens=12, with_logits=True, lossless=True))
    for ours, full in zip(found, expected, strict=True):
        assert ours.logits is not None
        assert full.logits is not None
        assert torch.allclose(ours.logits, full.logits, atol=5e-5)


def test_of_a_single_loop_it_is_full_depth() -> None:
    single = tiny_ouro(total_ut_steps=1)
    texts = generate(single, prompts(1), ls.ExitPolicy("margin", 0.5), max_new_tokens=30, lossless=True)
    assert same_tokens(texts, generate(single, prompts(1), max_new_tokens=30))


def test_drafts_may_come_from_a_policy_for_another_cache(model: LoopedModel) -> None:
    """The text is full depth's, whatever that guarantees of text with its own cache."""
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


def test_what_is_drawn_does_not_depend_on_what_was_drafted(model: LoopedModel, spaced: Spaced) -> None:
    sampling, texts = Sampling(temperature=1.2, top_p=0.9, seed=4), []
    for spacing in (*every_spacing(model), Spacing(4)):
        spaced(spacing)
        texts.append(generate(model, prompts(3), POLICIES[0], max_new_tokens=20, lossless=True, sampling=sampling))
    assert all(same(each, texts[0]) for each in texts)
    assert texts[0][0].accepted > texts[-1][0].accepted == 0


def test_a_finished_row_leaves_nothing_behind(model: LoopedModel, spaced: Spaced) -> None:
    """A policy that nobody uses any more is forgotten, and the next prompt of a row begins anew."""
    texts = Wavefront(model, 2, (), Sampling())
    for turn in range(6):
        policy = ls.ExitPolicy("kl", 0.05 + turn / 100)
        texts.begin(turn % 2, np.array([turn + 1, 3]), policy, 9, turn)
        for _ in range(5):
            texts.advance()
        texts.end(turn % 2)
    assert not texts._decisions
    assert not texts._flights
