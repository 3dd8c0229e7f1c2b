"""Does vLLM write what LoopScope writes, and does every token exit where it exits in LoopScope?

`LOOPSCOPE_CHECKPOINT=FOLDER make test-vllm` asks the same of a checkpoint of your own.
"""

import json
import os
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import pytest
from vllm_engines import (
    GOLDEN_OURO,
    LENGTHS,
    answers,
    engine,
    expected,
    greedy,
    loops_of,
    noted,
    some_prompts,
    write_looped_llama,
    write_small_ouro,
)

import loopscope as ls
from loopscope.errors import UserError
from loopscope.integrations.vllm.exits_log import StepExits, prompt_digest, read_exits
from loopscope.models.checkpoint_folder import write_hashes
from loopscope.models.tokenizer import load_tokenizer
from loopscope.scope import Scope

pytest.importorskip("vllm.config", reason="needs an environment with vLLM: make test-vllm")

OWN = Path(os.environ.get("LOOPSCOPE_CHECKPOINT", ""))
own = pytest.mark.skipif(not OWN.name, reason="LOOPSCOPE_CHECKPOINT names no checkpoint")
TEXT = (
    "The history of the city begins with a bridge over the river, which merchants from the north had built of wood. "
    "In the winter of that year it burnt down, and the council decided that the next one was to be of stone. Every "
    "family gave a part of what it had earned, and when the money was still not enough, the mayor sold his house. "
)
PROMPTS = some_prompts(97)
QWEN = {"looping": {"source": "qwen2"}, "use_sliding_window": False, "sliding_window": 8}  # which it does not use
TIED = {"num_hidden_layers": 2, "tie_word_embeddings": True}


def english(folder: Path) -> list[list[int]]:
    """16 prompts of different lengths."""
    tokens = load_tokenizer(folder).encode(3 * TEXT)
    return [tokens[3 * number : 3 * number + length] for number, length in enumerate(LENGTHS)]


def exits_alike(
    folder: Path, readout: str, threshold: float, out: Path, prompts: list[list[int]] = PROMPTS, **options: Any
) -> tuple[set[int], list[StepExits]]:
    """Holds vLLM's tokens and loops against LoopScope's; the loops that were taken, and vLLM's steps."""
    tokens, loops = expected(folder, prompts, ls.ExitPolicy(readout, threshold), "propagate")
    rule = {"readout": readout, "threshold": threshold, "exits_log": str(out / "exits.jsonl")}
    with engine(folder, rule, **options) as llm:
        written = answers(llm, prompts)
    assert [list(answer.outputs[0].token_ids) for answer in written] == tokens
    assert loops_of(written) == loops
    found, steps = noted(out / "exits.jsonl", prompts)
    assert found == loops
    return set(chain(*loops)), steps


@pytest.mark.parametrize("changes", [None, {}, QWEN], ids=["ouro", "llama", "qwen"])
def test_full_depth_token_for_token(changes: dict[str, Any] | None, tmp_path: Path) -> None:
    folder = GOLDEN_OURO if changes is None else write_looped_llama(tmp_path / "llama", **changes)
    with engine(folder) as llm:
        assert greedy(llm, PROMPTS) == expected(folder, PROMPTS)[0]


@pytest.mark.parametrize("path", [None, pytest.param(OWN, marks=own)], ids=["small", "own"])
def test_full_depth_token_for_token_compiled(path: Path | None, tmp_path: Path) -> None:
    folder = path or write_small_ouro(tmp_path / "small")
    prompts = english(path) if path else some_prompts(300)
    with engine(folder, enforce_eager=False) as llm:
        assert greedy(llm, prompts) == expected(folder, prompts)[0]


@pytest.mark.parametrize("how", ["loops", "total_ut_steps", "policy"])
def test_fewer_loops_are_a_fixed_depth(how: str, tmp_path: Path) -> None:
    policy = ls.ExitPolicy("fixed", 2)
    policy.save(tmp_path / "policy.json")
    options = {
        "loops": {"loopscope": {"loops": 2}},
        "total_ut_steps": {"hf_overrides": {"total_ut_steps": 2}},
        "policy": {"loopscope": {"policy": str(tmp_path / "policy.json")}},
    }
    wanted = expected(GOLDEN_OURO, PROMPTS, policy)[0]
    assert wanted != expected(GOLDEN_OURO, PROMPTS)[0]
    with engine(GOLDEN_OURO, **options[how]) as llm:
        assert greedy(llm, PROMPTS) == wanted


@pytest.mark.parametrize(
    ("batched", "eager"), [(8192, True), (16, True), (16, False)], ids=["whole prompts", "in parts", "compiled"]
)
def test_ouro_by_its_gate(batched: int, eager: bool, tmp_path: Path) -> None:
    """With parts of 16 tokens the last part of one prompt is a single token, which is none of its text."""
    options = {"max_num_batched_tokens": batched, "enforce_eager": eager}
    taken, steps = exits_alike(GOLDEN_OURO, "gate", 0.5, tmp_path, **options)
    assert taken == {1, 2, 3, 4}
    continuing = [step for step in steps if not step.prompts]
    assert all(step.ran == max(step.loops) for step in continuing)
    assert {step.ran for step in continuing} >= {2, 3, 4}
    assert all(step.ran == 4 for step in steps if step.prompts)


@pytest.mark.parametrize(("readout", "threshold"), [("gate", 0.5), ("margin", 0.3)])
def test_two_workers_write_the_same_and_exit_at_the_same_loops(readout: str, threshold: float, tmp_path: Path) -> None:
    assert len(exits_alike(GOLDEN_OURO, readout, threshold, tmp_path, tensor_parallel_size=2)[0]) > 2


@pytest.mark.parametrize(
    ("changes", "readout", "threshold", "depths", "eager"),
    [({}, "gate", 0.6, 3, True), ({}, "margin", 0.3, 3, False), (TIED, "kl", 0.05, 2, True)],
    ids=["layers after the loops, gate", "the same, margin, compiled", "tied weights, a readout that looks back"],
)
def test_looped_llamas(
    changes: dict[str, Any], readout: str, threshold: float, depths: int, eager: bool, tmp_path: Path
) -> None:
    folder = write_looped_llama(tmp_path / "llama", **changes)
    assert len(exits_alike(folder, readout, threshold, tmp_path, enforce_eager=eager)[0]) >= depths


@own
@pytest.mark.parametrize(("readout", "threshold"), [("gate", 0.5), ("margin", 0.5)])
def test_exits_of_a_checkpoint_of_your_own(readout: str, threshold: float, tmp_path: Path) -> None:
    taken, _ = exits_alike(OWN, readout, threshold, tmp_path, english(OWN))
    print(f"\n{readout} at {threshold}: tokens exit at the loops {sorted(taken)}")


def test_a_request_that_was_preempted_reads_its_text_again_as_a_prompt(tmp_path: Path) -> None:
    """In parts, and at full depth, whoever exits in the same steps; from there on it is written as after any prompt."""
    prompts, log, policy = PROMPTS[-6:], tmp_path / "exits.jsonl", ls.ExitPolicy("gate", 0.5)
    options = {"max_num_batched_tokens": 16, "block_size": 32, "num_gpu_blocks_override": 9}
    with engine(GOLDEN_OURO, {"readout": "gate", "threshold": 0.5, "exits_log": str(log)}, **options) as llm:
        found = answers(llm, prompts, 40)
    written = [list(answer.outputs[0].token_ids) for answer in found]
    assert {len(loops) for loops in loops_of(found)} == {40}  # of the same tokens, whatever was read again
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


def test_what_cannot_be_served_is_refused_before_an_engine_starts(tmp_path: Path) -> None:
    looped_llama, altered = (write_looped_llama(tmp_path / name) for name in ("llama", "altered"))
    write_hashes(altered, {"model.safetensors": "ab" * 32})
    exits = {"readout": "gate", "threshold": 0.5}
    connector = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}
    policy = tmp_path / "policy.json"
    ls.ExitPolicy("gate", 0.5, scope=Scope(model="ab" * 32)).save(policy)
    for folder, told, options, words in (
        (GOLDEN_OURO, {"policy": str(policy)}, {}, "calibrated for another model"),
        (altered, {}, {}, "was altered since its run wrote it"),
        (GOLDEN_OURO, exits, {"kv_transfer_config": connector}, "no other request or engine may have it"),
        (looped_llama, exits, {"max_num_batched_tokens": 64}, "must fit into one step"),
        (GOLDEN_OURO, exits | {"exits_log": str(tmp_path / "nowhere" / "log.jsonl")}, {}, "No such file"),
    ):
        with pytest.raises((UserError, ValueError), match=words), engine(folder, told, **options):
            pass


def test_a_log_of_many_texts_of_one_prompt(tmp_path: Path) -> None:
    """They are told apart, and each has its own loops."""
    prompt, log = PROMPTS[8], tmp_path / "exits.jsonl"
    _, (loops,) = expected(GOLDEN_OURO, [prompt], ls.ExitPolicy("gate", 0.5), "propagate")
    with engine(GOLDEN_OURO, {"readout": "gate", "threshold": 0.5, "exits_log": str(log)}) as llm:
        greedy(llm, [prompt] * 9)
    texts, _ = read_exits(log)
    assert [text.loops[:24] for text in texts] == [loops] * 9
    assert json.loads(log.read_text().splitlines()[0])["prompts"]["0"][0] == len(prompt)
