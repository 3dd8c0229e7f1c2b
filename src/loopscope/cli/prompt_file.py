"""Which texts are to be continued, and how? A file of prompts: one per line, or .jsonl, where each may have a rule."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from loopscope.cli.policies import load_policy
from loopscope.errors import UserError
from loopscope.reading import read_text

if TYPE_CHECKING:
    from loopscope.exits import ExitPolicy


class Rule(NamedTuple):
    """What a prompt has to say of its exits: a policy's file, a readout with its threshold, or a depth."""

    policy: Path | None = None
    readout: str | None = None
    threshold: float | None = None
    loops: int | None = None

    def exit_policy(self, any_model: bool) -> "ExitPolicy | None":
        from loopscope.exits import ExitPolicy
        from loopscope.exits.readouts import check_threshold

        if self.policy is not None:
            return load_policy(self.policy, any_model)
        if self.readout is not None:
            policy = ExitPolicy(self.readout, self.threshold)
            check_threshold(self.readout, self.threshold or 0)
            return policy
        return None if self.loops is None else ExitPolicy("fixed", self.loops)


class GivenPrompt(NamedTuple):
    prompt: Any  # a text, or the messages of a chat
    rule: Rule = Rule()


def read_prompts(path: Path) -> Iterator[GivenPrompt]:
    for number, line in enumerate(read_text(path, "file with a prompt a line").split("\n"), start=1):
        if not line.strip():
            continue
        entry = {"prompt": line} if path.suffix != ".jsonl" else _parsed(line)
        prompt = None if entry is None else _prompt_of(entry)
        if entry is None or prompt is None:
            raise UserError(
                f'{path}, line {number} is neither {{"prompt": "..."}} nor {{"messages": [{{"role": "...", "content": '
                '"..."}, ...]}; correct it.'
            )
        rule = _rule_of(entry, path.parent)
        if rule is None:
            raise UserError(
                f'{path}, line {number} has a rule of its own that is none: give "loops": 2, or "readout": "..." with '
                '"threshold": 0.5, or "policy": "FILE".'
            )
        yield GivenPrompt(prompt, rule)


def _parsed(line: str) -> dict[str, Any] | None:
    try:
        entry = json.loads(line)
        json.dumps(entry, allow_nan=False)  # NaN and numbers without end are Python's, not JSON's
    except (ValueError, RecursionError):
        return None
    return entry if isinstance(entry, dict) else None


def _prompt_of(entry: dict[str, Any]) -> str | list[dict[str, str]] | None:
    """The text of a prompt, or the messages of a chat; None where it is neither."""
    messages, prompt = entry.get("messages"), entry.get("prompt")
    if "messages" not in entry:
        return prompt if isinstance(prompt, str) else None
    well_formed = isinstance(messages, list) and all(
        isinstance(each, dict) and all(isinstance(each.get(name), str) for name in ("role", "content"))
        for each in messages
    )
    return messages if well_formed and messages else None


def _rule_of(entry: dict[str, Any], folder: Path) -> Rule | None:
    """The rule of a prompt; None where it is none."""
    given = [name for name in ("policy", "readout", "loops") if name in entry]
    if len(given) > 1 or ("readout" in entry) != ("threshold" in entry):
        return None
    loops: Any = entry.get("loops")
    threshold: Any = entry.get("threshold")
    if given == ["policy"]:
        named = isinstance(entry["policy"], str) and entry["policy"] and "\0" not in entry["policy"]
        return Rule(policy=folder / entry["policy"]) if named else None
    if given == ["readout"]:
        number = type(threshold) in (int, float) and abs(threshold) < 2**63
        return Rule(readout=entry["readout"], threshold=threshold) if type(entry["readout"]) is str and number else None
    if given == ["loops"]:
        return Rule(loops=loops) if type(loops) is int and 1 <= loops < 2**63 else None
    return Rule()
