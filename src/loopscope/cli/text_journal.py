"""How does a file of texts survive a kill? Those that are finished are kept beside it; when all are, it is written.

The lines are kept in the order in which they are finished, each after its hash, below one that says what is being
written. The same command goes on from there, and another one is refused; a line that was altered is made again.
"""

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

from loopscope.cli.options import new_path
from loopscope.errors import UserError, visible
from loopscope.files import BusyError, atomic_file, locked, remove_leftovers, room_for


class TextJournal:
    """The lines of prompts that are finished, by their numbers from 0."""

    def __init__(self, lines: dict[int, str], file: TextIO) -> None:
        self.lines, self._file = lines, file

    def add(self, number: int, line: dict[str, Any]) -> None:
        self.lines[number] = text = visible(json.dumps(line, ensure_ascii=False))
        print(_hash(text), text, file=self._file, flush=True)


def unfinished(out: Path) -> Path:
    """What is there of it."""
    return out.with_name(f"{out.name}.unfinished")


def new_texts(text: str) -> Path:
    """A file of texts that is not there yet; what a killed writer of it had left to do is ended."""
    out = Path(text)
    journal = unfinished(out)
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
    journal = unfinished(out)
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
