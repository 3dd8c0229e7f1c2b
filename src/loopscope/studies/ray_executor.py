"""How do the steps of a study spread over a cluster? One Ray task an artifact, all of them writing to one shared store.

Ray starts a task when what it needs is done, and starts it again elsewhere when its node dies. A training run that is
started again goes on from its last checkpoint, so the results are those of one machine.
"""

import os
from pathlib import Path
from typing import Any

from loopscope.errors import UserError
from loopscope.machine import cores
from loopscope.studies.checkpoint_steps import Score, Time
from loopscope.studies.step_runner import HELD_UP, Failures, StepResult, StudyProgress, do_step, pin
from loopscope.studies.steps import Record, Step, Train

_RETRIES = 10
_EVERY = 1.0
"""Seconds between two looks at the store."""


def run_on_ray(
    steps: list[Step], store: Path, progress: StudyProgress, device: str, threads: int = 1, address: str | None = None
) -> Failures:
    """Does all steps on the cluster at `address`, whose nodes share the store, or on a Ray of this machine's own."""
    try:
        import ray
    except ImportError:
        raise UserError("--engine ray needs Ray; install it with: pip install 'loopscope[ray]'.") from None
    _connect(ray, address)
    try:
        _check(ray, device, threads)
        return _run(ray, steps, store.resolve(), progress, device, threads)
    finally:
        ray.shutdown()


def _connect(ray: Any, address: str | None) -> None:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    quiet = {"log_to_driver": False, "logging_level": "error", "include_dashboard": False}
    try:
        if address is None:
            ray.init(num_cpus=cores(), **quiet)
        else:
            del quiet["include_dashboard"]
            ray.init(address=address, **quiet)
    except (ConnectionError, ValueError, RuntimeError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UserError(f"There is no Ray cluster to reach at '{address or 'this machine'}' ({reason}).") from None


def _check(ray: Any, device: str, threads: int) -> None:
    """A task that no node can take would wait for ever."""
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    gpus = 1 if device.startswith("cuda") else 0
    if not any(node.get("CPU", 0) >= threads and node.get("GPU", 0) >= gpus for node in nodes):
        most = max((int(node.get("CPU", 0)) for node in nodes), default=0)
        resources = f"{threads} CPUs" + (" and a GPU" if gpus else "")
        raise UserError(f"No node of the Ray cluster has {resources} (the largest has {most} CPUs); ask for less.")


def _run(ray: Any, steps: list[Step], store: Path, progress: StudyProgress, device: str, threads: int) -> Failures:
    task = ray.remote(num_cpus=threads, max_retries=_RETRIES)(_task)
    refs: dict[str, Any] = {}
    for step in steps:
        gpus = 1 if device.startswith("cuda") and isinstance(step, Train | Record | Score | Time) else 0
        needed = [refs[need.key] for need in step.needs if need.key in refs]
        refs[step.key] = task.options(num_gpus=gpus).remote(step, store, device if gpus else "cpu", threads, *needed)
    step_of = dict(zip(refs.values(), steps, strict=True))
    failures, waiting = Failures(), list(step_of)
    while waiting:
        ended, waiting = ray.wait(waiting, num_returns=len(waiting), timeout=_EVERY)
        for ref in ended:
            failures.look_at(step_of[ref], _outcome(ray, ref))
        progress.update(step_of[ref] for ref in (*ended, *waiting))
    return failures


def _task(step: Step, store: Path, device: str, threads: int, *needed: StepResult) -> StepResult:
    """What a worker does; it hands on what became of it, so that what needs a failed step is not tried."""
    if any(outcome is not None for outcome in needed):
        return HELD_UP
    pin(threads)
    try:
        do_step(step, store, device)
    except UserError as error:
        return error
    return None


def _outcome(ray: Any, ref: Any) -> StepResult:
    try:
        outcome: StepResult = ray.get(ref)
    except ray.exceptions.RayTaskError:
        raise  # a bug: its traceback is the worker's
    except ray.exceptions.RayError as error:
        return UserError(f"it was lost {_RETRIES} times with its worker or node ({type(error).__name__}).")
    return outcome
