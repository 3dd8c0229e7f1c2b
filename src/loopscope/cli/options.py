"""What may an option be? A number, a name or a file, checked while it is read; and the options of several verbs."""

import argparse
import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, NoReturn

from loopscope.cli.parser import Parser
from loopscope.errors import UserError, did_you_mean
from loopscope.files import is_file, remove_leftovers, require_file
from loopscope.readouts.readout import READOUTS, needs_labels

PRECISIONS: Final = ("float32", "bfloat16", "float16")
"""Those of `models.checkpoint`, which takes PyTorch to import."""
READOUT_NAMES: Final = ", ".join(name for name in READOUTS if not needs_labels(name))
RECORDED = "a run whose validation and test splits are recorded, or a folder with two recordings of these names"


def _reject(text: str, expected: str) -> NoReturn:
    raise argparse.ArgumentTypeError(f"'{text}' is {expected}")


def whole_number(text: str, least: int, most: int = 10**15 - 1) -> int:
    if not re.fullmatch("[0-9]{1,15}", text) or not least <= int(text) <= most:
        _reject(text, f"not a whole number from {least} to {most:,}")
    return int(text)


count, whole = partial(whole_number, least=1), partial(whole_number, least=0)
rounds, threads = partial(whole_number, least=1, most=10_000), partial(whole_number, least=1, most=4096)


def number(text: str) -> float:
    return _real(text, lambda value: 0 <= value <= 1e18, "from 0 to 1e18")


def share(text: str) -> float:
    return _real(text, lambda value: 0 < value <= 1, "above 0 and up to 1")


def _real(text: str, fits: Callable[[float], bool], which: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not fits(value):
        _reject(text, f"not a number {which}")
    return value


def number_range(text: str) -> range:
    """12, or 12-15."""
    found = re.fullmatch("([0-9]{1,4})(?:-([0-9]{1,4}))?", text)
    if found is None or int(found[2] or found[1]) < int(found[1]):
        _reject(text, "neither a number such as 12 nor a range such as 12-15")
    return range(int(found[1]), int(found[2] or found[1]) + 1)


def device_name(text: str) -> str:
    if not re.fullmatch(r"auto|cpu|mps|cuda(:\d+)?", text):
        meant = "cuda" if text.lower() in ("gpu", "nvidia") else text
        hint = did_you_mean(meant, ("auto", "cpu", "cuda", "mps"))
        raise UserError(f"There is no device '{text}'{hint}; choose auto, cpu, cuda, cuda:1 or mps.")
    return text


def text_file(text: str, what: str = "text file") -> Path:
    require_file(Path(text), what)
    return Path(text)


def out_folder(text: str) -> Path:
    """A folder to write to: no file is in its way."""
    for place in (Path(text), *Path(text).parents):
        if is_file(place):
            raise UserError(f"{place} is a file; give a folder.")
    return Path(text)


def new_path(text: str | Path) -> Path:
    """What is written and not there yet; in an empty file nothing is."""
    out = Path(text)
    if out.exists() and not (out.is_file() and not out.stat().st_size):
        remove_leftovers(out)
        raise UserError(f"{out} is there already; choose another --out, or remove it.")
    return out


_TYPES: dict[str, Any] = {"N": count, "X": float, "FILE": Path, "DIR": Path}


def option(parser: Any, words: str, text: str, **more: Any) -> None:
    """Add `--name VALUE`, or a positional argument.

    N is a count, X a number, FILE and DIR are paths, unless `type` says otherwise; without a value it is a flag. A
    default that is a number or a name is added to the help.
    """
    name, _, metavar = words.partition(" ")
    default = more.get("default")
    if isinstance(default, int | float | str) and "default" not in text:
        text = f"{text} (default: {default:g})" if isinstance(default, float) else f"{text} (default: {default})"
    if name.startswith("--") and not metavar and "choices" not in more:
        parser.add_argument(name, action="store_true", help=text, **more)
        return
    if metavar:
        more = {"metavar": metavar, "type": _TYPES.get(metavar), **more}
    if more.get("action") == "append":
        more = {"default": [], **more}
    parser.add_argument(name, help=text, **more)


_SHARED: dict[str, tuple[str, dict[str, Any]]] = {
    "model": ("the folder of a checkpoint, or its name on the Hub", {}),
    "run": ("the folder of a finished run", {"type": Path}),
    "--any-model": ("use the policy on any model, without its promise", {}),
    "--at X": ("target accuracy, such as 0.95 (default: 1 point below full depth on validation data)", {"type": share}),
    "--confidence X": ("probability with which the promise is to hold (default: 0.95)", {}),
    "--data DIR": ("folder with the benchmarks' files (default: from the Hub)", {}),
    "--device NAME": (
        "device to compute on: auto (default), cpu, cuda, cuda:1, mps",
        {"type": device_name, "default": "auto"},
    ),
    "--dtype NAME": ("precision: float32, bfloat16 or float16 (default: the file's)", {"choices": PRECISIONS}),
    "--force": ("start even what is far too big for this machine", {}),
    "--gate DIR": ("folder of a fitted gate or stopper, as one more readout (repeatable)", {"action": "append"}),
    "--hidden": ("keep the pooled hidden states in the recording", {}),
    "--json": ("print the result as JSON", {}),
    "--max-drop X": ("largest loss against full depth that is allowed (default: 0.01)", {}),
    "--open": ("open the page of the report in the browser", {}),
    "--style": (
        "style of the figures: as on the page (default), or as wide as a column of a paper",
        {"choices": ("page", "paper"), "default": "page"},
    ),
    "--product NAME": (
        "make only this product, or group of them: overview, ouro, paper (repeatable)",
        {"action": "append"},
    ),
    "--reference RUN": (
        "run, or folder of recordings, whose trajectory is the measure: its path, or its name if it is given here or "
        "lies beside a run that is",
        {},
    ),
    "--rounds N": ("rounds to measure after the warm-up", {"type": rounds, "default": 5}),
    "--set A.B=C": ("change a setting, such as training.seed=1 (repeatable)", {"action": "append"}),
    "--store DIR": ("folder of all artifacts (default: store, beside --out)", {"type": out_folder}),
    "--threads N": ("CPU threads to use (default: as PyTorch chooses)", {"type": threads}),
    "--unseen": ("count only examples that training did not have", {}),
}
"""Options that mean the same wherever they are."""
COMPUTE = ("--device NAME", "--threads N", "--json")


def add_report_options(parser: Parser) -> None:
    shown = parser.add_mutually_exclusive_group()  # --open opens the page, which --product does not write
    add_shared(shown, "--product NAME", "--open")
    add_shared(parser, "--style")


def add_shared(parser: Any, *names: str, **changes: Any) -> None:
    for name in names:
        text, more = _SHARED[name]
        option(parser, name, text, **{**more, **changes})
    if "--any-model" in names:
        parser.needs(any_model="policy")


def target_accuracies(values: Sequence[float]) -> list[float]:
    """What --at says, each once."""
    return list({f"{target:g}": target for target in values}.values())


def given(options: argparse.Namespace, *names: str) -> dict[str, Any]:
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
