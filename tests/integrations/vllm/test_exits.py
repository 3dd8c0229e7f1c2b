"""Does a token in vLLM exit where it exits in LoopScope, and is no loop run for nobody?"""

import json
from itertools import chain, pairwise
from pathlib import Path

import pytest
from vllm_engines import GOLDEN_OURO, engine, expected, greedy, noted, some_prompts, write_looped_llama

import loopscope as ls
from loopscope.errors import UserError
from loopscope.integrations.vllm.exits_log import prompt_digest, read_exits
from loopscope.models.run_hashes import write_hashes

pytest.importorskip("vllm.config", reason="needs an environment with vLLM: make test-vllm")


@pytest.mark.parametrize("batched", [8192, 16], ids=["whole prompts", "prompts in parts"])
def test_ouro_by_its_gate(batched: int, tmp_path: Path) -> None:
    """With parts of 16 tokens the last part of one prompt is a single token, which is none of its text."""
    prompts, log, policy = some_prompts(97), tmp_path / "exits.jsonl", tmp_path / "policy.json"
    ls.ExitPolicy("gate", 0.5).save(policy)
    tokens, loops = expected(GOLDEN_OURO, prompts, ls.ExitPolicy.load(policy), "propagate")
    assert set(chain(*loops)) == {1, 2, 3, 4}
    with engine(GOLDEN_OURO, {"policy": str(policy), "exits_log": str(log)}, max_num_batched_tokens=batched) as llm:
        assert greedy(llm, prompts) == tokens
    found, steps = noted(log, prompts)
    assert found == loops
    continuing = [step for step in steps if not step.prompts]
    assert all(step.ran == max(step.loops) for step in continuing)
    assert {step.ran for step in continuing} >= {2, 3, 4}
    assert all(step.ran == 4 for step in steps if step.prompts)


def test_a_request_that_was_preempted_reads_its_text_again_as_a_prompt(tmp_path: Path) -> None:
    """In parts, and at full depth, whoever exits in the same steps; from there on it is written as after any prompt."""
    prompts, log, policy = some_prompts(97)[-6:], tmp_path / "exits.jsonl", ls.ExitPolicy("gate", 0.5)
    options = {"max_num_batched_tokens": 16, "block_size": 32, "num_gpu_blocks_override": 9}
    with engine(GOLDEN_OURO, {"readout": "gate", "threshold": 0.5, "exits_log": str(log)}, **options) as llm:
        written = greedy(llm, prompts, 40)
    begun = {text.prompt for text in read_exits(log)[0]}
    again = []
    for prompt, text in zip(prompts, written, strict=True):
        starts = [count for count in range(40) if prompt_digest(prompt + text[:count]) in begun]
        assert starts[0] == 0
        for first, last in pairwise([*starts, 40]):
            ((continued,), _) = expected(GOLDEN_OURO, [prompt + text[:first]], policy, "propagate", 40 - first)
            assert continued[: last - first] == text[first:last]
        again += [count for count in starts if count > 1]
    assert again


@pytest.mark.parametrize(("readout", "threshold"), [("gate", 0.6), ("margin", 0.3)])
def test_a_looped_llama_with_layers_after_the_loops(readout: str, threshold: float, tmp_path: Path) -> None:
    looped_llama = write_looped_llama(tmp_path / "llama")
    prompts, log = some_prompts(97), tmp_path / "exits.jsonl"
    tokens, loops = expected(looped_llama, prompts, ls.ExitPolicy(readout, threshold), "propagate")
    assert set(chain(*loops)) == {1, 2, 3}
    with engine(looped_llama, {"readout": readout, "threshold": threshold, "exits_log": str(log)}) as llm:
        assert greedy(llm, prompts) == tokens
    assert noted(log, prompts)[0] == loops


def test_a_readout_that_looks_back_and_tied_weights(tmp_path: Path) -> None:
    folder = write_looped_llama(tmp_path / "tied", num_hidden_layers=2, tie_word_embeddings=True)
    prompts, log = some_prompts(97), tmp_path / "exits.jsonl"
    tokens, loops = expected(folder, prompts, ls.ExitPolicy("kl", 0.05), "propagate")
    assert len(set(chain(*loops))) > 1
    with engine(folder, {"readout": "kl", "threshold": 0.05, "exits_log": str(log)}) as llm:
        assert greedy(llm, prompts) == tokens
    assert noted(log, prompts)[0] == loops


def test_what_cannot_be_served_is_refused_before_an_engine_starts(tmp_path: Path) -> None:
    looped_llama = write_looped_llama(tmp_path / "llama")
    exits = {"readout": "gate", "threshold": 0.5}
    connector = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}
    policy = tmp_path / "policy.json"
    ls.ExitPolicy("gate", 0.5, model="ab" * 32).save(policy)
    altered = write_looped_llama(tmp_path / "altered")
    write_hashes(altered, {"model.safetensors": "ab" * 32})
    refused = [
        (GOLDEN_OURO, {"policy": str(policy)}, {}, "calibrated for another model"),
        (GOLDEN_OURO, {"depth": 2}, {}, "depth"),
        (altered, {}, {}, "was altered since its run wrote it"),
        (GOLDEN_OURO, exits, {"kv_transfer_config": connector}, "no other request or engine may have it"),
        (looped_llama, exits, {"max_num_batched_tokens": 64}, "must fit into one step"),
        (GOLDEN_OURO, {"policy": str(tmp_path / "none.json")}, {}, "none.json"),
        (GOLDEN_OURO, exits | {"exits_log": str(tmp_path / "nowhere" / "log.jsonl")}, {}, "No such file"),
    ]
    for folder, told, options, words in refused:
        with pytest.raises((UserError, ValueError), match=words), engine(folder, told, **options):
            pass


def test_a_log_of_many_texts_of_one_prompt(tmp_path: Path) -> None:
    """They are told apart, and each has its own loops."""
    prompt, log = some_prompts(97)[8], tmp_path / "exits.jsonl"
    _, (loops,) = expected(GOLDEN_OURO, [prompt], ls.ExitPolicy("gate", 0.5), "propagate")
    with engine(GOLDEN_OURO, {"readout": "gate", "threshold": 0.5, "exits_log": str(log)}) as llm:
        greedy(llm, [prompt] * 9)
    texts, _ = read_exits(log)
    assert [text.loops[:24] for text in texts] == [loops] * 9
    assert json.loads(log.read_text().splitlines()[0])["prompts"]["0"][0] == len(prompt)
