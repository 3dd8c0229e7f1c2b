"""What every way of running a study shares: doing a step, watching the work, and what happens when a step fails."""

import fcntl
import os
from collections.abc import Iterable
from pathlib import Path

import torch

from loopscope.errors import UserError
from loopscope.machine import keep_memory, out_of_memory
from loopscope.progress import ProgressCallback
from loopscope.studies.steps import Step

HELD_UP = "held up"
StepResult = BaseException | str | None
"""What became of a step: an error, or that something it needs failed, or (None) that it is done."""


def pin(threads: int) -> None:
    """Prepares the process that steps are done in: with another number of threads, floats add up in another order."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # deterministic; read at the first use of CUDA
    torch.set_num_threads(threads)
    keep_memory()


def do_step(step: Step, store: Path, device: str) -> None:
    """Does a step, unless somebody has done it meanwhile; who does it already is waited for."""
    locks = store / ".locks"
    locks.mkdir(exist_ok=True)
    with (locks / step.key).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not step.done(store):
            try:
                step.run(store, torch.device(device))
            except RuntimeError as error:
                if not out_of_memory(error):
                    raise
                raise UserError(
                    f"there is not enough memory for it on {device}; take a device that has more, or smaller batches."
                ) from error


class StudyProgress:
    """The progress of a whole study, read off the store: it is the same wherever the steps are done."""

    def __init__(self, everything: Iterable[Step], store: Path, advance: ProgressCallback) -> None:
        self._steps = {step.key: step for step in everything}
        self._store, self._advance = store, advance
        self._done = {key: step.units_done(store) for key, step in self._steps.items()}
        self.update([])

    def update(self, running: Iterable[Step]) -> None:
        """Looks again at those that are running or have just ended."""
        for step in running:
            self._done[step.key] = step.units_done(self._store)
        self._advance(sum(self._done.values()), sum(step.units for step in self._steps.values()), "")


class Failures:
    """A step that fails takes with it what needs it, and nothing else."""

    def __init__(self) -> None:
        self._errors: dict[str, UserError] = {}
        self._skipped: set[str] = set()

    def look_at(self, step: Step, outcome: StepResult) -> None:
        """Notes an error that says what to do; any other is raised."""
        if isinstance(outcome, UserError):
            self._errors[step.key] = outcome
        elif isinstance(outcome, BaseException):
            raise outcome
        elif outcome is not None:
            self._skipped.add(step.key)

    def hold_up(self, step: Step) -> bool:
        """Whether something that the step needs has failed, so that it cannot be done either."""
        if any(needed.key in self._errors or needed.key in self._skipped for needed in step.needs):
            self._skipped.add(step.key)
            return True
        return False

    def join(self, other: "Failures") -> None:
        """What failed elsewhere counts here, too."""
        self._errors |= other._errors
        self._skipped |= other._skipped

    def check(self) -> None:
        """Says what failed, if anything did."""
        if not self._errors:
            return
        key, error = next(iter(self._errors.items()))
        counted = "One step" if len(self._errors) == 1 else f"{len(self._errors)} steps"
        rest = f", and {len(self._skipped)} that need them were left out" if self._skipped else ""
        raise UserError(
            f"{counted} of the study failed{rest}; all others are done. The first, {key}: {error} Whatever is damaged "
            "in the store can be removed: it is made again."
        )
