"""How is an lm_eval task run? By lm_eval itself, on a `LoopScopeLM`, with data from the Hub or from files."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from lm_eval import evaluator, tasks as lm_eval_tasks
from lm_eval.api.group import AggMetricConfig, Group
from lm_eval.tasks import TaskManager

from loopscope.config import Settings
from loopscope.errors import UserError
from loopscope.files import is_file
from loopscope.integrations.lm_eval.lm_eval_model import LoopScopeLM
from loopscope.integrations.lm_eval.task_names import benchmark_tasks
from loopscope.questions import reading_benchmark, subjects_of, templates_compiled_once, write_task_definition


class LoopUsage(Settings, frozen=True):
    """Hold the average depth of a task's decisions."""

    decisions: int  # one for each question; one for each token that is generated, or scored without choices
    average_loops: float


class Evaluation(Settings, frozen=True):
    """Hold lm_eval's results of some tasks, and the depth of the model."""

    model: dict[str, Any]  # the model's description
    results: dict[str, dict[str, Any]]  # by task or group, then by metric, under lm_eval's names
    shots: dict[str, Any]
    samples: dict[str, Any]  # the number of documents that were evaluated, and of all
    versions: dict[str, Any]  # of the task definitions
    loops: dict[str, LoopUsage]


def evaluate(
    model: LoopScopeLM,
    tasks: Sequence[str],
    *,
    data: Path | None = None,
    limit: int | None = None,
    shots: int | None = None,
    chat: bool = False,
) -> Evaluation:
    """Run tasks by lm_eval's names, or by the paths of their definitions; `data` is for the six benchmarks.

    `shots` defaults to the task's own number, and `limit` applies to each task, as in lm_eval. The counts of
    `model.used` restart at 0.
    """
    model.used.clear()
    with templates_compiled_once(), _skip_environment_report(), TemporaryDirectory() as folder:
        if data is None:
            manager, loaded = _hub_tasks(tasks)
        else:
            manager = TaskManager(include_defaults=False)
            loaded = [_local_task(name, data, Path(folder), manager) for name in tasks]
        _check_shots(loaded, shots)
        evaluated = evaluator.simple_evaluate(
            model,
            tasks=loaded,
            task_manager=manager,
            num_fewshot=shots,
            limit=limit,
            apply_chat_template=chat,
            log_samples=False,
        )
    return Evaluation(
        model=model.get_model_info(),
        results={
            name: {metric: _as_python(value) for metric, value in found.items() if metric != "alias"}
            for name, found in evaluated["results"].items()
        },
        shots=evaluated["n-shot"],
        samples=evaluated["n-samples"],
        versions=evaluated["versions"],
        loops={name: LoopUsage(count, total / count) for name, (count, total) in model.used.items()},
    )


def _as_python(value: Any) -> Any:
    """A metric of lm_eval as a number of Python: some metrics are scalars of NumPy, which JSON does not take."""
    return value.item() if isinstance(value, np.generic) else value


@contextmanager
def _skip_environment_report() -> Iterator[None]:
    """Keep lm_eval from asking git and pip about the machine; the result is not used, and git may complain."""
    functions = evaluator.get_git_commit_hash, evaluator.add_env_info
    evaluator.get_git_commit_hash, evaluator.add_env_info = (lambda: None), (lambda storage: None)
    try:
        yield
    finally:
        evaluator.get_git_commit_hash, evaluator.add_env_info = functions


def _hub_tasks(names: Sequence[str]) -> tuple[TaskManager, list[Any]]:
    """Load tasks by name; return also their top groups."""
    known, home = benchmark_tasks(), Path(lm_eval_tasks.__file__).parent
    ours = all(name in known or is_file(Path(name)) for name in names)
    where = sorted({home / known[name].definitions for name in names if name in known})
    manager = TaskManager(include_defaults=not ours, include_path=list(where))  # all of them take half a minute
    found: list[Any] = []
    for name in names:
        path = Path(name) if is_file(Path(name)) else None
        with reading_benchmark("The task definition" if path else f"The task '{name}'", path):
            loaded = manager.load([name])
        inside = {child for children in loaded["group_map"].values() for child in children}
        for kind in ("groups", "tasks"):
            found += [each for key, each in loaded[kind].items() if key not in inside]
    return manager, found


def _check_shots(loaded: Sequence[Any], shots: int | None) -> None:
    """Reject more shots than a task has examples: lm_eval would fail only when it draws them."""
    for task in (each for found in loaded for each in (found.get_all_tasks() if isinstance(found, Group) else [found])):
        own = task.get_config("num_fewshot")
        needed = own if shots is None or own == 0 else shots
        if not needed:
            continue
        examples = len(task.fewshot_docs()) - (task.fewshot_cfg.split == task.config.test_split)
        if needed > examples:
            raise UserError(
                f"{needed} shots are asked for, and {task.config.task} has {examples} examples to give; ask for fewer."
            )


def _local_task(name: str, data: Path, folder: Path, manager: TaskManager) -> Any:
    """Load a benchmark whose data are in a folder: its task, or the group of its subjects' tasks."""
    benchmark = benchmark_tasks()[name]
    found: dict[str, Any] = {}
    with reading_benchmark(benchmark.title, data):
        for subject in subjects_of(benchmark, data):
            path = write_task_definition(benchmark, subject, benchmark.dataset_split("test"), data, folder)
            if name in (benchmark.name, path.stem):
                found |= manager.load([str(path)])["tasks"]
    if not found:
        raise UserError(f"There is no {name} in {data / benchmark.name}.")
    if not benchmark.subjects or name != benchmark.name:
        return found[name]
    group = Group(name, aggregate_metric_list=[AggMetricConfig(metric=benchmark.metric, weight_by_size=True)])
    for task in found.values():
        group.add(task)
    return group
