"""Train an Ouro on a text, with its tokenizer.

loopscope pretrain recipes/small_ouro/small_ouro.toml --text train.txt --validation validation.txt --out small-ouro
loopscope pretrain my.toml --text a.jsonl b.txt --validation c.txt --out mine --set training.steps=100

A text file holds documents with <|endoftext|> between them, a .jsonl file one {"text": ...} a line. The folder is a
checkpoint in Ouro's layout, with a byte-level BPE tokenizer that is trained on the text first.
A killed or interrupted run continues with the same command and ends bit-identical.
"""

import argparse
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loopscope.cli.devices import device_of
from loopscope.cli.options import COMPUTE, add_shared, add_verb
from loopscope.cli.output import print_note, print_trained
from loopscope.cli.workers import with_workers

if TYPE_CHECKING:
    from loopscope.training.parallel import Workers


def define(subparsers: Any) -> None:
    parser = add_verb(subparsers, "pretrain", __doc__, execute, resumes=True)
    parser.add_argument("settings", type=Path, help="a TOML file")
    parser.add_argument("--text", type=Path, nargs="+", required=True, metavar="FILE", help="what is trained on")
    parser.add_argument("--validation", type=Path, nargs="+", required=True, metavar="FILE", help="other documents")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="the run's folder, a checkpoint")
    add_shared(parser, "--set", "--force", *COMPUTE)


def execute(options: argparse.Namespace) -> None:
    with_workers(options, _pretrain)


def _pretrain(options: argparse.Namespace, workers: "Workers") -> None:
    from loopscope.progress import clock, silent, track
    from loopscope.training.estimate import time_for
    from loopscope.training.language_run import LanguageRun, read_pretrain_settings
    from loopscope.training.loop import train_run
    from loopscope.training.run_folder import steps_done

    with workers.together():
        settings = read_pretrain_settings(options.settings, options.set)
        device = device_of(options)
        run = LanguageRun(settings, tuple(options.text), tuple(options.validation), options.out)
        left = settings.training.steps - steps_done(options.out)
        if workers.is_main and left and not options.force:
            expected = time_for(settings.flops * left, settings.model.hidden_size, device, workers)
            expected.check()
            print_note(f"{left:,} steps to go, about {clock(expected.seconds)} on a quiet machine.")
    with track("training") if workers.is_main else nullcontext(silent) as advance:
        result = train_run(run, device, advance, workers)
    if workers.is_main:
        print_trained(result, f"{result.folder}: the validation sample's next tokens.", options.json)
