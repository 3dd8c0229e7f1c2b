"""How much of the loops that exits save is saved in time, against vLLM's compiled engine at full depth?

Prompts take all loops, so the time that they take alone is subtracted for "writing". Other work on the machine moves
the seconds on the clock, so the worker's CPU time is compared beside them. Engines and depths take turns, and ratios
are taken within a round. LoopScope's own engine runs beside them, under the policy "two" and at full depth.

`VLLM_SIZE=large make test-vllm` measures a model of 34 million parameters instead of 5, and `VLLM_BATCH=8` one batch
instead of two.
"""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
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
_ROUNDS, _PROMPT, _NEW = 5, 32, 32
_IDLE = 1.2
"""Seconds after which the processes of an engine stop looking for work in a loop, which slows down who runs next."""
_STOP_AT_A_LOOP = 0.35
"""What the gate says at every loop; of the loops up to one it is 0.35, 0.58, 0.73."""
_POLICIES = {"one": ls.ExitPolicy("gate", 0.3), "two": ls.ExitPolicy("gate", 0.5), "three": ls.ExitPolicy("gate", 0.7)}


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


class Taken(NamedTuple):
    clock: float  # seconds
    work: float  # of the worker's CPU time

    def without(self, other: "Taken") -> "Taken":
        return Taken(self.clock - other.clock, self.work - other.work)


class Engine(NamedTuple):
    llm: Any
    worker: Any  # its process

    def answer(self, prompts: list[list[int]], depth: str | None = None, new: int = _NEW) -> tuple[Taken, list[int]]:
        """What answers take, and the loops of their tokens if a depth is asked for."""
        from vllm import SamplingParams

        arguments = None if depth is None else {"loopscope_depth": depth}
        options = {"temperature": 0, "max_tokens": new, "ignore_eos": True, "detokenize": False}
        sampling = SamplingParams(extra_args=arguments, **options)
        began, worked = time.perf_counter(), self._worked()
        answers = self.llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False)
        taken = Taken(time.perf_counter() - began, self._worked() - worked)
        return taken, [loops for each in answers if depth for loops in each.kv_transfer_params["loopscope"]["loops"]]

    def _worked(self) -> float:
        times = self.worker.cpu_times()
        return times.user + times.system


@contextmanager
def started(folder: Path, told: dict[str, Any] | None = None) -> Iterator[Engine]:
    """A compiled engine, and the one of its processes that runs the model."""
    import psutil

    before = psutil.Process().children(recursive=True)
    with engine(folder, told, enforce_eager=False, max_num_seqs=8) as llm:
        own = [process for process in psutil.Process().children(recursive=True) if process not in before]
        yield Engine(llm, max(own, key=lambda process: process.cpu_times().user))


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
    own = ls.load_model(tmp_path / "model")
    with started(tmp_path / "model") as full, started(tmp_path / "model", told) as adaptive:
        print(f"\n{parameters / 1e6:.1f} million parameters, {_LOOPS} loops, {_ROUNDS} rounds: times as fast")
        for batch in batches:
            names = ("full", *_POLICIES)
            whole, writing = ({name: [] for name in names} for _ in range(2))
            beside: dict[str, list[float]] = {"at full depth": [], 'under "two"': []}
            loops: dict[str, float] = {}
            for number in range(_ROUNDS + 1):
                time.sleep(_IDLE)
                (base, _), (base_prompts, _) = (full.answer(prompts[:batch], new=new) for new in (_NEW, 1))
                time.sleep(_IDLE)
                own_prompts, _ = adaptive.answer(prompts[:batch], "full", new=1)
                found = {name: adaptive.answer(prompts[:batch], name) for name in names}
                time.sleep(_IDLE)
                own_full, own_two = (written_here(own, prompts[:batch], name) for name in ("full", "two"))
                if not number:  # the first round warms up
                    loops = {name: float(np.mean(taken)) for name, (_, taken) in found.items()}
                    continue
                for name, (taken, _) in found.items():
                    whole[name].append(ratios(base, taken))
                    writing[name].append(ratios(base.without(base_prompts), taken.without(own_prompts)))
                beside["at full depth"].append(base.clock / own_full)
                beside['under "two"'].append(found["two"][0].clock / own_two)
            for name in names:
                print(f"batch {batch}, {name}: {loops[name]:.2f} loops per token")
                for what, taken in (("whole", whole[name]), ("writing", writing[name])):
                    for measure, values in zip(Taken._fields, map(list, zip(*taken, strict=True)), strict=True):
                        share = median(values) * loops[name] / _LOOPS
                        print(f"    {what}, {measure}: {spread(values)}, {share:.2f} of the ideal")
            for how, values in beside.items():
                print(f"batch {batch}, LoopScope {how}: {spread(values)} of vLLM {how}")
            assert median(each.work for each in whole["one"]) > median(each.work for each in whole["full"])
            assert [round(loops[name], 6) for name in ("one", "two", "three", "full")] == [1, 2, 3, 4]


def ratios(base: Taken, taken: Taken) -> Taken:
    return Taken(base.clock / taken.clock, base.work / taken.work)
