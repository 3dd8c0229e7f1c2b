"""Estimates: is a run that is too big for the machine told before it starts?"""

from itertools import count

import pytest
import torch
from conftest import tiny_settings
from torch.utils.flop_counter import FlopCounterMode

import loopscope as ls
from loopscope.training.estimate import check_memory, estimate_time, matmul_rate
from loopscope.training.settings import read_settings

CPU = torch.device("cpu")


def test_a_run_too_big_for_the_machine_says_so() -> None:
    endless = read_settings("paper", ["training.steps=40000000"])
    with pytest.raises(ls.UserError, match=r"would take about .* days here"):
        estimate_time(endless, CPU).check()
    estimate_time(endless, CPU, done=40_000_000 - 1).check()
    for override in ("training.batch_size=10000000", "model.width=1000000", "task.train_examples=100000000"):
        with pytest.raises(ls.UserError, match="GiB"):
            check_memory(read_settings("paper", [override, "model.layers=40"]), CPU)
    check_memory(tiny_settings(), CPU)


def test_where_a_product_takes_long_the_rate_is_that_of_small_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU that has no float16 of its own, for instance; here the clock is fast."""

    def computed(dtype: torch.dtype) -> int:
        with FlopCounterMode(display=False) as counter:
            matmul_rate(64, CPU, dtype)
        return counter.get_total_flops()

    large = 2 * 1024 * 64 * 256
    seconds = count()
    monkeypatch.setattr("time.perf_counter", lambda: float(next(seconds)))
    assert computed(torch.float32) >= 6 * large  # slow on a busy machine only
    assert computed(torch.float16) < large
