"""Are the questions lm_eval's own, to the character and to the token, and split as the docs say?"""

import json
import shutil
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from benchmark_slices import DATA, asked, byte_pairs
from conftest import GOLDEN

from loopscope.errors import UserError
from loopscope.questions import (
    BENCHMARKS,
    Question,
    _task_definitions,
    benchmark_named,
    encode_questions,
    load_questions,
)


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
    assert len(BENCHMARKS["mmlu"].subjects) == 57
    for benchmark in BENCHMARKS.values():
        assert all(path.is_file() for path in _task_definitions(benchmark).values())
    folder = next(iter(_task_definitions(BENCHMARKS["mmlu"]).values())).parent
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


def test_data_that_do_not_fit_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no file .*arc_easy/train.jsonl, which ARC-Easy needs"):
        load_questions(BENCHMARKS["arc_easy"], "test", tmp_path)
    with pytest.raises(UserError, match="no MMLU in"):
        load_questions(BENCHMARKS["mmlu"], "test", tmp_path)
    (tmp_path / "mmlu" / "anatomie").mkdir(parents=True)
    with pytest.raises(UserError, match="nothing else .found: anatomie"):
        load_questions(BENCHMARKS["mmlu"], "test", tmp_path)
    shutil.copytree(DATA / "arc_easy", tmp_path / "arc_easy")
    (tmp_path / "arc_easy" / "test.jsonl").write_text("not JSON\n", encoding="utf-8")
    with pytest.raises(UserError, match="arc_easy/test.jsonl holds no questions"):
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
    with pytest.raises(UserError, match="openbookqa/1 has .* a choice that is no text"):
        load_questions(BENCHMARKS["openbookqa"], "test", tmp_path)


def test_without_a_folder_the_hub_is_asked() -> None:
    with pytest.raises(UserError, match="OpenBookQA could not be read from the Hub.*allenai/openbookqa"):
        load_questions(BENCHMARKS["openbookqa"], "test")


@pytest.mark.parametrize("name", ["arc_easy", "arc_challenge", "hellaswag", "commonsense_qa"])
def test_a_training_question_is_not_among_its_own_examples(name: str) -> None:
    for question in asked(name, "train"):
        own = question.context.split("\n\n")[-1]
        assert question.context.count(own) == 1, question.key


def lm_eval_pairs(questions: list[Question], tokenizer: Any) -> list[tuple[list[int], list[int]]]:
    """Context and continuation of every request, by lm_eval's own code."""
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    class TokensOnly(HFLM):
        def __init__(self) -> None:
            self.tokenizer, self.backend = tokenizer, "causal"
            self.add_bos_token = self.custom_prefix_token_id = self.enable_thinking = None

        def _loglikelihood_tokens(self, requests: Any, **_: Any) -> Any:
            return [(context, continuation) for _, context, continuation in requests]

    requests = [Instance("loglikelihood", {}, (q.context, choice), 0) for q in questions for choice in q.choices]
    return TokensOnly().loglikelihood(requests, disable_tqdm=True)


def asking(context: str, *choices: str) -> Question:
    return Question(key="made/0", context=context, choices=choices, label=0, norms=tuple(map(len, choices)))


ODD = [
    asking("ends in spaces  \n ", " a", " longer one"),
    asking("", " nothing before", "<|endoftext|> the first token"),
    asking("<|endoftext|>begins with the first token", " a", " b"),
    asking("Where do cats sle", "ep", "ep in the sun", "pt"),  # words that go on
]


@pytest.mark.parametrize("settings", [{}, {"words": False}, {"first": True}], ids=["plain", "merging", "bos"])
def test_tokens_are_those_of_lm_eval(settings: dict[str, bool]) -> None:
    tokenizer = byte_pairs(**settings)
    questions = [question for name in BENCHMARKS for question in asked(name)[:6]] + ODD
    ours = encode_questions(questions, tokenizer)
    pairs = [(encoded.context.tolist(), choice.tolist()) for encoded in ours for choice in encoded.choices]
    assert pairs == lm_eval_pairs(questions, tokenizer)
    assert all(encoded.cut == 0 for encoded in ours)
    merged = [
        tokenizer(q.context + q.choices[0])["input_ids"][: len(encoded.context)] != encoded.context.tolist()
        for q, encoded in zip(questions, ours, strict=True)
    ]
    assert any(merged[:-4]) == ("words" in settings)  # the odd case is among the real questions


def test_a_subjects_questions_share_their_first_tokens() -> None:
    questions = asked("mmlu") + asked("arc_easy")[:5]
    encoded = encode_questions(questions, byte_pairs())
    for subject in {question.subject for question in questions} - {None}:
        group = [e for q, e in zip(questions, encoded, strict=True) if q.subject == subject]
        (prefix,) = {e.prefix for e in group}
        assert len({tuple(e.context[:prefix]) for e in group}) == 1
        assert len({tuple(e.context[: prefix + 1]) for e in group}) > 1
        text = byte_pairs().decode(group[0].context[:prefix])
        assert text.count("\nAnswer:") == 5
    assert [e.prefix for e in encoded[-5:]] == [0] * 5
    assert encode_questions(questions[:1], byte_pairs())[0].prefix == 0
    assert encode_questions(questions[:1] * 2, byte_pairs())[0].prefix == len(encoded[0].context) - 1


def test_what_is_too_long_is_cut_from_the_left_as_the_longest_choice_needs_it() -> None:
    questions = asked("arc_challenge")[:20]
    whole = encode_questions(questions, byte_pairs())
    limit = int(np.median([len(e.context) for e in whole]))
    for full, short in zip(whole, encode_questions(questions, byte_pairs(), limit), strict=True):
        longest = max(map(len, full.choices))
        row = np.concatenate([full.context, max(full.choices, key=len)])[-(limit + 1) :]  # as lm_eval cuts it
        np.testing.assert_array_equal(short.context, row[:-longest])
        assert short.cut == len(full.context) - len(short.context)
        assert [c.tolist() for c in short.choices] == [c.tolist() for c in full.choices]
    with pytest.raises(UserError, match="and for every choice, and the model runs 2 at most"):
        encode_questions(questions, byte_pairs(), 2)


def test_a_question_without_tokens_is_refused() -> None:
    for question in (asking("context", "", " b"), asking("  ", " a")):
        with pytest.raises(UserError, match="made/0 needs a token"):
            encode_questions([question], byte_pairs())
    assert encode_questions([], byte_pairs()) == []
