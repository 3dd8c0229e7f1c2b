"""The pieces that the verbs' parsers are made of: verbs, options that several of them have, and what these may say."""

import argparse
import re
import textwrap
from collections.abc import Callable, Sequence
from itertools import groupby, takewhile
from pathlib import Path
from typing import Any, Final, NoReturn

from loopscope.errors import UserError, did_you_mean
from loopscope.reading import is_file

Execute = Callable[[argparse.Namespace], int | None]
"""What a verb does; the exit code is 0 where it returns nothing."""

PRECISIONS: Final = ("float32", "bfloat16", "float16")
CACHE_MODES: Final = ("full", "propagate", "latest")
BOUNDS: Final = ("betting", "hoeffding_bentkus")
CHECK_KINDS: Final = ("contract", "precision", "batch", "cache", "replay", "speed")
"""As the library has them, which need not be imported to refuse another name."""

PRESETS: Final = "demo, demo-parity, paper, paper-parity"
STUDIES: Final = "demo, mano, mano-mod3, ouro, paper"
BENCHMARKS: Final = "mmlu, arc_easy, arc_challenge, openbookqa, hellaswag, commonsense_qa"
READOUTS: Final = (
    "gate, entropy, top1, margin, kl, logit_change, hidden_change, hidden_cosine, patience, settling, "
    "hidden_acceleration, fixed"
)
"""What is listed where a name is asked for."""

_NAMED = {"dtype": ("precision", PRECISIONS), "cache": ("cache", CACHE_MODES), "only": ("check", CHECK_KINDS)}


def check_names(options: argparse.Namespace) -> None:
    """Refuses a name that does not exist in a sentence, before anything heavy is imported."""
    for option, (what, known) in _NAMED.items():
        names = getattr(options, option, None) or ()
        for name in (names,) if isinstance(names, str) else names:
            if name not in known:
                hint = did_you_mean(name, known)
                raise UserError(f"There is no {what} '{name}'{hint}; choose one of {', '.join(known)}.")
    device = getattr(options, "device", "cpu")
    if not re.fullmatch(r"auto|cpu|mps|cuda(:\d+)?", device):
        meant = "cuda" if device.lower() in ("gpu", "nvidia") else device
        hint = did_you_mean(meant, ("auto", "cpu", "cuda", "mps"))
        raise UserError(f"There is no device '{device}'{hint}; choose auto, cpu, cuda, cuda:1 or mps.")


def check_words(words: Sequence[str]) -> None:
    """Refuses what no name, path or text can be, before it gets anywhere."""
    for word in words:
        if "\0" in word:
            raise UserError(f"The argument '{word}' holds a NUL character; leave it out.")
        try:
            word.encode()
        except UnicodeEncodeError:
            raise UserError(f"The argument '{word}' is not UTF-8; convert it, or rename the file.") from None


_PLAIN = (
    (r"^argument (\S+): ", r"\1: "),
    (r"invalid float value: (.*)$", r"\1 is not a number"),
    (r"invalid int value: (.*)$", r"\1 is not a whole number"),
    (r"expected (?:at least )?one argument$", "a value is missing"),
    (r"not allowed with argument (.*)$", r"it excludes \1; leave one of them out"),
    (r"^the following arguments are required: (.*)$", r"missing: \1"),
    (r"^unrecognized arguments: (.*)$", r"'\1' is more than this takes"),
)
"""What argparse says, and how it is said here."""


class Parser(argparse.ArgumentParser):
    """Refuses in one sentence, as all else is refused, with what was probably meant; its subparsers are of its kind."""

    _words: Sequence[str] = ()
    takes: str = ""
    """What a verb takes, in words, where the names of what is missing do not say it."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        self._words = list(args or ())
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        sentence = self._sentence(message)  # without the usage: its ten lines would hide it
        raise UserError(f"{sentence[0].upper()}{sentence[1:]}; see {self.prog} --help.")

    def _sentence(self, message: str) -> str:
        """With a verb or choice that is close to what was typed, or an option close to an unknown one."""
        if wrong := re.search(r"^argument (.*): invalid choice: '(.*)' \(choose from (.*)\)$", message, re.DOTALL):
            known = re.findall(r"[\w.:-]+", wrong[3])
            what = f"{wrong[1]}: there is no '" if wrong[1].startswith("-") else f"there is no '{self.prog} "
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
        from loopscope.artifacts import loopscope_version

        print(f"loopscope {loopscope_version()}")
        parser.exit()


def add_verb(subparsers: Any, name: str, text: str | None, execute: Execute, resumes: bool = False) -> Parser:
    """A verb whose help is `text`, the docstring of its module: a sentence, a paragraph of examples, and notes.

    `resumes`: done again, it finds whatever was finished before.
    """
    parser = _add_parser(subparsers, name, text)
    parser.set_defaults(execute=execute, resumes=resumes, parser=parser)
    return parser


def add_group(subparsers: Any, name: str, text: str | None) -> Any:
    """A verb that has verbs of its own, to be added to what this returns."""
    return _add_parser(subparsers, name, text).add_subparsers(title="what", metavar="WHAT", required=True)


def _add_parser(subparsers: Any, name: str, text: str | None) -> Parser:
    sentence, examples, *notes = [*(text or name).strip().split("\n\n"), ""]  # Python's -OO leaves no docstrings
    parser: Parser = subparsers.add_parser(
        name,
        help=sentence.rstrip("."),
        description=sentence,
        epilog="\n\n".join(["examples:\n" + re.sub("(?m)^", "  ", examples), *notes]),
        formatter_class=HelpFormatter,
    )
    return parser


def count(text: str) -> int:
    if whole(text) == 0:
        raise argparse.ArgumentTypeError(f"'{text}' is not a whole number from 1 on")
    return whole(text)


def whole(text: str) -> int:
    if not re.fullmatch("[0-9]{1,15}", text):
        raise argparse.ArgumentTypeError(f"'{text}' is not a whole number from 0 on, of 15 digits at most")
    return int(text)


def number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"'{text}' is not a number") from None
    if not 0 <= value <= 1e18:
        raise argparse.ArgumentTypeError(f"'{text}' is not a number from 0 to 1e18")
    return value


def probability(text: str) -> float:
    if not 0 < number(text) <= 1:
        raise argparse.ArgumentTypeError(f"'{text}' is not a number above 0 and up to 1")
    return number(text)


def rounds(text: str) -> int:
    if count(text) > 10_000:
        raise argparse.ArgumentTypeError(f"'{text}' rounds never end; 10000 at most")
    return count(text)


def threads(text: str) -> int:
    if count(text) > 4096:
        raise argparse.ArgumentTypeError(f"'{text}' is more than any machine has; 4096 at most")
    return count(text)


def levels(text: str) -> range:
    found = re.fullmatch(r"([1-9][0-9]{0,8})(?:-([0-9]{1,9}))?", text)
    if found is None:
        raise argparse.ArgumentTypeError(f"'{text}' is not a range of difficulties such as 11-14")
    first, last = int(found[1]), int(found[2] or found[1])
    if last < first:
        raise argparse.ArgumentTypeError(f"'{text}' is an empty range")
    return range(first, last + 1)


_SHARED: dict[str, dict[str, Any]] = {
    "--any-model": {"action": "store_true", "help": "use the policy on any model, without its promise"},
    "--data": {"type": Path, "metavar": "DIR", "help": "folder with the benchmarks' files (default: from the Hub)"},
    "--device": {
        "default": "auto",
        "metavar": "NAME",
        "help": "device to compute on: auto (default), cpu, cuda, cuda:1, mps",
    },
    "--dtype": {"metavar": "NAME", "help": "precision: float32, bfloat16 or float16 (default: the file's)"},
    "--force": {"action": "store_true", "help": "start even what is far too big for this machine"},
    "--gate": {
        "action": "append",
        "type": Path,
        "default": [],
        "metavar": "DIR",
        "help": "folder of a fitted gate or stopper, as one more readout (repeatable)",
    },
    "--hidden": {"action": "store_true", "help": "keep the pooled hidden states in the recording"},
    "--json": {"action": "store_true", "help": "print the result as JSON"},
    "--open": {"action": "store_true", "help": "open the page of the report in the browser"},
    "--style": {
        "choices": ("page", "paper"),
        "default": "page",
        "help": "style of the figures: as on the page (default), or as wide as a column of a paper",
    },
    "--product": {
        "action": "append",
        "metavar": "NAME",
        "help": "make only this product, or group of them: overview, ouro, paper (repeatable)",
    },
    "--rounds": {
        "type": rounds,
        "default": 5,
        "metavar": "N",
        "help": "rounds to measure after the warm-up (default: 5)",
    },
    "--set": {
        "action": "append",
        "default": [],
        "metavar": "A.B=C",
        "help": "change a setting, such as training.seed=1 (repeatable)",
    },
    "--store": {"type": Path, "metavar": "DIR", "help": "folder of all artifacts (default: store, beside --out)"},
    "--threads": {"type": threads, "metavar": "N", "help": "CPU threads to use (default: as PyTorch chooses)"},
    "--with-readout": {
        "action": "append",
        "default": [],
        "metavar": "MODULE:NAME",
        "help": "add a readout of your own, which a module defines (repeatable)",
    },
    "--unseen": {"action": "store_true", "help": "count only examples that training did not have"},
}
"""Options that mean the same wherever they are."""
AT = "target accuracy, such as 0.95 (default: 1 point below full depth on validation data)"
REFERENCE = (
    "run, or folder of recordings, whose trajectory is the measure: its path, or its name if it is given here or lies "
    "beside a run that is"
)
RECORDED = "a run whose validation and test splits are recorded, or a folder with two recordings of these names"
MAX_DROP = "largest loss against full depth that is allowed (default: 0.01)"
CONFIDENCE = "probability with which the promise is to hold (default: 0.95)"
COMPUTE = ("--device", "--threads", "--json")


def add_shared(parser: argparse.ArgumentParser, *names: str) -> None:
    for name in names:
        parser.add_argument(name, **_SHARED[name])


def target_accuracies(values: Sequence[float]) -> list[float]:
    """What --at says, each once."""
    if not all(0 < target <= 1 for target in values):
        raise UserError("--at takes accuracies between 0 and 1, such as 0.95.")
    return list({f"{target:g}": target for target in values}.values())


def check_new(out: Path | None) -> None:
    """Refuses to write over what is there; in an empty file nothing is."""
    if out is not None and out.exists() and not (out.is_file() and not out.stat().st_size):
        from loopscope.writing import remove_leftovers

        remove_leftovers(out)
        raise UserError(f"{out} is there already; choose another --out, or remove it.")


def check_folder(folder: Path) -> None:
    """Refuses a file where a folder is to be, or to be made in."""
    for place in (folder, *folder.parents):
        if is_file(place):
            raise UserError(f"{place} is a file; give a folder.")


def values(options: argparse.Namespace, *names: str) -> dict[str, Any]:
    """What these options say, where anything; they have the names of the library's own."""
    return {name: value for name in names if (value := getattr(options, name)) is not None}


def option_words(options: dict[str, Any]) -> list[str]:
    """These options as they are written on the command line; those without a value are left out."""
    words = []
    for name, value in options.items():
        for each in value if isinstance(value, list) else [value]:
            if each is not None and each is not False:
                words += [f"--{name.removesuffix('s') if name in ('models', 'benchmarks') else name}"]
                words += [] if each is True else [f"{each:g}" if isinstance(each, float) else str(each)]
    return words
