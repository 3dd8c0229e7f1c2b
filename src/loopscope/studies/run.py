"""Running a study: whatever is missing in the store is made, here or on a cluster."""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Literal

import torch

from loopscope.errors import UserError
from loopscope.progress import ProgressCallback
from loopscope.studies.checkpoint_steps import Time
from loopscope.studies.local_executor import run_locally
from loopscope.studies.plan import Model, Plan
from loopscope.studies.ray_executor import run_on_ray
from loopscope.studies.step_runner import Failures, StudyProgress
from loopscope.studies.steps import Step, Train, all_steps, to_be_done
from loopscope.training.estimate import TimeEstimate, estimate_time
from loopscope.writing import remove_scratch

Executor = Literal["local", "ray"]


def run_study(
    plan: Plan,
    store: Path,
    progress_callback: ProgressCallback,
    engine: Executor = "local",
    address: str | None = None,
    device: str = "cpu",
    threads: int = 1,
    workers: int | None = None,
) -> int:
    """Makes every artifact that is missing; returns how many there were to make."""
    models = sorted(plan.models, key=_seed)  # every variant with one seed, before any with the next
    goals = [step for model in models for step in model.goals]
    steps = to_be_done(goals, store)
    if not steps:
        return 0
    for step in steps:
        if isinstance(step, Train):
            step.check(store)
    if store.exists() and not store.is_dir():
        raise UserError(f"{store} is a file; give a folder as the store.")
    store.mkdir(parents=True, exist_ok=True)
    remove_scratch(store)
    progress = StudyProgress(all_steps(goals), store, progress_callback)
    failures = Failures()
    for timing, at_a_time in ((False, workers), (True, 1)):  # what is timed runs last, and locally by itself
        some = [step for step in steps if isinstance(step, Time) is timing]
        ready = [step for step in some if not failures.hold_up(step)]
        if ready and engine == "ray":
            failures.join(run_on_ray(ready, store, progress, device, threads, address))
        elif ready:
            failures.join(run_locally(ready, store, progress, device, threads, at_a_time))
    failures.check()
    return len(steps)


def _seed(model: Model) -> int:
    return 0 if model.training is None else model.training.settings.training.seed


def training_time(steps: Iterable[Step], store: Path, device: str = "cpu") -> list[TimeEstimate]:
    """About how long each training run that is missing would take on this machine; runs of one shape are timed once."""
    known: dict[object, TimeEstimate] = {}  # of one step
    found = []
    for step in steps:
        if isinstance(step, Train) and not step.done(store):
            settings = step.settings
            shape = (settings.model, settings.task, settings.training.batch_size)
            if shape not in known:
                known[shape] = estimate_time(settings, torch.device(device), settings.training.steps - 1)
            left = step.units - step.units_done(store)
            found.append(replace(known[shape], seconds=known[shape].seconds * left))
    return found
