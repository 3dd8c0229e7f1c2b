"""Measure how time and memory grow with the examples, stage by stage.

python -m benchmarks.growth
python -m benchmarks.growth --examples 100000 --loops 64

Every stage runs in a process of its own, at every size. Memory is what the process holds beyond what its imports take,
without the pages of memory-mapped recordings, which the system can drop.
"""

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec
import numpy as np

from benchmarks.command import run_benchmark
from loopscope.certify.calibration import calibrate
from loopscope.cli.options import Parser, add_shared, option
from loopscope.cli.output import print_json, print_table
from loopscope.errors import UserError
from loopscope.progress import ProgressCallback, track
from loopscope.recording.recording_folder import Arrays, write_recording
from loopscope.trajectory import SIGNAL_PREFIX, Trajectory

SIZES = [10_000, 100_000, 1_000_000]
_CHUNK = 1 << 14
_LOOK_SECONDS = 0.005
"""Between two looks at the memory of a stage."""
_RUN = "run"


class StageGrowth(msgspec.Struct, frozen=True):
    """One stage at one size."""

    stage: str
    examples: int
    seconds: float
    megabytes: float | None  # None where the system does not tell
    written: int  # bytes


class GrowthBench(msgspec.Struct, frozen=True):
    loops: int
    classes: int
    stages: list[StageGrowth]


def simulate(folder: Path, split: str, examples: int, loops: int, classes: int) -> None:
    """Writes a recording of answers that settle with depth, the later the harder an example is."""
    numbers, grid = dict.fromkeys(("labels", "difficulty"), ((examples,), np.int64)), (examples, loops)
    steps = {SIGNAL_PREFIX + name: (grid, np.float64) for name in ("hidden_change", "hidden_cosine")}
    layout = {**numbers, "logits": ((*grid, classes), np.float32), "gate_logits": (grid, np.float32), **steps}

    def fill(arrays: Arrays) -> None:
        for start in range(0, examples, _CHUNK):
            rows = slice(start, min(start + _CHUNK, examples))
            for name, values in _answers([start, len(split)], rows.stop - start, loops, classes).items():
                arrays[name][rows] = values

    texts = [f"{split} {row}" for row in range(examples)]
    write_recording(folder, split, layout, {"keeps_hidden": False}, fill, texts)


def _answers(seed: list[int], rows: int, loops: int, classes: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    labels, difficulty = rng.integers(0, classes, rows), rng.integers(1, 11, rows)
    settled = 1 - np.exp(-4 * np.arange(1, loops + 1) / loops * rng.gamma(2, 1, (rows, 1)) / np.sqrt(difficulty[:, None]))
    logits = rng.normal(size=(rows, 1, classes)) + 0.7 * (1 - settled[..., None]) * rng.normal(size=(rows, loops, classes))
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


def _load(folder: Path) -> tuple[Trajectory, Trajectory]:
    return Trajectory.load(folder / "validation"), Trajectory.load(folder / "test")


def _record(folder: Path) -> Callable[[], object]:
    from loopscope.recording.task_recording import record_task

    return lambda: record_task(folder / _RUN, "test", folder / "recorded")


def _loading(folder: Path) -> Callable[[], object]:
    return lambda: _load(folder)


def _sweep(folder: Path) -> Callable[[], object]:
    from loopscope.frontier import sweep
    from loopscope.threshold_grids import available_readouts

    pair = _load(folder)
    return lambda: [sweep(name, *pair) for name in available_readouts(*pair)]


def _diagnose(folder: Path) -> Callable[[], object]:
    from loopscope.analysis.diagnosis import diagnose

    pair = _load(folder)
    return lambda: diagnose(*pair)


def _calibrate(folder: Path) -> Callable[[], object]:
    validation, _ = _load(folder)
    return lambda: calibrate(validation, 0.02)


def _report(folder: Path) -> Callable[[], object]:
    from loopscope.report.write import report

    pair = _load(folder)
    return lambda: report({"model": pair}, folder / "report")


STAGES = {
    "record": _record,
    "load": _loading,
    "sweep": _sweep,
    "diagnose": _diagnose,
    "calibrate": _calibrate,
    "report": _report,
}


def _serve(stage: str, folder: Path, pipe: Connection) -> None:
    """In a process of its own: imports, says that it begins, does the work, and says how long it took."""
    import resource

    work = STAGES[stage](folder)
    pipe.send("begins")
    began = time.perf_counter()
    work()
    pipe.send(time.perf_counter() - began)
    del resource


def _anonymous_megabytes(process: int) -> float | None:
    """What a process holds that is no file; None where the system does not tell."""
    try:
        lines = Path(f"/proc/{process}/status").read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) / 1000
    except (OSError, StopIteration):
        return None


def measure_stage(stage: str, folder: Path, examples: int) -> StageGrowth:
    context = get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(stage, folder, theirs), daemon=True)
    process.start()
    theirs.close()
    assert process.pid is not None
    most, said = 0.0, 0.0
    try:
        while not ours.poll(_LOOK_SECONDS) or ours.recv() == "begins":
            most = max(most, _anonymous_megabytes(process.pid) or 0.0)
    except EOFError:
        raise UserError(f"The stage '{stage}' failed.") from None
    process.join()
    return StageGrowth(stage, examples, said, most or None, 0)
