"""Will this run fit the machine at hand? An estimate of its time and memory, made before it starts."""

import os
import time
from dataclasses import dataclass

import torch

from loopscope.errors import UserError
from loopscope.models.transformer import training_bytes, training_flops
from loopscope.progress import clock
from loopscope.training.settings import RunSettings

_LONGEST_HOURS = 24.0
_EFFICIENCY = 0.5
"""The share of the measured matrix-product rate that a training step reaches."""


@dataclass(frozen=True)
class Estimate:
    seconds: float
    bytes: float
    available_bytes: float
    gigaflops: float
    device: str

    def check(self) -> None:
        """Refuses a run that is far too big for the machine."""
        if self.bytes > self.available_bytes:
            raise UserError(
                f"This run needs about {self.bytes / 2**30:.0f} GiB for its activations, {self.device} has "
                f"{self.available_bytes / 2**30:.0f} GiB; make training.batch_size smaller, or start it anyway with "
                "--force."
            )
        if self.seconds > _LONGEST_HOURS * 3600:
            raise UserError(
                f"This run would take about {clock(self.seconds)} here ({self.device} multiplies matrices at "
                f"{self.gigaflops:,.0f} GFLOP/s); use the preset 'demo', set training.steps lower, or start it anyway "
                "with --force."
            )


def estimate(settings: RunSettings, device: torch.device) -> Estimate:
    """Time from the operation count and the rate at which this machine multiplies matrices of this width."""
    rows = settings.training.batch_size
    tokens = rows * settings.task.positions
    flops = training_flops(settings.model, settings.task.vocab_size, tokens, rows) * settings.training.steps
    rate = _matmul_rate(settings.model.width, device)
    if device.type == "cuda":
        available = float(torch.cuda.mem_get_info(device)[0])
    else:
        available = float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    return Estimate(
        seconds=flops / (rate * _EFFICIENCY),
        bytes=training_bytes(settings.model, tokens, rows),
        available_bytes=available,
        gigaflops=rate / 1e9,
        device=f"this {device.type.upper()}",
    )


def _matmul_rate(width: int, device: torch.device) -> float:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    left, right = (torch.ones(size, dtype=dtype, device=device) for size in ((1024, width), (width, 4 * width)))
    best = 0.0
    for _ in range(5):
        began = time.perf_counter()
        for _ in range(10):
            product = left @ right
        product[0, 0].item()  # waits for the device
        best = max(best, 10 * 2 * 1024 * width * 4 * width / (time.perf_counter() - began))
    return best
