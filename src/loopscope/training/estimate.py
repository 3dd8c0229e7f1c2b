"""Will this run fit the machine? An estimate of its time and memory before it starts."""

import os
import time
from dataclasses import dataclass
from typing import Any

import msgspec
import torch

from loopscope.errors import UserError
from loopscope.models.device import synchronize
from loopscope.models.model_settings import TransformerSettings
from loopscope.models.packing import share_prefixes
from loopscope.models.transformer import LoopedTransformer
from loopscope.progress import clock
from loopscope.training.objectives import expected_loops
from loopscope.training.parallel import SINGLE_WORKER, Workers
from loopscope.training.settings import Objective, RunSettings
from loopscope.training.task_run import AnswerLosses, initial_model
from loopscope.training.training_loop import Optimizers, deterministic, train_step

_MAX_HOURS = 24.0
_MAX_MEASURED_WIDTH = 1024
"""A larger matrix product has the same rate, and only takes longer to measure."""
_MAX_SECONDS_OF_FEW_ROWS = 0.02
_EFFICIENCY = 0.5
"""The share of the measured rate of matrix products that a training step reaches."""
_WARM_UP, _TIMED_STEPS = 2, 5
_SAMPLED_ROWS, _SAMPLED_TOKENS = 1024, 1_000_000
"""At most so many rows and tokens of a batch are drawn to count the states of the batch."""


@dataclass(frozen=True)
class TimeEstimate:
    """Hold the estimated time of a training run, and the measurement behind it."""

    seconds: float
    speed: str  # the measurement behind the estimate, in words

    @property
    def is_too_long(self) -> bool:
        return self.seconds > _MAX_HOURS * 3600

    def check(self, why: str = "") -> None:
        """Reject a run that would take far too long on this machine; `why` precedes the advice in the error."""
        if self.is_too_long:
            raise UserError(
                f"This run would take about {clock(self.seconds)} here ({self.speed}){why}; use the preset 'demo', set "
                "training.steps lower, or start it anyway with --force."
            )


def check_memory(settings: RunSettings, device: torch.device, workers: Workers = SINGLE_WORKER) -> None:
    """Reject a run whose memory exceeds its device, or the machine that its workers share."""
    task, training = settings.generator, settings.training
    data = 8.0 * (task.train_examples + task.validation_examples) * task.positions
    rows = -(-workers.share(training.batch_size) // (training.accumulate or 1))
    need = _training_bytes(settings, rows, bf16=device.type == "cuda" and training.bf16)
    host = float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    places = {device.type.upper(): (workers.count * (need + data), host)}
    if device.type == "cuda":
        places = {"CUDA": (need, float(torch.cuda.mem_get_info(device)[0])), "CPU": (data, host)}
    for name, (size, have) in places.items():
        if size > have:
            raise UserError(
                f"This run needs about {size / 2**30:,.0f} GiB, this {name} has {have / 2**30:,.0f} GiB; make the "
                "model or training.batch_size smaller, set training.accumulate or training.checkpointing, or start it "
                "anyway with --force."
            )


def _training_bytes(settings: RunSettings, rows: int, bf16: bool) -> float:
    """The bytes of a model in training and of a step on so many rows (a custom model's step counts 0)."""
    task, model = settings.generator, settings.model
    if model.is_custom:
        return 16.0 * _custom_model_size(settings)[0]
    states = _batch_states(settings, rows)
    sizes = (model, task.vocab_size, settings.block_size, states, task.positions)
    weights, of_loop = transformer_training_bytes(*sizes, bf16=bf16)
    loops = min(model.loops, settings.objective.truncated or model.loops)
    if settings.training.checkpointing:  # the states between the loops, and the states inside one loop at a time
        return weights + of_loop + loops * states * model.width * 8.0
    return weights + loops * of_loop


def _batch_states(settings: RunSettings, rows: int) -> float:
    """The states of a batch: fewer than its tokens, because rows share the states of common prefixes."""
    some = min(rows, _SAMPLED_ROWS, max(1, _SAMPLED_TOKENS // settings.generator.positions))
    batch = settings.generator.batch(settings.training.seed, 0, some)
    layout = share_prefixes(torch.from_numpy(batch.tokens), torch.from_numpy(batch.lengths))
    assert layout.sharing is not None
    return len(layout.sharing.owners) * rows / some


def step_flops(settings: RunSettings) -> float:
    """The mean operations of a training step over all tokens, including tokens that rows share."""
    rows, task = settings.training.batch_size, settings.generator
    tokens = rows * sum(map(task.length, task.levels)) // len(task.levels)
    if settings.model.is_custom:
        flops = 6.0 * settings.num_loops * tokens * _custom_model_size(settings)[0]  # each parameter once a loop
    else:
        flops = transformer_step_flops(settings.model, task.vocab_size, tokens, rows)
    return flops * expected_loops(settings.objective, settings.num_loops) / settings.num_loops


def transformer_step_flops(settings: TransformerSettings, vocab_size: int, tokens: int, rows: int) -> float:
    """The operations of one training step of a looped Transformer (forward and backward; 2 for a multiply-add)."""
    layer = 2 * tokens * 12 * settings.width**2 + 4 * tokens * (tokens / rows) * settings.width
    head = 2 * rows * settings.width * vocab_size
    return 3.0 * settings.loops * (settings.layers * layer + head)


def transformer_training_bytes(
    settings: TransformerSettings, vocab_size: int, block_size: int, states: float, longest: int, bf16: bool = False
) -> tuple[float, float]:
    """The approximate bytes of training a looped Transformer: weights, optimizer, and a loop's activations of S states.

    Weights and all that belongs to them are float32. Autocast to bf16 keeps most activations, and a copy of the
    weights, at half the size, and its fused attention keeps no scores. (Measured for the paper's models, per state,
    layer and width: 69 to 73 bytes in float32, and 41 to 42 in bf16.)
    """
    with torch.device("meta"):
        model = LoopedTransformer(settings, vocab_size, block_size)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    per_state = 44.0 * settings.width if bf16 else 80.0 * settings.width + 12.0 * settings.heads * longest
    return (18.0 if bf16 else 16.0) * parameters, settings.layers * states * per_state


def estimate_time(
    settings: RunSettings, device: torch.device, done: int = 0, workers: Workers = SINGLE_WORKER
) -> TimeEstimate:
    """The time of the remaining steps: on a GPU from a few real steps, on a CPU from the rate of matrix products.

    A step of a large model takes long on a CPU, and small products leave a GPU waiting, so each measurement is wrong on
    the other kind of device. One worker measures while the others wait.
    """
    left, flops = settings.training.steps - done, step_flops(settings)
    if device.type == "cpu":
        width = _custom_model_size(settings)[1] if settings.model.is_custom else settings.model.width
        return time_for(flops * left, width, device, workers)
    share = expected_loops(settings.objective, settings.num_loops) / settings.num_loops
    seconds = share * _seconds_per_step(settings, device, workers.share(settings.training.batch_size))
    return TimeEstimate(left * seconds, f"{device} trains it at {flops / seconds / 1e9:,.0f} GFLOP/s")


def _seconds_per_step(settings: RunSettings, device: torch.device, rows: int) -> float:
    """The seconds of a training step, from a few real steps on a temporary model; the objective's own time is ignored.

    All loops run, even if the objective draws the number of loops of a step.
    """
    model: Any = initial_model(settings).to(device)
    model.gradient_checkpointing = bool(settings.training.checkpointing)
    batch = settings.generator.batch(settings.training.seed, 0, rows).by_length()
    if settings.objective.name == "random_depth":
        settings = msgspec.structs.replace(settings, objective=Objective())
    given = (AnswerLosses(model), lambda found: found.cross_entropy.mean(), Optimizers(model, settings.training), batch)
    with deterministic():
        for step in range(_WARM_UP + _TIMED_STEPS):
            if step == _WARM_UP:
                synchronize(device)
                began = time.perf_counter()
            train_step(*given, step, settings)
        synchronize(device)
        seconds = (time.perf_counter() - began) / _TIMED_STEPS
    del model, given
    if device.type == "cuda":
        torch.cuda.empty_cache()  # another process may train on this device
    return seconds


def _custom_model_size(settings: RunSettings) -> tuple[int, int]:
    """The number of parameters of a custom model, and the width of its widest matrix."""
    parameters = list(initial_model(settings).parameters())
    return sum(each.numel() for each in parameters), max(each.shape[-1] for each in parameters if each.ndim)


def time_for(flops: float, width: int, device: torch.device, workers: Workers = SINGLE_WORKER) -> TimeEstimate:
    """Estimate the time of so many operations, most of them in matrix products of this width."""
    rate = matmul_rate(min(width, _MAX_MEASURED_WIDTH), device) * workers.count
    speed = f"this {device.type.upper()} multiplies matrices at {rate / 1e9:,.0f} GFLOP/s"
    return TimeEstimate(flops / (rate * _EFFICIENCY), speed)


def matmul_rate(width: int, device: torch.device, dtype: torch.dtype | None = None) -> float:
    """Measure operations per second in matrix products of this width; the best of a few tries.

    The default is the device's training precision. If even small products take long, only small ones are measured: a
    CPU without float16 units needs seconds for a large product.
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
    if device.type == "cpu" and threads > 1:  # on a busy machine threads wait for each other
        torch.set_num_threads(1)
        best = min(best, *(seconds(rows) for _ in range(6)))
        torch.set_num_threads(threads)
    return 2 * rows * width * 4 * width / best
