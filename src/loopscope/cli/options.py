"""How is a command line read, and which options do several verbs share?

By argparse, whose complaints become one plain sentence with what was probably meant. Nothing heavy is imported here.
"""

import argparse
import inspect
import re
import textwrap
from collections.abc import Callable, Sequence
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any, Final, NoReturn

from loopscope.errors import UserError, did_you_mean

Execute = Callable[[argparse.Namespace], int | None]
"""The function of a verb; the exit code is 0 if it returns nothing."""

PRECISIONS: Final = ("float32", "bfloat16", "float16", "int8")
"""The names in `models.checkpoint`, which would import PyTorch."""
_VERB, _KIND = "VERB", "WHAT"
_HELP_WIDTH = 79
_PLAIN = (
    (r"^argument (\S+): ", r"\1: "),
    (r"invalid float value: (.*)$", r"\1 is not a number"),
    (r"expected (?:at least )?one argument$", "a value is missing"),
    (r"not allowed with argument (.*)$", r"it excludes \1; leave one of them out"),
    (r"^the following arguments are required: (.*)$", r"missing: \1"),
    (r"^one of the arguments (\S+) (\S+) is required$", r"missing: \1 or \2"),
    (r"^unrecognized arguments: (.*)$", r"'\1' is more than this takes"),
)
"""The messages of argparse, and our sentences for them."""


class Parser(argparse.ArgumentParser):
    """A parser of the command line whose errors are one sentence with a hint."""

    _words: Sequence[str] = ()
    takes: str = ""
    """The arguments of a verb in words, for the error if some are missing."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.formatter_class = argparse.RawDescriptionHelpFormatter
        self._pairs: list[tuple[str, str, bool]] = []

    def needs(self, **others: str) -> None:
        """Rejects an option without another: `alpha="monitor"` rejects --alpha without --monitor."""
        self._pairs += [(option, other, True) for option, other in others.items()]

    def excludes(self, option: str, *others: str) -> None:
        """Rejects an option together with any of these."""
        self._pairs += [(option, other, False) for other in others]

    def check_pairs(self, options: argparse.Namespace) -> None:
        actions = {action.dest: action for action in self._actions}
        given = {name for name in actions if getattr(options, name, None) != actions[name].default}
        names = {name: (*action.option_strings, action.metavar)[0] for name, action in actions.items()}
        for option, other, together in self._pairs:
            if option in given and (other in given) != together:
                needed = f"needs {names[other]}; give it with {names[other]}, or leave it out"
                excluded = f"excludes {names[other]}; leave out {names[other]}"
                raise UserError(f"{names[option]} {needed if together else excluded}.")

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        """Keep the sentence that the type of an argument raises, instead of argparse's."""
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
        """The sentence for argparse's error, with a hint at a similar verb, choice or option."""
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
        if message.startswith("the following arguments are required"):
            for action in self._actions:
                if action.nargs == argparse.PARSER:
                    return f"after {self.prog} comes one of {', '.join(action.choices or ())}"
            message += self.takes and f": {self.takes}"
        for pattern, plain in _PLAIN:
            message = re.sub(pattern, plain, message, flags=re.DOTALL)
        return message


def described(text: str) -> dict[str, str]:
    """The parts of a verb's help from a docstring: a sentence, examples, and notes."""
    sentence, examples, *notes = [*inspect.cleandoc(text).split("\n\n"), ""]
    sentence, *notes = (textwrap.fill(each, _HELP_WIDTH, break_on_hyphens=False) for each in (sentence, *notes))
    return {"description": sentence, "epilog": "\n\n".join(["examples:\n" + re.sub("(?m)^", "  ", examples), *notes])}


def add_verb(subparsers: Any, name: str, text: str | None, execute: Execute, resumes: bool = False) -> Parser:
    """Add a verb whose help is `text`; `resumes`: running it again continues unfinished work."""
    parser = _add_parser(subparsers, name, text)
    parser.set_defaults(execute=execute, resumes=resumes, parser=parser)
    return parser


def add_verbs(parser: Parser) -> Any:
    """Let a parser have verbs, and return the place to add them."""
    return parser.add_subparsers(title="verbs", metavar=_VERB, required=True)


def add_group(subparsers: Any, name: str, text: str | None) -> Any:
    """Add a verb that has verbs of its own, and return the place to add them."""
    return _add_parser(subparsers, name, text).add_subparsers(title="what", metavar=_KIND, required=True)


def _add_parser(subparsers: Any, name: str, text: str | None) -> Parser:
    """Add the parser of a verb with its help."""
    shown = described(text or name)  # Python's -OO leaves no docstrings
    parser: Parser = subparsers.add_parser(name, help=shown["description"].rstrip("."), **shown)
    return parser


def _reject_argument(text: str, expected: str) -> NoReturn:
    """Raise the error for an argument of a wrong form."""
    raise argparse.ArgumentTypeError(f"'{text}' is {expected}")


def whole_number(text: str, least: int, most: int = 10**15 - 1) -> int:
    """Parse a whole number between two limits."""
    if not re.fullmatch("[0-9]{1,15}", text) or not least <= int(text) <= most:
        _reject_argument(text, f"not a whole number from {least} to {most:,}")
    return int(text)


def real_number(text: str, fits: Callable[[float], bool], which: str) -> float:
    """Parse a number that `fits` accepts; `which` describes such numbers."""
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not fits(value):
        _reject_argument(text, f"not a number {which}")
    return value


count, whole = partial(whole_number, least=1), partial(whole_number, least=0)
rounds, threads = partial(whole_number, least=1, most=10_000), partial(whole_number, least=1, most=4096)
loops = partial(whole_number, least=1, most=1024)
non_negative = partial(real_number, fits=lambda value: 0 <= value <= 1e18, which="from 0 to 1e18")
share_or_zero = partial(real_number, fits=lambda value: 0 <= value <= 1, which="from 0 to 1")
share = partial(real_number, fits=lambda value: 0 < value <= 1, which="above 0 and up to 1")


def _between_0_and_1(example: float) -> Callable[[str], float]:
    """A parser for numbers between 0 and 1."""
    return partial(real_number, fits=lambda value: 0 < value < 1, which=f"between 0 and 1, such as {example}")


def number_range(text: str) -> range:
    """Parse one number or a range: `12`, or `12-15`."""
    found = re.fullmatch("([0-9]{1,4})(?:-([0-9]{1,4}))?", text)
    if found is None or int(found[2] or found[1]) < int(found[1]):
        _reject_argument(text, "neither a number such as 12 nor a range such as 12-15")
    return range(int(found[1]), int(found[2] or found[1]) + 1)


def device_name(text: str) -> str:
    """Parse the name of a device."""
    if not re.fullmatch(r"auto|cpu|mps|cuda(:\d+)?", text):
        meant = "cuda" if text.lower() in ("gpu", "nvidia") else text
        hint = did_you_mean(meant, ("auto", "cpu", "cuda", "mps"))
        raise UserError(f"There is no device '{text}'{hint}; choose auto, cpu, cuda, cuda:1 or mps.")
    return text


def gpu_names(text: str) -> list[str]:
    """Parse a list of GPUs: `cuda:0,cuda:1`."""
    names = text.split(",")
    if not all(re.fullmatch(r"cuda:\d+", name) for name in names) or len({*names}) < len(names):
        _reject_argument(text, "not a list of different CUDA devices such as cuda:0,cuda:1")
    return names


_TYPES: dict[str, Any] = {"N": count, "X": float, "FILE": Path, "DIR": Path}
_SHARED: dict[str, tuple[str, dict[str, Any]]] = {
    "model": ("the folder of a checkpoint, or its name on the Hub", {}),
    "run": ("the folder of a finished run", {"type": Path}),
    "--any-model": ("use the policy on any model, without the policy's guarantee", {}),
    "--at X": (
        "target accuracy, such as 0.95 (default: 1 percentage point below full-depth accuracy on validation data)",
        {"type": share},
    ),
    "--chat": ("put each prompt into the model's chat template", {}),
    "--confidence X": (
        "probability with which the guarantee must hold (default: 0.95)",
        {"type": _between_0_and_1(0.95)},
    ),
    "--compile": ("compile the loop first; useful for long runs, because compiling takes a minute or more", {}),
    "--data DIR": ("folder with the benchmarks' files (default: download them from the Hub)", {}),
    "--device NAME": ("device: auto (default), cpu, cuda, cuda:1 or mps", {"type": device_name, "default": "auto"}),
    "--dtype NAME": (
        "precision: float32, bfloat16, float16 or int8 (default: as in the checkpoint)",
        {"choices": PRECISIONS},
    ),
    "--force": ("start even if the run is far too big for this machine", {}),
    "--fitted DIR": ("folder of a fitted gate or stopper to add as a readout (repeatable)", {"action": "append"}),
    "--hidden": ("keep the pooled hidden states in the recording", {}),
    "--json": ("print the result as JSON", {}),
    "--max-drop X": ("largest allowed loss against full depth (default: 0.01)", {"type": _between_0_and_1(0.01)}),
    "--open": ("open the report in the browser", {}),
    "--style": (
        "width of the figures: a page, or a column of a paper",
        {"choices": ("page", "paper"), "default": "page"},
    ),
    "--product NAME": (
        "make only this table or figure, or this group of tables and figures: overview, ouro, paper (repeatable)",
        {"action": "append"},
    ),
    "--reference RUN": ("run or folder of recordings to compare with, given by path or name", {}),
    "--rounds N": ("number of rounds to measure after the warm-up", {"type": rounds, "default": 5}),
    "--seed N": ("random seed", {"type": whole, "default": 0}),
    "--set A.B=C": ("change a setting, such as training.seed=1 (repeatable)", {"action": "append"}),
    "--shots N": ("number of few-shot examples per question (default: the task's own number)", {"type": whole}),
    "--threads N": ("number of CPU threads (default: PyTorch chooses)", {"type": threads}),
    "--unseen": ("count only examples that are not in the training data", {}),
}
"""Options that mean the same wherever they are."""
COMPUTE = ("--device NAME", "--threads N", "--json")


def option(parser: Any, words: str, text: str, **more: Any) -> None:
    """Add `--name VALUE`, or a positional argument.

    N is a count, X a number, FILE and DIR are paths, unless `type` says otherwise; without a value it is a flag. A
    default that is a number or a name is added to the help.
    """
    name, _, metavar = words.partition(" ")
    default = more.get("default")
    if isinstance(default, int | float | str) and "default" not in text:
        text = f"{text} (default: {default:g})" if isinstance(default, float) else f"{text} (default: {default})"
    if metavar:
        more = {"metavar": metavar, "type": _TYPES.get(metavar), **more}
    elif name.startswith("--") and "choices" not in more:
        more = {"action": "store_true", **more}
    if more.get("action") == "append":
        more = {"default": [], **more}
    parser.add_argument(name, help=text, **more)


def add_shared(parser: Any, *names: str, **changes: Any) -> None:
    """Add options that several verbs share, by name."""
    for name in names:
        text, more = _SHARED[name]
        option(parser, name, text, **{**more, **changes})
    if "--any-model" in names:
        parser.needs(any_model="policy")


def given(options: argparse.Namespace, *names: str) -> dict[str, Any]:
    """The options with these names that have a value, as parameters for the library."""
    return {name: value for name in names if (value := getattr(options, name)) is not None}


def target_accuracies(values: Sequence[float]) -> list[float]:
    """The accuracies that --at names, each once."""
    return list({f"{target:g}": target for target in values}.values())
