"""How is a ratio measured on a machine that others use too? In rounds: each way once a round, one after the other.

A ratio is taken within a round, where both ways met about the same machine; what is reported is the median over the
rounds and the quartiles beside it. Every way runs once before the first round. A device that works on its own is waited
for before a clock is read, and the machine's rate is that of the device and precision that are benched.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from loopscope.analysis.schema import Machine, Spread
from loopscope.models.device import synchronize
from loopscope.progress import ProgressCallback
from loopscope.training.estimate import matmul_rate

Seconds = NDArray[np.float64]
_CPU = torch.device("cpu")


def spread(values: Any) -> Spread:
    """The median of a measurement over rounds, with its quartiles."""
    low, middle, high = np.quantile(np.asarray(values, dtype=np.float64), [0.25, 0.5, 0.75]).tolist()
    return Spread(middle, low, high)


def interleaved(
    ways: Mapping[str, Callable[[], Any]],
    rounds: int,
    width: int,
    progress: ProgressCallback,
    weights: Tensor | None = None,
) -> tuple[dict[str, Seconds], Machine]:
    """The seconds of every way in every round, with the machine's own speed in the same rounds.

    Every round begins with another way: on small models, the first one after the matrix products was slower.
    `weights`, some of the model that is benched, say on which device and in which precision (default: float32 here).
    """
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    rates = []
    device, dtype = (_CPU, torch.float32) if weights is None else (weights.device, weights.dtype)
    order, total = [*ways.items()], (rounds + 1) * len(ways)
    for turn in range(rounds + 1):  # the first one warms up
        rate = matmul_rate(width, device, dtype)
        for index in range(len(order)):
            name, way = order[(turn + index) % len(order)]
            elapsed = timed(way, device)
            progress(turn * len(ways) + index + 1, total, name)
            if turn:
                seconds[name].append(elapsed)
        if turn:
            rates.append(rate)
    measured = {name: np.array(values) for name, values in seconds.items()}
    by_round = [rate / 1e9 for rate in rates]
    where = (str(device), str(dtype).removeprefix("torch."))
    return measured, Machine(torch.get_num_threads(), rounds, width, spread(by_round), by_round, *where)


def fastest_batch(way: Callable[[int], Any], sizes: Sequence[int], device: torch.device = _CPU) -> int:
    """The batch size at which a way runs fastest on a device, in two runs of each size."""
    best = {size: min(timed(partial(way, size), device) for _ in range(2)) for size in sizes}
    return min(best, key=lambda size: best[size])


def timed(way: Callable[[], Any], device: torch.device = _CPU) -> float:
    """The seconds that a function takes on a device."""
    synchronize(device)
    began = time.perf_counter()
    way()
    synchronize(device)
    return time.perf_counter() - began
