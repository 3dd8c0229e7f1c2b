"""Do fewer loops take less time?"""

import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pytest
from tiny_language import write_ouro
from vllm_engines import engine, greedy

pytest.importorskip("vllm.config", reason="needs an environment with vLLM: make test-vllm")

_SIZES = {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 8, "vocab_size": 2000}


@pytest.mark.parametrize("fewer", [{"loops": 2}, {"readout": "gate", "threshold": 0.0}], ids=["2 loops", "exits at 1"])
def test_fewer_loops_take_clearly_less_time(fewer: dict[str, Any], tmp_path: Path) -> None:
    """Two engines of one checkpoint answer in turns; by the gate all tokens but those of prompts exit at loop 1."""
    folder = write_ouro(tmp_path / "small", **_SIZES)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(1, 2000, 32).tolist() for _ in range(6)]
    with engine(folder) as full, engine(folder, fewer) as half:
        ratios = []
        for turn in range(6):
            took = []
            for llm in (full, half):
                began = time.perf_counter()
                greedy(llm, prompts, 32)
                took.append(time.perf_counter() - began)
            if turn:  # the first warms up
                ratios.append(took[0] / took[1])
    spread = f"median of 5, {min(ratios):.2f} to {max(ratios):.2f}"
    print(f"\nAll 4 loops take {median(ratios):.2f} times as long as {fewer} ({spread})")
    assert median(ratios) > 1.3
