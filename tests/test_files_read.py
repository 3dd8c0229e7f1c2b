"""Is a file that may hold anything read within bounds, or refused in one sentence?"""

import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

from loopscope.config import read_json, read_toml
from loopscope.errors import UserError, brief, visible
from loopscope.files import is_plain_name, read_bytes, read_text
from loopscope.models.tokenizer import read_documents

DIGITS = "1" * 5000


@pytest.mark.parametrize(
    ("read", "name", "data", "words"),
    [
        (read_toml, "a.toml", b"a = " + b"[" * 60_000, "nested"),
        (read_toml, "a.toml", b"[" + b".".join([b"a"] * 5000) + b"]", "nested"),
        (read_toml, "a.toml", f"a = {DIGITS}".encode(), "beyond 64 bits"),
        (read_toml, "a.toml", b"a = '\xff'", "not UTF-8 text .byte 5.; convert it"),
        (read_toml, "a.toml", b"#" * (1 << 22) + b"\n", "too large for a TOML file"),
        (lambda path: read_json(dict[str, Any], path, "policy"), "a.json", b'{"a":' * 60_000, "nested"),
        (lambda path: read_json(int, path, "policy"), "a.json", DIGITS.encode(), "a.json"),
        (lambda path: read_json(dict[str, Any], path, "policy"), "a.json", b'{"a": "\xff"}', "not a readable policy"),
        (lambda path: read_documents([path]), "a.txt", b"\xff", "not UTF-8 text"),
        (lambda path: read_documents([path]), "a.jsonl", b"[" * 60_000, "Line 1 of .*; a line must be"),
        (lambda path: read_documents([path]), "a.jsonl", b'{"text": "\xff"}', "is not JSON; a line must be"),
        (lambda path: read_documents([path]), "a.jsonl", b'\n{"text": 5}', "Line 2 of .* what its `text` is; a line"),
    ],
)
def test_what_has_no_bounds_is_refused(tmp_path: Path, read: Any, name: str, data: bytes, words: str) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(UserError, match=words) as refused:
        read(tmp_path / name)
    assert len(str(refused.value)) < 500


@pytest.mark.parametrize("read", [lambda path: read_bytes(path, "text file"), lambda path: read_documents([path])])
def test_nobody_waits_for_what_is_no_file(tmp_path: Path, read: Any) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path, words in ((tmp_path, "is a folder"), (tmp_path / "no", "no file"), (tmp_path / "a\0b", "no file")):
        with pytest.raises(UserError, match=words):
            read(path)
    for path in (tmp_path / "pipe", Path("/dev/zero")):
        with pytest.raises(UserError, match="a device or a pipe; give a text file"):
            read(path)


def test_a_byte_order_mark_is_no_text_and_a_path_is_no_name(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"\xef\xbb\xbfa = 1")
    assert read_text(tmp_path / "a", "text file") == "a = 1"
    names = ("model-00001.safetensors", "a..b", "../x", "/x", "a/b", "..")
    assert [is_plain_name(name) for name in names] == [True, True, False, False, False, False]


@given(st.text(st.characters() | st.sampled_from("\x1b\x07\r\n\x9b\u202e\ud800"), max_size=2000))
def test_nothing_said_steers_a_terminal(text: str) -> None:
    said = str(UserError(text))
    assert len(said) < 500
    said.encode()  # without halves of characters
    assert not any(ord(each) < 32 or 127 <= ord(each) < 160 or each in "\u202e\u2066" for each in said)
    assert not set(visible(text)) & set("\x1b\x07\r\x9b\u202e")


def test_what_is_too_long_keeps_its_beginning_and_its_advice() -> None:
    said = brief(f"There is no split '{'x' * 5000}'; choose one of train, test.")
    assert said.startswith("There is no split 'xxx")
    assert said.endswith("xxx'; choose one of train, test.")
    assert visible("a\tb\nc \x1b[31m é 漢") == "a\tb\nc \\u001b[31m é 漢"
