"""Does text become the checkpoint's tokens, without any code of the checkpoint's?"""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from benchmark_slices import byte_pairs

from loopscope.errors import UserError, tokenizing
from loopscope.models.tokenizer import (
    Detokenizer,
    chat_prompt,
    decode,
    encode,
    load_tokenizer,
    render_chat,
    stop_tokens,
    tokenize_documents,
)
from loopscope.questions import Question, encode_questions


def test_a_tokenizer_is_read_as_data(tmp_path: Path) -> None:
    byte_pairs().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text(encoding="utf-8"))
    config |= {"tokenizer_class": "GPT2Tokenizer", "auto_map": {"AutoTokenizer": ["code.Tokenizer", None]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    (tmp_path / "config.json").write_text('{"model_type": "ouro", "auto_map": {"AutoModel": "code.Model"}}')
    (tmp_path / "code.py").write_text("raise SystemExit('code of a checkpoint was run')")
    text = "Where do cats sleep?\nAnswer: in the sun"
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer(text)["input_ids"] == byte_pairs()(text)["input_ids"]
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_text_ends_at_eos_and_at_the_end_of_a_turn() -> None:
    assert stop_tokens(byte_pairs(), {0}) == {0, 2}
    assert stop_tokens(byte_pairs(), {7}) == {0, 2, 7}
    assert stop_tokens(byte_pairs()) == {0, 2}


def test_a_chat_ends_where_the_models_turn_begins(tmp_path: Path) -> None:
    tokenizer = byte_pairs()
    ids = chat_prompt(tokenizer, [{"role": "user", "content": "Where?"}])
    assert tokenizer.decode(ids) == "<|im_start|>user\nWhere?<|im_end|>\n<|im_start|>assistant:"
    assert ids.count(1) == 2
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    with pytest.raises(UserError, match="no chat template"):
        chat_prompt(load_tokenizer(tmp_path), [{"role": "user", "content": "Where?"}])


def test_missing_or_broken_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="has no tokenizer.json; put"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}", encoding="utf-8")
    with pytest.raises(UserError, match="No tokenizer could be read from"):
        load_tokenizer(tmp_path)
    with pytest.raises(UserError, match="No tokenizer could be read from nobody/nothing"):
        load_tokenizer("nobody/nothing")


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{{ 1 / 0 }}", "does not take these messages .division by zero"),
        ("{{ raise_exception('\x1b[31mno') }}", r"does not take these messages .\\u001b\[31mno"),
        ("{% for %}", "does not take these messages"),
        ("{{ ''.__class__.__mro__ }}", "does not take these messages"),
        ("{{ 'x' * 10**10 }}", "too much time or memory"),
        ("{{ 'x' * 2 * 10**7 }}", "too much time or memory"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "too much time or memory"),
        ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "too much time or memory"),
        ("", "makes nothing of these messages"),
    ],
)
def test_a_template_that_raises_or_never_ends(template: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loopscope.models.tokenizer.MAX_TEMPLATE_SECONDS", 1)
    tokenizer = byte_pairs()  # which other tests have, too
    monkeypatch.setattr(tokenizer, "chat_template", template)
    with pytest.raises(UserError, match=words):
        chat_prompt(tokenizer, [{"role": "user", "content": "Where?"}])


def test_a_chat_is_the_same_in_a_process_of_its_own() -> None:
    tokenizer, messages = byte_pairs(), [{"role": "user", "content": "Wo? \U0001f600"}]
    for options in ({"add_generation_prompt": True}, {"add_generation_prompt": False}):
        assert render_chat(tokenizer, messages, **options) == tokenizer.apply_chat_template(
            messages, tokenize=False, **options
        )
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert chat_prompt(tokenizer, messages) == ids


def test_half_a_character_is_no_text() -> None:
    with pytest.raises(UserError, match="half a character"):
        encode(byte_pairs(), "a\ud800")
    with pytest.raises(UserError, match="half a character"):
        chat_prompt(byte_pairs(), [{"role": "\ud800", "content": "Where?"}])


def written(folder: Path, **changed: Any) -> Path:
    """A tokenizer whose file says something else here and there."""
    byte_pairs().save_pretrained(str(folder))
    file = folder / "tokenizer.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changed))
    return folder


TEXTS = ["a text of some length, longer than four tokens", "b"]


def tokens_of(folder: Path) -> list[list[int]]:
    """Of the texts, by every way from text to tokens."""
    tokenizer = load_tokenizer(folder)
    asked = encode_questions([Question("q", text, (" c",), 0, (1,)) for text in TEXTS], tokenizer)
    documents = [row.tolist() for row in tokenize_documents(TEXTS, folder)]
    return [*documents, *(encode(tokenizer, text) for text in TEXTS), *(each.context.tolist() for each in asked)]


def test_settings_of_whoever_saved_it_last_neither_cut_nor_pad(tmp_path: Path) -> None:
    """As an ordinary `save_pretrained` after `tokenizer(..., padding="max_length")` writes them."""
    plain = tokens_of(written(tmp_path / "plain"))
    saved = load_tokenizer(tmp_path / "plain")
    saved.pad_token = saved.eos_token
    saved(TEXTS, padding="max_length", truncation=True, max_length=4)
    saved.save_pretrained(str(tmp_path / "cut"))
    assert json.loads((tmp_path / "cut" / "tokenizer.json").read_text())["truncation"]["max_length"] == 4
    assert tokens_of(tmp_path / "cut") == plain


def replaced(pattern: dict[str, str], content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": pattern, "content": content}


DOUBLED, BYTES = replaced({"String": "a"}, "aa"), {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
TOO_LONG = "more than 1024 times as long"


@pytest.mark.parametrize(
    ("part", "value", "words"),
    [
        ("normalizer", replaced({"Regex": "(a+)+$"}, "x"), r"cannot be used; fetch .* \(Onig: Regex search error"),
        ("normalizer", {"type": "Sequence", "normalizers": [DOUBLED] * 30}, TOO_LONG),
        ("normalizer", {"type": "Sequence", "normalizers": [replaced({"Regex": ""}, "x")] * 30}, TOO_LONG),
        ("normalizer", {"type": "Prepend", "prepend": "a" * 10**6}, TOO_LONG),
        ("pre_tokenizer", {"type": "Sequence", "pretokenizers": [BYTES] * 9}, TOO_LONG),
        ("decoder", {"type": "Sequence", "decoders": [DOUBLED] * 30}, TOO_LONG),
    ],
)
def test_a_tokenizer_that_panics_or_multiplies_is_rejected(
    part: str, value: Any, words: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """In one sentence, before which Rust prints nothing."""
    folder, text = written(tmp_path, **{part: value}), "a" * 40 + "!"
    for tokenize in (lambda: tokenize_documents([text], folder), lambda: encode(load_tokenizer(folder), text)):
        with pytest.raises(UserError, match=words):
            tokenize()
    assert capfd.readouterr().err == ""


def test_text_whose_decoder_panics_ends_in_a_sentence(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    tokenizer = load_tokenizer(written(tmp_path, decoder=replaced({"Regex": "(a+)+$"}, "x")))
    tokenizer.add_tokens(["a" * 40 + "!"])
    for read in (lambda token: decode(tokenizer, [token]), Detokenizer(tokenizer).add):
        with pytest.raises(UserError, match=r"cannot be used; fetch .* \(Onig: Regex search error"):
            read(len(tokenizer) - 1)
    assert capfd.readouterr().err == ""


def test_what_else_is_printed_meanwhile_is_shown(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UserError, match="cannot be used"), tokenizing():
        os.write(2, b"a warning")
        raise ValueError
    with tokenizing():
        os.write(2, b" and another")
    assert capfd.readouterr().err == "a warning and another"
