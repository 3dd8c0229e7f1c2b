"""Measure how time and memory grow with the examples, stage by stage.

python -m benchmarks.growth
python -m benchmarks.growth --examples 100000 --loops 64 --stage report

Every stage runs in a process of its own. Time is processor time, which others on the machine change least. Memory is
the most that the process held beyond what it began with, without the pages of memory-mapped files, which the system can
drop; it is looked at from outside, on Linux only.

Recordings are simulated, but for the stage `record`, which records the task MANO by a looped Transformer of width 16.
"""

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import product
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.command import run_benchmark
from loopscope.analysis.diagnosis import diagnose
from loopscope.certify.calibration import calibrate
from loopscope.cli.inputs import device_of
from loopscope.cli.options import Parser, add_shared, option
from loopscope.cli.output import print_json, print_table
from loopscope.errors import UserError
from loopscope.frontier import sweep
from loopscope.policy import ExitPolicy
from loopscope.progress import ProgressCallback, track
from loopscope.readouts.replay import available_readouts
from loopscope.recording.recording_folder import Arrays, write_recording
from loopscope.recording.task_recording import record_task
from loopscope.report.write import report
from loopscope.training.settings import read_settings
from loopscope.training.task_run import train
from loopscope.trajectory import SIGNAL_PREFIX, Trajectory

SIZES = (10_000, 100_000, 1_000_000)
MIN_EXAMPLES, MIN_CLASSES = 1000, 6
_MAX_DROP = 0.02
_WRITTEN = {"record": "recorded", "report": "report"}
"""The folders that stages leave."""
_AT_ONCE = 1 << 14
"""Examples that are simulated together."""
_LOOK_SECONDS = 0.01
"""Between two looks at the memory of a stage."""


class StageGrowth(msgspec.Struct, frozen=True):
    """One stage at one size."""

    stage: str
    examples: int
    seconds: float  # of the processor
    megabytes: float | None  # None where the system does not tell
    written: int  # bytes of the report, or of the recording


class GrowthBench(msgspec.Struct, frozen=True):
    loops: int
    classes: int
    stages: list[StageGrowth]


def bench_growth(
    sizes: Sequence[int], loops: int, classes: int, stages: Sequence[str], progress: ProgressCallback
) -> GrowthBench:
    """Every stage at every size, one after the other."""
    measured = []
    cases = list(product(sizes, stages))
    with TemporaryDirectory() as scratch:
        made: set[int] = set()
        for done, (examples, stage) in enumerate(cases):
            progress(done, len(cases), f"{stage} of {examples:,}")
            folder = Path(scratch, str(examples))
            for split in ("validation", "test") if examples not in made else ():
                simulate(folder / split, split, examples, loops, classes)
            made.add(examples)
            measured.append(measure_stage(stage, folder, examples, loops, classes))
    progress(len(cases), len(cases), "")
    return GrowthBench(loops, classes, measured)


def simulate(folder: Path, split: str, examples: int, loops: int, classes: int) -> None:
    """Writes a recording of answers that settle with depth, the later the harder an example is."""
    shape = (examples, loops)
    layout: dict[str, Any] = dict.fromkeys(("labels", "difficulty"), (shape[:1], np.int64))
    layout |= {"logits": ((*shape, classes), np.float32), "gate_logits": (shape, np.float32)}
    layout |= {SIGNAL_PREFIX + name: (shape, np.float64) for name in ("hidden_change", "hidden_cosine")}

    def fill(arrays: Arrays) -> None:
        for start in range(0, examples, _AT_ONCE):
            rows = slice(start, min(start + _AT_ONCE, examples))
            rng = np.random.default_rng([start, len(split)])
            for name, values in _simulated(rng, rows.stop - start, loops, classes).items():
                arrays[name][rows] = values

    texts = [f"{split} {row}" for row in range(examples)]
    write_recording(folder, split, layout, {"keeps_hidden": False}, fill, texts)


def _simulated(rng: np.random.Generator, rows: int, loops: int, classes: int) -> dict[str, NDArray[Any]]:
    labels, difficulty = rng.integers(0, classes, rows), rng.integers(1, 11, rows)
    pace = 4 * rng.gamma(2, 1, (rows, 1)) / np.sqrt(difficulty[:, None])
    settled = 1 - np.exp(-pace * np.arange(1, loops + 1) / loops)
    logits = rng.normal(size=(rows, 1, classes)) + 0.7 * (1 - settled[..., None]) * rng.normal(
        size=(rows, loops, classes)
    )
    logits[np.arange(rows), :, labels] += 6 * settled
    step = np.abs(np.diff(settled, axis=1, prepend=np.nan) + 0.01 * rng.normal(size=settled.shape))
    return {
        "labels": labels,
        "difficulty": difficulty,
        "logits": logits,
        "gate_logits": 6 * settled - 4 + rng.normal(size=settled.shape),
        SIGNAL_PREFIX + "hidden_change": step,
        SIGNAL_PREFIX + "hidden_cosine": step**2,
    }


Stage = Callable[[Path, int, int, int], Callable[[], object]]
"""From a folder, a number of examples, loops and classes to what is measured; what this needs is made before."""


def _pair(folder: Path) -> tuple[Trajectory, Trajectory]:
    return Trajectory.load(folder / "validation"), Trajectory.load(folder / "test")


def _record(folder: Path, examples: int, loops: int, classes: int) -> Callable[[], object]:
    task = [f"task.modulus={classes - 5}", "task.train_examples=1000", f"task.test_examples={examples}"]
    model = ["model.width=16", f"model.loops={loops}"]
    settings = read_settings("demo", [*task, *model, "training.steps=1", "training.validation_sample=100"])
    train(settings, folder / "run")
    return lambda: record_task(folder / "run", "test", folder / _WRITTEN["record"])


def _load(folder: Path, *_: int) -> Callable[[], object]:
    return partial(_pair, folder)


def _sweep(folder: Path, *_: int) -> Callable[[], object]:
    pair = _pair(folder)
    return lambda: [sweep(name, *pair) for name in available_readouts(*pair)]


def _diagnose(folder: Path, *_: int) -> Callable[[], object]:
    return partial(diagnose, *_pair(folder))


def _calibrate(folder: Path, *_: int) -> Callable[[], object]:
    validation, _test = _pair(folder)
    return lambda: calibrate(validation, _MAX_DROP).save(folder / "policy.json")


def _report(folder: Path, *_: int) -> Callable[[], object]:
    pair = _pair(folder)
    if not (folder / "policy.json").is_file():
        calibrate(pair[0], _MAX_DROP).save(folder / "policy.json")
    policies = {"model": [ExitPolicy.load(folder / "policy.json")]}
    return lambda: report({"model": pair}, folder / _WRITTEN["report"], policies=policies)


STAGES: dict[str, Stage] = {
    "record": _record,
    "load": _load,
    "sweep": _sweep,
    "diagnose": _diagnose,
    "calibrate": _calibrate,
    "report": _report,
}


def measure_stage(stage: str, folder: Path, examples: int, loops: int, classes: int) -> StageGrowth:
    """In a process of its own, whose memory is looked at from here."""
    context = get_context("spawn")
    ours, theirs = context.Pipe()
    given = (theirs, stage, folder, examples, loops, classes)
    process = context.Process(target=_run_stage, args=given, daemon=True)
    process.start()
    theirs.close()
    assert process.pid is not None
    try:
        with _ended(process):
            ours.recv()  # what it needs is there
            least = most = _anonymous_megabytes(process.pid)
            while not ours.poll(_LOOK_SECONDS):
                now = _anonymous_megabytes(process.pid)
                most = now if most is None or now is None else max(most, now)
            seconds = ours.recv()
    except EOFError:
        raise UserError(f"The stage '{stage}' of {examples:,} examples ended without a result.") from None
    held = None if most is None or least is None else most - least
    written = (folder / _WRITTEN[stage]).iterdir() if stage in _WRITTEN else ()
    return StageGrowth(stage, examples, seconds, held, sum(file.stat().st_size for file in written))


@contextmanager
def _ended(process: Any) -> Iterator[None]:
    try:
        yield
    finally:
        process.terminate()
        process.join()


def _run_stage(pipe: Connection, stage: str, folder: Path, examples: int, loops: int, classes: int) -> None:
    torch.set_num_threads(1)
    work = STAGES[stage](folder, examples, loops, classes)
    pipe.send("ready")
    began = time.process_time()
    work()
    pipe.send(time.process_time() - began)


def _anonymous_megabytes(process: int) -> float | None:
    """What a process holds that is no file; None where the system does not tell."""
    try:
        lines = Path(f"/proc/{process}/status").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) / 1000 for line in lines if line.startswith("RssAnon")), None)


def define(parser: Parser) -> None:
    every = ", ".join(f"{size:,}" for size in SIZES)
    option(parser, "--examples N", f"examples of each recording (repeatable; default: {every})", action="append")
    option(parser, "--loops N", "loops of the recordings", default=6)
    option(parser, "--classes N", "classes of the answers", default=23)
    option(parser, "--stage NAME", "stage to measure (repeatable; default: all)", action="append", choices=[*STAGES])
    add_shared(parser, "--json")


def execute(options: argparse.Namespace) -> None:
    sizes, stages = options.examples or list(SIZES), options.stage or list(STAGES)
    if min(sizes) < MIN_EXAMPLES or options.classes < MIN_CLASSES:
        raise UserError(
            f"Growth is measured from {MIN_EXAMPLES:,} examples and {MIN_CLASSES} classes on; got {min(sizes):,} and "
            f"{options.classes}."
        )
    options.threads = 1
    device_of(options)
    with track("measuring growth") as advance:
        result = bench_growth(sizes, options.loops, options.classes, stages, advance)
    if options.json:
        print_json(result)
        return
    title = f"{result.loops} loops, {result.classes} classes; processor time and memory of one process."
    columns = ["stage", "examples", "seconds", "microseconds an example", "MB", "kB an example", "MB written"]
    print_table(title, columns, [_row(each) for each in result.stages])


def _row(stage: StageGrowth) -> list[str]:
    held = stage.megabytes
    memory = ["", ""] if held is None else [f"{held:,.0f}", f"{1000 * held / stage.examples:.2f}"]
    written = f"{stage.written / 1e6:,.1f}" if stage.written else ""
    each = f"{1e6 * stage.seconds / stage.examples:,.1f}"
    return [stage.stage, f"{stage.examples:,}", f"{stage.seconds:,.2f}", each, *memory, written]


def main(words: Sequence[str] | None = None) -> int:
    return run_benchmark("growth", __doc__, define, execute, words)


if __name__ == "__main__":
    sys.exit(main())
