"""Texts are the user's: a file with other bytes is refused, or gives what the same text gives when it comes cleanly."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

import loopscope as ls
from loopscope.models.checkpoint import load_model
from loopscope.models.tokenizer import chat_prompt, load_tokenizer
from loopscope.recording.question_recording import record_benchmark
from loopscope.recording.text_recording import record_text

from .runner import Case, WrongError, json_values
from .world import TEXTS, World


@cache
def _ready(checkpoint: Path) -> tuple[Any, Any]:
    """The model and the tokenizer of a good checkpoint, loaded once."""
    return load_model(checkpoint), load_tokenizer(checkpoint)


def prompts(world: World, case: Case) -> str:
    path = case.copy(world.documents[case.rng.choice(("prompts.jsonl", "prompts.txt"))])
    case.spoil(path)
    words = ("--max-new-tokens", 2, "--json", "--device", "cpu")
    printed = case.command("generate", world.checkpoint, "--prompts", path, *words)
    lines = [line for line in path.read_bytes().decode("utf-8-sig").split("\n") if line.strip()]
    given = [json.loads(line) if path.suffix == ".jsonl" else {"prompt": line} for line in lines]
    answers = [json.loads(line) for line in printed.split("\n") if line]
    if len(answers) != len(given):
        raise WrongError("there are more or fewer answers than prompts")
    model, tokenizer = _ready(world.checkpoint)
    entry, answer = case.rng.choice(list(zip(given, answers, strict=True)))
    said, chosen = entry.get("messages", entry.get("prompt")), answer["prompt"]
    if said != chosen and (path.suffix == ".jsonl" or said.rstrip("\r") != chosen):  # the end of a line may go
        raise WrongError("a prompt is not what the file says")
    tokens = tokenizer(chosen)["input_ids"] if isinstance(chosen, str) else chat_prompt(tokenizer, chosen)
    policy = None if entry.get("loops") is None else ls.ExitPolicy("fixed", entry["loops"])
    (alone,) = ls.generate(model, [ls.Prompt(0, np.array(tokens))], policy, max_new_tokens=2, stop=[0, 1, 2])
    if alone.tokens != answer["tokens"]:
        raise WrongError("a prompt gives another text than alone")
    return "other"


def unfinished_texts(world: World, case: Case) -> str:
    """What an interrupted command kept: it goes on to what it would have written, or is refused."""
    kept = case.copy(world.unfinished_texts)
    case.spoil(kept, writes=True)
    out = kept.with_name(kept.name.removesuffix(".unfinished"))
    case.command(*world.words(TEXTS, out))
    if out.read_bytes() != world.whole_texts.read_bytes():
        raise WrongError("the texts are not those of a command that was not interrupted")
    return "same"


def examples(world: World, case: Case) -> str:
    path = case.copy(world.documents["examples.txt"])
    case.spoil(path)
    printed = case.command("run", world.run, path, "--threshold", 0.5, "--device", "cpu")
    with path.open(encoding="utf-8-sig") as lines:
        given = [line.strip() for line in lines if line.strip()]
    if [json.loads(line)["example"] for line in printed.split("\n") if line] != given:
        raise WrongError("the answered examples are not those of the file")
    return "other"


def documents(world: World, case: Case) -> str:
    name = case.rng.choice(("documents.txt", "documents.jsonl"))
    path = case.copy(world.documents[name])
    case.spoil(path)
    if case.rng.random() < 0.1:
        case.command("record", "text", world.checkpoint, path, "--out", case.out, "--device", "cpu")
    recording = record_text(world.checkpoint, [path], "validation", case.out)
    data = path.read_bytes()
    if name.endswith(".jsonl"):
        found = [entry["text"] for entry in json_values(data.decode())]
    else:
        found = data.decode().split("<|endoftext|>")
    _, tokenizer = _ready(world.checkpoint)
    tokens = [tokenizer.encode(text, add_special_tokens=False) for text in found if text.strip()]
    expected = [token for row in tokens for token in row[1:]]
    if recording.labels is None or recording.labels.tolist() != expected:
        raise WrongError("the recorded tokens are not those of the text")
    return "other"


def benchmark(world: World, case: Case) -> str:
    """The questions of a benchmark as lm_eval reads them."""
    data = case.copy(world.benchmarks, "data")
    case.spoil(case.rng.choice(sorted((data / "openbookqa").iterdir())))
    recording = record_benchmark(world.checkpoint, "openbookqa", "test", case.out, data=data, limit=2)
    if recording.num_examples > 2:
        raise WrongError("more questions than were asked for")
    return "other"
