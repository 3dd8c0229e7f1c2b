"""How are the steps of a study done? By worker processes here, or as Ray tasks; all of them write to one store.

With the same number of threads a worker, the results do not depend on how many workers there are, nor on where they
run. A training run that was interrupted, or whose node died, goes on from its last checkpoint.

Every GPU has a worker of its own, which does one step at a time; what needs no GPU is done on cores beside them. What
is timed runs last and alone.
"""

import fcntl
import multiprocessing
import os
import signal
import threading
import time
import traceback
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Literal

import msgspec
import torch

from loopscope.config import digest, plain
from loopscope.errors import UserError, install_command, out_of_memory
from loopscope.files import remove_scratch
from loopscope.models.device import cores, keep_memory
from loopscope.progress import ProgressCallback
from loopscope.studies.plan import Model, Plan
from loopscope.studies.steps import Step, Train, all_steps, missing_steps
from loopscope.training.estimate import TimeEstimate, estimate_time
from loopscope.training.objectives import expected_loops
from loopscope.training.settings import RunSettings

Executor = Literal["local", "ray"]
StepResult = BaseException | str | None
"""The result of a step: an error, `_HELD_UP` (a step that it needs failed), or None (done)."""
_HELD_UP = "held up"
_LEAVING_SECONDS = 10.0
"""The seconds in which an idle worker ends."""
_RAY_RETRIES = 10
_RAY_SECONDS = 1.0
"""Between two looks at the store."""


def run_study(
    plan: Plan,
    store: Path,
    progress_callback: ProgressCallback,
    engine: Executor = "local",
    address: str | None = None,
    devices: Sequence[str] = ("cpu",),
    threads: int = 1,
    workers: int | None = None,
) -> int:
    """Make every missing artifact of a study in its store; return how many were missing.

    `devices` are all of one type: `cpu`, or CUDA devices by number, each of which does one step at a time. Ray hands
    out devices of that type itself. `workers` is how many steps run on cores at a time.
    """
    models = sorted(plan.models, key=_training_seed)  # every variant with one seed, before any with the next
    goals = [step for model in models for step in model.goals]
    steps = missing_steps(goals, store)
    if not steps:
        return 0
    for step in steps:
        if isinstance(step, Train):
            step.check(store)
    store.mkdir(parents=True, exist_ok=True)
    remove_scratch(store)
    work = StudyWork(all_steps(goals), store, devices, threads, progress_callback)
    for alone in (False, True):
        ready = [step for step in steps if step.alone is alone and not work.hold_up(step)]
        if ready and engine == "ray":
            _run_on_ray(ready, work, address, alone)
        elif ready:
            _run_locally(ready, work, [devices[0]] if alone else _worker_devices(ready, work, workers))
    work.check_failures()
    return len(steps)


def _training_seed(model: Model) -> int:
    """The training seed of a study's model."""
    return 0 if model.training is None else model.training.settings.training.seed


def training_left(steps: Iterable[Step], store: Path) -> list[tuple[RunSettings, int]]:
    """The training runs of a study that are missing, each with its number of remaining steps."""
    missing = [step for step in steps if isinstance(step, Train) and not step.done(store)]
    return [(step.settings, step.units - step.units_done(store)) for step in missing]


def training_time(left: Iterable[tuple[RunSettings, int]], device: str = "cpu") -> list[TimeEstimate]:
    """Estimate the time of remaining training on a device here; runs of one shape are timed once.

    Custom models are left out: their size is not known before they are imported, and a plan imports nothing.
    """
    known: dict[str, TimeEstimate] = {}  # of one step
    found = []
    for settings, steps in left:
        if settings.model.is_custom:
            continue
        training = msgspec.structs.replace(settings.training, seed=0, steps=1)
        loops = expected_loops(settings.objective, settings.num_loops)
        shape = digest([plain(settings.task), plain(settings.model), plain(training), loops])
        if shape not in known:
            known[shape] = estimate_time(settings, torch.device(device), settings.training.steps - 1)
        found.append(replace(known[shape], seconds=known[shape].seconds * steps))
    return found


class StudyWork:
    """The work of a study: its steps, its progress (read from the store), and its failures.

    A step that fails takes with it what needs it, and nothing else.
    """

    def __init__(
        self, everything: list[Step], store: Path, devices: Sequence[str], threads: int, advance: ProgressCallback
    ) -> None:
        self.store, self.devices, self.threads, self._advance = store, devices, threads, advance
        self._units = sum(step.units for step in everything)
        self._done = {step.key: step.units_done(store) for step in everything}
        self._failed: dict[str, UserError | str] = {}
        self.look_at([])

    def look_at(self, running: Iterable[Step]) -> None:
        """Updates the progress of steps that are running or have just ended."""
        for step in running:
            self._done[step.key] = step.units_done(self.store)
        self._advance(sum(self._done.values()), self._units, "")

    def end(self, step: Step, result: StepResult) -> None:
        """Note an error of a step that tells the user what to do; raise any other error."""
        if isinstance(result, UserError | str):
            self._failed[step.key] = result
        elif result is not None:
            raise result

    def hold_up(self, step: Step) -> bool:
        """Whether something that the step needs has failed, so that it cannot be done either."""
        if any(needed.key in self._failed for needed in step.needs):
            self._failed[step.key] = _HELD_UP
        return step.key in self._failed

    def check_failures(self) -> None:
        """Raise an error that lists the failed steps, if there are any."""
        errors = [f"{key}: {error}" for key, error in self._failed.items() if isinstance(error, UserError)]
        if not errors:
            return
        counted = "One step" if len(errors) == 1 else f"{len(errors)} steps"
        skipped = len(self._failed) - len(errors)
        rest = f", and {skipped} that need them were left out" if skipped else ""
        raise UserError(
            f"{counted} of the study failed{rest}; all others are done. The first, {errors[0]} Whatever is damaged in "
            "the store can be removed: it is made again."
        )


def do_step(step: Step, store: Path, device: str) -> None:
    """Do one step of a study, unless another process has done it; wait for a process that is doing it."""
    locks = store / ".locks"
    locks.mkdir(exist_ok=True)
    with (locks / step.key).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if step.done(store):
            return
        try:
            step.run(store, torch.device(device))
        except RuntimeError as error:
            if not out_of_memory(error):
                raise
            raise UserError(
                f"there is not enough memory for it on {device}; take a device that has more, or smaller batches."
            ) from error


def _prepare_worker(threads: int) -> None:
    """Prepare a worker process: deterministic CUDA, and the number of threads, on which sums of floats depend."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # deterministic; read at the first use of CUDA
    torch.set_num_threads(threads)
    keep_memory()


def _worker_devices(steps: Sequence[Step], work: StudyWork, workers: int | None) -> list[str]:
    """The device of each worker: one worker per GPU, the other workers share the CPU's cores."""
    on_device = [step for step in steps if step.uses_device]
    on_cores = len(steps) if "cpu" in work.devices else len(steps) - len(on_device)
    gpus = [device for device in work.devices if device != "cpu"][: len(on_device)]
    return gpus + ["cpu"] * min(workers or max(1, cores() // work.threads), on_cores)


def _run_locally(steps: list[Step], work: StudyWork, places: Sequence[str]) -> None:
    """Do all steps with worker processes on these devices, each step after the steps it needs."""
    waiting = {step.key: step for step in steps}
    with _worker_processes(places, work) as pool:
        while waiting or any(worker.step for worker in pool):
            busy = {worker.step.key for worker in pool if worker.step}
            for step in _next_steps(waiting.values(), len(pool)):
                idle = [worker for worker in pool if not worker.step]
                if not idle:
                    break
                devices = work.devices if step.uses_device else ("cpu",)
                worker = next((worker for worker in idle if worker.device in devices), None)
                if work.hold_up(step):
                    del waiting[step.key]
                elif worker and not any(needed.key in waiting or needed.key in busy for needed in step.needs):
                    worker.begin(waiting.pop(step.key))
                    busy.add(step.key)
            running = {worker.pipe: worker.step for worker in pool if worker.step}
            work.look_at(running.values())
            ended = wait(list(running), timeout=0.5)
            for worker in pool:
                if worker.pipe in ended:
                    work.end(running[worker.pipe], worker.end())
            work.look_at(running[pipe] for pipe in running if pipe in ended)


def _next_steps(waiting: Iterable[Step], workers: int) -> list[Step]:
    """The waiting steps in the order to start them: the last few training runs come first, so that none begins late."""
    steps = list(waiting)
    if sum(isinstance(step, Train) for step in steps) < 2 * workers:
        steps.sort(key=lambda step: not isinstance(step, Train))
    return steps


class _Worker:
    """A worker process: it receives steps through a pipe, and sends back their results.

    The standard library's pools need semaphores that have names, and a study that is killed would leave them behind.
    """

    def __init__(self, work: StudyWork, device: str) -> None:
        context = multiprocessing.get_context("spawn")
        self.device = device
        self.pipe, theirs = context.Pipe()
        given = (theirs, work.store, device, work.threads, os.getpid())
        self.process = context.Process(target=_worker_loop, args=given, daemon=True)
        self.process.start()
        theirs.close()
        self.step: Step | None = None

    def begin(self, step: Step) -> None:
        self.step = step
        self.pipe.send(step)

    def end(self) -> StepResult:
        """The result of the worker's step, which has ended."""
        self.step = None
        try:
            result: StepResult = self.pipe.recv()
        except (EOFError, ConnectionError):
            raise UserError(
                "A worker process died (out of memory?); the same command continues where it stopped."
            ) from None
        return result


@contextmanager
def _worker_processes(places: Sequence[str], work: StudyWork) -> Iterator[list[_Worker]]:
    """Start the worker processes of a study, and end them afterwards."""
    names = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
    before = {name: os.environ.get(name) for name in names}
    os.environ.update(dict.fromkeys(names, str(work.threads)))  # their linear algebra keeps to its threads, too
    try:
        pool = [_Worker(work, device) for device in places]
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
    try:
        yield pool
    finally:
        for worker in pool:
            worker.pipe.close() if worker.step is None else worker.process.terminate()  # an idle one ends by itself
        for worker in pool:
            worker.process.join(_LEAVING_SECONDS)
            worker.process.terminate()
            worker.process.join()


def _worker_loop(pipe: Connection, store: Path, device: str, threads: int, parent: int) -> None:
    """The loop of a worker process; it ends when its study ends, in any way."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all of a group: the study ends its workers itself
    _prepare_worker(threads)
    if device.startswith("cuda:"):
        torch.cuda.set_device(device)  # so that nothing goes to another GPU because it names none

    def exit_with_parent() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=exit_with_parent, daemon=True).start()
    while True:
        try:
            step = pipe.recv()
        except (EOFError, ConnectionError):
            return
        try:
            do_step(step, store, device)
            pipe.send(None)
        except Exception as error:
            error.add_note(traceback.format_exc())  # an exception leaves its own behind when it is sent
            pipe.send(error)


def _run_on_ray(steps: list[Step], work: StudyWork, address: str | None, alone: bool) -> None:
    """Do all steps on the Ray cluster at `address`, whose nodes share the store, or on a local Ray.

    `alone`: one after the other, so that none is timed beside another.
    """
    ray = _connect_to_ray(address)
    try:
        _check_resources(ray, work)
        for together in [[step] for step in steps] if alone else [steps]:
            _await_on_ray(ray, together, work)
    finally:
        ray.shutdown()


def _await_on_ray(ray: Any, steps: list[Step], work: StudyWork) -> None:
    """Submit all steps to Ray and wait; Ray restarts a task elsewhere if its node dies."""
    task = ray.remote(num_cpus=work.threads, max_retries=_RAY_RETRIES)(_ray_task)
    refs: dict[str, Any] = {}
    for step in steps:
        on_gpu = _needs_gpu(work) and step.uses_device  # a task sees the GPU that it is given, and no other
        given = (step, work.store.resolve(), "cuda" if on_gpu else "cpu", work.threads)
        needed = [refs[need.key] for need in step.needs if need.key in refs]
        refs[step.key] = task.options(num_gpus=int(on_gpu)).remote(*given, *needed)
    step_of = dict(zip(refs.values(), steps, strict=True))
    waiting = list(step_of)
    while waiting:
        ended, waiting = ray.wait(waiting, num_returns=len(waiting), timeout=_RAY_SECONDS)
        for ref in ended:
            try:
                result = ray.get(ref)
            except ray.exceptions.RayTaskError:
                raise  # a bug: its traceback is the worker's
            except ray.exceptions.RayError as error:
                lost = f"it was lost {_RAY_RETRIES} times with its worker or node ({type(error).__name__})."
                result = UserError(lost)
            work.end(step_of[ref], result)
        work.look_at(step_of[ref] for ref in (*ended, *waiting))


def _needs_gpu(work: StudyWork) -> bool:
    """Whether the steps run on GPUs."""
    return work.devices[0].startswith("cuda")


def _connect_to_ray(address: str | None) -> Any:
    """Connect to a Ray cluster, or start a local one."""
    try:
        ray: Any = import_module("ray")
    except ImportError:
        raise UserError(f"--engine ray needs Ray; install it with: {install_command('ray')}.") from None
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    place = {"num_cpus": cores(), "include_dashboard": False} if address is None else {"address": address}
    try:
        ray.init(log_to_driver=False, logging_level="error", **place)
    except (ConnectionError, ValueError, RuntimeError) as error:
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise UserError(f"There is no Ray cluster to reach at '{address or 'this machine'}' ({reason}).") from None
    return ray


def _check_resources(ray: Any, work: StudyWork) -> None:
    """Reject a step that no Ray node has the resources for: it would wait forever."""
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    gpus = int(_needs_gpu(work))
    if not any(node.get("CPU", 0) >= work.threads and node.get("GPU", 0) >= gpus for node in nodes):
        most = max((int(node.get("CPU", 0)) for node in nodes), default=0)
        resources = f"{work.threads} CPUs" + (" and a GPU" if gpus else "")
        raise UserError(f"No node of the Ray cluster has {resources} (the largest has {most} CPUs); ask for less.")


def _ray_task(step: Step, store: Path, device: str, threads: int, *needed: StepResult) -> StepResult:
    """Do one step as a Ray task; skip it if a step that it needs failed."""
    if any(result is not None for result in needed):
        return _HELD_UP
    _prepare_worker(threads)
    try:
        do_step(step, store, device)
    except UserError as error:
        return error
    return None
