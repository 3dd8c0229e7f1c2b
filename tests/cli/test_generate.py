"""`loopscope generate`: prompts in, text or JSON lines out, and what cannot be generated."""

import json
import re
import shutil
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from benchmark_slices import byte_pairs
from tiny_language import draft_at, write_ouro

import loopscope as ls
from cli.conftest import Command, run
from loopscope.cli.generate import _no_saving_note
from loopscope.engine import generation
from loopscope.engine.draft_spacing import Spacing
from loopscope.models.tokenizer import Detokenizer
from loopscope.scope import Scope


def test_a_prompt_is_continued_as_it_comes(checkpoint: str, command: Command) -> None:
    options = ("--max-new-tokens", "6", "--readout", "gate", "--threshold", "0.6", "--show-loops")
    out, err = command("generate", checkpoint, "A student wants to", *options)
    assert out.count("[") == 6
    assert "6 tokens in" in err
    assert "of 4 loops per token on average" in err


def test_many_prompts(checkpoint: str, tmp_path: Path, command: Command) -> None:
    (tmp_path / "prompts.jsonl").write_text(
        '{"prompt": "The sun"}\n{"messages": [{"role": "user", "content": "The moon"}]}\n', encoding="utf-8"
    )
    words = ("--prompts", str(tmp_path / "prompts.jsonl"), "--max-new-tokens", "5")
    assert run("generate", checkpoint, *words, "--out", str(tmp_path / "texts.jsonl"), "--loops", "2") == 0
    lines = [json.loads(line) for line in (tmp_path / "texts.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [len(line["tokens"]) for line in lines] == [5, 5]
    assert all(loops == 2 for line in lines for loops in line["loops"])
    assert [line["finish_reason"] for line in lines] == ["length", "length"]
    assert lines[0]["text"] == byte_pairs().decode(lines[0]["tokens"], skip_special_tokens=True)
    for place, (prompt, *more) in enumerate((("The sun",), ("The moon", "--chat"))):  # a turn is another prompt
        assert (
            command.json("generate", checkpoint, prompt, *more, "--max-new-tokens", "5", "--loops", "2")["tokens"]
            == lines[place]["tokens"]
        )


def test_lossless_text_is_full_depths(checkpoint: str, command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    draft_at(Spacing(1), monkeypatch)
    words = ("generate", checkpoint, "A student wants to", "--max-new-tokens", "20", "--json")
    lines, notes = [], []
    for more in ((), ("--loops", "1", "--lossless")):
        out, err = command(*words, *more)
        lines.append(json.loads(out))
        notes.append(err)
    full, ours = lines
    assert ours["tokens"] == full["tokens"]
    assert ours == full  # how much was drafted depends on the machine, and is in the note
    assert re.search(r"\d+ of [1-9]\d* drafts stood", notes[1])
    assert "up to rounding" not in notes[1]
    for more, noted in ((("--loops", "1", "--lossless"), True), ((), False)):
        said = command(*words, *more, "--dtype", "bfloat16").err
        assert ("In bfloat16, lossless text is full depth's up to rounding" in said) is noted


def test_a_text_is_spelled_as_it_comes_without_decoding_it_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = byte_pairs()
    written = "Grüße, 你好 🙂 and some more words. " * 20
    tokens = tokenizer(written)["input_ids"]
    with monkeypatch.context() as patch:
        patch.setattr(type(tokenizer), "decode", None)  # never of all tokens
        text = Detokenizer(tokenizer)
        parts = [text.add(token) for token in tokens]
    assert "".join(parts) + text.rest() == written
    assert "\N{REPLACEMENT CHARACTER}" not in "".join(parts)
    for token in tokenizer("🙂")["input_ids"][:2]:  # it ends within a character
        assert text.add(token) == ""
    assert text.rest() == "\N{REPLACEMENT CHARACTER}"


def lines_of(file: Path) -> list[Any]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize("more", [(), ("--temperature", "0.9"), ("--temperature", "0.9", "--loops", "1", "--lossless")])
def test_an_interrupted_run_goes_on_where_it_was(
    more: tuple[str, ...], checkpoint: str, tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "prompts.txt").write_text("one\ntwo\nthree\n", encoding="utf-8")
    whole, asked = generation.stream, []

    def cut(model: Any, prompts: Any, *given: Any, **options: Any) -> Iterator[Any]:
        """Text 1 goes on and on; 2 ends, then somebody presses Ctrl-C."""
        for token in whole(model, prompts, *given, **options):
            yield replace(token, finish_reason=None) if token.key == 0 else token
            if token.key == 1 and token.finish_reason:
                raise KeyboardInterrupt

    def noted(model: Any, prompts: Any, *given: Any, **options: Any) -> Iterator[Any]:
        asked.extend(prompt.key for prompt in prompts)
        return whole(model, prompts, *given, **options)

    words = ("generate", checkpoint, "--prompts", str(tmp_path / "prompts.txt"), "--max-new-tokens", "3")
    words += ("--batch-size", "2", *more)
    assert run(*words, "--out", str(tmp_path / "undisturbed.jsonl")) == 0
    texts, kept = tmp_path / "texts.jsonl", tmp_path / "texts.jsonl.unfinished"
    monkeypatch.setattr(generation, "stream", cut)
    assert "run the same command again to go on" in command(*words, "--out", str(texts), code=130).err
    assert not texts.exists()
    line = json.loads(kept.read_text(encoding="utf-8").split("\n")[1].partition(" ")[2])
    assert (line["number"], line["prompt"], len(line["tokens"])) == (2, "two", 3)
    damaged = kept.read_bytes().split(b"\n")[1].replace(b'"number": 2', b'"number": 1')
    kept.write_bytes(kept.read_bytes() + damaged + b'\n012 {"number": 3, "pro')  # as a kill leaves it, and altered
    monkeypatch.setattr(generation, "stream", noted)
    assert "has the texts of another command" in command.refused(*words, "--seed", "5", "--out", str(texts))
    assert "1 of 3 texts were finished before" in command(*words, "--out", str(texts)).err
    assert asked == [0, 2]
    assert texts.read_bytes() == (tmp_path / "undisturbed.jsonl").read_bytes()
    assert not kept.exists()
    assert "is there already" in command.refused(*words, "--out", str(texts))


def test_texts_of_another_model_are_not_gone_on_with(
    checkpoint: str, tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the texts depend on may change between two halves: the model's depth, its tokens, the rule's code."""
    (tmp_path / "prompts.txt").write_text("one\ntwo\n", encoding="utf-8")
    (tmp_path / "own_height.py").write_text(
        "import loopscope as ls\n\n\n"
        "@ls.readout('own_height', exits='above', reads='logits')\ndef height(logits):\n    return logits.max(axis=1)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    shutil.copytree(checkpoint, tmp_path / "model")
    words = ("generate", str(tmp_path / "model"), "--prompts", str(tmp_path / "prompts.txt"), "--max-new-tokens", "2")
    words += ("--batch-size", "1", "--chat", "--with-readout", "own_height:height", "--readout", "own_height")
    words += ("--threshold", "1e9", "--out", str(tmp_path / "texts.jsonl"))
    whole = generation.stream

    def cut(*given: Any, **options: Any) -> Iterator[Any]:
        for token in whole(*given, **options):
            if token.key == 1:
                raise KeyboardInterrupt
            yield token

    with monkeypatch.context() as patch:
        patch.setattr(generation, "stream", cut)
        assert run(*words) == 130
    for name, old, new in (
        ("config.json", '"total_ut_steps": 4', '"total_ut_steps": 3'),
        ("config.json", '"hidden_act"', '"eos_token_id": 7, "hidden_act"'),
        ("chat_template.jinja", "<|im_start|>", "<|im_end|>"),
        ("own_height.py", "logits.max(axis=1)", "logits.mean(axis=1)"),
    ):
        file = tmp_path / name if name == "own_height.py" else tmp_path / "model" / name
        before = file.read_text(encoding="utf-8")
        assert old in before
        file.write_text(before.replace(old, new), encoding="utf-8")
        _forget_readout("own_height", monkeypatch)
        assert "has the texts of another command" in command.refused(*words)
        file.write_text(before, encoding="utf-8")
    _forget_readout("own_height", monkeypatch)
    assert run(*words) == 0
    _forget_readout("own_height", monkeypatch)


def _forget_readout(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As another process would not know it."""
    ls.READOUTS.pop(name)  # type: ignore[attr-defined]
    monkeypatch.delitem(sys.modules, name)


def test_a_text_ends_before_a_string(checkpoint: str, tmp_path: Path, command: Command) -> None:
    words = ("generate", checkpoint, "The sun", "--max-new-tokens", "12")
    whole = command.json(*words)["text"]
    stop = whole[5:8]
    line = command.json(*words, "--stop", "never said", "--stop", stop)
    assert (line["text"], line["finish_reason"]) == (whole.split(stop)[0], "stop")
    for more in ((), ("--lossless", "--loops", "1")):
        assert command(*words, "--stop", stop, *more).out == f"{whole.split(stop)[0]}\n"
    assert command(*words, "--stop", "never said").out == f"{whole}\n"


def test_prompts_have_rules_of_their_own(checkpoint: str, tmp_path: Path, command: Command) -> None:
    ls.ExitPolicy("fixed", 3).save(tmp_path / "three.json")
    rules = ({}, {"loops": 2}, {"readout": "fixed", "threshold": 1}, {"policy": "three.json"})
    lines = "\n".join(json.dumps({"prompt": "The sun", **rule}) for rule in rules)
    (tmp_path / "prompts.jsonl").write_text(lines, encoding="utf-8")
    words = ("generate", checkpoint, "--prompts", str(tmp_path / "prompts.jsonl"), "--max-new-tokens", "3")
    assert run(*words, "--out", str(tmp_path / "texts.jsonl")) == 0
    assert [line["loops"][0] for line in lines_of(tmp_path / "texts.jsonl")] == [4, 2, 1, 3]
    for wrong in ({"loops": 0}, {"loops": True}, {"readout": "fixed"}, {"loops": 1, "policy": "x"}, {"policy": 3}):
        (tmp_path / "prompts.jsonl").write_text(json.dumps({"prompt": "x", **wrong}), encoding="utf-8")
        assert "line 1 has a rule of its own that is none" in command.refused(*words)


def test_a_policy_that_was_saved_with_the_model(checkpoint: str, tmp_path: Path, command: Command) -> None:
    folder = Path(shutil.copytree(checkpoint, tmp_path / "model"))
    (folder / "exit_policy").mkdir()
    ls.ExitPolicy("fixed", 2, scope=Scope(cache="latest")).save(folder / "exit_policy" / "policy.json")
    (folder / "generation_config.json").write_text('{"policy": "exit_policy/policy.json"}')
    words = ("generate", str(folder), "The sun", "--max-new-tokens", "3")
    assert command.json(*words)["loops"] == [2, 2, 2]
    assert command.json(*words, "--loops", "4")["loops"] == [4, 4, 4]
    assert "with the cache 'latest'" in command.refused(*words, "--cache", "full")
    named = {"policy": "exit_policy/policy.json", "cache": "full"}
    (folder / "generation_config.json").write_text(json.dumps(named))
    assert "with the cache 'latest'" in command.refused(*words)
    ls.ExitPolicy("margin", 0.0).save(folder / "exit_policy" / "policy.json")
    (folder / "generation_config.json").write_text(json.dumps({**named, "lossless": True}))
    deep, lossless = command.json(*words, "--loops", "4"), command.json(*words)
    assert lossless["tokens"] == deep["tokens"]
    (folder / "exit_policy" / "policy.json").unlink()
    assert "names the exit policy 'exit_policy/policy.json', and there is no such file" in command.refused(*words)


def test_a_policy_that_saves_no_time_is_named(checkpoint: str, command: Command) -> None:
    """Every other token goes deep, and makes the one before it catch up."""
    words = ("generate", checkpoint, "The sun", "--max-new-tokens", "12")
    said = {}
    for policy in (("--loops", "2"), ("--loops", "4"), ("--readout", "margin", "--threshold", "0.1")):
        said[policy[-1]] = command(*words, *policy).err
    assert [name for name, text in said.items() if "This saved no time" in text] == ["0.1"], said


@pytest.mark.parametrize(
    ("drafted", "accepted", "cost", "words"),
    [(0, 0, 130.0, "nothing was drafted"), (20, 19, 130.0, "no faster than full depth"), (60, 25, 70.0, None)],
)
def test_lossless_text_that_saves_no_time_is_named(drafted: int, accepted: int, cost: float, words: str | None) -> None:
    """By what it took, those that were asked in vain included, not by how many drafts stood."""
    stats = generation.GenerationStats(tokens=100, drafted=drafted, accepted=accepted, drafting_cost=cost)
    told = _no_saving_note(stats, 110, 4, lossless=True)
    assert told is None if words is None else words in str(told)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.jsonl", b'{"prompt": 5}', "a.jsonl, line 1 is neither"),
        ("a.jsonl", b'{"prompt": "x"}\n{"messages": [1]}', "a.jsonl, line 2 is neither"),
        ("a.jsonl", b'{"messages": [{"role": "user"}]}', "line 1 is neither"),
        ("a.txt", b"\n\n", "There is no prompt in"),
        ("a.txt", b"caf\xe9", "a.txt is not UTF-8"),
        ("a.jsonl", b'{"prompt": "x"}\n{"prompt": ""}', "A prompt is empty"),
        ("a.jsonl", b'{"prompt": "x", "readout": "top1", "threshold": 1.5}', "'top1' never reaches 1.5"),
        ("a.jsonl", b"[" * 60_000, "line 1 is neither"),
        ("a.jsonl", b'{"prompt": ' + b"1" * 5000 + b"}", "line 1 is neither"),
    ],
)
def test_a_file_that_is_no_prompts(tmp_path: Path, name: str, content: bytes, words: str, command: Command) -> None:
    """Before the model is looked for: here there is none."""
    (tmp_path / name).write_bytes(content)
    assert words in command.refused("generate", str(tmp_path / "nowhere"), "--prompts", str(tmp_path / name))


def test_generated_text_does_not_steer_a_terminal(
    checkpoint: str, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Elsewhere, in a pipe or a file, the text is what the model wrote."""
    monkeypatch.setattr(Detokenizer, "add", lambda self, token: "a\x1b[31m\n")
    monkeypatch.setattr(Detokenizer, "rest", lambda self: "\x07")
    for terminal, said in ((True, "a\\u001b[31m\n\\u0007\n"), (False, "a\x1b[31m\n\x07\n")):
        monkeypatch.setattr("sys.stdout.isatty", lambda terminal=terminal: terminal)
        assert command("generate", checkpoint, "The sun", "--max-new-tokens", 1).out == said


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("x", "--stop", ""), "a text of at least one character"),
        (("x", "--seed", "9" * 23), "seed"),
        (("--prompts", "/dev/zero"), "a device or a pipe"),
        (("x", "--temperature", "1e400"), "temperature"),
        (("x", "--policy", "other.json"), "calibrated for another model"),
    ],
)
def test_what_cannot_be_generated(
    checkpoint: str,
    options: tuple[str, ...],
    words: str,
    tmp_path: Path,
    command: Command,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nothing is announced that is rejected, also not what the weights reject."""
    monkeypatch.chdir(tmp_path)
    ls.ExitPolicy("margin", 0.5, scope=Scope(model="0" * 64)).save("other.json")
    assert words in command.refused("generate", checkpoint, *options)
    assert not list(tmp_path.glob("*.unfinished"))


def test_a_text_says_that_it_ended_where_the_model_does(tmp_path: Path, command: Command) -> None:
    model = write_ouro(tmp_path / "short", byte_pairs(), max_position_embeddings=8)
    for most, noted in ((100, True), (2, False)):
        err = command("generate", model, "The sun", "--max-new-tokens", most).err
        assert ("The text ends at 8 tokens, the most that the model takes, before --max-new-tokens." in err) == noted
