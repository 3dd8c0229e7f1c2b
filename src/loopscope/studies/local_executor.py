"""How do the steps of a study share this machine? Worker processes, a fixed number of threads each.

With the same number of threads a worker, the results do not depend on how many workers there are. A training run that
was interrupted goes on from its last checkpoint.
"""

import multiprocessing
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from pathlib import Path

from loopscope.errors import UserError
from loopscope.machine import cores
from loopscope.studies.step_runner import Failures, StudyProgress, do_step, pin
from loopscope.studies.steps import Step


def run_locally(
    steps: list[Step], store: Path, progress: StudyProgress, device: str, threads: int = 1, workers: int | None = None
) -> Failures:
    """Does all steps, each when what it needs is done, in their order, as many at a time as there are workers."""
    workers = min(workers or (max(1, cores() // threads) if device == "cpu" else 1), len(steps))
    waiting = {step.key: step for step in steps}
    running: dict[Future[None], Step] = {}
    failures = Failures()
    context = multiprocessing.get_context("spawn")
    with (
        _fewer_threads(threads),
        ProcessPoolExecutor(workers, context, initializer=_begin, initargs=(threads, os.getpid())) as pool,
    ):
        try:
            while waiting or running:
                busy = {step.key for step in running.values()}
                for step in list(waiting.values()):
                    if len(running) == workers:
                        break
                    if failures.hold_up(step):
                        del waiting[step.key]
                    elif not any(needed.key in waiting or needed.key in busy for needed in step.needs):
                        running[pool.submit(do_step, waiting.pop(step.key), store, device)] = step
                        busy.add(step.key)
                progress.update(running.values())
                finished, _ = wait(running, timeout=0.5, return_when=FIRST_COMPLETED)
                ended = [(running.pop(future), future) for future in finished]
                for step, future in ended:
                    failures.look_at(step, future.exception())
                progress.update(step for step, _ in ended)
        except BaseException as error:
            for process in list((pool._processes or {}).values()):
                process.terminate()
            if isinstance(error, BrokenProcessPool):
                raise UserError(
                    "A worker process died (out of memory?); the same command continues where it stopped."
                ) from None
            raise
    return failures


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


def _begin(threads: int, parent: int) -> None:
    """Prepares a worker, and lets it end with the study that it works for, however that one ended."""
    pin(threads)

    def exit_with_parent() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=exit_with_parent, daemon=True).start()
