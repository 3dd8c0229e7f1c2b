"""Adaptive depth in looped Transformers: blame the trajectory, or the readout?

All stages at once, on a small task (a few minutes on two CPU cores):
  loopscope demo --out runs/demo

The paper's study, scaled down to some six hours of one CPU core:
  loopscope study run mano

Or stage by stage:
  loopscope train demo --out runs/mine
  loopscope record task runs/mine --split validation
  loopscope record task runs/mine --split test
  loopscope sweep runs/mine/recordings/validation runs/mine/recordings/test
  loopscope diagnose runs/mine
  loopscope report runs/mine --out runs/mine/report
  loopscope calibrate runs/mine/recordings/validation --max-drop 0.01 \\
      --out policy.json
  loopscope check runs/mine/recordings/test --policy policy.json
  loopscope answer runs/mine examples.txt --policy policy.json
  loopscope bench exits runs/mine
"""
# One verb per stage, in the order of the stages; only the module of the verb that was typed is imported. The docstrings
# of this module, of the verbs' modules and of what they execute are what `--help` prints.

import argparse
import os
import select
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import loopscope
from loopscope.cli.options import Parser, add_verbs
from loopscope.errors import RecordingWarning, UserError, brief, missing_extra, out_of_memory, visible

VERBS = {
    "train": "Train a looped Transformer or a custom model on a task",
    "pretrain": "Train a new Ouro and its tokenizer on a text, or train a checkpoint further",
    "loop": "Loop the middle layers of an ordinary language model",
    "record": "Record every loop of a model on a task, a text or a benchmark, or run a text live with early exits",
    "sweep": "Compare exit rules: sweep the thresholds of every readout of a recording",
    "diagnose": "Find which part of a model is to blame: its trajectory or its readout",
    "compare": "Compare two readouts on the same examples",
    "report": "Write a report with tables and figures on runs or folders of recordings",
    "calibrate": "Choose an exit threshold with a guarantee",
    "check": "Check a policy and its guarantee on held-out examples",
    "monitor": "Check a recording for drift from the data on which a policy was calibrated",
    "answer": "Answer the examples in a file with adaptive depth",
    "generate": "Continue text with a looped language model",
    "bench": "Measure speed-ups over full depth, in interleaved rounds",
    "harness": "Run lm_eval's tasks on a language model",
    "selfcheck": "Check a model on this machine: contract, precision, batches, caches, exits, speed",
    "fit": "Fit a gate or a stopper to a recording of the train split",
    "insert": "Insert a fitted gate into a copy of a checkpoint",
    "study": "Run a study: one file describes many runs, and one report compares the runs",
    "demo": "Train, record and diagnose five small models, and write the report",
}
"""Each verb, with the sentence that its help begins with."""
_ELSEWHERE = {"pretrain": "train", "monitor": "check", "insert": "fit", "demo": "study"}
"""The module of a verb that is not called like the verb; it is defined there by `define_VERB`."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line of LoopScope; return the exit code."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    verb = next((word for word in words if not word.startswith("-")), "")
    return run_command(words, lambda: make_parser([verb]))


def run_command(words: Sequence[str], make: Any) -> int:
    """Execute a command with the parser that `make` returns; return the exit code."""
    options = argparse.Namespace(resumes=False)
    _open_standard_streams()
    try:
        _check_arguments(words)
        _, unknown = make().parse_known_args(words, options)
        if unknown:
            options.parser.error(f"unrecognized arguments: {' '.join(unknown)}")  # by the verb's own parser
        options.parser.check_pairs(options)
        with _warnings_as_notes():
            code = options.execute(options) or 0
        sys.stdout.flush()
        return code
    except (UserError, ModuleNotFoundError) as error:
        shown_error = missing_extra(error, "This") if isinstance(error, ModuleNotFoundError) else error
        if not isinstance(shown_error, UserError):
            raise
        if _is_silent_worker():
            return 0  # the first worker has the same error; failing here could end it before it has said so
        _print_error(str(shown_error))
    except OSError as error:
        if isinstance(error, BrokenPipeError) and _output_is_closed():
            return 1  # as rich ends a table
        where = f"{error.filename}: " if error.filename else ""
        _print_error(f"{where}{error.strerror or error}.")
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not out_of_memory(error):
            raise
        _print_error(
            "there is not enough memory for this; ask for less at a time (a smaller --batch-tokens or --batch-size, "
            "where there is one), for fewer examples, or for a lower precision (--dtype bfloat16)."
        )
    except KeyboardInterrupt:
        if not _is_silent_worker():
            more = "; run the same command again to go on" if options.resumes else ""
            _print_error(f"interrupted{more}.")
        return 130
    return 2


def _open_standard_streams() -> None:
    """Open standard streams that the caller closed, so that no file that is opened next takes their place."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open(mode, encoding="utf-8"))  # noqa: SIM115 - until the end


def _output_is_closed() -> bool:
    """Whether the reader of standard output has stopped, as `head` does; then the rest of the output is dropped."""
    output = select.poll()
    output.register(sys.stdout.fileno(), 0)
    closed = bool(output.poll(0))
    if closed:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return closed


def _print_error(text: str) -> None:
    """Print the one sentence of an error on standard error."""
    print(f"loopscope: {brief(text)}", file=sys.stderr)


def _check_arguments(words: Sequence[str]) -> None:
    """Reject arguments that no name, path or text can be."""
    for word in words:
        no_text = any("\ud800" <= letter <= "\udfff" for letter in word)  # bytes that are not UTF-8
        if no_text or "\0" in word:
            reason = "is not UTF-8; convert it" if no_text else "holds a NUL character; leave it out"
            raise UserError(f"The argument '{word}' {reason}, or rename the file.")


@contextmanager
def _warnings_as_notes() -> Iterator[None]:
    """Print each warning about a recording once, as a note of one line."""
    with warnings.catch_warnings():
        warnings.simplefilter("always", RecordingWarning)
        show, shown = warnings.showwarning, set[str]()

        def noted(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> None:
            if not issubclass(category, RecordingWarning):
                show(message, category, *where, **more)
            elif str(message) not in shown and not _is_silent_worker():
                shown.add(str(message))
                print(visible(str(message)), file=sys.stderr)

        warnings.showwarning = noted
        yield


def _is_silent_worker() -> bool:
    """Whether torchrun started this process, and another process prints for all of them."""
    return "TORCHELASTIC_RUN_ID" in os.environ and os.environ.get("RANK") != "0"


def make_parser(verbs: Sequence[str] = tuple(VERBS)) -> Parser:
    """The parser of the command line with the arguments of these verbs; it only lists the other verbs."""
    description, _, epilog = (__doc__ or "").partition("\n\n")
    parser = Parser(prog="loopscope", description=description, epilog=epilog)
    parser.add_argument(
        "--version", action="version", version=f"loopscope {loopscope.__version__}", help="print the version and exit"
    )
    subparsers = add_verbs(parser)
    for name, sentence in VERBS.items():
        if name not in verbs:
            subparsers.add_parser(name, help=sentence)
            continue
        module = import_module(f"loopscope.cli.{_ELSEWHERE.get(name, name)}")
        getattr(module, f"define_{name}" if name in _ELSEWHERE else "define")(subparsers)
    return parser
