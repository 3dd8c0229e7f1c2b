"""How is an lm_eval task run? By lm_eval itself, on the model that `load` gives it, from the Hub or from files.

lm_eval is imported when it is needed, so that whoever does not evaluate need not have it.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from textwrap import shorten
from typing import TYPE_CHECKING, Any

from loopscope.config import Settings
from loopscope.errors import UserError
from loopscope.harness.task_names import check_tasks
from loopscope.questions import BENCHMARKS
from loopscope.questions.lm_eval_tasks import (
    reading_benchmark,
    subjects_of,
    templates_compiled_once,
    write_task_definition,
)
from loopscope.reading import is_file

if TYPE_CHECKING:
    from loopscope.harness.lm_eval_model import LoopScopeLM


class LoopUsage(Settings, frozen=True):
    """How deep a task went."""

    decisions: int  # one a question; one a token of what is generated, or scored without choices
    average_loops: float


class Evaluation(Settings, frozen=True):
    """What lm_eval says of some tasks, and how deep the model went for it."""

    model: dict[str, Any]  # what it was
    results: dict[str, dict[str, Any]]  # by task or group, then by metric, as lm_eval names them
    shots: dict[str, Any]
    samples: dict[str, Any]  # how many of how many documents
    versions: dict[str, Any]  # of the task definitions
    loops: dict[str, LoopUsage]


def load(pretrained: Any, **options: Any) -> "LoopScopeLM":
    """The lm_eval model; the options are those of `loopscope.harness.lm_eval_model.LoopScopeLM`."""
    try:
        from loopscope.harness.lm_eval_model import LoopScopeLM
    except ImportError as error:
        if error.name is None or error.name.split(".")[0] == "loopscope":
            raise
        raise UserError("This needs lm_eval; install it with: pip install 'loopscope[lm]'.") from None
    return LoopScopeLM(pretrained, **options)


def evaluate(
    model: "LoopScopeLM",
    tasks: Sequence[str],
    *,
    data: Path | None = None,
    limit: int | None = None,
    shots: int | None = None,
    chat: bool = False,
) -> Evaluation:
    """Runs tasks by lm_eval's names, or by the paths of their definitions; `data` is for the six benchmarks.

    Shots are the task's own unless they are given; `limit` is by task, as lm_eval has it.
    """
    from lm_eval import simple_evaluate

    before = dict(model.used)
    with templates_compiled_once(), _environment_left_alone(), _prepared(tasks, data) as prepared:
        _check_shots(prepared.tasks, shots)
        evaluated = simple_evaluate(
            model,
            tasks=prepared.tasks,
            task_manager=prepared.manager,
            num_fewshot=shots,
            limit=limit,
            apply_chat_template=chat,
            log_samples=False,
        )
    return Evaluation(
        model=model.get_model_info(),
        results={
            name: {k: v for k, v in found.items() if k != "alias"} for name, found in evaluated["results"].items()
        },
        shots=evaluated["n-shot"],
        samples=evaluated["n-samples"],
        versions=evaluated["versions"],
        loops={
            name: LoopUsage(new, (total - loops_before) / new)
            for name, (count, total) in model.used.items()
            for count_before, loops_before in [before.get(name, (0, 0))]
            if (new := count - count_before)
        },
    )


@contextmanager
def _environment_left_alone() -> Iterator[None]:
    """lm_eval asks git and pip about the machine, for what is not used here; git complains where there is none."""
    from lm_eval import evaluator

    functions = evaluator.get_git_commit_hash, evaluator.add_env_info
    evaluator.get_git_commit_hash, evaluator.add_env_info = (lambda: None), (lambda storage: None)
    try:
        yield
    finally:
        evaluator.get_git_commit_hash, evaluator.add_env_info = functions


@dataclass(frozen=True)
class _Prepared:
    tasks: list[Any]
    manager: Any


@contextmanager
def _prepared(names: Sequence[str], data: Path | None) -> Iterator[_Prepared]:
    """The tasks, loaded; their data may lie in a folder that is gone afterwards."""
    from lm_eval import tasks
    from lm_eval.tasks import TaskManager

    if not names:
        raise UserError("Which tasks? Name one at least, as lm_eval names it.")
    known = {task: benchmark for benchmark in BENCHMARKS.values() for task in (benchmark.name, *benchmark.tasks)}
    with TemporaryDirectory() as folder:
        if data is not None:
            manager = TaskManager(include_defaults=False)
            loaded = [_local(name, data, Path(folder), manager) for name in names]
        else:
            home = Path(tasks.__file__).parent
            ours = all(name in known or is_file(Path(name)) for name in names)
            where = sorted({home / known[name].definitions for name in names if name in known})
            manager = TaskManager(include_defaults=not ours, include_path=list(where))  # all of them take half a minute
            loaded = []
            for name in names:
                if name not in manager.task_index and not is_file(Path(name)):
                    raise UserError(f"lm_eval has no task '{name}'; `lm_eval ls tasks` lists them.")
                with _defining(Path(name)) if is_file(Path(name)) else reading_benchmark(f"The task '{name}'", None):
                    loaded += list(_top(manager.load([name])))
        yield _Prepared(loaded, manager)


@contextmanager
def _defining(path: Path) -> Iterator[None]:
    """Whatever lm_eval makes of a definition that is wrong, in a sentence."""
    try:
        yield
    except Exception as error:  # YAML, lm_eval and what it loads data with have errors of their own
        reason = shorten(str(error.__cause__ or error) or type(error).__name__, 200).rstrip(".")
        raise UserError(
            f"The task definition {path} is wrong, or the data that it names cannot be read ({reason}); correct it."
        ) from error


def _check_shots(loaded: Sequence[Any], shots: int | None) -> None:
    """lm_eval finds out when it draws, and fails; a task that is not asked about itself has one example more."""
    from lm_eval.api.group import Group

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


def _local(name: str, data: Path, folder: Path, manager: Any) -> Any:
    """A benchmark whose data are in a folder: its task, or the group of its subjects' tasks."""
    from lm_eval.api.group import AggMetricConfig, Group

    for benchmark in BENCHMARKS.values():
        if name == benchmark.name or name in benchmark.tasks:
            break
    else:
        check_tasks([name], data)
        raise AssertionError(f"{name} is a benchmark")
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


def _top(loaded: Any) -> Iterator[Any]:
    """What was asked for: groups that are in no other, and tasks that are in no group."""
    inside = {child for children in loaded["group_map"].values() for child in children}
    for kind in ("groups", "tasks"):
        yield from (each for name, each in loaded[kind].items() if name not in inside)
