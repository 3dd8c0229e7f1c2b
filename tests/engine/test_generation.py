"""Generation: is every token what a plain run says, whatever the cache, the policy and the batch?"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from conftest import GOLDEN
from plain_decoding import PlainDecoder
from safetensors.torch import load_file
from tiny_language import MODELS, VOCABULARY, draft_exits

import loopscope as ls
from loopscope.engine.decoder import CACHE_MODES, CacheMode, Decoder
from loopscope.engine.generation import Completion, GenerationStats, Prompt, generate, stream
from loopscope.engine.sampling import Sampling
from loopscope.learned.stopper import STOPPER_KINDS, StopperKind
from loopscope.models.looped_model import LoopedModel
from loopscope.trajectory import concatenate

POLICIES = [
    ls.ExitPolicy("gate", 0.6),
    ls.ExitPolicy("top1", 0.075),
    ls.ExitPolicy("hidden_cosine", 0.3),
    ls.ExitPolicy("kl", 0.07),
    ls.ExitPolicy("fixed", 2),
]

EVERY_CACHE = [
    (name, policy, CACHE_MODES[(place + turn) % 3])
    for turn, name in enumerate(("ouro", "coda", "looped llama"))
    for place, policy in enumerate(POLICIES)
]
"""Every policy with every cache, each with another model."""


@pytest.fixture(scope="module")
def model() -> LoopedModel:
    return MODELS["ouro"]()


def prompts(count: int = 5, longest: int = 14) -> list[Prompt]:
    rng = np.random.default_rng(0)
    return [Prompt(f"prompt {i}", rng.integers(0, VOCABULARY, rng.integers(1, longest))) for i in range(count)]


def same(ours: list[Completion], theirs: list[Completion]) -> bool:
    return all(
        (one.key, one.tokens, one.loops, one.finish_reason)
        == (other.key, other.tokens, other.loops, other.finish_reason)
        for one, other in zip(ours, theirs, strict=True)
    )


@pytest.mark.parametrize("cache", ["full", "propagate"])
def test_golden_greedy_continuation(cache: CacheMode) -> None:
    golden = ls.load_model(GOLDEN / "ouro-tiny")
    expected = load_file(GOLDEN / "ouro-tiny" / "expected.safetensors")
    asked = [Prompt(number, row) for number, row in enumerate(expected["input_ids"].numpy())]
    start = len(asked[0].tokens)
    for batch_size in (1, 2, 3):
        texts = generate(golden, asked, max_new_tokens=12, cache=cache, batch_size=batch_size)
        assert [text.tokens for text in texts] == expected["greedy"][:, start : start + 12].tolist()
        assert all(text.loops == [4] * 12 and text.finish_reason == "length" for text in texts)


@pytest.mark.parametrize(("name", "policy", "cache"), EVERY_CACHE, ids=str)
def test_every_cache_is_what_it_is_meant_to_be(
    name: str, policy: ls.ExitPolicy, cache: CacheMode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a batch with others, and by itself; against a decoder that keeps everything in dictionaries."""
    model = MODELS[name]()
    together = generate(model, prompts(), policy, max_new_tokens=5, cache=cache, batch_size=3)
    draft_exits(monkeypatch)
    assert same(together, generate(model, prompts(), policy, max_new_tokens=5, cache=cache, batch_size=1))
    if policy.readout != "fixed":
        assert len({loop for text in together for loop in text.loops}) > 1
    streamed = list(stream(model, prompts(2), policy, max_new_tokens=5, cache=cache, with_logits=True))
    for prompt, text in zip(prompts(2), together, strict=False):
        decoder = PlainDecoder(model, policy, cache, monkeypatch)
        tokens, loops, logits = decoder.generate(prompt.tokens.tolist(), 5)
        assert (tokens, loops) == (text.tokens, text.loops)
        for token, expected in zip((token for token in streamed if token.key == prompt.key), logits, strict=True):
            assert token.logits is not None
            assert torch.allclose(token.logits, expected, atol=5e-5)


@torch.inference_mode()
def said(model: LoopedModel, prompt: Prompt, tokens: Sequence[int]) -> ls.Trajectory:
    """What every loop of a plain pass says at these tokens after a prompt."""
    out = model.loops(torch.from_numpy(np.concatenate((prompt.tokens, tokens)))[None])
    there = slice(len(prompt.tokens) - 1, -1)
    assert out.gate_logits is not None
    return ls.Trajectory(
        logits=out.logits[:, 0, there].transpose(0, 1).numpy(),
        gate_logits=out.gate_logits[:, 0, there].T.numpy(),
        hidden=out.hidden[:, 0, there].transpose(0, 1).numpy(),
        labels=np.asarray(tokens),
    )


@pytest.mark.filterwarnings("ignore:All gate_logits lie between 0 and 1")  # those of random weights may
@pytest.mark.parametrize(
    ("name", "policy"),
    list(zip(MODELS, [*POLICIES[:2], POLICIES[3], *POLICIES[:2], POLICIES[3], None], strict=True)),
    ids=str,
)
def test_with_all_loops_kept_it_is_the_replay_on_what_was_said(
    name: str, policy: ls.ExitPolicy | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = MODELS[name]()
    draft_exits(monkeypatch)
    replayed = policy or ls.ExitPolicy("fixed", model.num_loops)
    for prompt, text in zip(prompts(2), generate(model, prompts(2), policy, max_new_tokens=40), strict=True):
        recorded = said(model, prompt, text.tokens)
        loops = replayed.exit_loops(recorded)
        assert loops.tolist() == text.loops
        assert recorded.predicted[np.arange(40), loops - 1].tolist() == text.tokens


@pytest.mark.parametrize("kind", STOPPER_KINDS)
def test_a_stopper_writes_as_it_is_replayed(kind: StopperKind, model: LoopedModel) -> None:
    """Its signals over the vocabulary come from the device, the others from states, answers and the gate."""
    full = generate(model, prompts(3), max_new_tokens=34)
    recording = concatenate([said(model, prompt, text.tokens) for prompt, text in zip(prompts(3), full, strict=True)])
    policy = ls.ExitPolicy("stopper:mine", 0.3, ls.fit_stopper(recording, kind=kind, gain="agreement"))
    exits = []
    for prompt, text in zip(prompts(3), generate(model, prompts(3), policy, max_new_tokens=34), strict=True):
        assert policy.exit_loops(said(model, prompt, text.tokens)).tolist() == text.loops
        exits += text.loops
    assert len(set(exits)) > 1


def test_what_the_caches_take(model: LoopedModel) -> None:
    stats_by_cache = {}
    for cache in CACHE_MODES:
        stats_by_cache[cache] = GenerationStats()
        texts = generate(model, prompts(), max_new_tokens=5, cache=cache, stats=stats_by_cache[cache])
        assert (stats_by_cache[cache].tokens, stats_by_cache[cache].loops) == (25, 100)
        tokens = sum(len(p.tokens) for p in prompts()) + sum(len(text.tokens) - 1 for text in texts)
        assert stats_by_cache[cache].token_loops == 4 * tokens  # all but the last one of a text
    taken = []
    for count, batch_size in ((1, 1), (1, 8), (4, 4), (8, 4)):
        generate(model, prompts(count), max_new_tokens=2, batch_size=batch_size, stats=(stats := GenerationStats()))
        taken.append(stats.cache_bytes)
    assert taken == [taken[0], taken[0], 4 * taken[0], 4 * taken[0]]  # by who is there at a time
    assert (
        stats_by_cache["full"].cache_bytes
        == stats_by_cache["propagate"].cache_bytes
        == 4 * stats_by_cache["latest"].cache_bytes
        > 0
    )


def test_only_what_is_needed_runs(model: LoopedModel) -> None:
    """Kept loops are made up for when somebody needs them, and a prompt's only when the text goes on."""
    tokens = sum(len(prompt.tokens) for prompt in prompts())
    for cache, loops in (("full", 1), ("propagate", 4), ("latest", 4)):
        for count in (1, 3):
            stats = GenerationStats()
            generate(model, prompts(), ls.ExitPolicy("fixed", 1), max_new_tokens=count, cache=cache, stats=stats)
            assert stats.token_loops == tokens * (1 if count == 1 else loops) + 5 * (count - 1)
            assert stats.prompt_loops == tokens * (1 if count == 1 else loops)


def test_policies_that_nobody_uses_any_more_are_forgotten(model: LoopedModel) -> None:
    """Each keeps logits of the loop before."""
    policies = [ls.ExitPolicy("kl", threshold) for threshold in np.geomspace(1e-4, 1, 12)]
    batch = Decoder(model, 3, "full")
    for turn in range(12):
        batch.prefill(turn % 3, np.array([turn + 1, 3]), policies[turn])
        while not len(batch.step().rows):
            pass
    assert len(batch._groups) <= 3


@torch.inference_mode()
@pytest.mark.parametrize("cache", ["full", "propagate"])
def test_forced_tokens_are_said_and_the_models_thoughts_told(model: LoopedModel, cache: CacheMode) -> None:
    (prompt,) = prompts(1)
    forced = np.random.default_rng(1).integers(0, VOCABULARY, 8)
    asked = [Prompt("forced", prompt.tokens, forced), Prompt("free", prompt.tokens)]
    out = list(stream(model, asked, stop={int(forced[2])}, max_new_tokens=3, cache=cache, with_logits=True))
    tokens = [token for token in out if token.key == "forced"]
    assert [token.token for token in tokens] == forced.tolist()
    assert [token.finish_reason for token in tokens] == [None] * 7 + ["length"]
    plain = model.loops(torch.from_numpy(np.concatenate((prompt.tokens, forced)))[None]).logits[-1, 0]
    logits = torch.stack([token.logits for token in tokens if token.logits is not None])
    assert torch.allclose(logits, plain[len(prompt.tokens) - 1 : -1], atol=5e-5)
    assert len(out) == 8 + 3
    assert next(stream(model, asked[:1])).logits is None


def test_a_text_ends_at_a_stop_token_or_at_its_length(model: LoopedModel) -> None:
    whole = generate(model, prompts(), max_new_tokens=12)
    stop = whole[0].tokens[3]
    for text, full in zip(generate(model, prompts(), max_new_tokens=12, stop=[stop], batch_size=2), whole, strict=True):
        assert text.tokens == full.tokens[: len(text.tokens)]
        if stop in full.tokens:
            assert (text.finish_reason, text.tokens.index(stop)) == ("stop", len(text.tokens) - 1)
        else:
            assert (text.finish_reason, len(text.tokens)) == ("length", 12)
    (short,) = generate(model, [Prompt(0, np.ones(250, dtype=np.int64))], max_new_tokens=50)
    assert (short.finish_reason, len(short.tokens)) == ("length", 6)  # as far as the block goes


def test_what_is_drawn_depends_on_the_prompt_alone(model: LoopedModel) -> None:
    hot = Sampling(temperature=1.5, top_k=20, top_p=0.9, seed=3)
    for lossless in (False, True):
        options = {"max_new_tokens": 8, "lossless": lossless}
        alone = generate(model, prompts(), POLICIES[0], sampling=hot, batch_size=1, **options)
        for batch_size in (2, 5):
            assert same(generate(model, prompts(), POLICIES[0], sampling=hot, batch_size=batch_size, **options), alone)
        assert not same(generate(model, prompts(), POLICIES[0], sampling=replace(hot, seed=4), **options), alone)
    twice = generate(model, [prompts()[0]] * 2, max_new_tokens=8, sampling=hot)
    assert twice[0].tokens != twice[1].tokens
    greedy = generate(model, prompts(), max_new_tokens=8)
    for cold in (Sampling(temperature=2.0, top_k=1), Sampling(temperature=1.0, top_p=1e-9), Sampling(temperature=1e-6)):
        assert same(generate(model, prompts(), max_new_tokens=8, sampling=cold), greedy)


def test_tokens_come_before_all_is_done(model: LoopedModel) -> None:
    """And prompts are taken only when there is room."""
    taken = 0

    def arriving() -> Iterator[Prompt]:
        nonlocal taken
        for prompt in prompts(6):
            taken += 1
            yield prompt

    stats = GenerationStats()
    tokens = stream(model, arriving(), POLICIES[0], max_new_tokens=4, batch_size=2, stats=stats)
    first = next(tokens)
    assert (taken, stats.tokens, first.finish_reason) == (2, 1, None)
    rest = [first, *tokens]
    assert (taken, stats.tokens, len(rest)) == (6, 24, 24)
    assert [token.finish_reason for token in rest if token.key == "prompt 5"] == [None, None, None, "length"]


@pytest.mark.parametrize(
    ("prompt", "options", "words"),
    [
        (Prompt(0, np.empty(0, dtype=np.int64)), {}, "at least one token"),
        (Prompt(0, np.array([1]), np.array([99])), {}, "outside the model's vocabulary"),
        (Prompt(0, np.array([1]), np.ones(256, dtype=np.int64)), {}, "block size is 256"),
        (Prompt(0, np.array([1])), {"cache": "some"}, "no cache 'some'; choose one of full, propagate, latest"),
        (Prompt(0, np.array([1])), {"policy": ls.ExitPolicy("fixed", 9)}, "beyond the 4 loops here"),
    ],
)
def test_what_cannot_be_is_refused(model: LoopedModel, prompt: Prompt, options: dict[str, object], words: str) -> None:
    with pytest.raises(ls.UserError, match=words):
        generate(model, [prompt], **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "settings", [{"temperature": -1.0}, {"top_k": -1}, {"top_p": 0.0}, {"top_p": 1.1}, {"seed": -1}, {"seed": 2**63}]
)
def test_impossible_sampling(settings: dict[str, float]) -> None:
    with pytest.raises(ls.UserError):
        Sampling(**settings)  # type: ignore[arg-type]
