"""How is a question asked? lm_eval's task objects build the requests; here they become questions, split and limited.

A task definition is the built-in one, included by a small file that names other data or another split and nothing else.
The requests of a whole task are built first, as lm_eval does (few-shot examples are drawn in document order from one
stream), and only then split and limited: a question is the same, whatever else is asked.

Data come from the Hub (`data` None) or from a folder that holds `<benchmark>/<split>.jsonl` and
`mmlu/<subject>/<split>.jsonl` in the Hub's field names.

Where the test split has no public labels, the validation split is divided: documents are put in the order of the 64-bit
numbers that NumPy's PCG64, seeded with 42, draws for them (`random_raw`, which is the same in every version); the first
round(0.2 N) are the validation questions, the others the test questions, both in document order.
"""

import json
import logging
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from functools import cache
from io import StringIO
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory
from textwrap import shorten
from typing import Any

import numpy as np

from loopscope.errors import UserError
from loopscope.questions.benchmarks import Benchmark, Split
from loopscope.reading import DEEPEST, is_folder, json_depth, no_folder, read_bytes

FEWSHOT_SEED = 1234  # lm_eval's own default
SPLIT_SEED = 42  # the paper's


@dataclass(frozen=True)
class Question:
    """One question as lm_eval asks it."""

    key: str  # "arc_challenge/17", "mmlu/anatomy/3": names the document, unique in a split
    context: str
    choices: tuple[str, ...]  # the continuations of lm_eval's requests, with their leading space
    label: int
    norms: tuple[int, ...]  # characters of each choice, by which acc_norm divides
    subject: str | None = None  # questions of one subject begin with the same description and examples


def load_questions(
    benchmark: Benchmark, split: Split, data: Path | None = None, limit: int | None = None
) -> list[Question]:
    """The questions of a split; `limit` keeps the first ones, of MMLU in turn from every subject."""
    found: list[Question] = []
    with templates_compiled_once(), TemporaryDirectory() as folder:
        for subject in subjects_of(benchmark, data):
            task = _task(benchmark, subject, benchmark.dataset_split(split), data, Path(folder))
            found += _questions(benchmark, subject, task)
    if benchmark.validation_share is not None and split != "train":
        found = [found[document] for document in _share(len(found), benchmark.validation_share, split)]
    return _limited(found, limit)


def subjects_of(benchmark: Benchmark, data: Path | None) -> Sequence[str | None]:
    """Those whose data are there."""
    if not benchmark.subjects:
        return (None,)
    if data is None:
        return benchmark.subjects
    folder = data / benchmark.name
    present = sorted(path.name for path in folder.iterdir() if path.is_dir()) if folder.is_dir() else []
    if not present:
        raise UserError(f"There is no {benchmark.title} in {data}: put its subjects into {folder}/<subject>/.")
    if unknown := sorted({*present} - {*benchmark.subjects}):
        raise UserError(f"{folder / unknown[0]} is not a subject of {benchmark.title}; rename or remove it.")
    return present


def check_data(benchmark: Benchmark, split: Split, data: Path | None) -> None:
    """Refuses a folder that lacks files of these questions; it needs no lm_eval."""
    scored = benchmark.dataset_split(split)
    if data is None:
        return
    if not is_folder(data):
        raise no_folder(data, "the folder of the benchmarks' files, as docs/benchmarks.md shows them")
    for subject in subjects_of(benchmark, data):
        _files(benchmark, subject, scored, data)


def _files(benchmark: Benchmark, subject: str | None, scored: str, data: Path) -> dict[str, Path]:
    """Those with the examples of the prompts and with the questions."""
    source = data / benchmark.name / (subject or "")
    files = {name: source / f"{name}.jsonl" for name in (benchmark.pool, scored)}
    for file in files.values():
        if not file.is_file():
            raise UserError(f"There is no file {file}, which {benchmark.title} needs; docs/benchmarks.md lists them.")
    return files


def write_task_definition(
    benchmark: Benchmark, subject: str | None, scored: str, data: Path | None, folder: Path
) -> Path:
    """Writes a task definition into `folder`: lm_eval's own, with these data and this split."""
    definition: dict[str, Any] = {"include": str(_definitions(benchmark)[_task_name(benchmark, subject)])}
    if scored != "validation" or benchmark.validation_share is None:
        definition["test_split"] = scored
    if scored == benchmark.pool:
        definition["fewshot_split"] = scored  # said, so that lm_eval keeps a question out of its own examples
    if data is not None:
        files = _files(benchmark, subject, scored, data)
        for file in files.values():
            if any(json_depth(line) > DEEPEST for line in read_bytes(file, "file of questions", None).splitlines()):
                raise UserError(f"{file} is nested deeper than {DEEPEST} levels, so it holds no questions.")
        local = {"data_files": {name: str(file) for name, file in files.items()}, "cache_dir": str(folder)}
        definition |= {"dataset_path": "json", "dataset_name": None, "dataset_kwargs": local}
    path = folder / f"{_task_name(benchmark, subject)}.yaml"
    path.write_text(json.dumps(definition), encoding="utf-8")  # JSON is YAML
    return path


def _task(benchmark: Benchmark, subject: str | None, scored: str, data: Path | None, folder: Path) -> Any:
    """lm_eval's task object, its requests built."""
    path = write_task_definition(benchmark, subject, scored, data, folder)
    with reading_benchmark(benchmark.title, None if data is None else data / benchmark.name / (subject or "")):
        return _built(path, benchmark.shots)


@contextmanager
def reading_benchmark(what: str, source: Path | None) -> Iterator[None]:
    """Says in a sentence whatever the libraries make of an unreachable Hub or of unfit data."""
    library = logging.getLogger("huggingface_hub")
    before = library.level
    library.setLevel(logging.ERROR)  # it tells of every retry
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        message = shorten(str(error.__cause__ or error) or type(error).__name__, 200).rstrip(".")
        reason = re.sub(r" \(\w+Error\)", "", message)
        place = source or "the Hub; check the network or give a folder with its files"
        raise UserError(f"{what} could not be read from {place} ({reason}).") from error
    finally:
        library.setLevel(before)


def _built(path: Path, shots: int) -> Any:
    from lm_eval.tasks import TaskManager

    with redirect_stderr(StringIO()):  # progress bars and hints
        (task,) = TaskManager(include_defaults=False).load(str(path))["tasks"].values()
        task.set_config("num_fewshot", shots)
        task.set_fewshot_seed(FEWSHOT_SEED)
        task.build_all_requests()
    return task


def _questions(benchmark: Benchmark, subject: str | None, task: Any) -> Iterator[Question]:
    place = "/".join((benchmark.name, *([subject] if subject else [])))
    for document, group in groupby(task.instances, key=lambda request: request.doc_id):
        requests = list(group)
        choices, gold = task.doc_to_choice(requests[0].doc), task.doc_to_target(requests[0].doc)
        if not all(isinstance(choice, str) for choice in choices):
            raise UserError(f"{place}/{document} has a choice that is no text; correct the data of {benchmark.title}.")
        label = gold if isinstance(gold, int) else choices.index(gold) if gold in choices else -1
        if not 0 <= label < len(choices):
            raise UserError(
                f"{place}/{document} has no right answer ({gold!r}); {benchmark.title} needs labelled data."
            )
        yield Question(
            key=f"{place}/{document}",
            context=requests[0].args[0],
            choices=tuple(request.args[1] for request in requests),
            label=label,
            norms=tuple(map(len, choices)),
            subject=subject,
        )


def _share(count: int, share: float, split: Split) -> list[int]:
    """The documents of `split`, in order."""
    order = np.argsort(np.random.PCG64(SPLIT_SEED).random_raw(count), kind="stable")
    first = round(share * count)
    return sorted((order[:first] if split == "validation" else order[first:]).tolist())


def _limited(questions: list[Question], limit: int | None) -> list[Question]:
    if limit is None:
        return questions
    requested: dict[str | None, int] = {}
    turns = []
    for question in questions:
        turns.append(requested.get(question.subject, 0))
        requested[question.subject] = turns[-1] + 1
    kept = sorted(range(len(questions)), key=turns.__getitem__)[:limit]
    return [questions[index] for index in sorted(kept)]


def _task_name(benchmark: Benchmark, subject: str | None) -> str:
    return benchmark.name if subject is None else f"{benchmark.name}_{subject}"


@cache
def _definitions(benchmark: Benchmark) -> dict[str, Path]:
    """The files of lm_eval that define the tasks of a benchmark, by the tasks' names."""
    from lm_eval import tasks

    folder = Path(tasks.__file__).parent / benchmark.definitions
    index = tasks.TaskManager(include_defaults=False, include_path=[folder]).task_index
    return {name: index[name].yaml_path for name in benchmark.tasks}


@contextmanager
def templates_compiled_once() -> Iterator[None]:
    """lm_eval compiles a prompt's template anew for every document and example: 15 times the time of filling it in."""
    try:
        from lm_eval.utils import env
    except ImportError:
        raise UserError("Benchmarks need lm_eval; install it with: pip install 'loopscope[lm]'.") from None
    compiled = env.from_string
    env.from_string = cache(compiled)
    try:
        yield
    finally:
        env.from_string = compiled
