"""Engines of vLLM, and what LoopScope itself writes, for the tests here."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from conftest import GOLDEN
from tiny_language import looped_llama_config, tiny_looped_llama, write_ouro

import loopscope as ls
from loopscope.integrations.vllm.exits_log import StepExits, prompt_digest, read_exits
from loopscope.models.checkpoint import save_model
from loopscope.training.language_run import train_tokenizer

os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_NO_USAGE_STATS": "1"}

LENGTHS = (1, 2, 3, 5, 8, 9, 13, 14, 20, 27, 31, 32, 33, 47, 50, 64)
NEW = 24
SENTENCES = [f"{a} and {b} make {a + b}, as the sun makes plants grow." for a in range(30) for b in range(10)]
GOLDEN_OURO = GOLDEN / "ouro-tiny"


def some_prompts(vocab_size: int) -> list[list[int]]:
    """16 of different lengths."""
    rng = np.random.default_rng(0)
    return [rng.integers(1, vocab_size, length).tolist() for length in LENGTHS]


@contextmanager
def engine(folder: Path, loopscope: dict[str, Any] | None = None, **options: Any) -> Iterator[Any]:
    """An engine in processes of its own, of so few places that prompts wait for others to end."""
    from vllm import LLM

    overrides = {**options.pop("hf_overrides", {}), **({} if loopscope is None else {"loopscope": loopscope})}
    sizes = {"max_model_len": 128, "max_num_seqs": 6, "enforce_eager": True, "dtype": "float32"}
    llm = LLM(str(folder), skip_tokenizer_init=True, hf_overrides=overrides, **{**sizes, **options})
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()


def greedy(llm: Any, prompts: list[list[int]], new: int = NEW) -> list[list[int]]:
    return [list(answer.outputs[0].token_ids) for answer in answers(llm, prompts, new)]


def answers(llm: Any, prompts: list[list[int]], new: int = NEW) -> list[Any]:
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True, detokenize=False)
    found: list[Any] = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False)
    return found


def loops_of(found: list[Any]) -> list[list[int]]:
    """Those of every token, as the answers have them."""
    return [answer.kv_transfer_params["loopscope"]["loops"] for answer in found]


def expected(
    folder: Path, prompts: list[list[int]], policy: ls.ExitPolicy | None = None, cache: str = "full", new: int = NEW
) -> tuple[list[list[int]], list[list[int]]]:
    """The tokens that LoopScope writes, and their loops."""
    given = [ls.Prompt(number, np.array(prompt)) for number, prompt in enumerate(prompts)]
    texts = ls.generate(ls.load_model(folder), given, policy, max_new_tokens=new, cache=cache)
    return [text.tokens for text in texts], [text.loops for text in texts]


def noted(path: Path, prompts: list[list[int]], new: int = NEW) -> tuple[list[list[int]], list[StepExits]]:
    """The loops of these prompts' texts by a log, and its steps."""
    texts, steps = read_exits(path)
    loops = {text.prompt: text.loops for text in texts}
    return [loops[prompt_digest(prompt)][:new] for prompt in prompts], steps


def write_small_ouro(folder: Path) -> Path:
    """The checkpoint of an Ouro with a tokenizer and with opinions."""
    folder.mkdir(parents=True)
    train_tokenizer(SENTENCES, 300, 256, folder)
    return write_ouro(folder, sure=8.0, vocab_size=300, num_hidden_layers=2)


def write_looped_llama(folder: Path, **changes: Any) -> Path:
    """The checkpoint of a small looped Llama of random weights: a layer before the loops, one in them, one after."""
    changes = {"vocab_size": 97, **changes}
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(looped_llama_config(**changes)))
    model = tiny_looped_llama(**changes)
    save_model({name: value for name, value in model.state_dict().items() if name not in model.tied}, folder)
    return folder
