"""How do the steps of a study share this machine? Worker processes, a fixed number of threads each.

With the same number of threads a worker, the results do not depend on how many workers there are. A training run that
was interrupted goes on from its last checkpoint.
"""

import multiprocessing
import os
import signal
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from pathlib import Path

from loopscope.errors import UserError
from loopscope.machine import cores
from loopscope.studies.step_runner import Failures, StepResult, StudyProgress, do_step, pin
from loopscope.studies.steps import Step

_LEAVING = 10.0
"""Seconds in which a worker with nothing to do ends."""


def run_locally(
    steps: list[Step], store: Path, progress: StudyProgress, device: str, threads: int = 1, workers: int | None = None
) -> Failures:
    """Does all steps, each when what it needs is done, in their order, as many at a time as there are workers."""
    count = min(workers or (max(1, cores() // threads) if device == "cpu" else 1), len(steps))
    waiting = {step.key: step for step in steps}
    failures = Failures()
    with _workers(count, threads) as pool:
        while waiting or any(worker.step for worker in pool):
            busy = {worker.step.key for worker in pool if worker.step}
            for step in list(waiting.values()):
                if (idle := next((worker for worker in pool if not worker.step), None)) is None:
                    break
                if failures.hold_up(step):
                    del waiting[step.key]
                elif not any(needed.key in waiting or needed.key in busy for needed in step.needs):
                    idle.begin(waiting.pop(step.key), store, device)
                    busy.add(step.key)
            running = {worker.pipe: worker.step for worker in pool if worker.step}
            progress.update(running.values())
            ended = wait(list(running), timeout=0.5)
            for worker in pool:
                if worker.pipe in ended:
                    failures.look_at(running[worker.pipe], worker.end())
            progress.update(running[pipe] for pipe in running if pipe in ended)
    return failures


class _Worker:
    """A process that does one step after the other: the steps go through its pipe, and what became of them comes back.

    The standard library's pools need semaphores that have names, and a study that is killed would leave them behind.
    """

    def __init__(self, threads: int) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_work, args=(theirs, threads, os.getpid()), daemon=True)
        self.process.start()
        theirs.close()
        self.step: Step | None = None

    def begin(self, step: Step, store: Path, device: str) -> None:
        self.step = step
        self.pipe.send((step, store, device))

    def leave(self) -> None:
        """Ends by itself if it has nothing to do: libraries that it loaded tidy up then."""
        if self.step is None:
            self.pipe.close()
        else:
            self.process.terminate()

    def end(self) -> StepResult:
        """What became of its step, which has ended."""
        self.step = None
        try:
            outcome: StepResult = self.pipe.recv()
        except (EOFError, ConnectionError):
            raise UserError(
                "A worker process died (out of memory?); the same command continues where it stopped."
            ) from None
        return outcome


@contextmanager
def _workers(count: int, threads: int) -> Iterator[list[_Worker]]:
    with _fewer_threads(threads):
        pool = [_Worker(threads) for _ in range(count)]
    try:
        yield pool
    finally:
        for worker in pool:
            worker.leave()
        for worker in pool:
            worker.process.join(_LEAVING)
            worker.process.terminate()
            worker.process.join()


@contextmanager
def _fewer_threads(threads: int) -> Iterator[None]:
    """What the workers are born with: their linear algebra keeps to its threads, too."""
    names = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
    before = {name: os.environ.get(name) for name in names}
    os.environ.update(dict.fromkeys(names, str(threads)))
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


def _work(pipe: Connection, threads: int, parent: int) -> None:
    """A worker's life; it ends with the study that it works for, however that one ended."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all of a group: the study ends its workers itself
    pin(threads)

    def exit_with_parent() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=exit_with_parent, daemon=True).start()
    while True:
        try:
            step, store, device = pipe.recv()
        except (EOFError, ConnectionError):
            return
        try:
            do_step(step, store, device)
            pipe.send(None)
        except Exception as error:
            error.add_note(traceback.format_exc())  # an exception leaves its own behind when it is sent
            pipe.send(error)
