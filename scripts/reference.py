"""Writes the generated pages of the reference: the command line from its parser, settings from their classes."""

import argparse
import re
import sys
import textwrap
from inspect import cleandoc
from pathlib import Path
from typing import Any

import msgspec
from msgspec import inspect

from loopscope.certify.risk_target import RiskTarget
from loopscope.cli import make_parser
from loopscope.learned.stopper_fitting import StopperSettings
from loopscope.models.model_settings import ModelSettings
from loopscope.studies.study_file import Checkpoints, Gates, Reference, RunGrid, Study, StudyPart
from loopscope.tasks import CustomTask, HopInduction, Mano, Parity, Reachability, Splits, StateTracking
from loopscope.training.gate_fitting import GateSettings
from loopscope.training.settings import (
    Adapters,
    ContinueSettings,
    Objective,
    OuroShape,
    PretrainSettings,
    RunSettings,
    Training,
    presets,
)

FOLDER = Path(__file__).parents[1] / "docs" / "reference"
_GENERATED = "`scripts/reference.py` writes this page"
_WIDTH = 110
_LARGE = 1e5
"""A bound from here on only keeps numbers within what computers hold."""

SETTINGS: dict[str, tuple[str, list[tuple[str, type[msgspec.Struct]]]]] = {
    "A run on a task": (
        f"`loopscope train SETTINGS` and `ls.train` take a preset ({', '.join(f'`{name}`' for name in presets())}) or "
        "a TOML file with these tables. `--set training.steps=300` changes one setting.",
        [
            ("The file", RunSettings),
            ("`[task]`: every task", Splits),
            ('`[task]` with `name = "mano"`', Mano),
            ('`[task]` with `name = "parity"`', Parity),
            ('`[task]` with `name = "state-tracking"`', StateTracking),
            ('`[task]` with `name = "hop-induction"`', HopInduction),
            ('`[task]` with `name = "reachability"`', Reachability),
            ("`[task]` of a custom task", CustomTask),
            ("`[model]`", ModelSettings),
            ("`[objective]`", Objective),
            ("`[training]`", Training),
        ],
    ),
    "A run on a text": (
        "`loopscope pretrain SETTINGS` takes a TOML file. The tables `[objective]` and `[training]` are the same as "
        "for a run on a task.",
        [
            ("A new Ouro", PretrainSettings),
            ("`[model]` of a new Ouro", OuroShape),
            ("With `--start`", ContinueSettings),
            ("`[adapters]`", Adapters),
        ],
    ),
    "Fitted gates and stoppers": (
        "`loopscope fit` has an option for most of these settings; `ls.fit_gate` and `ls.fit_stopper` take all "
        "settings as keywords.",
        [("A gate", GateSettings), ("A stopper", StopperSettings)],
    ),
    "A study": (
        "`loopscope study run STUDY` takes a TOML file. [Studies](../how-to/studies.md) explains the file of a study.",
        [
            ("The file", Study),
            ("`[[parts]]`", StudyPart),
            ("`[[parts.runs]]`", RunGrid),
            ("`gates`", Gates),
            ("`reference`, and an entry of `latency`", Reference),
            ("An entry of `guarantees`", RiskTarget),
            ("`[[checkpoints]]`", Checkpoints),
        ],
    ),
}
"""Groups of settings: what takes them, and their tables."""


def main() -> None:
    for name, text in pages().items():
        (FOLDER / name).write_text(text, encoding="utf-8")


def pages() -> dict[str, str]:
    """The text of every page, by the name of its file."""
    return {"cli.md": command_line(), "settings.md": settings()}


def command_line() -> str:
    parser = make_parser()
    intro = cleandoc(parser.epilog or "").replace("\\\n", "\\\n")
    examples = re.sub(r"(?m)^(\S.*:)$", r"# \1", re.sub(r"(?m)^  ", "", intro))
    parts = [
        "# Command line",
        f"{_GENERATED} from the parser. `loopscope VERB --help` prints the part for one verb.",
        f"```sh\n{examples}\n```",
        _table(["verb", "what it does"], [[f"[`{name}`](#{_anchor(name)})", text] for name, text in _listed(parser)]),
    ]
    for path, verb in _verbs(parser):
        parts += _verb(path, verb)
    return _page(parts)


def _page(parts: list[str]) -> str:
    """The parts of a page, its prose wrapped."""
    prose = textwrap.TextWrapper(_WIDTH, break_long_words=False, break_on_hyphens=False)
    return "\n\n".join(part if part.startswith(("#", "|", "```")) else prose.fill(part) for part in parts) + "\n"


def _anchor(verb: str) -> str:
    return f"loopscope-{verb}".replace(" ", "-")


def _listed(parser: argparse.ArgumentParser) -> list[list[str]]:
    (verbs,) = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    return [[choice.dest, _sentence(choice.help)] for choice in verbs._choices_actions]


def _verbs(parser: argparse.ArgumentParser, before: str = "") -> list[tuple[str, argparse.ArgumentParser]]:
    """Every verb with its words, and after a group its verbs."""
    found = []
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, verb in action.choices.items():
                found += [(f"{before}{name}", verb), *_verbs(verb, f"{before}{name} ")]
    return found


def _verb(path: str, verb: argparse.ArgumentParser) -> list[str]:
    shown = [action for action in verb._actions if not isinstance(action, argparse._HelpAction)]
    groups = [action for action in shown if isinstance(action, argparse._SubParsersAction)]
    level = "###" if " " in path else "##"
    parts = [f"{level} `loopscope {path}`", cleandoc(verb.description or "").replace("\n", " ")]
    examples, *notes = cleandoc(verb.epilog or "").split("\n\n")
    if groups:
        return [*parts, _table(["verb", "what it does"], _listed(verb))]
    parts.append(f"```sh\n{re.sub('(?m)^  ', '', examples.removeprefix('examples:').lstrip(chr(10)))}\n```")
    parts += [re.sub(r"<\|\w+\|>", r"`\g<0>`", note.replace("\n", " ")) for note in notes]
    parts.append(_table(["argument", "meaning"], [[_names(action), _sentence(action.help)] for action in shown]))
    return parts


def _names(action: argparse.Action) -> str:
    choices = " or ".join(map(str, action.choices)) if action.choices else ""
    value = (action.metavar if isinstance(action.metavar, str) else choices or action.dest).replace("|", " or ")
    if not action.option_strings:
        return f"`{value} ...`" if action.nargs == "+" else f"`[{value}]`" if action.nargs == "?" else f"`{value}`"
    taken = "" if action.nargs == 0 else f" {value}{' ...' if action.nargs == '+' else ''}"
    return f"`{action.option_strings[0]}{taken}`" + (" (required)" if action.required else "")


def _sentence(text: str | None) -> str:
    text = " ".join((text or "").replace("|", "\\|").split())
    return f"{text[:1].upper()}{text[1:]}."


def settings() -> str:
    source = "from the classes that read settings files; the docstrings of these classes hold the meanings"
    parts = ["# Settings", f"{_GENERATED} {source}."]
    for title, (text, tables) in SETTINGS.items():
        parts += [f"## {title}", text]
        for heading, kind in tables:
            summary = cleandoc(kind.__doc__ or "").partition("\n\nParameters\n")[0]
            parts += [f"### {heading}", *summary.split("\n\n"), described(kind)]
    return _page(parts)


def described(kind: type[msgspec.Struct]) -> str:
    """The settings of a class: their names, values, defaults and meanings; a task's without those of every task."""
    told, own = meanings(kind), meanings(kind, own=True)
    shared = set(Splits.__struct_fields__) - own.keys() if kind is not Splits else set()
    rows = [
        [f"`{field.name}`", _values(field.type), _default(field), told[field.name]]
        for field in inspect.type_info(kind).fields
        if field.name not in shared
    ]
    return _table(["setting", "values", "default", "meaning"], rows)


def meanings(kind: type[msgspec.Struct], own: bool = False) -> dict[str, str]:
    """What the docstring of a class, and those of its bases, say of its settings."""
    found: dict[str, str] = {}
    for each in kind.__mro__[:1] if own else reversed(kind.__mro__):
        _, _, section = cleandoc(each.__dict__.get("__doc__") or "").partition("Parameters\n----------\n")
        lines = re.findall(r"^(\w+)\n((?:    .*\n?)+)", section.partition("\n\n")[0], re.MULTILINE)
        found |= {name: " ".join(text.split()) for name, text in lines}
    return found


def _default(field: inspect.Field) -> str:
    if field.required:
        return "required"
    value: Any = field.default
    if value in (msgspec.UNSET, None, (), msgspec.NODEFAULT) or isinstance(value, msgspec.Struct):
        return ""
    return f"`{msgspec.json.encode(value).decode()}`"


def _values(kind: Any) -> str:
    """What a setting may be, in words."""
    match kind:
        case inspect.UnionType():
            given = [each for each in kind.types if not isinstance(each, inspect.NoneType)]
            return " or ".join(dict.fromkeys(filter(None, map(_values, given))))
        case inspect.LiteralType():
            return ", ".join(f"`{value}`" for value in sorted(kind.values))
        case inspect.BoolType():
            return "true or false"
        case inspect.IntType() | inspect.FloatType():
            return ("whole number" if isinstance(kind, inspect.IntType) else "number") + _bounds(kind)
        case inspect.VarTupleType() | inspect.ListType():
            return f"list: {_values(kind.item_type)}"
        case inspect.StructType() | inspect.DictType():
            return "table"
        case inspect.StrType():
            return "text"
    return ""


def _bounds(kind: inspect.IntType | inspect.FloatType) -> str:
    low = f" from {kind.ge:,g}" if kind.ge is not None else f" above {kind.gt:g}" if kind.gt is not None else ""
    high = f" to {kind.le:,g}" if kind.le is not None and kind.le < _LARGE else ""
    return low + (f" below {kind.lt:,g}" if kind.lt is not None and kind.lt < _LARGE else high)


def _table(columns: list[str], rows: list[list[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    sys.exit(main())
