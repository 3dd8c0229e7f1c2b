"""Does lm_eval hear of a looped model what its own Hugging Face backend would say of the same weights?"""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from benchmark_slices import asked, byte_pairs
from tiny_language import hugging_face, outspoken, write_outspoken

import loopscope as ls
from loopscope.engine.generation import Prompt, StopStrings, generate
from loopscope.integrations.lm_eval.lm_eval_model import LoopScopeLM, sampling_of
from loopscope.scope import Scope

load = partial(LoopScopeLM, tokenizer=byte_pairs(), batch_tokens=600)
TEXT = "A river carries small stones to the sea. Which of these does the work of the water? The wind helps it at times."


def instances(kind: str, arguments: list[tuple[Any, ...]], documents: list[int] | None = None) -> list[Any]:
    from lm_eval.api.instance import Instance

    places = documents or list(range(len(arguments)))
    return [Instance(kind, {}, each, 0, ("made_up", place, 1)) for each, place in zip(arguments, places, strict=True)]


def likelihoods() -> list[Any]:
    """Real questions, a context that is empty, one that ends in spaces, and one that is much too long."""
    questions = asked("openbookqa")[:6] + asked("arc_easy")[:2]
    pairs = [(q.context, choice, place) for place, q in enumerate(questions) for choice in q.choices]
    pairs += [("", " the sea", 20), ("", "<|endoftext|>the", 20), ("A stone  ", "falls", 21), (TEXT, " Water", 22)]
    return instances("loglikelihood", [pair[:2] for pair in pairs], [pair[2] for pair in pairs])


@pytest.mark.parametrize("depth", [1, 3])
def test_likelihoods_are_those_of_the_hugging_face_backend(depth: int) -> None:
    model, requests = outspoken(), likelihoods()
    ours = load(model, loops=depth).loglikelihood(requests)
    theirs = hugging_face(model, depth).loglikelihood(requests, disable_tqdm=True)
    np.testing.assert_allclose([likely for likely, _ in ours], [likely for likely, _ in theirs], atol=1e-3)
    assert [greedy for _, greedy in ours] == [greedy for _, greedy in theirs]


@pytest.mark.parametrize("policy", [None, ls.ExitPolicy("margin", 1e9)], ids=["full depth", "never early"])
def test_what_the_model_would_say_itself_is_greedy(policy: ls.ExitPolicy | None) -> None:
    model, tokenizer = outspoken(), byte_pairs()
    context = tokenizer.encode(TEXT)
    (said,) = generate(model, [Prompt(0, np.array(context))], max_new_tokens=3)
    lm = load(model, policy=policy)
    wrong = [*said.tokens[:2], (said.tokens[2] + 1) % 600]
    pairs = [(None, context, said.tokens), (None, context, wrong)]
    assert [greedy for _, greedy in lm._loglikelihood_tokens(pairs)] == [True, False]
    assert [greedy for _, greedy in hugging_face(model, 3)._loglikelihood_tokens(pairs)] == [True, False]


@pytest.mark.parametrize("block", [24, 1024])
def test_rolling_likelihoods_are_those_of_the_hugging_face_backend(block: int) -> None:
    model = outspoken(max_position_embeddings=block)
    requests = instances("loglikelihood_rolling", [(TEXT,), ("Stones.",)])
    ours = load(model).loglikelihood_rolling(requests)
    np.testing.assert_allclose(ours, hugging_face(model, 3).loglikelihood_rolling(requests, True), rtol=1e-5)
    adaptive = load(model, policy=ls.ExitPolicy("margin", 1e9)).loglikelihood_rolling(requests[1:])
    np.testing.assert_allclose(adaptive, ours[1:], rtol=1e-5)  # token by token


def test_texts_are_those_of_the_hugging_face_backend() -> None:
    model = outspoken()
    free = {"until": [], "max_gen_toks": 12, "do_sample": False}
    (text,) = load(model).generate_until(instances("generate_until", [(TEXT, free)]))
    stop = text[4:6]  # within what it says
    until = {"until": [stop, "\n\n"], "max_gen_toks": 12}
    arguments = [(TEXT, free), (TEXT, until), ("Why?", until), (asked("arc_easy")[0].context, free)]
    requests = instances("generate_until", arguments)
    lm = load(model, batch_size=3)
    ours = lm.generate_until(requests)
    assert ours == hugging_face(model, 3).generate_until(requests, disable_tqdm=True)
    assert ours[1] == text[:4]
    count, loops = lm.used["made_up"]
    assert count < 48  # a text that has met its string went no further
    assert loops == 3 * count


def test_the_engine_compares_no_choices_where_there_is_one() -> None:
    model, context = outspoken(), np.arange(5)
    single = ls.choices(0, context, [np.array([7, 8])])
    with pytest.raises(ls.UserError, match="single continuation"):
        list(ls.run(model, [single], ls.ExitPolicy("margin", 1.0)))
    (answer,) = ls.run(model, [single], ls.ExitPolicy("gate", 0.5))
    assert answer.greedy is None
    assert answer.logits.shape == (1,)


def test_settings_of_texts() -> None:
    sampling = sampling_of({"do_sample": True, "temperature": 0.7, "top_p": 0.9, "num_beams": 1}, seed=3)
    assert (sampling.temperature, sampling.top_p, sampling.seed) == (0.7, 0.9, 3)
    assert sampling_of({"do_sample": False, "temperature": 0.7}, 0).temperature == 0
    with pytest.raises(ls.UserError, match="repetition_penalty"):
        sampling_of({"repetition_penalty": 1.3}, 0)
    lm = load(outspoken(max_position_embeddings=64))
    with pytest.raises(ls.UserError, match="fewer"):
        lm.generate_until(instances("generate_until", [("Why?", {"until": []})]))


def test_a_text_ends_at_its_string_whatever_its_tokens() -> None:
    tokenizer = byte_pairs()
    tokens = tokenizer.encode("The sea is wide.\n\nQuestion: why")
    for until in (["bc", "ab"], ["ab", "bc"]):
        first = StopStrings(tokenizer, until)
        for token in tokenizer.encode("x abc", add_special_tokens=False):
            first(0, token)
        assert first.text(0, []) == "x "
    watch = StopStrings(tokenizer, ["\n\nQuestion", "never"])
    seen = [watch(0, token) for token in tokens]
    assert seen.index(True) == len(tokenizer.encode("The sea is wide.\n\nQuestion")) - 1
    assert watch.text(0, {0}) == "The sea is wide."
    thinking = StopStrings(tokenizer, ["\n\n"], think_end="</think>")
    ended = [thinking(0, token) for token in [*tokenizer.encode("Well,\n\nthen.</think>\nIt is.\n\nNo"), 2]]
    assert ended.index(True) > len(tokenizer.encode("Well,\n\nthen."))
    assert thinking.text(0, {2}) == "It is."


def test_chats_names_and_low_precision() -> None:
    lm = load(outspoken().to(torch.bfloat16))
    assert all(np.isfinite(likely) for likely, _ in lm.loglikelihood(likelihoods()[:8]))
    history = [{"role": "user", "content": "Why?"}]
    assert lm.apply_chat_template(history) == "<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant:"


@pytest.mark.parametrize("cache", ["full", "propagate", "latest"])
def test_the_default_cache_is_the_policy_s_own(cache: str) -> None:
    requests = instances("generate_until", [(TEXT, {"until": [], "max_gen_toks": 12})])
    policy = ls.ExitPolicy("margin", 1.0, scope=Scope(cache=cache))
    lm = load(outspoken(), policy=policy)
    assert lm.get_model_info()["cache"] == cache
    text = lm.generate_until(requests)
    assert text == load(outspoken(), policy=ls.ExitPolicy("margin", 1.0), cache=cache).generate_until(requests)
    assert lm.used["made_up"][1] < 3 * lm.used["made_up"][0]


def test_lm_eval_s_default_device_where_there_is_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """lm_eval passes `cuda:0` where nobody named a device."""
    folder = {"pretrained": str(write_outspoken(tmp_path / "model"))}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    lm = LoopScopeLM.create_from_arg_obj(folder, {"device": "cuda:0", "batch_size": 2, "max_batch_size": None})
    assert (next(lm.model.parameters()).device.type, lm.batch_size) == ("cpu", 2)
    with pytest.raises(ls.UserError, match="'cuda:1' is not available"):
        LoopScopeLM.create_from_arg_obj(folder, {"device": "cuda:1"})


def test_a_depth_and_a_policy_exclude_each_other() -> None:
    with pytest.raises(ls.UserError, match="exclude"):
        load(outspoken(), loops=2, policy=ls.ExitPolicy("gate", 0.5))
