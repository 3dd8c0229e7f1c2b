"""How do several runs share this machine? One worker process a core, one thread each, one progress for all.

Every job is resumable by itself, so an interrupted study continues where each of its runs stopped. With one thread a
worker the results do not depend on how many cores there are.
"""

import multiprocessing
import os
import threading
import time
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from queue import Empty
from typing import Any

from loopscope.errors import UserError
from loopscope.machine import cores, keep_memory
from loopscope.progress import Advance
from loopscope.training.loop import steps_done
from loopscope.training.settings import RunSettings

SPLITS = ("validation", "test")
_RECORDING_SHARE = 50
"""Recording the splits counts as much progress as 1/50 of the training."""

_queue: Any = None


@dataclass(frozen=True)
class Job:
    """A run to be trained and recorded."""

    folder: Path
    settings: RunSettings

    @property
    def units(self) -> int:
        return self.settings.training.steps + self._recording_units

    @property
    def _recording_units(self) -> int:
        return max(1, self.settings.training.steps // _RECORDING_SHARE)

    def run(self, report: Any) -> None:
        """Trains and records; `report(done, note)` counts in units."""
        import torch

        from loopscope.recording import record
        from loopscope.training import train

        torch.set_num_threads(1)
        keep_memory()
        name, steps = self.folder.name, self.settings.training.steps
        train(self.settings, self.folder, torch.device("cpu"), lambda done, _, note: report(done, f"{name}: {note}"))
        for split in SPLITS:
            report(steps, f"{name}: recording {split}")
            record(self.folder, split, self.folder / "recordings" / split)
        report(self.units, f"{name}: done")


def run_all(jobs: list[Job], progress: Advance, workers: int | None = None) -> None:
    """Runs all jobs, as many at a time as there are cores; the first error ends it."""
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    total = sum(job.units for job in jobs)
    done = [min(steps_done(job.folder), job.units) for job in jobs]
    workers = min(workers or cores(), len(jobs))
    progress(sum(done), total, "")
    with ProcessPoolExecutor(workers, context, initializer=_connect, initargs=(queue, os.getpid())) as pool:
        futures = [pool.submit(_work, index, job) for index, job in enumerate(jobs)]
        try:
            while not all(future.done() for future in futures):
                try:
                    index, units, note = queue.get(timeout=0.5)
                except Empty:
                    _raise_first(futures)
                    continue
                done[index] = units
                progress(sum(done), total, note)
            _raise_first(futures)
        except BaseException:
            for future in futures:
                future.cancel()
            for process in list((pool._processes or {}).values()):
                process.terminate()
            raise
    progress(total, total, "")


def _raise_first(futures: list["Future[None]"]) -> None:
    for future in futures:
        if future.done() and not future.cancelled():
            try:
                future.result()
            except BrokenProcessPool:
                raise UserError(
                    "A worker process died (out of memory?); the same command continues where it stopped."
                ) from None


def _connect(queue: Any, parent: int) -> None:
    """Gives a worker its queue, and lets it end with the study that it works for, however that one ended."""
    global _queue
    _queue = queue

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _work(index: int, job: Job) -> None:
    last = -1

    def report(done: int, note: str) -> None:
        nonlocal last
        if done * 200 // job.units != last or done == job.units:  # a few hundred messages a job, not one a step
            last = done * 200 // job.units
            _queue.put((index, done, note))

    job.run(report)
