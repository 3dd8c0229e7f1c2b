"""Do fewer loops take less time?"""

import time
from pathlib import Path
from statistics import median

import numpy as np
import pytest
from tiny_language import write_ouro
from vllm_engines import engine, greedy

pytest.importorskip("vllm.config", reason="needs an environment with vLLM: make test-vllm")

_SIZES = {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 8, "vocab_size": 2000}


def test_two_of_four_loops_take_clearly_less_time(tmp_path: Path) -> None:
    """Two engines of one checkpoint answer in turns."""
    folder = write_ouro(tmp_path / "small", **_SIZES)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(1, 2000, 32).tolist() for _ in range(6)]
    with engine(folder) as full, engine(folder, {"loops": 2}) as half:
        ratios = []
        for turn in range(6):
            took = []
            for llm in (full, half):
                began = time.perf_counter()
                greedy(llm, prompts, 32)
                took.append(time.perf_counter() - began)
            if turn:  # the first warms up
                ratios.append(took[0] / took[1])
    print(
        f"\n4 loops take {median(ratios):.2f} times as long as 2 (median of 5, {min(ratios):.2f} to {max(ratios):.2f})"
    )
    assert median(ratios) > 1.3
