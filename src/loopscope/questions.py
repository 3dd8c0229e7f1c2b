"""Which questions does a benchmark ask, and in which tokens? lm_eval's own, split and limited.

The benchmarks are the paper's six, with its shots, splits and metrics. What a question looks like, how few-shot
examples are drawn and how answers are judged is in lm_eval's task definitions, which are named here and not copied. A
task definition is the built-in one, included by a small file that names other data or another split and nothing else.
The requests of a whole task are built first, as lm_eval does (few-shot examples are drawn in document order from one
stream), and only then split and limited: a question is the same, whatever else is asked.

Data come from the Hub (`data` None) or from a folder that holds `<benchmark>/<split>.jsonl` and
`mmlu/<subject>/<split>.jsonl` in the Hub's field names.

Where the test split has no public labels, the validation split is divided: documents are put in the order of the 64-bit
numbers that NumPy's PCG64, seeded with 42, draws for them (`random_raw`, which is the same in every version); the first
round(0.2 N) are the validation questions, the others the test questions, both in document order.

The tokens of a question are those that lm_eval's Hugging Face model would run: whitespace at the end of the context
moves to the choices; context and context + choice are tokenised, with the special tokens that the tokenizer adds by
itself (none where the text already begins with the tokenizer's first token); the tokens of a choice are those of
context + choice beyond the number of the context's tokens. So all choices of a question have one context, even where a
tokenizer merges across the border. An empty context is the tokenizer's first token (bos, or else eos). A model runs all
tokens of a row but the last one, `max_length` at most; what is too much is cut from the left. lm_eval cuts every row by
itself. Here a context is cut as its question's longest choice needs it, so that it stays one context, and `cut` says by
how much.

Shapes: N questions, T loops, C choices of the question that has most.
"""

import json
import logging
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass, replace
from functools import cache
from io import StringIO
from itertools import count, groupby
from pathlib import Path
from tempfile import TemporaryDirectory
from textwrap import shorten
from typing import Any, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from loopscope.errors import UserError, check_known, tokenizing
from loopscope.files import read_bytes

Tokens = NDArray[np.int64]
FEWSHOT_SEED = 1234  # lm_eval's own default
SPLIT_SEED = 42  # the paper's
_TOKENIZED_TOGETHER = 256
"""Questions in one call of the tokenizer: enough for its threads; it keeps far more than the ids of a batch."""

Metric = Literal["acc", "acc_norm"]
Split = Literal["train", "validation", "test"]

_MMLU_SUBJECTS = """
abstract_algebra anatomy astronomy business_ethics clinical_knowledge college_biology college_chemistry
college_computer_science college_mathematics college_medicine college_physics computer_security
conceptual_physics econometrics electrical_engineering elementary_mathematics formal_logic global_facts
high_school_biology high_school_chemistry high_school_computer_science high_school_european_history
high_school_geography high_school_government_and_politics high_school_macroeconomics high_school_mathematics
high_school_microeconomics high_school_physics high_school_psychology high_school_statistics
high_school_us_history high_school_world_history human_aging human_sexuality international_law jurisprudence
logical_fallacies machine_learning management marketing medical_genetics miscellaneous moral_disputes
moral_scenarios nutrition philosophy prehistory professional_accounting professional_law professional_medicine
professional_psychology public_relations security_studies sociology us_foreign_policy virology world_religions
"""


@dataclass(frozen=True)
class Benchmark:
    """A benchmark as the paper runs it: tasks of lm_eval, few-shot examples, metric."""

    name: str
    title: str  # as the paper writes it
    shots: int
    metric: Metric  # the one that is scored; the other one is reported too
    definitions: str  # the folder of lm_eval's task definitions
    subjects: tuple[str, ...] = ()  # each is an lm_eval task of its own
    pool: str = "train"  # where few-shot examples come from; lm_eval opens it even where none is drawn
    validation_share: float | None = None  # of the validation split, where the test split's labels are not public
    most_choices: int = 4  # of its questions

    @property
    def has_training(self) -> bool:
        """Whether there are questions to fit a gate on that are in no prompt."""
        return self.pool == "train"

    @property
    def tasks(self) -> tuple[str, ...]:
        """lm_eval's names of it."""
        return tuple(f"{self.name}_{subject}" for subject in self.subjects) or (self.name,)

    def dataset_split(self, split: Split) -> str:
        """The split of the data set that holds the questions of `split`."""
        if split == "train":
            if not self.has_training:
                raise UserError(f"{self.title} has no training questions: its {self.pool} split is in every prompt.")
            return split
        return split if self.validation_share is None else "validation"


BENCHMARKS = {
    benchmark.name: benchmark
    for benchmark in (
        Benchmark("mmlu", "MMLU", 5, "acc", "mmlu/default", subjects=tuple(_MMLU_SUBJECTS.split()), pool="dev"),
        Benchmark("arc_easy", "ARC-Easy", 8, "acc_norm", "arc", most_choices=5),
        Benchmark("arc_challenge", "ARC-Challenge", 25, "acc_norm", "arc", most_choices=5),
        Benchmark("openbookqa", "OpenBookQA", 0, "acc_norm", "openbookqa"),
        Benchmark("hellaswag", "HellaSwag", 10, "acc_norm", "hellaswag", validation_share=0.2),
        Benchmark("commonsense_qa", "CommonsenseQA", 10, "acc", "commonsense_qa", validation_share=0.2, most_choices=5),
    )
}


def benchmark_named(name: str, shots: int | None = None) -> Benchmark:
    """A benchmark by its name, with `shots` few-shot examples in place of the paper's number."""
    check_known(name, BENCHMARKS, "benchmark")
    found = BENCHMARKS[name]
    return found if shots is None else replace(found, shots=shots)


@dataclass(frozen=True)
class Question:
    """One question of a benchmark as lm_eval asks it."""

    key: str  # "arc_challenge/17", "mmlu/anatomy/3": names the document, unique in a split
    context: str
    choices: tuple[str, ...]  # the continuations of lm_eval's requests, with their leading space
    label: int
    norms: tuple[int, ...]  # characters of each choice, by which acc_norm divides
    subject: str | None = None  # questions of one subject begin with the same description and examples


def load_questions(
    benchmark: Benchmark, split: Split, data: Path | None = None, limit: int | None = None
) -> list[Question]:
    """Load the questions of a split; `limit` keeps the first ones (of MMLU in turn from every subject)."""
    found: list[Question] = []
    with templates_compiled_once(), TemporaryDirectory() as folder:
        for subject in subjects_of(benchmark, data):
            task = _lm_eval_task(benchmark, subject, benchmark.dataset_split(split), data, Path(folder))
            found += _questions_of_task(benchmark, subject, task)
    if benchmark.validation_share is not None and split != "train":
        found = [found[document] for document in _split_documents(len(found), benchmark.validation_share, split)]
    return _first_questions(found, limit)


def subjects_of(benchmark: Benchmark, data: Path | None) -> Sequence[str | None]:
    """The subjects of a benchmark (MMLU) whose data are there; [None] for benchmarks without subjects."""
    if not benchmark.subjects:
        return (None,)
    if data is None:
        return benchmark.subjects
    folder = data / benchmark.name
    present = sorted(path.name for path in folder.iterdir() if path.is_dir()) if folder.is_dir() else []
    if not present or not {*present} <= {*benchmark.subjects}:
        raise UserError(
            f"There is no {benchmark.title} in {data}: put its subjects into {folder}/<subject>/, and nothing else "
            f"(found: {', '.join(present) or 'nothing'})."
        )
    return present


def check_data(benchmark: Benchmark, split: Split, data: Path | None) -> None:
    """Reject a folder that lacks files of these questions; this needs no lm_eval."""
    scored = benchmark.dataset_split(split)
    if data is not None:
        for subject in subjects_of(benchmark, data):
            _benchmark_files(benchmark, subject, scored, data)


def _benchmark_files(benchmark: Benchmark, subject: str | None, scored: str, data: Path) -> dict[str, Path]:
    """The local files with few-shot examples and with questions."""
    source = data / benchmark.name / (subject or "")
    files = {name: source / f"{name}.jsonl" for name in (benchmark.pool, scored)}
    for file in files.values():
        if not file.is_file():
            raise UserError(
                f"There is no file {file}, which {benchmark.title} needs; docs/how-to/benchmarks.md lists them."
            )
    return files


def write_task_definition(
    benchmark: Benchmark, subject: str | None, scored: str, data: Path | None, folder: Path
) -> Path:
    """Write a task definition for lm_eval into `folder`: its own, with local data and this split."""
    definition: dict[str, Any] = {"include": str(_task_definitions(benchmark)[_task_name(benchmark, subject)])}
    if scored != "validation" or benchmark.validation_share is None:
        definition["test_split"] = scored
    if scored == benchmark.pool:
        definition["fewshot_split"] = scored  # said, so that lm_eval keeps a question out of its own examples
    if data is not None:
        files = _benchmark_files(benchmark, subject, scored, data)
        for file in files.values():
            try:
                msgspec.json.Decoder().decode_lines(read_bytes(file, "file of questions", None))
            except (RecursionError, ValueError, msgspec.MsgspecError) as error:
                raise UserError(f"{file} holds no questions: {error}.") from None
        local = {"data_files": {name: str(file) for name, file in files.items()}, "cache_dir": str(folder)}
        definition |= {"dataset_path": "json", "dataset_name": None, "dataset_kwargs": local}
    path = folder / f"{_task_name(benchmark, subject)}.yaml"
    path.write_text(json.dumps(definition), encoding="utf-8")  # JSON is YAML
    return path


def _lm_eval_task(benchmark: Benchmark, subject: str | None, scored: str, data: Path | None, folder: Path) -> Any:
    """Build lm_eval's task object with its requests."""
    path = write_task_definition(benchmark, subject, scored, data, folder)
    source = None if data is None else data / benchmark.name / (subject or "")
    with reading_benchmark(benchmark.title, source), redirect_stderr(StringIO()):  # progress bars and hints
        (task,) = _lm_eval_tasks().TaskManager(include_defaults=False).load(str(path))["tasks"].values()
        task.set_config("num_fewshot", benchmark.shots)
        task.set_fewshot_seed(FEWSHOT_SEED)
        task.build_all_requests()
    return task


def _lm_eval_tasks() -> Any:
    """Import `lm_eval.tasks`."""
    from lm_eval import tasks

    return tasks


@contextmanager
def reading_benchmark(what: str, source: Path | None) -> Iterator[None]:
    """Turn errors about an unreachable Hub or unfit data into one sentence."""
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


def _questions_of_task(benchmark: Benchmark, subject: str | None, task: Any) -> Iterator[Question]:
    """Read the questions from lm_eval's task object."""
    place = "/".join((benchmark.name, *([subject] if subject else [])))
    for document, group in groupby(task.instances, key=lambda request: request.doc_id):
        requests = list(group)
        key, texts = f"{place}/{document}", task.doc_to_choice(requests[0].doc)
        gold = task.doc_to_target(requests[0].doc)
        label = gold if isinstance(gold, int) else texts.index(gold) if gold in texts else -1
        if not 0 <= label < len(texts) or not all(isinstance(text, str) for text in texts):
            raise UserError(
                f"{key} has no right answer ({gold!r}), or a choice that is no text; {benchmark.title} needs both."
            )
        choices, norms = tuple(request.args[1] for request in requests), tuple(map(len, texts))
        yield Question(key, requests[0].args[0], choices, label, norms, subject)


def _split_documents(count: int, share: float, split: Split) -> list[int]:
    """The documents of `split`, in order: validation takes a seeded share of them, test the rest."""
    order = np.argsort(np.random.PCG64(SPLIT_SEED).random_raw(count), kind="stable")
    first = round(share * count)
    return sorted((order[:first] if split == "validation" else order[first:]).tolist())


def _first_questions(questions: list[Question], limit: int | None) -> list[Question]:
    """Keep the first `limit` questions, of several subjects in turn."""
    if limit is None:
        return questions
    turns: dict[str | None, Iterator[int]] = defaultdict(count)
    turn_of = [next(turns[question.subject]) for question in questions]
    kept = sorted(range(len(questions)), key=turn_of.__getitem__)[:limit]
    return [questions[index] for index in sorted(kept)]


def _task_name(benchmark: Benchmark, subject: str | None) -> str:
    """The name of lm_eval's task for a benchmark and subject."""
    return benchmark.name if subject is None else f"{benchmark.name}_{subject}"


@cache
def _task_definitions(benchmark: Benchmark) -> dict[str, Path]:
    """lm_eval's files that define the tasks of a benchmark, by task name."""
    tasks = _lm_eval_tasks()
    folder = Path(tasks.__file__).parent / benchmark.definitions
    index = tasks.TaskManager(include_defaults=False, include_path=[folder]).task_index
    return {name: index[name].yaml_path for name in benchmark.tasks}


@contextmanager
def templates_compiled_once() -> Iterator[None]:
    """Compile each prompt template of lm_eval once, not for every document: rendering is 15 times quicker."""
    from lm_eval.utils import env

    compiled = env.from_string
    env.from_string = cache(compiled)
    try:
        yield
    finally:
        env.from_string = compiled


def metric_scores(log_likelihoods: NDArray[np.floating], norms: Tokens, metric: Metric) -> NDArray[np.float64]:
    """Turn log-likelihoods [N, T, C] into the metric's scores: unchanged, or per character by `norms` [N, C].

    Ties go to the first choice, as in lm_eval, so scores are kept in float64.
    """
    scores = log_likelihoods.astype(np.float64)
    return scores if metric == "acc" else scores / norms[:, None]


@dataclass(frozen=True, eq=False)
class EncodedQuestion:
    """A question in tokens: the model scores choice c by the log-probabilities of `choices[c]` after `context`."""

    context: Tokens
    choices: tuple[Tokens, ...]
    prefix: int  # leading tokens of the context that all given questions of its subject share; 0 without others
    cut: int  # tokens that the context lost on its left


def encode_questions(
    questions: Sequence[Question], tokenizer: Any, max_length: int | None = None
) -> list[EncodedQuestion]:
    """Encode questions in their order; `tokenizer` is a fast one of transformers."""
    pairs = []
    for start in range(0, len(questions), _TOKENIZED_TOGETHER):
        pairs += _contexts_and_choices(questions[start : start + _TOKENIZED_TOGETHER], tokenizer)
    contexts, cuts = [], []
    contexts_of_subject: dict[str | None, list[list[int]]] = {}
    for question, (context, endings) in zip(questions, pairs, strict=True):
        needed = len(context) + max(map(len, endings)) - 1
        cuts.append(0 if max_length is None else max(0, needed - max_length))
        contexts.append(context[cuts[-1] :])
        if not contexts[-1] or not all(endings):
            raise UserError(
                f"{question.key} needs a token for its context and for every choice, and the model runs {max_length} "
                "at most; the tokenizer leaves it without one."
            )
        contexts_of_subject.setdefault(question.subject, []).append(contexts[-1])
    prefixes: dict[str | None, int] = {
        subject: _shared_prefix_length(alike) for subject, alike in contexts_of_subject.items() if subject is not None
    }
    return [
        EncodedQuestion(np.array(context), tuple(map(np.array, endings)), prefixes.get(question.subject, 0), cut)
        for question, (_, endings), context, cut in zip(questions, pairs, contexts, cuts, strict=True)
    ]


def _contexts_and_choices(questions: Sequence[Question], tokenizer: Any) -> list[tuple[list[int], list[list[int]]]]:
    """The tokens of the context and of the choices of every question."""
    first = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
    texts = [text for q in questions for text in (q.context.rstrip(), *(q.context + choice for choice in q.choices))]
    bare = [not q.context for q in questions for _ in (q.context, *q.choices)]
    if first is not None:
        begin = tokenizer.decode(first)
        bare = [alone or text.startswith(begin) for alone, text in zip(bare, texts, strict=True)]
    tokens = iter(_tokenized(texts, bare, tokenizer))
    pairs = []
    for question in questions:
        context, *rows = [next(tokens) for _ in (question.context, *question.choices)]
        if question.context:
            endings = [row[len(context) :] for row in rows]
        else:
            context = [] if first is None else [first]
            endings = [row[1:] if row[:1] == context else row for row in rows]
        pairs.append((context, endings))
    return pairs


def _tokenized(texts: list[str], bare: list[bool], tokenizer: Any) -> list[list[int]]:
    """The tokens of every text, without special tokens for `bare` texts."""
    tokens: list[list[int]] = [[]] * len(texts)
    for alone in {*bare}:
        chosen = [index for index, value in enumerate(bare) if value == alone]
        batch = [texts[index] for index in chosen]
        with tokenizing():
            found = tokenizer(batch, add_special_tokens=not alone, return_attention_mask=False, verbose=False)
        for index, row in zip(chosen, found["input_ids"], strict=True):
            tokens[index] = row
    return tokens


def _shared_prefix_length(contexts: list[list[int]]) -> int:
    """The number of leading tokens that all contexts share; each context keeps at least its last token."""
    if len(contexts) < 2:
        return 0
    low, high = min(contexts), max(contexts)  # in dictionary order: what these two share, all between them share
    most = min(map(len, contexts)) - 1
    return next((place for place in range(most) if low[place] != high[place]), most)
