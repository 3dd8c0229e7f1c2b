"""Which texts are to be continued, and how? A file of prompts: one per line, or .jsonl, where each may have a rule."""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeVar

import msgspec

from loopscope.cli.inputs import load_policy, policy_by_hand
from loopscope.config import Loops
from loopscope.errors import UserError
from loopscope.files import read_text
from loopscope.policy import ExitPolicy

T = TypeVar("T")
Some = msgspec.Meta(min_length=1)


_NO_PROMPT = 'is neither {"prompt": "..."} nor {"messages": [{"role": "...", "content": "..."}, ...]}; correct it'
_NO_RULE = 'has a rule of its own that is none: give "loops", or "readout" with "threshold", or "policy" with a file'


class _Message(msgspec.Struct):
    role: str
    content: str


class _Line(msgspec.Struct):
    """What a line of a .jsonl file says of a text: its prompt, or the messages of a chat."""

    prompt: str | None = None
    messages: Annotated[list[_Message], Some] | None = None


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
        entry = _parsed(line)
        text, rule = _converted(entry, _Line), _converted(entry, Rule)
        prompt = None if text is None else text.prompt if text.messages is None else entry["messages"]
        if prompt is None or rule is None:
            raise UserError(f"{path}, line {number} {_NO_PROMPT if prompt is None else _NO_RULE}.")
        if rule.policy is not None:
            rule = msgspec.structs.replace(rule, policy=str(path.parent / rule.policy))
        yield GivenPrompt(prompt, rule)


def _parsed(line: str) -> Any:
    """What a line of JSON holds; None where it is none."""
    try:
        return msgspec.json.decode(line.encode())
    except (ValueError, RecursionError, msgspec.MsgspecError):
        return None


def _converted(entry: Any, kind: type[T]) -> T | None:
    try:
        return msgspec.convert(entry, kind)
    except msgspec.ValidationError:
        return None
