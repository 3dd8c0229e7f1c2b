"""Train a model: on a task (`train`), or on a text (`pretrain`), alone or with the workers that torchrun started."""

import argparse
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import loopscope as ls
from loopscope.cli.compute import device_of, working
from loopscope.cli.inputs import find_model
from loopscope.cli.options import COMPUTE, add_shared, option, out_folder, text_file
from loopscope.cli.output import print_by_loop, print_json
from loopscope.cli.parser import add_verb
from loopscope.progress import ProgressCallback, clock, silent
from loopscope.training.run_folder import check_run_place
from loopscope.training.settings import presets, read_continue_settings, read_pretrain_settings, read_settings

if TYPE_CHECKING:
    import torch

    from loopscope.training.parallel import Workers
    from loopscope.training.training_loop import RunResult


class _Training(NamedTuple):
    """A run that can be trained."""

    train: "Callable[[ProgressCallback], RunResult]"
    steps_left: int
    checked_seconds: Callable[[], float]  # that these steps take, unless they are far too much for this machine
    title: str  # of the table, after the folder


def define(subparsers: Any) -> None:
    """Add the arguments of `loopscope train` to the parser."""
    parser = add_verb(subparsers, "train", _train_task.__doc__, _train_task, resumes=True)
    option(parser, "settings", f"a preset ({', '.join(presets())}) or a TOML file")
    option(parser, "--out DIR", "folder of the run", type=out_folder, required=True)
    add_shared(parser, "--set A.B=C", "--force", *COMPUTE)


def define_pretrain(subparsers: Any) -> None:
    parser = add_verb(subparsers, "pretrain", _pretrain.__doc__, _pretrain, resumes=True)
    texts = {"type": text_file, "nargs": "+", "required": True}
    option(parser, "settings", "a TOML file with the settings", type=partial(text_file, what="TOML file"))
    option(parser, "--text FILE", "text files to train on", **texts)
    option(parser, "--validation FILE", "text files with other documents, to validate on", **texts)
    option(parser, "--out DIR", "folder of the run, which becomes a checkpoint", type=out_folder, required=True)
    option(parser, "--start CHECKPOINT", "train this checkpoint further, in place of a new one", type=Path)
    option(parser, "--teacher CHECKPOINT", "checkpoint to follow, with targets = 'teacher'", type=Path)
    parser.needs(teacher="start")
    add_shared(parser, "--set A.B=C", "--force", *COMPUTE)


def _train_task(options: argparse.Namespace) -> None:
    """Train a looped Transformer.

    loopscope train demo --out runs/mine
    loopscope train demo --out runs/gate --set objective.name=learned_gate --set model.gate=linear
    loopscope train paper --out runs/paper --set training.seed=1  # on a GPU
    loopscope train my.toml --out runs/other --device cuda
    loopscope train demo --out runs/own --set objective=my_losses:improving  # a function in my_losses.py
    torchrun --nproc-per-node 4 -m loopscope.cli train paper --out runs/paper --device cuda

    A killed or interrupted run continues with the same command and ends bit-identical.
    """
    check_run_place(options.out, read_settings(options.settings, options.set))
    _train_with_workers(options, _task_training)


def _pretrain(options: argparse.Namespace) -> None:
    """Train an Ouro on a text, with its tokenizer; or train a checkpoint further.

    loopscope pretrain recipes/small_ouro/small_ouro.toml --text train.txt --validation v.txt --out runs/small-ouro
    loopscope pretrain my.toml --text a.jsonl b.txt --validation c.txt --out mine --set training.steps=100
    loopscope pretrain heal.toml --start looped --text train.txt --validation validation.txt --out healed
    loopscope pretrain heal.toml --start a --teacher a --set targets=teacher --text t.txt --validation v.txt --out b

    A text file holds documents with <|endoftext|> between them, a .jsonl file one {"text": ...} per line. The folder is
    a checkpoint in Ouro's layout, with a byte-level BPE tokenizer that is trained on the text first.

    With --start the folder is a checkpoint of the same kind as the start, whose tokenizer it keeps; docs/training.md
    says what the TOML file may hold then.

    A killed or interrupted run continues with the same command and ends bit-identical.
    """
    for checkpoint in filter(None, (options.start, options.teacher)):
        find_model(checkpoint)
    check_run_place(options.out)
    _text_settings(options)
    _train_with_workers(options, _text_training)


def _text_settings(options: argparse.Namespace) -> Any:
    read = read_pretrain_settings if options.start is None else read_continue_settings
    return read(options.settings, options.set)


def _train_with_workers(
    options: argparse.Namespace, prepare: "Callable[[argparse.Namespace, torch.device, Workers], _Training]"
) -> None:
    """Trains with the workers that torchrun started, or in this process alone; the first one speaks for all."""
    from loopscope.training.parallel import exit_worker, join_workers, shared_device

    options.device = shared_device(options.device)
    notes: list[str] = []
    with join_workers(options.device) as workers:
        with workers.together():
            training = prepare(options, device_of(options), workers)
            if workers.is_main and training.steps_left and not options.force:
                left = clock(training.checked_seconds())
                notes.append(f"{training.steps_left:,} steps to go, about {left} on a quiet machine.")
        with working(options, "training", *notes) if workers.is_main else nullcontext(silent) as advance:
            result = training.train(advance)
        if workers.is_main:
            _print(result, training.title, options.json)
    if workers.count > 1:
        exit_worker(0)


def _task_training(options: argparse.Namespace, device: "torch.device", workers: "Workers") -> _Training:
    from loopscope.training.estimate import check_memory, estimate_time
    from loopscope.training.training_loop import steps_done

    settings = read_settings(options.settings, options.set)
    start, steps = steps_done(options.out), settings.training.steps

    def checked_seconds() -> float:
        check_memory(settings, device, workers)
        expected = estimate_time(settings, device, start, workers)
        left_out = f"; keys that {options.settings} leaves out have the paper's values, which are large"
        expected.check("" if options.settings in presets() else left_out)
        return expected.seconds

    state = "was finished already" if start == steps else f"went on from step {start:,}" if start else "is finished"
    return _Training(
        lambda advance: ls.train(settings, options.out, device, advance, workers),
        steps - start,
        checked_seconds,
        f" {state}. Validation sample, forced exits:",
    )


def _text_training(options: argparse.Namespace, device: "torch.device", workers: "Workers") -> _Training:
    from loopscope.training.estimate import time_for
    from loopscope.training.language_run import ContinuedRun, LanguageRun, TextRun
    from loopscope.training.training_loop import steps_done, train_run

    run: TextRun
    settings, texts = _text_settings(options), (tuple(options.text), tuple(options.validation))
    if options.start is not None:
        run = ContinuedRun(settings, *texts, options.out, options.start, options.teacher)
    else:
        run = LanguageRun(settings, *texts, options.out)
    left = run.settings.training.steps - steps_done(options.out)

    def checked_seconds() -> float:
        expected = time_for(run.flops * left, run.width, device, workers)
        expected.check()
        return expected.seconds

    return _Training(
        lambda advance: train_run(run, device, advance, workers),
        left,
        checked_seconds,
        ": the validation sample's next tokens.",
    )


def _print(result: "RunResult", title: str, as_json: bool) -> None:
    """The validation of a finished run at every loop."""
    if as_json:
        print_json({"run": str(result.folder), "resumed_from": result.resumed_from, **result.final})
    else:
        by_loop = {name: result.final[f"validation_{name}"] for name in ("loss", "accuracy")}
        print_by_loop(f"{result.folder}{title}", {}, by_loop, as_json)
