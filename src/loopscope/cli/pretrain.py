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
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loopscope.cli.compute import device_of, with_workers, working
from loopscope.cli.inputs import find_model
from loopscope.cli.options import COMPUTE, add_shared, option, out_folder, text_file
from loopscope.cli.output import print_trained
from loopscope.cli.parser import add_verb
from loopscope.progress import clock, silent
from loopscope.training.run_folder import check_run_place
from loopscope.training.settings import read_continue_settings, read_pretrain_settings

if TYPE_CHECKING:
    from loopscope.training.parallel import Workers


def define(subparsers: Any) -> None:
    parser = add_verb(subparsers, "pretrain", __doc__, execute, resumes=True)
    texts = {"type": text_file, "nargs": "+", "required": True}
    option(parser, "settings", "a TOML file with the settings", type=partial(text_file, what="TOML file"))
    option(parser, "--text FILE", "text files to train on", **texts)
    option(parser, "--validation FILE", "text files with other documents, to validate on", **texts)
    option(parser, "--out DIR", "folder of the run, which becomes a checkpoint", type=out_folder, required=True)
    option(parser, "--start CHECKPOINT", "train this checkpoint further, in place of a new one", type=Path)
    option(parser, "--teacher CHECKPOINT", "checkpoint to follow, with targets = 'teacher'", type=Path)
    parser.needs(teacher="start")
    add_shared(parser, "--set A.B=C", "--force", *COMPUTE)


def execute(options: argparse.Namespace) -> None:
    for checkpoint in filter(None, (options.start, options.teacher)):
        find_model(checkpoint)
    check_run_place(options.out)
    _read_settings(options)
    with_workers(options, _pretrain)


def _read_settings(options: argparse.Namespace) -> Any:
    read = read_pretrain_settings if options.start is None else read_continue_settings
    return read(options.settings, options.set)


def _pretrain(options: argparse.Namespace, workers: "Workers") -> None:
    from loopscope.training.estimate import time_for
    from loopscope.training.language_run import ContinuedRun, LanguageRun, TextRun
    from loopscope.training.run_state import steps_done
    from loopscope.training.training_loop import train_run

    notes: list[str] = []
    texts = tuple(options.text), tuple(options.validation)
    with workers.together():
        run: TextRun
        device, settings = device_of(options), _read_settings(options)
        if options.start is not None:
            run = ContinuedRun(settings, *texts, options.out, options.start, options.teacher)
        else:
            run = LanguageRun(settings, *texts, options.out)
        left = run.settings.training.steps - steps_done(options.out)
        if workers.is_main and left and not options.force:
            expected = time_for(run.flops * left, run.width, device, workers)
            expected.check()
            notes.append(f"{left:,} steps to go, about {clock(expected.seconds)} on a quiet machine.")
    with working(options, "training", *notes) if workers.is_main else nullcontext(silent) as advance:
        result = train_run(run, device, advance, workers)
    if workers.is_main:
        print_trained(result, f"{result.folder}: the validation sample's next tokens.", options.json)
