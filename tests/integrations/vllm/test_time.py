"""How much of the loops that exits save is saved in time, against vLLM's compiled engine at full depth?

Prompts take all loops, so the time is compared whole, and from the last prompt's first token on. LoopScope's own engine
runs beside it, under the policy "two" and at full depth.

`VLLM_SIZE=large make test-vllm` measures a model of 34 million parameters instead of 5, and `VLLM_BATCH=8` one batch
instead of two. Other work on the machine moves the figures; the engines and depths take turns, and the ratios of a
round are compared, not its times.
"""

import os
import time
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from tiny_language import tiny_ouro, write_ouro
from vllm_engines import engine

import loopscope as ls
from loopscope.models.checkpoint import save_model

pytest.importorskip("vllm.config", reason="needs an environment with vLLM: make test-vllm")

_SIZES = {
    "small": {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 5, "num_attention_heads": 4},
    "large": {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 10, "num_attention_heads": 8},
}
_LOOPS = 4
_ROUNDS, _PROMPT, _NEW = 5, 32, 48
_STOP_AT_A_LOOP = 0.35
"""What the gate says at every loop; of the loops up to one it is 0.35, 0.58, 0.73."""
_POLICIES = {
    "one": ls.ExitPolicy("gate", 0.3),
    "two": ls.ExitPolicy("gate", 0.5),
    "three": ls.ExitPolicy("gate", 0.7),
}


def write_model(folder: Path, size: str) -> int:
    """An Ouro of random weights whose gate says the same of every token; its parameters."""
    changes = {**_SIZES[size], "vocab_size": 2000, "total_ut_steps": _LOOPS}
    changes["num_key_value_heads"] = changes["num_attention_heads"]
    write_ouro(folder, **changes)
    model = tiny_ouro(**changes)
    state = model.state_dict()
    (weight,) = [name for name in state if name.endswith("early_exit_gate.weight")]
    state[weight] = torch.zeros_like(state[weight])
    bias = weight.replace("weight", "bias")
    state[bias] = torch.full_like(state[bias], float(np.log(_STOP_AT_A_LOOP / (1 - _STOP_AT_A_LOOP))))
    save_model(state, folder)
    return sum(parameter.numel() for parameter in model.parameters())


class Answered(NamedTuple):
    whole: float  # seconds that answers take
    writing: float  # of these, the seconds after the last prompt's first token
    loops: list[int]  # of every token, if a depth was asked for


def answered(llm: Any, prompts: list[list[int]], depth: str | None = None) -> Answered:
    from vllm import SamplingParams

    arguments = None if depth is None else {"loopscope_depth": depth}
    sampling = SamplingParams(temperature=0, max_tokens=_NEW, ignore_eos=True, detokenize=False, extra_args=arguments)
    began = time.perf_counter()
    answers = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False)
    whole = time.perf_counter() - began
    stats = [answer.metrics for answer in answers]
    writing = max(each.last_token_ts for each in stats) - max(each.first_token_ts for each in stats)
    loops = [loops for answer in answers if depth for loops in answer.kv_transfer_params["loopscope"]["loops"]]
    return Answered(whole, writing, loops)


def written_here(model: Any, prompts: list[list[int]], depth: str) -> float:
    """The seconds that LoopScope's own engine takes."""
    policy, cache = (_POLICIES[depth], "propagate") if depth in _POLICIES else (None, "full")
    given = [ls.Prompt(number, np.array(prompt)) for number, prompt in enumerate(prompts)]
    began = time.perf_counter()
    texts = list(ls.generate(model, given, policy, max_new_tokens=_NEW, cache=cache))
    assert all(len(text.tokens) == _NEW for text in texts)
    return time.perf_counter() - began


def spread(ratios: list[float]) -> str:
    return f"{median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


def test_exits_take_less_time_than_a_compiled_engine_at_full_depth(tmp_path: Path) -> None:
    size, chosen = os.environ.get("VLLM_SIZE", "small"), os.environ.get("VLLM_BATCH")
    batches = (int(chosen),) if chosen else (1, 8)
    parameters = write_model(tmp_path / "model", size)
    for name, policy in _POLICIES.items():
        policy.save(tmp_path / f"{name}.json")
    told = {"policies": {name: str(tmp_path / f"{name}.json") for name in _POLICIES}}
    rng = np.random.default_rng(0)
    prompts = [rng.integers(1, 2000, _PROMPT).tolist() for _ in range(8)]
    options = {"enforce_eager": False, "max_num_seqs": 8, "disable_log_stats": False}
    own = ls.load_model(tmp_path / "model")
    with engine(tmp_path / "model", **options) as full, engine(tmp_path / "model", told, **options) as adaptive:
        print(f"\n{parameters / 1e6:.1f} million parameters, {_LOOPS} loops, {_ROUNDS} rounds: times as fast")
        for batch in batches:
            names = ("full", *_POLICIES)
            whole, writing = ({name: [] for name in names} for _ in range(2))
            beside: dict[str, list[float]] = {"at full depth": [], 'under "two"': []}
            loops: dict[str, float] = {}
            for number in range(_ROUNDS + 1):
                base = answered(full, prompts[:batch])
                found = {name: answered(adaptive, prompts[:batch], name) for name in names}
                own_full, own_two = (written_here(own, prompts[:batch], name) for name in ("full", "two"))
                if not number:  # the first round warms up
                    loops = {name: float(np.mean(each.loops)) for name, each in found.items()}
                    continue
                for name, each in found.items():
                    whole[name].append(base.whole / each.whole)
                    writing[name].append(base.writing / each.writing)
                beside["at full depth"].append(base.whole / own_full)
                beside['under "two"'].append(found["two"].whole / own_two)
            for name in names:
                shares = [median(ratios[name]) * loops[name] / _LOOPS for ratios in (whole, writing)]
                print(
                    f"batch {batch}, {name}: {loops[name]:.2f} loops per token; whole {spread(whole[name])}, "
                    f"{shares[0]:.2f} of the ideal; writing {spread(writing[name])}, {shares[1]:.2f} of the ideal"
                )
            for how, ratios in beside.items():
                print(f"batch {batch}, LoopScope {how}: {spread(ratios)} of vLLM {how}")
            assert median(whole["one"]) > median(whole["full"])
            assert [round(loops[name], 6) for name in ("one", "two", "three", "full")] == [1, 2, 3, 4]
