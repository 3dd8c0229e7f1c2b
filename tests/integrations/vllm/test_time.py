"""What of the loops that exits save is saved in time, against vLLM's compiled engine at full depth?

LoopScope's own engine runs beside it, under the policy "two" and at full depth.

`VLLM_SIZE=large make test-vllm` measures a model of 34 million parameters instead of 5. Other work on the machine
moves the figures; the engines and depths take turns, and the ratios of a round are compared, not its times.
"""

import os
import time
from pathlib import Path
from statistics import median
from typing import Any

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
_ROUNDS, _PROMPT, _NEW = 5, 32, 64
_STOP_AT_A_LOOP = 0.35
"""What the gate says at every loop; of the loops up to one it is 0.35, 0.58, 0.73."""
_POLICIES = {
    "one": ls.ExitPolicy("gate", 0.3),
    "two": ls.ExitPolicy("gate", 0.5),
    "three": ls.ExitPolicy("gate", 0.7),
    "mixed": ls.ExitPolicy("margin", 0.4),
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


def answered(llm: Any, prompts: list[list[int]], depth: str | None = None) -> tuple[float, list[int]]:
    """The seconds that answers take, and the loops of their tokens."""
    from vllm import SamplingParams

    arguments = None if depth is None else {"loopscope_depth": depth}
    sampling = SamplingParams(temperature=0, max_tokens=_NEW, ignore_eos=True, detokenize=False, extra_args=arguments)
    began = time.perf_counter()
    answers = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False)
    took = time.perf_counter() - began
    return took, [loops for answer in answers if depth for loops in answer.kv_transfer_params["loopscope"]["loops"]]


def written_here(model: Any, prompts: list[list[int]], depth: str) -> float:
    """The seconds that LoopScope's own engine takes."""
    policy, cache = (_POLICIES[depth], "propagate") if depth in _POLICIES else (None, "full")
    given = [ls.Prompt(number, np.array(prompt)) for number, prompt in enumerate(prompts)]
    began = time.perf_counter()
    texts = list(ls.generate(model, given, policy, max_new_tokens=_NEW, cache=cache))
    assert all(len(text.tokens) == _NEW for text in texts)
    return time.perf_counter() - began


def test_exits_take_less_time_than_a_compiled_engine_at_full_depth(tmp_path: Path) -> None:
    size = os.environ.get("VLLM_SIZE", "small")
    parameters = write_model(tmp_path / "model", size)
    for name, policy in _POLICIES.items():
        policy.save(tmp_path / f"{name}.json")
    told = {"policies": {name: str(tmp_path / f"{name}.json") for name in _POLICIES}}
    rng = np.random.default_rng(0)
    prompts = [rng.integers(1, 2000, _PROMPT).tolist() for _ in range(8)]
    options = {"enforce_eager": False, "max_num_seqs": 8}
    own, realised = ls.load_model(tmp_path / "model"), {}
    with engine(tmp_path / "model", **options) as full, engine(tmp_path / "model", told, **options) as adaptive:
        print(f"\n{parameters / 1e6:.1f} million parameters, {_LOOPS} loops, {_ROUNDS} rounds")
        for batch in (1, 8):
            names = ("full", *_POLICIES)
            ratios: dict[str, list[float]] = {name: [] for name in (*names, "LoopScope full", "LoopScope two")}
            loops: dict[str, float] = {}
            for number in range(_ROUNDS + 1):
                base, _ = answered(full, prompts[:batch])
                took: dict[str, float] = {}
                for name in names:
                    took[name], taken = answered(adaptive, prompts[:batch], name)
                    loops[name] = float(np.mean(taken))
                own_times = {name: written_here(own, prompts[:batch], name) for name in ("full", "two")}
                if number:  # the first round warms up
                    for name in names:
                        ratios[name].append(base / took[name])
                    ratios["LoopScope full"].append(base / own_times["full"])
                    ratios["LoopScope two"].append(took["two"] / own_times["two"])
            for name, found in ratios.items():
                line = (
                    f"batch {batch}, {name}: {median(found):.2f} times as fast ({min(found):.2f} to {max(found):.2f})"
                )
                if name in names:
                    realised[f"{name} {batch}"] = median(found) * loops[name] / _LOOPS
                    line += f", {loops[name]:.2f} loops per token, {realised[f'{name} {batch}']:.2f} of the ideal"
                else:
                    line += f" as vLLM {'compiled at full depth' if name.endswith('full') else 'under the same policy'}"
                print(line)
            assert [round(loops[name], 6) for name in ("one", "two", "three", "full")] == [1, 2, 3, 4]
    assert all(realised[f"{name} {batch}"] > 0.4 for name in ("one", "two") for batch in (1, 8))
