"""Train an Ouro on a text, with its tokenizer; or train a checkpoint further.

loopscope pretrain recipes/small_ouro/small_ouro.toml --text train.txt --validation validation.txt --out runs/small-ouro
loopscope pretrain my.toml --text a.jsonl b.txt --validation c.txt --out mine --set training.steps=100
loopscope pretrain heal.toml --start looped --text train.txt --validation validation.txt --out healed
loopscope pretrain heal.toml --start a --teacher a --set targets=teacher --text t.txt --validation v.txt --out b

A text file holds documents with <|endoftext|> between them, a .jsonl file one {"text": ...} per line. The folder is a
checkpoint in Ouro's layout, with a byte-level BPE tokenizer that is trained on the text first.

With --start the folder is a checkpoint of the same kind as the start, whose tokenizer it keeps; docs/training.md says
what the TOML file may hold then.

A killed or interrupted run continues with the same command and ends bit-identical.
"""

import argparse
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loopscope.cli.devices import device_of, working
from loopscope.cli.inputs import check_texts, find_model
from loopscope.cli.options import COMPUTE, add_shared, add_verb, check_folder
from loopscope.cli.output import print_trained
from loopscope.cli.workers import with_workers
from loopscope.errors import UserError
from loopscope.reading import require_file

if TYPE_CHECKING:
    from loopscope.training.parallel import Workers


def define(subparsers: Any) -> None:
    parser = add_verb(subparsers, "pretrain", __doc__, execute, resumes=True)
    parser.add_argument("settings", type=Path, help="a TOML file with the settings")
    parser.add_argument("--text", type=Path, nargs="+", required=True, metavar="FILE", help="text files to train on")
    parser.add_argument(
        "--validation",
        type=Path,
        nargs="+",
        required=True,
        metavar="FILE",
        help="text files with other documents, to validate on",
    )
    parser.add_argument(
        "--out", type=Path, required=True, metavar="DIR", help="folder of the run, which becomes a checkpoint"
    )
    parser.add_argument(
        "--start", type=Path, metavar="CHECKPOINT", help="train this checkpoint further, in place of a new one"
    )
    parser.add_argument(
        "--teacher", type=Path, metavar="CHECKPOINT", help="checkpoint to follow, with targets = 'teacher'"
    )
    add_shared(parser, "--set", "--force", *COMPUTE)


def execute(options: argparse.Namespace) -> None:
    if options.teacher is not None and options.start is None:
        raise UserError("--teacher is for a checkpoint that is trained further; give it with --start.")
    check_folder(options.out)
    require_file(options.settings, "TOML file")
    check_texts((*options.text, *options.validation))
    for checkpoint in (options.start, options.teacher):
        if checkpoint is not None:
            find_model(checkpoint)
    from loopscope.training.run_place import check_run_place

    check_run_place(options.out)
    _read_settings(options)
    with_workers(options, _pretrain)


def _read_settings(options: argparse.Namespace) -> Any:
    from loopscope.training.text_settings import read_continue_settings, read_pretrain_settings

    read = read_pretrain_settings if options.start is None else read_continue_settings
    return read(options.settings, options.set)


def _pretrain(options: argparse.Namespace, workers: "Workers") -> None:
    from loopscope.progress import clock, silent
    from loopscope.training.continued_run import ContinuedRun
    from loopscope.training.estimate import time_for
    from loopscope.training.language_run import LanguageRun, TextRun
    from loopscope.training.loop import train_run
    from loopscope.training.run_folder import steps_done

    notes: list[str] = []
    texts = tuple(options.text), tuple(options.validation)
    with workers.together():
        run: TextRun
        device = device_of(options)
        if options.start is not None:
            run = ContinuedRun(_read_settings(options), *texts, options.out, options.start, options.teacher)
            flops, width = run.flops, run.width
        else:
            settings = _read_settings(options)
            run = LanguageRun(settings, *texts, options.out)
            flops, width = settings.flops, settings.model.hidden_size
        left = run.settings.training.steps - steps_done(options.out)
        if workers.is_main and left and not options.force:
            expected = time_for(flops * left, width, device, workers)
            expected.check()
            notes.append(f"{left:,} steps to go, about {clock(expected.seconds)} on a quiet machine.")
    with working(options, "training", *notes) if workers.is_main else nullcontext(silent) as advance:
        result = train_run(run, device, advance, workers)
    if workers.is_main:
        print_trained(result, f"{result.folder}: the validation sample's next tokens.", options.json)
