"""How many loops did every token take? What a deployment with an exit policy notes, and how it is read.

vLLM has no place for it in its answers, so the first worker appends it to a file, a line of JSON for every step. A text
is known by the tokens of its prompt: `prompt_digest` of them is what a caller finds its own texts by. Texts of one
prompt stand in the order in which they were begun.

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
"""Bytes of a log, and of a line."""
LOG_BEGINNING = b'{"ran": '
"""Of every line."""


class StepExits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A line: one step."""

    ran: Tally  # loops that were run, for whoever went deepest
    texts: list[Tally]  # [N] the number of each request's text
    loops: list[Tally]  # [N] that its last token took
    prompts: dict[str, tuple[Tally, str]] = {}  # of those at their prompt, by number: its tokens so far, their digest

    def __post_init__(self) -> None:
        numbers = {str(text) for text in self.texts}
        once = len(self.loops) == len(self.texts) == len(numbers) and numbers.issuperset(self.prompts)
        if not once or not all(1 <= loops <= self.ran for loops in self.loops):
            raise ValueError("a text is there twice, or a token took more loops than were run, or none")


@dataclass
class TextExits:
    """One text; the loops are those of its tokens, one after the other, and may go on beyond the last that was sent."""

    prompt_tokens: int
    prompt: str
    loops: list[int] = field(default_factory=list)


def prompt_digest(tokens: Iterable[int]) -> str:
    """What a prompt of these tokens is known by."""
    return hashlib.sha256(np.asarray(list(tokens), dtype="<i8").tobytes()).hexdigest()[:16]


def read_exits(path: str | Path) -> tuple[list[TextExits], list[StepExits]]:
    """The texts in the order in which they were begun, and the steps; without a line that is still being written."""
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
    """Appends steps to a file, which may be that of an earlier deployment."""

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        self._texts: dict[int, int] = {}  # by the first block of their cache
        self._tokens: dict[int, list[int]] = {}  # so far, of a text that is read again maybe more than its prompt
        self._begun = _cut_unfinished(self._path)  # a text takes more than a byte, so no earlier one has this number

    def note(self, batch: Any, tokens: Integers, loops: Integers, ran: int) -> None:
        """A step with these tokens of its requests, who exited at these loops [N]."""
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


def _cut_unfinished(path: Path) -> int:
    """The size of a log, after a line that a worker which was killed did not finish is gone."""
    if not path.exists():
        return 0
    with path.open("r+b") as file:
        size = file.seek(max(0, path.stat().st_size - _MAX_LINE_BYTES))
        tail = file.read()
        size += tail.rfind(b"\n") + 1
        file.truncate(size)
    return size
