"""Measure a training step against the plain padded one, and against what the machine could do.

python -m benchmarks.training demo
python -m benchmarks.training paper --set training.batch_size=64 --steps 1
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import partial

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.command import print_measured, run_benchmark
from benchmarks.padded_baseline import plain_losses
from loopscope.analysis.schema import Machine, Spread
from loopscope.bench.measure import interleaved, spread
from loopscope.cli.inputs import device_of
from loopscope.cli.options import Parser, add_shared, option
from loopscope.errors import UserError
from loopscope.models.packing import share_prefixes
from loopscope.progress import ProgressCallback, track
from loopscope.tasks import Examples
from loopscope.training.objectives import load_objective
from loopscope.training.settings import RunSettings, presets, read_settings
from loopscope.training.task_run import AnswerLosses, initial_model, training_batches
from loopscope.training.training_loop import Optimizers, deterministic, train_step


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
    prepared = training_batches(settings)
    objective = load_objective(settings.objective, settings.training.seed)
    packed, plain = (initial_model(settings) for _ in range(2))
    packed_optimizers, plain_optimizers = (Optimizers(model, settings.training) for model in (packed, plain))

    def plain_step(batch: Examples) -> None:
        objective(plain_losses(plain, batch)).backward()  # type: ignore[no-untyped-call]
        plain_optimizers.step(0)

    def packed_step(batch: Examples) -> None:
        train_step(AnswerLosses(packed), objective, packed_optimizers, batch, 0, settings)

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


def define(parser: Parser) -> None:
    option(parser, "settings", f"a TOML file or a preset: {', '.join(presets())}", nargs="?", default="demo")
    option(parser, "--steps N", "steps of each way per round", default=4)
    add_shared(parser, "--set A.B=C", "--rounds N", "--threads N", "--json")


def execute(options: argparse.Namespace) -> None:
    settings = read_settings(options.settings, options.set)
    device_of(options)
    with track("measuring training") as advance:
        result = bench_train(settings, options.settings, options.rounds, options.steps, advance)
    rows = [
        ["milliseconds per step", str(result.milliseconds)],
        ["the plain way", str(result.plain_milliseconds)],
        ["speed-up", str(result.speedup)],
        ["block size / mean length", f"{result.padding:.2f}"],
        ["states per token", f"{result.states_a_token:.2f}"],
        ["useful GFLOP/s", str(result.useful_gigaflops)],
        ["share of the matrix-product rate", str(result.share_of_machine)],
    ]
    title = f"{result.settings}: width {result.width}, batch {result.batch_size}."
    print_measured(result, title, ["", "median [quartiles]"], rows, options.json)


def main(words: Sequence[str] | None = None) -> int:
    return run_benchmark("training", __doc__, define, execute, words)


if __name__ == "__main__":
    sys.exit(main())
