"""How many loops did every token take? A deployment with an exit policy logs them in a file; this module reads it.

vLLM's answers have no field for loops, so the first worker appends a JSON line for every step to a file. A text is
identified by the tokens of its prompt: callers find their texts by `prompt_digest` of these tokens. Texts with the same
prompt are in the order in which they began.

Shapes: N requests of a step.
"""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from loopscope.config import Tally
from loopscope.errors import UserError
from loopscope.files import read_text

Integers = NDArray[np.int64]
_MAX_BYTES, _MAX_LINE_BYTES = 1 << 30, 1 << 22
"""The largest size of a log, and of a line."""
_LINE_BEGINNING = b'{"ran": '
"""The beginning of every line."""


class StepExits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Hold a line of the log: one step."""

    ran: Tally  # loops that ran: those of the deepest token
    texts: list[Tally]  # [N] the index of each request's text
    loops: list[Tally]  # [N] loops of its last token
    prompts: dict[str, tuple[Tally, str]] = {}  # of requests in their prompt, by text: tokens so far, and their digest

    def __post_init__(self) -> None:
        numbers = {str(text) for text in self.texts}
        once = len(self.loops) == len(self.texts) == len(numbers) and numbers.issuperset(self.prompts)
        if not once or not all(1 <= loops <= self.ran for loops in self.loops):
            raise ValueError("a text is there twice, or a token took more loops than were run, or none")


@dataclass
class TextExits:
    """Hold the loops of one text's tokens, which may continue after the last token that was returned."""

    prompt_tokens: int
    prompt: str
    loops: list[int] = field(default_factory=list)


def prompt_digest(tokens: Iterable[int]) -> str:
    """The digest that identifies a prompt with these tokens."""
    return hashlib.sha256(np.asarray(list(tokens), dtype="<i8").tobytes()).hexdigest()[:16]


def read_exits(path: str | Path) -> tuple[list[TextExits], list[StepExits]]:
    """Read texts in the order of their beginning, and steps; an incomplete last line is left out."""
    texts: dict[int, TextExits] = {}
    steps = []
    *lines, _ = read_text(Path(path), "log of exits", _MAX_BYTES).split("\n")
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            step = msgspec.json.decode(line, type=StepExits)
            for text, loops in zip(step.texts, step.loops, strict=True):
                if (begun := step.prompts.get(str(text))) is not None:
                    known = texts.get(text)
                    if known is not None and begun[0] < known.prompt_tokens + len(known.loops):
                        raise ValueError("a text begins twice")
                    texts[text] = TextExits(*begun, loops=[loops])  # of a prompt in parts, the last part counts
                else:
                    texts[text].loops.append(loops)
        except (msgspec.DecodeError, ValueError, KeyError):
            raise UserError(f"{path}, line {number}, is not what a deployment notes of its exits.") from None
        steps.append(step)
    return list(texts.values()), steps


class ExitsLog:
    """Append steps to a log file, which may be that of an earlier deployment."""

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        self._texts: dict[int, int] = {}  # by the first block of their cache
        self._tokens: dict[int, list[int]] = {}  # so far; a text that is read again may have more than its prompt
        self._begun = _cut_incomplete_line(self._path)  # above all earlier indices

    def note(self, batch: Any, tokens: Integers, loops: Integers, ran: int) -> None:
        """Log a step with its requests' tokens, which exited at these loops [N]."""
        prompts: dict[str, tuple[int, str]] = {}
        for row, block in enumerate(batch.first_blocks.tolist()):
            new = tokens[batch.starts[row] : batch.ends[row]].tolist()
            if batch.prefilling[row] and batch.lengths[row] == len(new):
                self._texts[block], self._tokens[block], self._begun = self._begun, [], self._begun + 1
            known = self._tokens[block]
            known += new
            if batch.prefilling[row]:
                prompts[str(self._texts[block])] = (len(known), prompt_digest(known))
        texts = [self._texts[block] for block in batch.first_blocks.tolist()]
        line = {"ran": ran, "texts": texts, "loops": loops.tolist(), **({"prompts": prompts} if prompts else {})}
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def _cut_incomplete_line(path: Path) -> int:
    """Remove an incomplete last line, which a killed worker left; return the size of the log."""
    if not path.exists():
        return 0
    with path.open("r+b") as file:
        size = file.seek(max(0, path.stat().st_size - _MAX_LINE_BYTES))
        tail = file.read()
        size += tail.rfind(b"\n") + 1
        file.truncate(size)
    return size


def check_exits_log(log: Path) -> None:
    """Reject an unwritable or foreign log file before an engine starts, not at its first token."""
    try:
        with log.open("a+b") as file:
            file.seek(0)
            beginning = file.read(len(_LINE_BEGINNING))
    except OSError as error:
        raise UserError(f"exits_log: {log} cannot be written ({error.strerror}); choose another file.") from None
    if not _LINE_BEGINNING.startswith(beginning):  # a worker would cut its last line
        raise UserError(f"exits_log: {log} is there and is no log of exits; choose another file.")
