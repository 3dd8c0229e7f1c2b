"""Will this run fit the machine at hand? An estimate of its time and memory, made before it starts."""

import os
import time
from dataclasses import dataclass

import torch

from loopscope.errors import UserError
from loopscope.models.device import synchronize
from loopscope.models.transformer import training_bytes, training_flops
from loopscope.progress import clock
from loopscope.training.objectives import expected_loops
from loopscope.training.parallel import SINGLE_WORKER, Workers
from loopscope.training.settings import RunSettings

_MAX_HOURS = 24.0
_MAX_MEASURED_WIDTH = 1024
"""Beyond this width the rate no longer changes, only the time to measure it."""
_MAX_SECONDS_OF_FEW_ROWS = 0.02
_EFFICIENCY = 0.5
"""The share of the measured matrix-product rate that a training step reaches."""


@dataclass(frozen=True)
class TimeEstimate:
    seconds: float
    gigaflops: float
    device: str

    def check(self, why: str = "") -> None:
        """Rejects a run that would take far too long here; `why` is said before what to do."""
        if self.seconds > _MAX_HOURS * 3600:
            raise UserError(
                f"This run would take about {clock(self.seconds)} here ({self.device} multiplies matrices at "
                f"{self.gigaflops:,.0f} GFLOP/s){why}; use the preset 'demo', set training.steps lower, or start it "
                "anyway with --force."
            )


def check_memory(settings: RunSettings, device: torch.device, workers: Workers = SINGLE_WORKER) -> None:
    """Rejects a run that cannot fit the memory of the machine, which its workers share unless each has a device."""
    rows, task = workers.share(settings.training.batch_size), settings.generator
    tokens = rows * task.positions
    need = training_bytes(settings.model, task.vocab_size, settings.block_size, tokens, rows)
    need += 8.0 * (task.train_examples + task.validation_examples) * task.positions
    if device.type == "cuda":
        have = float(torch.cuda.mem_get_info(device)[0])
    else:
        need *= workers.count
        have = float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    if need > have:
        raise UserError(
            f"This run needs about {need / 2**30:,.0f} GiB, this {device.type.upper()} has {have / 2**30:,.0f} GiB; "
            "make the model or training.batch_size smaller, or start it anyway with --force."
        )


def estimate_time(
    settings: RunSettings, device: torch.device, done: int = 0, workers: Workers = SINGLE_WORKER
) -> TimeEstimate:
    """Time left from the operation count and the rate at which this machine multiplies matrices of this width.

    The rate is measured by one worker while the others wait, and taken times their number.
    """
    rows, task = settings.training.batch_size, settings.generator
    tokens = rows * sum(map(task.length, task.levels)) // len(task.levels)
    flops = training_flops(settings.model, task.vocab_size, tokens, rows) * (settings.training.steps - done)
    flops *= expected_loops(settings.objective, settings.num_loops) / settings.num_loops
    return time_for(flops, settings.model.width, device, workers)


def time_for(flops: float, width: int, device: torch.device, workers: Workers = SINGLE_WORKER) -> TimeEstimate:
    """The time for so many operations, most of them in matrix products of this width."""
    rate = matmul_rate(min(width, _MAX_MEASURED_WIDTH), device) * workers.count
    return TimeEstimate(flops / (rate * _EFFICIENCY), rate / 1e9, f"this {device.type.upper()}")


def matmul_rate(width: int, device: torch.device, dtype: torch.dtype | None = None) -> float:
    """Floating-point operations a second in matrix products of this width, the best of a few.

    In the precision of training there, unless it is asked for another. The products are small where even those take
    long: a CPU that has no float16 of its own computes a large one for seconds.
    """
    dtype = dtype or (torch.bfloat16 if device.type == "cuda" else torch.float32)
    left, right = (torch.ones(size, dtype=dtype, device=device) for size in ((1024, width), (width, 4 * width)))

    def seconds(rows: int) -> float:
        began = time.perf_counter()
        product = left[:rows] @ right
        product[0, 0].item()  # waits for the device
        return time.perf_counter() - began

    synchronize(device)
    is_slow = dtype != torch.float32 and min(seconds(16), seconds(16)) > _MAX_SECONDS_OF_FEW_ROWS
    rows = 16 if is_slow else len(left)  # float32 is slow on a busy machine only
    best, threads = min(seconds(rows) for _ in range(6)), torch.get_num_threads()
    if device.type == "cpu" and threads > 1:  # on a busy machine threads wait for each other, one alone does not
        torch.set_num_threads(1)
        best = min(best, *(seconds(rows) for _ in range(6)))
        torch.set_num_threads(threads)
    return 2 * rows * width * 4 * width / best
