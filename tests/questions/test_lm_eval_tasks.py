"""Are the questions lm_eval's own, to the character, and split as the docs say?"""

import json
import shutil
import sys
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from benchmark_slices import DATA, asked
from conftest import GOLDEN

from loopscope.errors import UserError
from loopscope.questions import BENCHMARKS, benchmark_named, load_questions
from loopscope.questions.lm_eval_tasks import _definitions
from loopscope.reproduction.published import BenchmarkTitle as Title


def golden_requests(benchmark: str) -> dict[str, list[dict[str, Any]]]:
    """By the key of the question that they ask."""
    found = defaultdict(list)
    for line in map(json.loads, (GOLDEN / "prompts.jsonl").read_text(encoding="utf-8").splitlines()):
        found[f"{line['task'].replace('mmlu_', 'mmlu/')}/{line['doc_id']}"].append(line)
    return {key: requests for key, requests in found.items() if key.startswith(f"{benchmark}/")}


def numbers(name: str, split: Any) -> list[int]:
    return [int(question.key.rpartition("/")[2]) for question in asked(name, split)]


@pytest.mark.parametrize("name", BENCHMARKS)
def test_every_golden_request_is_reproduced(name: str) -> None:
    golden = golden_requests(name)
    assert len(golden) == (8 if name == "mmlu" else 4)
    splits: tuple[Any, ...] = ("validation", "test") if BENCHMARKS[name].validation_share else ("test",)
    ours = {question.key: question for split in splits for question in asked(name, split)}
    for key, requests in golden.items():
        place, _, document = key.rpartition("/")
        assert requests == [
            {
                "task": place.replace("/", "_"),
                "num_fewshot": BENCHMARKS[name].shots,
                "doc_id": int(document),
                "choice": choice,
                "context": ours[key].context,
                "continuation": continuation,
                "is_gold": choice == ours[key].label,
            }
            for choice, continuation in enumerate(ours[key].choices)
        ]


def test_the_catalogue_is_the_papers_and_lm_evals() -> None:
    assert {benchmark.title for benchmark in BENCHMARKS.values()} == {*get_args(Title)}
    assert len(BENCHMARKS["mmlu"].subjects) == 57
    for benchmark in BENCHMARKS.values():
        assert all(path.is_file() for path in _definitions(benchmark).values())
    folder = next(iter(_definitions(BENCHMARKS["mmlu"]).values())).parent
    assert {path.stem for path in folder.glob("mmlu_*.yaml")} == {*BENCHMARKS["mmlu"].tasks}
    with pytest.raises(UserError, match="no benchmark 'piqa'; choose one of mmlu, arc_easy"):
        benchmark_named("piqa")


@pytest.mark.parametrize("name", ["mmlu", "arc_challenge", "openbookqa"])
def test_validation_questions_are_the_validation_documents_with_the_same_shots(name: str) -> None:
    questions = asked(name, "validation")
    folder = DATA / "mmlu" / "anatomy" if name == "mmlu" else DATA / name
    documents = [json.loads(line) for line in (folder / "validation.jsonl").read_text(encoding="utf-8").splitlines()]
    own = [question for question in questions if question.subject in (None, "anatomy")]
    for document, question in zip(documents, own, strict=True):
        text = document["question_stem" if name == "openbookqa" else "question"].strip()
        assert question.context.count("\nAnswer:") == (0 if name == "openbookqa" else BENCHMARKS[name].shots + 1)
        assert text in question.context.split("\n\n")[-1]
    # the few-shot draws depend on the document's number alone
    shots = [[q.context.rpartition("\n\n")[0] for q in asked(name, split)[:10]] for split in ("validation", "test")]
    assert shots[0] == shots[1]


@pytest.mark.parametrize("name", ["hellaswag", "commonsense_qa"])
def test_unlabelled_test_splits_are_replaced_by_four_fifths_of_validation(name: str) -> None:
    validation, test = numbers(name, "validation"), numbers(name, "test")
    count = len((DATA / name / "validation.jsonl").read_text(encoding="utf-8").splitlines())
    assert sorted(validation + test) == list(range(count))
    assert len(validation) == round(0.2 * count)
    assert validation == sorted(validation)
    assert test == sorted(test)
    order = np.argsort(np.random.PCG64(42).random_raw(count))
    assert {*validation} == {*order[: len(validation)]}
    if name == "hellaswag":  # as written down once: the same in every version of NumPy
        assert validation[:8] == [4, 8, 17, 27, 28, 35, 36, 49]


def test_a_limit_keeps_the_first_questions_of_every_subject() -> None:
    benchmark = BENCHMARKS["mmlu"]
    kept = load_questions(benchmark, "validation", DATA, limit=7)
    assert Counter(q.subject for q in kept) == {"anatomy": 3, "global_facts": 2, "high_school_mathematics": 2}
    whole = asked("mmlu", "validation")
    assert kept == [q for q in whole if int(q.key.rpartition("/")[2]) < (3 if q.subject == "anatomy" else 2)]
    assert load_questions(BENCHMARKS["arc_easy"], "test", DATA, limit=5) == asked("arc_easy")[:5]


def test_questions_have_three_four_or_five_choices_and_keys_of_their_own() -> None:
    questions = [question for name in BENCHMARKS for question in asked(name)]
    assert {len(question.choices) for question in questions} == {3, 4, 5}
    assert len({question.key for question in questions}) == len(questions)
    for question in questions:
        assert question.norms == tuple(len(choice) - 1 for choice in question.choices)  # all but the leading space


def test_data_that_do_not_fit_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no file .*arc_easy/train.jsonl, which ARC-Easy needs"):
        load_questions(BENCHMARKS["arc_easy"], "test", tmp_path)
    with pytest.raises(UserError, match="no MMLU in"):
        load_questions(BENCHMARKS["mmlu"], "test", tmp_path)
    (tmp_path / "mmlu" / "anatomie").mkdir(parents=True)
    with pytest.raises(UserError, match="anatomie is not a subject of MMLU"):
        load_questions(BENCHMARKS["mmlu"], "test", tmp_path)
    shutil.copytree(DATA / "arc_easy", tmp_path / "arc_easy")
    (tmp_path / "arc_easy" / "test.jsonl").write_text("not JSON\n", encoding="utf-8")
    with pytest.raises(UserError, match="ARC-Easy could not be read from .*arc_easy"):
        load_questions(BENCHMARKS["arc_easy"], "test", tmp_path)
    shutil.copytree(DATA / "commonsense_qa", tmp_path / "commonsense_qa")
    unlabelled = (DATA / "commonsense_qa" / "validation.jsonl").read_text(encoding="utf-8").splitlines()
    text = json.dumps(json.loads(unlabelled[0]) | {"answerKey": ""}) + "\n"
    (tmp_path / "commonsense_qa" / "validation.jsonl").write_text(text, encoding="utf-8")
    with pytest.raises(UserError, match="commonsense_qa/0 has no right answer"):
        load_questions(BENCHMARKS["commonsense_qa"], "test", tmp_path)
    shutil.copytree(DATA / "openbookqa", tmp_path / "openbookqa")
    good, odd = (DATA / "openbookqa" / "test.jsonl").read_text(encoding="utf-8").splitlines()[:2]
    spoilt = json.loads(odd)
    spoilt["choices"]["text"][3] = None
    (tmp_path / "openbookqa" / "test.jsonl").write_text(f"{good}\n{json.dumps(spoilt)}\n", encoding="utf-8")
    with pytest.raises(UserError, match="openbookqa/1 has a choice that is no text"):
        load_questions(BENCHMARKS["openbookqa"], "test", tmp_path)


def test_a_missing_lm_eval_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval.utils", None)
    with pytest.raises(UserError, match=r"pip install 'loopscope\[lm\]'"):
        load_questions(BENCHMARKS["openbookqa"], "test", DATA)


def test_without_a_folder_the_hub_is_asked() -> None:
    with pytest.raises(UserError, match="OpenBookQA could not be read from the Hub.*allenai/openbookqa"):
        load_questions(BENCHMARKS["openbookqa"], "test")


@pytest.mark.parametrize("name", ["arc_easy", "arc_challenge", "hellaswag", "commonsense_qa"])
def test_a_training_question_is_not_among_its_own_examples(name: str) -> None:
    for question in asked(name, "train"):
        own = question.context.split("\n\n")[-1]
        assert question.context.count(own) == 1, question.key
