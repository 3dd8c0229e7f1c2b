"""The pieces that the verbs' parsers are made of: verbs, options that several of them have, and what these may say."""

import argparse
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, NoReturn

from loopscope.errors import UserError, brief, did_you_mean

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
        hint = did_you_mean(device, ("auto", "cpu", "cuda", "mps"))
        raise UserError(f"The device '{device}'{hint} is not available here; choose auto, cpu, cuda, cuda:1 or mps.")


def check_words(words: Sequence[str]) -> None:
    """Refuses what no name, path or text can be, before it gets anywhere."""
    for word in words:
        if "\0" in word:
            raise UserError(f"The argument '{word}' holds a NUL character; leave it out.")
        try:
            word.encode()
        except UnicodeEncodeError:
            raise UserError(f"The argument '{word}' is not UTF-8; convert it, or rename the file.") from None


class Parser(argparse.ArgumentParser):
    """Says in a visible line what is wrong, and what was probably meant; its subparsers are of its kind."""

    _words: Sequence[str] = ()

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        self._words = list(args or ())
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        super().error(brief(self._with_meant(message)))

    def _with_meant(self, message: str) -> str:
        """The message with a verb or choice that is close to what was typed, or an option close to an unknown one."""
        if wrong := re.search(r"invalid choice: '(.*)' \(choose from (.*)\)$", message, re.DOTALL):
            hint = did_you_mean(wrong[1], re.findall(r"[\w.:-]+", wrong[2]))
            return message.replace(" (choose from", f"{hint} (choose from", 1)
        known = [option for action in self._actions for option in action.option_strings]
        for word in self._words:
            name = word.partition("=")[0]
            if name.startswith("--") and not any(option.startswith(name) for option in known):
                return f"{message}; there is no option {name}{did_you_mean(name, known)}"
        return message


class VersionAction(argparse.Action):
    """Looks the version up when it is asked for, not at every start."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        from loopscope.artifacts import loopscope_version

        print(f"loopscope {loopscope_version()}")
        parser.exit()


def add_verb(
    subparsers: Any, name: str, text: str | None, execute: Execute, resumes: bool = False
) -> argparse.ArgumentParser:
    """A verb whose help is `text`, the docstring of its module: a sentence, a paragraph of examples, and notes.

    `resumes`: done again, it finds whatever was finished before.
    """
    parser = _add_parser(subparsers, name, text)
    parser.set_defaults(execute=execute, resumes=resumes, parser=parser)
    return parser


def add_group(subparsers: Any, name: str, text: str | None) -> Any:
    """A verb that has verbs of its own, to be added to what this returns."""
    return _add_parser(subparsers, name, text).add_subparsers(title="what", metavar="WHAT", required=True)


def _add_parser(subparsers: Any, name: str, text: str | None) -> argparse.ArgumentParser:
    sentence, examples, *notes = [*(text or name).strip().split("\n\n"), ""]  # Python's -OO leaves no docstrings
    return subparsers.add_parser(
        name,
        help=sentence.rstrip("."),
        description=sentence,
        epilog="\n\n".join(["examples:\n" + re.sub("(?m)^", "  ", examples), *notes]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def count(text: str) -> int:
    if whole(text) == 0:
        raise argparse.ArgumentTypeError(f"'{text}' is not a whole number from 1 on")
    return whole(text)


def whole(text: str) -> int:
    if not re.fullmatch("[0-9]{1,15}", text):
        raise argparse.ArgumentTypeError(f"'{text}' is not a whole number from 0 on, of 15 digits at most")
    return int(text)


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
    "--any-model": {"action": "store_true", "help": "use a policy without its promise, on any model"},
    "--data": {"type": Path, "metavar": "DIR", "help": "local files of the benchmarks (default: the Hub)"},
    "--device": {"default": "auto", "metavar": "NAME", "help": "auto (default), cpu, cuda, cuda:1, mps"},
    "--dtype": {"metavar": "NAME", "help": "float32, bfloat16 or float16 (default: the file's)"},
    "--force": {"action": "store_true", "help": "start even what is far too big for this machine"},
    "--gate": {
        "action": "append",
        "type": Path,
        "default": [],
        "metavar": "DIR",
        "help": "a fitted gate or stopper (repeatable)",
    },
    "--hidden": {"action": "store_true", "help": "keep the pooled hidden states"},
    "--json": {"action": "store_true", "help": "print JSON"},
    "--open": {"action": "store_true", "help": "open the page in the browser"},
    "--style": {
        "choices": ("page", "paper"),
        "default": "page",
        "help": "of the figures: as on the page (default), or as wide as a column of a paper",
    },
    "--product": {
        "action": "append",
        "metavar": "NAME",
        "help": "a product, or a group: overview, ouro, paper (repeatable)",
    },
    "--rounds": {"type": rounds, "default": 5, "metavar": "N", "help": "rounds after warm-up (default: 5)"},
    "--set": {"action": "append", "default": [], "metavar": "A.B=C", "help": "change a setting (repeatable)"},
    "--store": {"type": Path, "metavar": "DIR", "help": "of all artifacts (default: store beside OUT)"},
    "--threads": {"type": threads, "metavar": "N", "help": "CPU threads (default: as PyTorch chooses)"},
    "--with-readout": {
        "action": "append",
        "default": [],
        "metavar": "MODULE:NAME",
        "help": "a readout of your own, beside those that there are (repeatable)",
    },
    "--unseen": {"action": "store_true", "help": "only examples that training did not have"},
}
"""Options that mean the same wherever they are."""
AT = "the target accuracy (default: 1 point below full depth on validation data)"
REFERENCE = "the run whose trajectory is the measure: its folder, or its name if it is one of these or beside them"
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
