"""Does vLLM write with a checkpoint of your own what LoopScope writes? `LOOPSCOPE_CHECKPOINT=FOLDER make test-vllm`."""

import os
from itertools import chain
from pathlib import Path

import pytest
from vllm_engines import LENGTHS, engine, expected, greedy, noted

import loopscope as ls
from loopscope.models.tokenizer import load_tokenizer

pytest.importorskip("vllm.config", reason="needs an environment with vLLM: make test-vllm")

FOLDER = Path(os.environ.get("LOOPSCOPE_CHECKPOINT", ""))
TEXT = (
    "The history of the city begins with a bridge over the river, which merchants from the north had built of wood. "
    "In the winter of that year it burnt down, and the council decided that the next one was to be of stone. Every "
    "family gave a part of what it had earned, and when the money was still not enough, the mayor sold his house. "
)
pytestmark = pytest.mark.skipif(not FOLDER.name, reason="LOOPSCOPE_CHECKPOINT names no checkpoint")


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """16 of different lengths, of English."""
    tokens = load_tokenizer(FOLDER).encode(3 * TEXT)
    return [tokens[3 * number : 3 * number + length] for number, length in enumerate(LENGTHS)]


def test_full_depth_token_for_token(prompts: list[list[int]]) -> None:
    with engine(FOLDER) as llm:
        assert greedy(llm, prompts) == expected(FOLDER, prompts)[0]


@pytest.mark.parametrize(("readout", "threshold"), [("gate", 0.5), ("margin", 0.5)])
def test_tokens_and_loops_with_exits(readout: str, threshold: float, prompts: list[list[int]], tmp_path: Path) -> None:
    tokens, loops = expected(FOLDER, prompts, ls.ExitPolicy(readout, threshold), "propagate")
    log = tmp_path / "exits.jsonl"
    with engine(FOLDER, {"readout": readout, "threshold": threshold, "exits_log": str(log)}) as llm:
        assert greedy(llm, prompts) == tokens
    assert noted(log, prompts)[0] == loops
    taken = list(chain(*loops))
    print(f"\n{readout} at {threshold}: tokens by loop { {loop: taken.count(loop) for loop in sorted(set(taken))} }")
