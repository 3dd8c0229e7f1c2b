"""`loopscope pretrain` and `loopscope record --text`: a looped language model from text, and what it says about one."""

import argparse
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loopscope.cli.options import compute_options, verb
from loopscope.cli.show import percent, print_json, print_table, say
from loopscope.errors import UserError

if TYPE_CHECKING:
    from loopscope.training.parallel import Workers


def define(subparsers: Any) -> None:
    parser = verb(
        subparsers,
        "pretrain",
        "train an Ouro on a text, with its tokenizer",
        """\
  loopscope pretrain recipes/small_ouro/small_ouro.toml --text train.txt --validation validation.txt --out small-ouro
  loopscope pretrain my.toml --text a.jsonl b.txt --validation c.txt --out mine --set training.steps=100

A text file holds documents with <|endoftext|> between them, a .jsonl file one {"text": ...} a line. The folder is a
checkpoint in Ouro's layout, with a byte-level BPE tokenizer that is trained on the text first.
A killed or interrupted run continues with the same command and ends bit-identical.""",
        pretrain,
    )
    parser.add_argument("settings", type=Path, help="a TOML file")
    parser.add_argument("--text", type=Path, nargs="+", required=True, metavar="FILE", help="what is trained on")
    parser.add_argument("--validation", type=Path, nargs="+", required=True, metavar="FILE", help="other documents")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="the run's folder, a checkpoint")
    parser.add_argument("--set", action="append", default=[], metavar="A.B=C", help="change a setting (repeatable)")
    parser.add_argument("--force", action="store_true", help="start even a run that takes far too long here")
    compute_options(parser)


def pretrain(options: argparse.Namespace) -> int:
    from loopscope.cli.verbs import with_workers

    return with_workers(options, _pretrain)


def _pretrain(options: argparse.Namespace, workers: "Workers") -> int:
    from loopscope.cli.verbs import device_of, print_validation
    from loopscope.progress import clock, silent, track
    from loopscope.training.estimate import time_of
    from loopscope.training.language import LanguageRun, read_pretrain_settings
    from loopscope.training.loop import steps_done, train_run

    with workers.together():
        settings = read_pretrain_settings(options.settings, options.set)
        device = device_of(options)
        run = LanguageRun(settings, tuple(options.text), tuple(options.validation), options.out)
        left = settings.training.steps - steps_done(options.out)
        if workers.leads and left and not options.force:
            expected = time_of(settings.flops * left, settings.model.hidden_size, device, workers)
            expected.check()
            say(f"{left:,} steps to go, about {clock(expected.seconds)} on a quiet machine.")
    with track("training") if workers.leads else nullcontext(silent) as advance:
        result = train_run(run, device, advance, workers)
    if not workers.leads:
        return 0
    final = result.final
    if options.json:
        print_json({"run": str(result.folder), "resumed_from": result.resumed_from, **final})
        return 0
    print_validation(f"{result.folder}: the validation sample's next tokens.", final)
    return 0


def record_text(options: argparse.Namespace) -> int:
    from loopscope.cli.verbs import device_of
    from loopscope.progress import track
    from loopscope.recording import record_text

    split = options.split or "validation"
    if options.out is None and not options.run.is_dir():
        raise UserError("Say with --out where the recording goes.")
    out = options.out or options.run / "recordings" / split
    with track(f"recording {split}") as advance:
        recording = record_text(
            str(options.run),
            options.text,
            split,
            out,
            context=options.context,
            limit=options.limit,
            hidden=options.hidden,
            device=device_of(options),
            dtype=options.dtype,
            progress=advance,
        )
    agreement = (recording.predicted == recording.predicted[:, -1:]).mean(axis=0)
    told = {
        "loss": recording.cross_entropy.mean(axis=0).tolist(),
        "accuracy": recording.correct.mean(axis=0).tolist(),
        "agreement": agreement.tolist(),
    }
    documents = recording.provenance["documents"]
    if options.json:
        counts = {"tokens": recording.num_examples, "documents": documents, "loops": recording.num_loops}
        print_json({"recording": str(out), "split": split, **counts, **told})
        return 0
    columns = zip(*told.values(), strict=True)
    rows = [[str(loop), f"{loss:.4f}", *map(percent, shares)] for loop, (loss, *shares) in enumerate(columns, start=1)]
    title = f"{out}: {recording.num_examples:,} next tokens of {documents:,} {split} documents. Forced exits:"
    print_table(title, ["loop", "loss", "accuracy", "as full depth"], rows)
    return 0
