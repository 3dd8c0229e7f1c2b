"""The command line: one verb per stage, in the order of the stages, and one sentence for whatever is wrong."""

import argparse
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from loopscope.cli import (
    bench,
    calibrate,
    compare,
    demo,
    diagnose,
    evaluate,
    gate,
    generate,
    harness,
    loop,
    pretrain,
    record,
    report,
    run,
    selfcheck,
    study,
    train,
)
from loopscope.cli.options import HelpFormatter, Parser, VersionAction, check_names, check_words
from loopscope.cli.output import print_error, print_note
from loopscope.cli.own_readouts import import_readouts
from loopscope.errors import RecordingWarning, UserError
from loopscope.machine import out_of_memory

VERBS = (
    *(train, pretrain, loop, record, evaluate, diagnose, compare, report, calibrate),
    *(run, generate, bench, harness, selfcheck, gate, study, demo),
)

_EPILOG = """\
All of it at once, on a small task (about 10 minutes on two CPU cores):
  loopscope demo --out runs/demo

The paper's study, scaled down to some six hours of one CPU core:
  loopscope study run mano

Or stage by stage:
  loopscope train demo --out runs/mine
  loopscope record task runs/mine --split validation
  loopscope record task runs/mine --split test
  loopscope evaluate runs/mine/recordings/validation runs/mine/recordings/test
  loopscope diagnose runs/mine
  loopscope report runs/mine --out runs/mine/report
  loopscope calibrate runs/mine/recordings/validation --max-drop 0.01 --out policy.json
  loopscope evaluate runs/mine/recordings/test --policy policy.json
  loopscope run runs/mine examples.txt --policy policy.json
  loopscope bench exits runs/mine
"""


def main(arguments: Sequence[str] | None = None) -> int:
    words, resumes = sys.argv[1:] if arguments is None else list(arguments), False
    try:
        check_words(words)
        options, unknown = make_parser().parse_known_args(words)
        if unknown:
            options.parser.error(f"unrecognized arguments: {' '.join(unknown)}")  # by the verb's own parser
        resumes = options.resumes
        check_names(options)
        import_readouts(options)
        with _warnings_as_notes():
            return options.execute(options) or 0
    except UserError as error:
        if _follows():
            return 0  # the first worker has the same error; failing here could end it before it has said so
        print_error(str(error))
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        print_error(f"{where}{error.strerror or error}.")
    except MemoryError:
        print_error("there is not enough memory for this; ask for fewer examples.")
    except RuntimeError as error:
        if not out_of_memory(error):
            raise
        print_error(
            "there is not enough memory for this; ask for less at a time (a smaller --batch-tokens or --batch-size, "
            "where there is one), or take a lower precision (--dtype bfloat16)."
        )
    except KeyboardInterrupt:
        if not _follows():
            more = "; run the same command again to go on" if resumes else ""
            print_error(f"interrupted{more}.")
        return 130
    return 2


@contextmanager
def _warnings_as_notes() -> Iterator[None]:
    """What is said of a recording is said once, in a line."""
    with warnings.catch_warnings():
        warnings.simplefilter("always", RecordingWarning)
        show, shown = warnings.showwarning, set[str]()

        def noted(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> None:
            if not issubclass(category, RecordingWarning):
                show(message, category, *where, **more)
            elif str(message) not in shown and not _follows():
                shown.add(str(message))
                print_note(str(message))

        warnings.showwarning = noted
        yield


def _follows() -> bool:
    """Whether torchrun started this process, and another one speaks for all that it started."""
    return "TORCHELASTIC_RUN_ID" in os.environ and os.environ.get("RANK") != "0"


def make_parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="loopscope",
        description="Adaptive depth in looped Transformers: is the trajectory to blame, or the readout?",
        epilog=_EPILOG,
        formatter_class=HelpFormatter,
    )
    parser.add_argument(
        "--version", action=VersionAction, nargs=0, default=argparse.SUPPRESS, help="print the version and exit"
    )
    subparsers = parser.add_subparsers(title="verbs", metavar="VERB", required=True)
    for verb in VERBS:
        verb.define(subparsers)
    return parser
