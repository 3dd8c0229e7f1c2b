"""How is a command line read? By argparse, whose complaints become one plain sentence with what was probably meant."""

import argparse
import inspect
import re
import textwrap
from collections.abc import Callable, Sequence
from itertools import groupby, takewhile
from typing import Any, NoReturn

import loopscope
from loopscope.errors import UserError, did_you_mean

Execute = Callable[[argparse.Namespace], int | None]
"""What a verb does; the exit code is 0 where it returns nothing."""

_VERB, _KIND = "VERB", "WHAT"
_PLAIN = (
    (r"^argument (\S+): ", r"\1: "),
    (r"invalid float value: (.*)$", r"\1 is not a number"),
    (r"invalid int value: (.*)$", r"\1 is not a whole number"),
    (r"expected (?:at least )?one argument$", "a value is missing"),
    (r"not allowed with argument (.*)$", r"it excludes \1; leave one of them out"),
    (r"^the following arguments are required: (.*)$", r"missing: \1"),
    (r"^one of the arguments (\S+) (\S+) is required$", r"missing: \1 or \2"),
    (r"^unrecognized arguments: (.*)$", r"'\1' is more than this takes"),
)
"""What argparse says, and how it is said here."""


class Parser(argparse.ArgumentParser):
    """Rejects in one sentence, with what was probably meant; its subparsers are of its kind."""

    _words: Sequence[str] = ()
    takes: str = ""
    """What a verb takes, in words, where the names of what is missing do not say it."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.formatter_class = HelpFormatter
        self._needs: list[tuple[str, str]] = []
        self._excludes: list[tuple[str, str]] = []

    def needs(self, **others: str) -> None:
        """Rejects an option without another: `alpha="monitor"` rejects --alpha without --monitor."""
        self._needs += others.items()

    def excludes(self, option: str, *others: str) -> None:
        """Rejects an option together with any of these."""
        self._excludes += [(option, other) for other in others]

    def check_pairs(self, options: argparse.Namespace) -> None:
        actions = {action.dest: action for action in self._actions}
        given = {name for name in actions if getattr(options, name, None) != actions[name].default}
        names = {name: (*action.option_strings, action.metavar)[0] for name, action in actions.items()}
        for option, other in self._needs:
            if option in given and other not in given:
                raise UserError(f"{names[option]} needs {names[other]}; give it with {names[other]}, or leave it out.")
        for option, other in self._excludes:
            if {option, other} <= given:
                raise UserError(f"{names[option]} excludes {names[other]}; leave out {names[other]}.")

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        """What the type of an argument says in a sentence of its own is said as it is."""
        try:
            return super()._get_value(action, arg_string)
        except argparse.ArgumentError as error:
            raise (error.__context__ if isinstance(error.__context__, UserError) else error) from None

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        self._words = list(args or ())
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        sentence = self._sentence(message)  # without the usage: its ten lines would hide it
        raise UserError(f"{sentence[0].upper()}{sentence[1:]}; see {self.prog} --help.")

    def _sentence(self, message: str) -> str:
        """With a verb or choice that is close to what was typed, or an option close to an unknown one."""
        if wrong := re.search(r"^argument (.*): invalid choice: '(.*)' \(choose from ", message, re.DOTALL):
            names = ((*action.option_strings, action.metavar, action.dest) for action in self._actions)
            choices = (list(action.choices or ()) for action in self._actions)
            known = next(found for name, found in zip(names, choices, strict=True) if wrong[1] in name)
            what = f"there is no '{self.prog} " if wrong[1] in (_VERB, _KIND) else f"{wrong[1]}: there is no '"
            return f"{what}{wrong[2]}'{did_you_mean(wrong[2], known)}; choose one of {', '.join(known)}"
        known = [option for action in self._actions for option in action.option_strings]
        for word in takewhile(lambda word: word != "--", self._words):
            name = word.partition("=")[0]
            if name.startswith("--") and not any(option.startswith(name) for option in known):
                return f"there is no option {name}{did_you_mean(name, known)}"
        below = [list(action.choices or ()) for action in self._actions if action.nargs == argparse.PARSER]
        if below and message.startswith("the following arguments are required"):
            return f"after {self.prog} comes one of {', '.join(below[0])}"
        if self.takes and message.startswith("the following arguments are required"):
            message += f": {self.takes}"
        for pattern, plain in _PLAIN:
            message = re.sub(pattern, plain, message, flags=re.DOTALL)
        return message


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Fills paragraphs, and breaks commands (indented) before an option, so that all of a help is equally wide."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        lines: list[str] = []
        for indented, found in groupby(text.splitlines(), lambda line: line.startswith("  ") if line else None):
            if indented is None:
                lines += found
            elif indented:
                lines += [part for line in found for part in _broken_command(line, width)]
            else:
                lines += textwrap.wrap(" ".join(found), width, break_on_hyphens=False)
        return "\n".join(indent + line for line in lines)


def _broken_command(line: str, width: int) -> list[str]:
    """A command as a shell reads it: a long one goes on in the next line, and its comment stands before it."""
    if len(line) <= width:
        return [line]
    command, _, comment = line.partition("  # ")
    before = [f"  # {comment}"] if comment else []
    glued = re.sub(r'"[^"]*"|(--[a-z-]+) (?=[^-])', lambda found: found[0].replace(" ", "\xa0"), command.strip())
    parts = textwrap.wrap(glued, width - 4, break_long_words=False, break_on_hyphens=False)
    parts = [part.replace("\xa0", " ") for part in parts]
    return [*before, " \\\n      ".join([f"  {parts[0]}", *parts[1:]])]


class VersionAction(argparse.Action):
    """Looks the version up when it is asked for, not at every start."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        print(f"loopscope {loopscope.__version__}")
        parser.exit()


def described(text: str) -> dict[str, str]:
    """The help of a verb from a docstring: a sentence, a paragraph of examples, and notes."""
    sentence, examples, *notes = [*inspect.cleandoc(text).split("\n\n"), ""]
    return {"description": sentence, "epilog": "\n\n".join(["examples:\n" + re.sub("(?m)^", "  ", examples), *notes])}


def add_verb(subparsers: Any, name: str, text: str | None, execute: Execute, resumes: bool = False) -> Parser:
    """Add a verb whose help is `text`; `resumes`: done again, it finds whatever was finished before."""
    parser = _add_parser(subparsers, name, text)
    parser.set_defaults(execute=execute, resumes=resumes, parser=parser)
    return parser


def add_verbs(parser: Parser) -> Any:
    """Where the verbs of the command line are added."""
    return parser.add_subparsers(title="verbs", metavar=_VERB, required=True)


def add_group(subparsers: Any, name: str, text: str | None) -> Any:
    """Add a verb that has verbs of its own, to be added to what this returns."""
    return _add_parser(subparsers, name, text).add_subparsers(title="what", metavar=_KIND, required=True)


def _add_parser(subparsers: Any, name: str, text: str | None) -> Parser:
    shown = described(text or name)  # Python's -OO leaves no docstrings
    parser: Parser = subparsers.add_parser(name, help=shown["description"].rstrip("."), **shown)
    return parser
