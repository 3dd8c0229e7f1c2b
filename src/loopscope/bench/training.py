"""How much faster than the plain way is a training step, and how much of the machine does it use?"""

from collections.abc import Callable
from functools import partial

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from loopscope.analysis.timings import Machine, Spread
from loopscope.bench.measure import interleaved, spread
from loopscope.bench.padded_baseline import plain_losses
from loopscope.errors import UserError
from loopscope.models.layout import share_prefixes
from loopscope.progress import ProgressCallback
from loopscope.tasks import Examples
from loopscope.training import RunSettings, initial_model
from loopscope.training.custom_objectives import load_objective
from loopscope.training.loop import deterministic, train_step
from loopscope.training.optimizers import Optimizers
from loopscope.training.task_run import AnswerLosses, training_batches


class TrainBench(msgspec.Struct, frozen=True):
    settings: str
    width: int
    batch_size: int
    block_size: int
    mean_length: float
    states_a_token: float  # less than 1 where rows begin alike
    machine: Machine
    milliseconds: Spread  # a step
    plain_milliseconds: Spread
    speedup: Spread  # examples per second against the plain way
    padding: float  # block size / mean length: what packing alone could gain
    useful_gigaflops: Spread
    share_of_machine: Spread  # of the matrix-product rate


def bench_train(settings: RunSettings, name: str, rounds: int, steps: int, progress: ProgressCallback) -> TrainBench:
    """`steps` steps of each way a round; both ways take the same batches and the same optimizers."""
    if settings.objective.name == "random_depth":
        raise UserError("Under random_depth every step runs another number of loops; bench another objective.")
    device, prepared = torch.device("cpu"), training_batches(settings)
    objective = load_objective(settings.objective, settings.training.seed)
    packed, plain = (initial_model(settings) for _ in range(2))
    packed_optimizers, plain_optimizers = (Optimizers(model, settings.training) for model in (packed, plain))

    def plain_step(batch: Examples) -> None:
        objective(plain_losses(plain, batch)).backward()  # type: ignore[no-untyped-call]
        plain_optimizers.step(0)

    def packed_step(batch: Examples) -> None:
        train_step(AnswerLosses(packed), objective, packed_optimizers, batch, 0, settings, device)

    def several(step: Callable[[Examples], None]) -> None:
        for index in range(steps):
            step(prepared(index))

    with deterministic():
        ways = {"packed": partial(several, packed_step), "plain": partial(several, plain_step)}
        seconds, machine = interleaved(ways, rounds, settings.model.width, progress)
    used = [prepared(index) for index in range(steps)]
    positions = [_positions(batch) for batch in used]
    flops = sum(useful_flops(settings, *pair) for pair in zip(used, positions, strict=True))
    tokens = sum(int(batch.lengths.sum()) for batch in used)
    states = sum(map(len, positions))
    rate = flops / seconds["packed"] / 1e9
    return TrainBench(
        settings=name,
        width=settings.model.width,
        batch_size=settings.training.batch_size,
        block_size=settings.block_size,
        mean_length=tokens / (steps * settings.training.batch_size),
        states_a_token=states / tokens,
        machine=machine,
        milliseconds=spread(1000 * seconds["packed"] / steps),
        plain_milliseconds=spread(1000 * seconds["plain"] / steps),
        speedup=spread(seconds["plain"] / seconds["packed"]),
        padding=settings.block_size * steps * settings.training.batch_size / tokens,
        useful_gigaflops=spread(rate),
        share_of_machine=spread(rate / np.array(machine.by_round)),
    )


def useful_flops(settings: RunSettings, batch: Examples, positions: NDArray[np.int64]) -> float:
    """Multiply-adds x 2 that a step on this batch needs, forward and backward, without norms and optimizer.

    `positions` [S] are those of its states. Common beginnings count once, attention up to the diagonal, and of the last
    layer of the last loop only keys and values outside the answer markers.
    """
    model, width = settings.model, settings.model.width
    layer = 24.0 * width**2 * len(positions) + 4.0 * width * float((positions + 1).sum())
    last = 4.0 * width**2 * len(positions) + 20.0 * width**2 * len(batch) + 4.0 * width * float(batch.lengths.sum())
    head = 2.0 * model.loops * len(batch) * width * settings.task.vocab_size
    return 3.0 * ((model.loops * model.layers - 1) * layer + last + head)


def _positions(batch: Examples) -> NDArray[np.int64]:
    """[S] the place in its row of every state that a step computes."""
    return share_prefixes(torch.from_numpy(batch.tokens), torch.from_numpy(batch.lengths)).positions.numpy()
