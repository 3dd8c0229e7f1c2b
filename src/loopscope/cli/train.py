"""Train a model: on a task (`train`), or on a text (`pretrain`), alone or with the workers that torchrun started."""

import argparse
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loopscope.cli.inputs import device_of, find_model, text_file
from loopscope.cli.options import COMPUTE, add_shared, add_verb, option
from loopscope.cli.output import print_by_loop, print_json, working
from loopscope.files import out_folder
from loopscope.progress import clock, silent
from loopscope.training.run_folder import check_run_place
from loopscope.training.settings import presets, read_continue_settings, read_pretrain_settings, read_settings

if TYPE_CHECKING:
    import torch

    from loopscope.training.language_run import TextRun
    from loopscope.training.parallel import Workers
    from loopscope.training.task_run import TaskRun
    from loopscope.training.training_loop import RunResult


def define(subparsers: Any) -> None:
    """Add the arguments of `loopscope train` to the parser."""
    parser = add_verb(subparsers, "train", _train_task.__doc__, _train_task, resumes=True)
    option(parser, "settings", f"a preset ({', '.join(presets())}) or a TOML file")
    option(parser, "--out DIR", "folder of the run", type=out_folder, required=True)
    add_shared(parser, "--set A.B=C", "--force", *COMPUTE)


def define_pretrain(subparsers: Any) -> None:
    """Add the arguments of `loopscope pretrain` to the parser."""
    parser = add_verb(subparsers, "pretrain", _pretrain.__doc__, _pretrain, resumes=True)
    texts = {"type": text_file, "nargs": "+", "required": True}
    option(parser, "settings", "a TOML file with the settings", type=partial(text_file, what="TOML file"))
    option(parser, "--text FILE", "text files to train on", **texts)
    option(parser, "--validation FILE", "text files for validation, with documents that are not in --text", **texts)
    option(parser, "--out DIR", "folder of the run, which becomes a checkpoint", type=out_folder, required=True)
    option(parser, "--start CHECKPOINT", "train this checkpoint further, instead of a new model", type=Path)
    followed = "checkpoint whose logits are the targets, with targets = 'teacher'"
    option(parser, "--teacher CHECKPOINT", followed, type=Path)
    parser.needs(teacher="start")
    add_shared(parser, "--set A.B=C", "--force", *COMPUTE)


def _train_task(options: argparse.Namespace) -> None:
    """Train a looped Transformer or a custom model on a task.

    loopscope train demo --out runs/mine
    loopscope train demo --out runs/gate --set objective.name=learned_gate \\
        --set model.gate=linear
    loopscope train paper --out runs/paper --set training.seed=1  # on a GPU
    loopscope train my.toml --out runs/other --device cuda
    # a function in my_losses.py, a class in my_model.py
    loopscope train demo --out runs/own --set objective=my_losses:improving
    loopscope train demo --out runs/model --set model=my_model:Net
    torchrun --nproc-per-node 4 -m loopscope.cli train paper --out runs/paper \\
        --device cuda

    If a run is killed or interrupted, the same command continues the run. The result of a continued run is
    bit-identical to the result of an uninterrupted run.
    """
    check_run_place(options.out, read_settings(options.settings, options.set))
    _train_with_workers(options, _task_run)


def _pretrain(options: argparse.Namespace) -> None:
    """Train a new Ouro and its tokenizer on a text, or train a checkpoint further.

    loopscope pretrain recipes/small_ouro/small_ouro.toml --text train.txt \\
        --validation v.txt --out runs/small-ouro
    loopscope pretrain my.toml --text a.jsonl b.txt --validation c.txt \\
        --out mine --set training.steps=100
    loopscope pretrain heal.toml --start looped --text train.txt \\
        --validation validation.txt --out healed
    loopscope pretrain heal.toml --start a --teacher a --set targets=teacher \\
        --text t.txt --validation v.txt --out b

    In a text file, <|endoftext|> separates the documents. In a .jsonl file, every line is a document {"text": ...}.
    LoopScope first trains a byte-level BPE tokenizer on the text. The folder of the run becomes a checkpoint in Ouro's
    layout.

    With --start, LoopScope trains an existing checkpoint further. The folder of the run becomes a checkpoint of the
    same kind, with the same tokenizer. For the TOML file of --start, see docs/how-to/training.md.

    If a run is killed or interrupted, the same command continues the run. The result of a continued run is
    bit-identical to the result of an uninterrupted run.
    """
    for checkpoint in filter(None, (options.start, options.teacher)):
        find_model(checkpoint)
    check_run_place(options.out)
    _pretrain_settings(options)
    _train_with_workers(options, _text_run)


def _pretrain_settings(options: argparse.Namespace) -> Any:
    """The settings of a training run on text, from file and options."""
    read = read_pretrain_settings if options.start is None else read_continue_settings
    return read(options.settings, options.set)


def _task_run(options: argparse.Namespace) -> "TaskRun":
    """The training run on a task that the options describe."""
    from loopscope.training.task_run import TaskRun, initial_model

    run = TaskRun(read_settings(options.settings, options.set), options.out).with_model()
    if run.is_custom:
        from loopscope.checks.model_contract import check_model

        check_model(initial_model(run.settings).eval())
    return run


def _text_run(options: argparse.Namespace) -> "TextRun":
    """The training run on a text that the options describe."""
    from loopscope.training.language_run import ContinuedRun, LanguageRun

    settings, texts = _pretrain_settings(options), (tuple(options.text), tuple(options.validation))
    if options.start is None:
        return LanguageRun(settings, *texts, options.out)
    return ContinuedRun(settings, *texts, options.out, options.start, options.teacher)


def _train_with_workers(
    options: argparse.Namespace, make_run: "Callable[[argparse.Namespace], TaskRun | TextRun]"
) -> None:
    """Train with the workers that torchrun started, or in this process; only the first worker prints."""
    from loopscope.training.parallel import exit_worker, join_workers, shared_device
    from loopscope.training.training_loop import steps_done, train_run

    options.device = shared_device(options.device)
    notes: list[str] = []
    with join_workers(options.device) as workers:
        with workers.together():
            device, run = device_of(options), make_run(options)
            start = steps_done(options.out)
            left = run.settings.training.steps - start
            if workers.is_main and left and not options.force:
                seconds = _estimated_seconds(run, options.settings, start, device, workers)
                notes.append(f"{left:,} steps to go, about {clock(seconds)} on a quiet machine.")
        with working(options, "training", *notes) if workers.is_main else nullcontext(silent) as advance:
            result = train_run(run, device, advance, workers)
        if workers.is_main:
            state = (
                f"went on from step {start:,}" if start and left else "is finished" if left else "was finished already"
            )
            _print_trained(result, state, options.json)
    if workers.count > 1:
        exit_worker(0)


def _estimated_seconds(
    run: "TaskRun | TextRun", source: str | Path, start: int, device: "torch.device", workers: "Workers"
) -> float:
    """Estimate the time of the remaining steps; reject a run that is far too large for this machine."""
    from loopscope.training.estimate import check_memory, estimate_time, time_for
    from loopscope.training.task_run import TaskRun

    why = ""
    if isinstance(run, TaskRun):
        check_memory(run.settings, device, workers)
        expected = estimate_time(run.settings, device, start, workers)
        if source not in presets():
            why = f"; keys that {source} leaves out have the paper's values, which are large"
    else:
        expected = time_for(run.flops * (run.settings.training.steps - start), run.width, device, workers)
    expected.check(why)
    return expected.seconds


def _print_trained(result: "RunResult", state: str, as_json: bool) -> None:
    """Print the validation of a finished run at every loop."""
    if as_json:
        print_json({"run": str(result.folder), "resumed_from": result.resumed_from, **result.final})
    else:
        by_loop = {name: result.final[f"validation_{name}"] for name in ("loss", "accuracy")}
        print_by_loop(f"{result.folder} {state}. Validation sample, forced exits:", {}, by_loop, as_json)
