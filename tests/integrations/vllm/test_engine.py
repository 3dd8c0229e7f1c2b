"""Does vLLM write what LoopScope writes, at full depth, at fewer loops, and on two workers?"""

from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from vllm_engines import (
    GOLDEN_OURO,
    engine,
    expected,
    greedy,
    noted,
    some_prompts,
    write_looped_llama,
    write_small_ouro,
)

import loopscope as ls

pytest.importorskip("vllm.config", reason="needs an environment with vLLM: make test-vllm")


def test_the_golden_ouro_token_for_token() -> None:
    prompts = some_prompts(97)
    with engine(GOLDEN_OURO) as llm:
        assert greedy(llm, prompts) == expected(GOLDEN_OURO, prompts)[0]


def test_a_small_ouro_token_for_token_compiled(tmp_path: Path) -> None:
    folder, prompts = write_small_ouro(tmp_path / "small"), some_prompts(300)
    with engine(folder, enforce_eager=False) as llm:
        assert greedy(llm, prompts) == expected(folder, prompts)[0]


@pytest.mark.parametrize(
    "changes",
    [{}, {"looping": {"source": "qwen2"}, "use_sliding_window": False, "sliding_window": 8}],
    ids=["llama", "qwen with a window that it does not use"],
)
def test_a_looped_llama_token_for_token(changes: dict[str, Any], tmp_path: Path) -> None:
    looped_llama, prompts = write_looped_llama(tmp_path / "llama", **changes), some_prompts(97)
    with engine(looped_llama) as llm:
        assert greedy(llm, prompts) == expected(looped_llama, prompts)[0]


@pytest.mark.parametrize("how", ["loops", "total_ut_steps", "policy"])
def test_fewer_loops_are_a_fixed_depth(how: str, tmp_path: Path) -> None:
    prompts, policy = some_prompts(97), ls.ExitPolicy("fixed", 2)
    policy.save(tmp_path / "policy.json")
    options = {
        "loops": {"loopscope": {"loops": 2}},
        "total_ut_steps": {"hf_overrides": {"total_ut_steps": 2}},
        "policy": {"loopscope": {"policy": str(tmp_path / "policy.json")}},
    }
    wanted, at_full_depth = expected(GOLDEN_OURO, prompts, policy)[0], expected(GOLDEN_OURO, prompts)[0]
    assert wanted != at_full_depth
    with engine(GOLDEN_OURO, **options[how]) as llm:
        assert greedy(llm, prompts) == wanted


@pytest.mark.parametrize(("readout", "threshold"), [("gate", 0.5), ("margin", 0.3)])
def test_two_workers_write_the_same_and_exit_at_the_same_loops(readout: str, threshold: float, tmp_path: Path) -> None:
    prompts, log = some_prompts(97), tmp_path / "exits.jsonl"
    tokens, loops = expected(GOLDEN_OURO, prompts, ls.ExitPolicy(readout, threshold), "propagate")
    assert len(set(chain(*loops))) > 2
    rule = {"readout": readout, "threshold": threshold, "exits_log": str(log)}
    with engine(GOLDEN_OURO, rule, tensor_parallel_size=2) as llm:
        assert greedy(llm, prompts) == tokens
    assert noted(log, prompts)[0] == loops
