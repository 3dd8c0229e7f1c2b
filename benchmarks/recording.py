"""Measure a recording against the bare forward pass that it needs anyway.

python -m benchmarks.recording runs/demo/fixed-geometric
python -m benchmarks.recording runs/demo/mlp-gate --split validation --examples 5000
"""

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import msgspec

from benchmarks.command import print_measured, run_benchmark
from loopscope.analysis.schema import Machine, Spread
from loopscope.bench.measure import interleaved, spread
from loopscope.cli.inputs import device_of, finished_run
from loopscope.cli.options import Parser, add_shared, option
from loopscope.models.checkpoint import load_model
from loopscope.progress import ProgressCallback, track
from loopscope.recording.recording_folder import Keep
from loopscope.recording.task_recording import BATCH, forward, record_task, split_examples
from loopscope.training.run_folder import read_run_settings
from loopscope.trajectory import SPLITS


class RecordBench(msgspec.Struct, frozen=True):
    model: str
    examples: int
    machine: Machine
    forward_milliseconds: Spread  # an example, all loops, nothing kept
    signals_ratio: Spread  # a recording of all signals, written to disk, against that
    logits_ratio: Spread  # the usual recording: logits, and the signals of the hidden states


def bench_record(run: Path, split: str, examples: int | None, rounds: int, progress: ProgressCallback) -> RecordBench:
    settings, model = read_run_settings(run), load_model(run)
    data = split_examples(settings, split, examples, None)

    def bare() -> None:
        for rows in data.same_length_batches(BATCH):
            forward(model, data.take(rows), "cpu")

    def recorded(keep: Keep) -> None:
        with tempfile.TemporaryDirectory() as folder:
            record_task(run, split, Path(folder) / "recording", keep, examples)

    ways = {"forward": bare, "signals": lambda: recorded(Keep(logits=False)), "logits": lambda: recorded(Keep())}
    seconds, machine = interleaved(ways, rounds, settings.model.width, progress)
    return RecordBench(
        model=run.name,
        examples=len(data),
        machine=machine,
        forward_milliseconds=spread(1000 * seconds["forward"] / len(data)),
        signals_ratio=spread(seconds["signals"] / seconds["forward"]),
        logits_ratio=spread(seconds["logits"] / seconds["forward"]),
    )


def define(parser: Parser) -> None:
    add_shared(parser, "run")
    option(parser, "--split NAME", "split to record", choices=SPLITS, default="test")
    option(parser, "--examples N", "number of examples to record (default: the task's)")
    add_shared(parser, "--rounds N", "--threads N", "--json")


def execute(options: argparse.Namespace) -> None:
    finished_run(options.run)
    device_of(options)
    with track("measuring recording") as advance:
        result = bench_record(options.run, options.split, options.examples, options.rounds, advance)
    rows = [
        ["bare forward pass, ms per example", str(result.forward_milliseconds)],
        ["all signals, against it", str(result.signals_ratio)],
        ["logits and signals of the states, against it", str(result.logits_ratio)],
    ]
    title = f"{result.model}: {result.examples:,} examples."
    print_measured(result, title, ["", "median [quartiles]"], rows, options.json)


def main(words: Sequence[str] | None = None) -> int:
    return run_benchmark("recording", __doc__, define, execute, words)


if __name__ == "__main__":
    sys.exit(main())
