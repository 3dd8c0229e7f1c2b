"""The verbs for language models: generate, record --benchmark, bench scoring and bench generation."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from benchmark_slices import DATA, byte_pairs
from conftest import random_trajectory
from tiny_language import write_ouro

import loopscope as ls
from loopscope.cli import main
from loopscope.cli.generating import Spelled
from loopscope.engine import generation
from loopscope.trajectory import Trajectory

TASK_OPTIONS = (("--no-logits",), ("--examples", "5"), ("--levels", "1-2"))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_ouro(tmp_path_factory.mktemp("models") / "ouro", byte_pairs()))


def _run(*arguments: str) -> int:
    return main(list(arguments))


def test_a_prompt_is_continued_as_it_comes(checkpoint: str, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--max-new-tokens", "6", "--readout", "gate", "--threshold", "0.6", "--show-loops")
    assert _run("generate", checkpoint, "A student wants to", *options) == 0
    told = capsys.readouterr()
    assert told.out.count("[") == 6
    assert "6 tokens in" in told.err
    assert "of 4 loops on average" in told.err


def test_many_prompts(checkpoint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "prompts.jsonl").write_text(
        '{"prompt": "The sun"}\n{"messages": [{"role": "user", "content": "The moon"}]}\n', encoding="utf-8"
    )
    asked = ("--prompts", str(tmp_path / "prompts.jsonl"), "--max-new-tokens", "5")
    assert _run("generate", checkpoint, *asked, "--out", str(tmp_path / "told.jsonl"), "--loops", "2") == 0
    lines = [json.loads(line) for line in (tmp_path / "told.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [len(line["tokens"]) for line in lines] == [5, 5]
    assert all(loops == 2 for line in lines for loops in line["loops"])
    assert lines[0]["text"] == byte_pairs().decode(lines[0]["tokens"], skip_special_tokens=True)
    assert _run("generate", checkpoint, "The sun", "--max-new-tokens", "5", "--loops", "2", "--json") == 0
    assert json.loads(capsys.readouterr().out)["tokens"] == lines[0]["tokens"]


def test_a_text_is_spelled_as_it_comes_without_decoding_it_again_and_again() -> None:
    class Counting:
        most = 0

        def decode(self, tokens: list[int], **options: bool) -> str:
            self.most = max(self.most, len(tokens))
            return str(byte_pairs().decode(tokens, **options))

    counting = Counting()
    said = "Grüße, 你好 🙂 and some more words. " * 20
    tokens = byte_pairs()(said)["input_ids"]
    text = Spelled(counting)
    parts = [text.add(token) for token in tokens]
    assert "".join(parts) + text.rest() == said
    assert "\N{REPLACEMENT CHARACTER}" not in "".join(parts)
    assert counting.most < 10
    for token in byte_pairs()("🙂")["input_ids"][:2]:  # it ends within a character
        assert text.add(token) == ""
    assert text.rest() == "\N{REPLACEMENT CHARACTER}"


def test_an_interrupted_run_leaves_what_was_finished(
    checkpoint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "prompts.txt").write_text("one\ntwo\nthree\n", encoding="utf-8")
    whole = generation.stream

    def cut(*given: Any, **options: Any) -> Iterator[Any]:
        """Text 1 goes on and on; 2 ends, then somebody presses Ctrl-C."""
        for token in whole(*given, **options):
            yield replace(token, finished=None) if token.key == 0 else token
            if token.key == 1 and token.finished:
                raise KeyboardInterrupt

    monkeypatch.setattr(generation, "stream", cut)
    asked = ("--prompts", str(tmp_path / "prompts.txt"), "--max-new-tokens", "3", "--batch-size", "2")
    assert _run("generate", checkpoint, *asked, "--out", str(tmp_path / "told.jsonl")) == 130
    (line,) = [json.loads(line) for line in (tmp_path / "told.jsonl").read_text(encoding="utf-8").splitlines()]
    assert (line["number"], line["prompt"], len(line["tokens"])) == (2, "two", 3)
    told = capsys.readouterr().err
    assert "prompts that were finished are written" in told
    assert "same command" not in told


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.jsonl", b'{"prompt": 5}', "a.jsonl, line 1 is neither"),
        ("a.jsonl", b'{"prompt": "x"}\n{"messages": [1]}', "a.jsonl, line 2 is neither"),
        ("a.jsonl", b'{"messages": [{"role": "user"}]}', "line 1 is neither"),
        ("a.jsonl", b'{"messages": []}', "line 1 is neither"),
        ("a.jsonl", b"[5]", "line 1 is neither"),
        ("a.txt", b"\n\n", "There is no prompt in"),
        ("a.txt", b"caf\xe9", "a.txt is not UTF-8"),
    ],
)
def test_a_file_that_is_no_prompts(
    tmp_path: Path, name: str, content: bytes, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before the model is looked for: here there is none."""
    (tmp_path / name).write_bytes(content)
    assert _run("generate", str(tmp_path / "nowhere"), "--prompts", str(tmp_path / name)) == 2
    assert words in capsys.readouterr().err


def test_a_chat_ends_with_its_turn(checkpoint: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Chat and plain text are different prompts."""
    told = []
    for more in ((), ("--chat",)):
        assert _run("generate", checkpoint, "The sun", "--max-new-tokens", "4", "--json", *more) == 0
        told.append(json.loads(capsys.readouterr().out)["tokens"])
    assert told[0] != told[1]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ((), "Give a prompt"),
        (("x", "--prompts", "y"), "Give a prompt"),
        (("x", "--readout", "gate"), "--threshold"),
        (("x", "--temperature", "-1"), "temperature"),
        (("x", "--top-p", "2"), "top_p"),
        (("x", "--seed", "9" * 23), "seed"),
        (("x", "--seed", "-1"), "seed"),
        (("x", "--top-k", "9" * 23), "top_k"),
        (("x", "--dtype", "int8"), "There is no precision 'int8'"),
        (("x", "--loops", "9"), "beyond the model's 4 loops"),
        (("--prompts", "nowhere.txt"), "There is no file nowhere.txt"),
    ],
)
def test_what_cannot_be_generated(
    checkpoint: str, options: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _run("generate", checkpoint, *options) == 2
    told = capsys.readouterr().err
    assert words in told
    assert "Traceback" not in told


def test_a_promise_about_whole_answers_is_none_about_text(
    checkpoint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = []
    for sequences in (None, np.arange(2000)):
        recording = random_trajectory(rows=2000, split="validation", sequences=sequences)
        file = tmp_path / f"{sequences is None}.json"
        ls.calibrate(recording, 0.9, 0.5, readout="margin").save(file)
        assert _run("generate", checkpoint, "x", "--max-new-tokens", "2", "--policy", str(file)) == 0
        told.append("promise is about whole answers" in capsys.readouterr().err)
    assert told == [True, False]


def test_a_device_without_room_is_told_in_a_sentence(
    checkpoint: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")

    monkeypatch.setattr(generation, "stream", full)
    assert _run("generate", checkpoint, "x") == 2
    told = capsys.readouterr().err
    assert told.startswith("loopscope: there is not enough memory")
    assert all(option in told for option in ("--batch-tokens", "--batch-size", "--dtype"))


@pytest.mark.parametrize(("verb", "going_on"), [("generate", False), ("train", True)])
def test_only_what_goes_on_says_so_when_interrupted(
    verb: str, going_on: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("loopscope.training.read_settings", interrupted)
    monkeypatch.setattr("loopscope.models.hub.find_checkpoint", interrupted)
    assert main([verb, "demo", *(("--out", "nowhere") if verb == "train" else ("x",))]) == 130
    assert ("same command" in capsys.readouterr().err) == going_on


def test_a_benchmark_is_recorded_and_evaluated(
    checkpoint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for split in ("validation", "test"):
        out = ("--out", str(tmp_path / split))
        where = ("--data", str(DATA), "--split", split, "--limit", "12", *out)
        assert _run("record", checkpoint, "--benchmark", "openbookqa", *where, "--json") == 0
        told = json.loads(capsys.readouterr().out)
        assert told["metric"] == "acc_norm"
        assert len(told["acc"]) == len(told["acc_norm"]) == 4
        recording = Trajectory.load(tmp_path / split)
        assert told["acc_norm"] == recording.correct.mean(axis=0).tolist()
    assert _run("evaluate", str(tmp_path / "validation"), str(tmp_path / "test")) == 0
    assert "hidden_cosine" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "words"),
    [
        *((("--benchmark", "openbookqa", *more), f"{more[0]} is not for") for more in TASK_OPTIONS),
        (("--benchmark", "openbookqa", "--context", "9"), "--context is not for"),
        (("--benchmark", "nothing"), "There is no benchmark 'nothing'"),
        (("--benchmark", "mmlu", "--split", "train"), "MMLU has no training questions"),
        (("--benchmark", "openbookqa", "--split", "extrapolation"), "choose train, validation or test"),
        (("--benchmark", "openbookqa", "--text", "a.txt"), "not both"),
    ],
)
def test_what_cannot_be_recorded(
    checkpoint: str, tmp_path: Path, options: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _run("record", checkpoint, *options, "--data", str(DATA), "--out", str(tmp_path / "out")) == 2
    assert words in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_scoring_is_measured(checkpoint: str, capsys: pytest.CaptureFixture[str]) -> None:
    measured = ("--benchmark", "mmlu", "--data", str(DATA), "--limit", "6", "--rounds", "1", "--json")
    assert _run("bench", "scoring", checkpoint, *measured) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["largest_difference"] < 1e-3
    assert told["shared_tokens"] > 100
    assert all(told[name]["median"] > 0 for name in ("per_choice", "per_choice_and_depth", "per_question"))


def test_generation_is_measured(checkpoint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "text.txt"
    text.write_text("<|endoftext|>".join(f"{word} " * 40 for word in ("sun", "moon", "sea", "sky")), encoding="utf-8")
    options = ["--text", str(text), "--prompts", "3", "--prompt-tokens", "8", "--new-tokens", "6", "--rounds", "1"]
    rules = ["--readout", "fixed", "--threshold", "4", "--readout", "fixed", "--threshold", "2", "--json"]
    assert _run("bench", "generation", checkpoint, *options, *rules) == 0
    told = {(way["threshold"], way["cache"]): way for way in json.loads(capsys.readouterr().out)["ways"]}
    assert len(told) == 6
    for cache in ("all", "fill"):  # full depth is full depth
        assert told[4, cache]["agreement"] == 1
        assert told[4, cache]["kl"] < 1e-9
    assert told[2, "all"]["average_loops"] == 2
    assert told[2, "all"]["kl"] > 0
    assert _run("bench", "generation", checkpoint, *options[:2], "--readout", "gate") == 2
    assert "--threshold" in capsys.readouterr().err
