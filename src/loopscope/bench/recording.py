"""What does a recording cost beside the forward pass that it needs anyway?"""

import tempfile
from pathlib import Path

import msgspec

from loopscope.analysis.timings import Machine, Spread
from loopscope.bench.measure import interleaved, spread
from loopscope.models import load_model
from loopscope.progress import ProgressCallback
from loopscope.recording import BATCH, Keep, forward, record_task, split_examples
from loopscope.training.settings import read_run_settings


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
