"""`generate` of looped models: are its texts those of LoopScope's engine, and is what it cannot do refused?"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_modeling import HUGINN, OURO, TEXT, folder, llama, load, loaded, padded, rows  # noqa: F401 - fixtures, too
from tiny_language import byte_pairs, write_ouro
from torch import Tensor
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.generation import EosTokenCriteria, TemperatureLogitsWarper

import loopscope as ls
from loopscope.engine.generation import Prompt
from loopscope.engine.sampling import Sampling
from loopscope.integrations.transformers import LoopedCache
from loopscope.scope import Scope

# ruff: noqa: F811 - fixtures

PROMPTS = torch.arange(1, 13).view(2, 6)
POLICY = ls.ExitPolicy("gate", 0.5)
TOKENS, MASK = padded(rows(), "left")
LONG = pytest.mark.long


def prompts() -> list[Prompt]:
    return [Prompt(number, text.numpy()) for number, text in enumerate(rows())]


def generated(model: Any, **options: Any) -> Any:
    return model.generate(TOKENS, attention_mask=MASK, **{"eos_token_id": None, **options})


def new_tokens(sequences: Tensor, ends: Any = ()) -> list[list[int]]:
    """What was generated, up to the token that ends a text."""
    found = []
    for row in sequences[:, TOKENS.shape[1] :].tolist():
        end = next((place for place, token in enumerate(row, start=1) if token in ends), len(row))
        found.append(row[:end])
    return found


def test_generates_what_the_engine_generates(folder: Path) -> None:
    model, ours = loaded(folder), ls.load_model(folder)
    free = [text.tokens for text in ls.generate(ours, prompts(), max_new_tokens=12)]
    ends = {free[0][4], free[1][7]}  # so that texts end at different times
    options = {"max_new_tokens": 12, "eos_token_id": sorted(ends), "pad_token_id": 0, "do_sample": False}
    written = generated(model, **options)
    expected = ls.generate(ours, prompts(), max_new_tokens=12, stop=ends)
    assert new_tokens(written, ends) == [text.tokens for text in expected]
    assert len({len(text.tokens) for text in expected}) > 1
    assert torch.equal(written, generated(model, use_cache=False, **options))


@pytest.mark.parametrize("mode", ["full", pytest.param("propagate", marks=LONG), pytest.param("latest", marks=LONG)])
def test_generates_under_a_policy_as_the_engine_does(folder: Path, mode: str, tmp_path: Path) -> None:
    model = loaded(folder)
    rules = {OURO: ("margin", 0.3), HUGINN: ("margin", 0.02)}
    policy = ls.ExitPolicy(*rules.get(folder, ("gate", 0.5)))
    expected = ls.generate(ls.load_model(folder), prompts(), policy, max_new_tokens=10, cache=mode)
    loops = np.array([text.loops for text in expected])
    assert len(np.unique(loops)) > 1, "a policy that this test says something about"
    given = {"policy": policy, "cache": mode, "max_new_tokens": 10}
    out = generated(model, return_dict_in_generate=True, **given)
    assert new_tokens(out.sequences) == [text.tokens for text in expected]
    assert np.array_equal(out.loops.numpy(), loops)
    if mode == "full":
        full_depth = generated(model, do_sample=False, max_new_tokens=10)
        assert torch.equal(generated(model, lossless=True, **given), full_depth)
    policy.save(tmp_path / "policy.json")
    assert torch.equal(generated(model, **{**given, "policy": tmp_path / "policy.json"}), out.sequences)


@pytest.mark.parametrize("ends", [[""], []])
def test_tokens_that_end_a_text_are_numbers_of_tokens(ends: list[Any]) -> None:
    with pytest.raises(ls.UserError, match="eos_token_id must be the number of a token"):
        generated(loaded(OURO), policy=POLICY, max_new_tokens=2, eos_token_id=ends)


def test_samples_under_a_policy_as_the_engine_does() -> None:
    settings = {"temperature": 1.3, "top_k": 20, "top_p": 0.9}
    texts = []
    for seed in (5, 5, 6):
        torch.manual_seed(seed)
        texts.append(generated(loaded(OURO), do_sample=True, policy=POLICY, max_new_tokens=8, **settings))
    assert torch.equal(texts[0], texts[1])
    assert not torch.equal(texts[0], texts[2])
    torch.manual_seed(5)
    sampling = Sampling(**settings, seed=int(torch.randint(2**62, ())))
    expected = ls.generate(ls.load_model(OURO), prompts(), POLICY, max_new_tokens=8, sampling=sampling)
    assert new_tokens(texts[0]) == [text.tokens for text in expected]


@pytest.mark.filterwarnings("ignore")
def test_sampling_and_beams_with_the_cache_are_those_without(folder: Path) -> None:
    for options in ({"do_sample": True, "num_return_sequences": 2}, {"num_beams": 3}, {"num_loops": 2}):
        texts = []
        for use_cache in (True, False):
            torch.manual_seed(0)
            texts.append(generated(loaded(folder), use_cache=use_cache, max_new_tokens=8, **options))
        assert torch.equal(*texts), options


@pytest.mark.filterwarnings("ignore")
def test_a_text_goes_on_from_its_cache() -> None:
    model, cache, options = loaded(OURO), LoopedCache(), {"eos_token_id": None, "do_sample": False}
    first = model.generate(TEXT, past_key_values=cache, max_new_tokens=4, **options)
    second = model.generate(first, past_key_values=cache, max_new_tokens=4, **options)
    assert torch.equal(second, model.generate(TEXT, max_new_tokens=8, **options))


def test_what_a_policy_does_not_go_with() -> None:
    for match, given in {
        "beams": {"num_beams": 2},
        "output_scores": {"output_scores": True, "return_dict_in_generate": True},
        "no cache 'some'": {"cache": "some"},
        "lossless is of an exit policy": {"policy": None, "lossless": True},
        "cache is of an exit policy": {"policy": None, "cache": "propagate"},
        "num_loops is not done": {"num_loops": 1},
        "output_loop_logits is not done": {"output_loop_logits": True},
        "past_key_values is not done": {"past_key_values": LoopedCache()},
        "a row of its own": {"position_ids": torch.zeros_like(TOKENS)},
        "EosTokenCriteria is not done": {"stopping_criteria": [EosTokenCriteria(5)]},
        "TemperatureLogitsWarper is not done": {"logits_processor": [TemperatureLogitsWarper(0.3)]},
        "stop_strings is not done": {"stop_strings": ["x"]},
        "stop_strings is not": {"generation_config": GenerationConfig(stop_strings=["x"])},
        "several rows is not done": {"streamer": Collected()},
    }.items():
        with pytest.raises(ls.UserError, match=match):
            generated(loaded(OURO), max_new_tokens=4, **{"policy": POLICY, **given})
    with pytest.raises(ls.UserError, match="training mode"):
        generated(load(OURO).train(), policy=POLICY, max_new_tokens=4)


def test_what_generate_says_of_other_ways() -> None:
    """Arguments of the code beside the weights, and transformers' continuous batching."""
    model = loaded(OURO)
    for match, given in {
        "exit_threshold belongs to the code of the model's authors.*policy=ls.ExitPolicy": {"exit_threshold": 0.5},
        "exit_at_step belongs to.*num_loops=N": {"exit_at_step": 1},
        "early_exit_threshold belongs": {"generation_config": GenerationConfig(early_exit_threshold=0.5)},
        "num_steps belongs to": {"num_steps": 4, "policy": POLICY},
    }.items():
        with pytest.raises(ls.UserError, match=match):
            generated(model, max_new_tokens=2, **given)
    assert generated(model, max_new_tokens=2, exit_threshold=None, exit_at_step=None).shape[1] == 11
    for start in (lambda: model.generate_batch([[1, 2, 3]]), lambda: model.init_continuous_batching()):
        with pytest.raises(ls.UserError, match=r"one set of keys and values per layer.*ls.generate\(model.looped"):
            start()


@pytest.mark.filterwarnings("ignore")  # PyTorch will replace it one day
def test_pytorch_s_dynamic_int8_is_refused() -> None:
    """It would change the gate and nothing else."""
    model = torch.ao.quantization.quantize_dynamic(load(OURO), {torch.nn.Linear}, dtype=torch.qint8)
    with pytest.raises(ls.UserError, match="The gate was replaced.*torchao"):
        model(TEXT)


class Collected:
    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.ended = False

    def put(self, tokens: Tensor) -> None:
        self.tokens += tokens.flatten().tolist()

    def end(self) -> None:
        self.ended = True


def test_a_stream_of_one_row() -> None:
    streamer = Collected()
    given = {"attention_mask": torch.ones_like(TEXT), "policy": POLICY, "max_new_tokens": 5, "eos_token_id": None}
    written = loaded(OURO).generate(TEXT, streamer=streamer, **given)
    assert streamer.tokens == written[0].tolist()
    assert streamer.ended


def test_a_policy_knows_its_model() -> None:
    """Loaded by transformers it is the model that it was calibrated on, until its weights change."""
    model = load(OURO)
    tied = ls.ExitPolicy("margin", 0.3, scope=Scope(model=ls.load_model(OURO).weights_sha256))
    assert generated(model, max_new_tokens=3, policy=tied).shape[1] == 12
    with torch.no_grad():
        model.lm_head.weight[5] += 1
    with pytest.raises(ls.UserError, match="model"):
        generated(model, max_new_tokens=3, policy=tied)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    written = write_ouro(tmp_path_factory.mktemp("generation") / "ouro", byte_pairs(), max_position_embeddings=64)
    return AutoModelForCausalLM.from_pretrained(written).eval()


@pytest.mark.parametrize("policy", [None, POLICY], ids=["full depth", "a policy"])
def test_more_than_the_model_has_positions_for(model: Any, policy: ls.ExitPolicy | None) -> None:
    with pytest.raises(ls.UserError, match="6 tokens and 59 after it are more than the 64"):
        model.generate(PROMPTS, max_new_tokens=59, policy=policy)
    assert model.generate(PROMPTS, max_new_tokens=58, policy=policy, eos_token_id=None).shape[1] == 64


def test_a_text_stops_at_a_string(model: Any) -> None:
    """The tokenizer is of the criterion, not of the network."""
    tokenizer, options = byte_pairs(), {"max_new_tokens": 12, "eos_token_id": None}
    whole = model.generate(PROMPTS[:1], **options)
    said = tokenizer.decode(whole[0, 6:])
    stopped = model.generate(PROMPTS[:1], stop_strings=[said[4]], tokenizer=tokenizer, **options)
    assert 6 < stopped.shape[1] < whole.shape[1]
    assert torch.equal(stopped[0], whole[0, : stopped.shape[1]])


@pytest.mark.parametrize("policy", [None, POLICY], ids=["full depth", "a policy"])
@pytest.mark.parametrize("asked", ["prompt_lookup_num_tokens", "assistant_early_exit"])
def test_modes_that_take_tokens_back_are_refused(model: Any, policy: ls.ExitPolicy | None, asked: str) -> None:
    """By transformers itself, with and without a policy."""
    with pytest.raises(ValueError, match="(?i)assisted"):
        model.generate(PROMPTS, policy=policy, max_new_tokens=4, **{asked: 1})
