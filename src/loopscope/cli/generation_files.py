"""Which files does `generate` read and write? Prompts, a line each, and a file of texts that survives a kill.

Texts that are finished are kept beside their file, in the order in which they are finished: each after its hash, below
a line that says what is being written. When all are there, the file is written. The same command goes on from there,
and another one is rejected; a line that was altered is made again.
"""

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TextIO, TypeVar

import msgspec

from loopscope.cli.inputs import load_policy, policy_by_hand
from loopscope.cli.options import new_path
from loopscope.config import Loops
from loopscope.errors import UserError, visible
from loopscope.files import BusyError, atomic_file, locked, read_text, remove_leftovers, room_for
from loopscope.policy import ExitPolicy

T = TypeVar("T")
_NO_PROMPT = 'is neither {"prompt": "..."} nor {"messages": [{"role": "...", "content": "..."}, ...]}; correct it'
_NO_RULE = 'has a rule of its own that is none: give "loops", or "readout" with "threshold", or "policy" with a file'


class _Message(msgspec.Struct):
    role: str
    content: str


class _Line(msgspec.Struct):
    """What a line of a .jsonl file says of a text: its prompt, or the messages of a chat."""

    prompt: str | None = None
    messages: Annotated[list[_Message], msgspec.Meta(min_length=1)] | None = None


class Rule(msgspec.Struct, frozen=True):
    """What a prompt has to say of its exits: a policy's file, a readout with its threshold, or a depth."""

    policy: Annotated[str, msgspec.Meta(pattern=r"^[^\0]+$")] | None = None
    readout: str | None = None
    threshold: float | None = None
    loops: Loops | None = None

    def __post_init__(self) -> None:
        rules = sum(given is not None for given in (self.policy, self.readout, self.loops))
        if rules > 1 or (self.readout is None) != (self.threshold is None):
            raise ValueError("a prompt has one rule, and a readout has a threshold")

    def exit_policy(self, any_model: bool) -> ExitPolicy | None:
        if self.policy is not None:
            return load_policy(Path(self.policy), any_model)
        if self.readout is not None:
            return policy_by_hand(self.readout, self.threshold)
        return None if self.loops is None else ExitPolicy("fixed", self.loops)


class GivenPrompt(NamedTuple):
    prompt: Any  # a text, or the messages of a chat
    rule: Rule = Rule()


def read_prompts(path: Path) -> Iterator[GivenPrompt]:
    for number, line in enumerate(read_text(path, "file with a prompt a line").split("\n"), start=1):
        if not line.strip():
            continue
        if path.suffix != ".jsonl":
            yield GivenPrompt(line)
            continue
        text, rule = _decoded(line, _Line), _decoded(line, Rule)
        if text is None or rule is None or (text.prompt is None and text.messages is None):
            raise UserError(f"{path}, line {number} {_NO_RULE if rule is None and text is not None else _NO_PROMPT}.")
        if rule.policy is not None:
            rule = msgspec.structs.replace(rule, policy=str(path.parent / rule.policy))
        yield GivenPrompt(text.prompt if text.messages is None else msgspec.json.decode(line)["messages"], rule)


def _decoded(line: str, kind: type[T]) -> T | None:
    """What a line of JSON says; None where it does not say this."""
    try:
        return msgspec.json.decode(line.encode(), type=kind)
    except (ValueError, RecursionError):
        return None


class TextJournal:
    """The lines of prompts that are finished, by their numbers from 0."""

    def __init__(self, lines: dict[int, str], file: TextIO) -> None:
        self.lines, self._file = lines, file

    def add(self, number: int, line: dict[str, Any]) -> None:
        self.lines[number] = text = visible(json.dumps(line, ensure_ascii=False))
        print(_hash(text), text, file=self._file, flush=True)


def _unfinished(out: Path) -> Path:
    return out.with_name(f"{out.name}.unfinished")


def new_texts(text: str) -> Path:
    """A file of texts that is not there yet; what a killed writer of it had left to do is ended."""
    out = Path(text)
    journal = _unfinished(out)
    if out.is_file() and out.stat().st_size:
        remove_leftovers(journal)
        if journal.is_file():
            with suppress(BusyError), locked(journal):
                kept = {line.partition(b" ")[2] for line in journal.read_bytes().split(b"\n")[1:-1]}
                if kept <= set(out.read_bytes().split(b"\n")):
                    journal.unlink()
    return new_path(text)


@contextmanager
def text_journal(out: Path, settings: object, prompts: int) -> Iterator[TextJournal]:
    """Goes on with what was begun with these settings; `out` is there when the texts of so many prompts are."""
    journal = _unfinished(out)
    digest = _hash(json.dumps(settings, sort_keys=True))
    with room_for(out), locked(journal):
        new_path(out)
        lines = _kept(journal, digest, prompts) if journal.exists() else {}
        try:
            with journal.open("a", encoding="utf-8") as file:
                if not file.tell():
                    print(json.dumps({"settings": digest}), file=file, flush=True)
                yield TextJournal(lines, file)
        finally:
            if not lines:
                journal.unlink(missing_ok=True)
        with atomic_file(out) as scratch:
            scratch.write_text("".join(f"{lines[number]}\n" for number in range(prompts)), encoding="utf-8")
        journal.unlink()


def _kept(journal: Path, digest: str, prompts: int) -> dict[int, str]:
    """The lines that are whole; of the last one, which may have been cut off, nothing stays."""
    data = journal.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    first, *lines = whole.decode(errors="replace").split("\n")[:-1] or [""]
    if whole and first != json.dumps({"settings": digest}):
        raise UserError(
            f"{journal} has the texts of another command: other prompts, another model or other settings; finish that "
            "one, remove the file, or choose another --out."
        )
    os.truncate(journal, len(whole))
    texts = (line.partition(" ") for line in lines)
    found = {json.loads(text)["number"] - 1: text for known, _, text in texts if known == _hash(text)}
    return {number: text for number, text in found.items() if 0 <= number < prompts}


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()
