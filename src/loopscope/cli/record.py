"""Record every loop of a model on a task, a text or a benchmark, or run a text live with early exits.

loopscope record task runs/mine --split validation
loopscope record text runs/ouro mine.txt --out recordings/mine
loopscope record live runs/ouro mine.txt --recording recordings/mine \\
    --cache propagate --out recordings/live
loopscope record benchmark runs/ouro arc_easy --split test --data DIR
"""

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, get_args

import loopscope as ls
from loopscope.artifacts import MANIFEST
from loopscope.certify.risk_target import RiskTarget
from loopscope.cli import inputs
from loopscope.cli.options import COMPUTE, add_group, add_shared, add_verb, given, loops, number_range, option
from loopscope.cli.output import percent, print_by_loop, print_json, print_note, print_table, working
from loopscope.config import build
from loopscope.errors import UserError
from loopscope.files import is_file, out_folder
from loopscope.models.checkpoint_folder import read_model_shape
from loopscope.models.tokenizer import check_context, read_documents
from loopscope.policy import ExitPolicy, Loss
from loopscope.progress import ProgressCallback
from loopscope.questions import BENCHMARKS, Split, benchmark_named, check_data
from loopscope.recording_paths import recordings_at
from loopscope.scope import CacheMode, Scope
from loopscope.training.run_folder import task_of_run
from loopscope.trajectory import SPLITS, Trajectory


def define(subparsers: Any) -> None:
    """Add the arguments of `loopscope record` to the parser."""
    kinds = add_group(subparsers, "record", __doc__)
    files: dict[str, Any] = {"type": inputs.text_file, "nargs": "+", "metavar": "FILE"}
    role = "role of the data: train, validation (default) or test"
    roles: dict[str, Any] = {"choices": get_args(Split), "default": "validation"}
    parser = add_verb(kinds, "task", _record_task.__doc__, _record_task, resumes=True)
    add_shared(parser, "run")
    option(parser, "--split NAME", f"split to record: {', '.join(SPLITS)}", choices=SPLITS, required=True)
    option(parser, "--examples N", "number of examples to record (default: the whole split)")
    levels = "range of difficulties, such as 11-14 (default: the difficulties of the task)"
    option(parser, "--levels A-B", levels, type=number_range)
    option(parser, "--loops N", "number of loops to run (default: the number of loops in training)", type=loops)
    option(parser, "--no-logits", "store signals and predictions instead of the logits")
    where = "folder of the recording (default: RUN/recordings/SPLIT; with --loops RUN/recordings/N-loops/SPLIT)"
    option(parser, "--out DIR", where, type=out_folder)
    add_shared(parser, "--hidden", *COMPUTE)
    inputs.add_custom_readouts(parser)
    inputs.add_custom_model(parser)
    inputs.add_custom_tasks(parser)
    parser = add_verb(kinds, "text", _record_text.__doc__, _record_text, resumes=True)
    add_shared(parser, "model")
    option(parser, "files", "text files to record", **files)
    option(parser, "--split NAME", role, **roles)
    option(parser, "--context N", "number of tokens per window (default: 512, or the model's maximum if below 512)")
    option(parser, "--limit N", "maximum number of tokens to record")
    option(parser, "--out DIR", "folder of the recording (default: MODEL/recordings/SPLIT)", type=out_folder)
    add_shared(parser, "--hidden", "--dtype NAME", "--compile", *COMPUTE)
    inputs.add_custom_readouts(parser)
    parser = add_verb(kinds, "live", _record_live.__doc__, _record_live, resumes=True)
    add_shared(parser, "model")
    option(parser, "files", "the text files of the recording", **files)
    option(parser, "--recording DIR", "recording of the text files, made by `record text`", required=True)
    caches = "KV cache of the live run: full, propagate (default) or latest"
    option(parser, "--cache MODE", caches, choices=get_args(CacheMode), default="propagate")
    option(parser, "--policy FILE", "policy file to check: LoopScope runs only this policy, on all documents")
    add_shared(parser, "--max-drop X", "--confidence X")
    losses = "answers that count as lost, as in `calibrate` (default: disagreement)"
    option(parser, "--loss", losses, choices=get_args(Loss))
    replayed = "readout of the candidates (default: auto, the readout with the fewest loops in a replay)"
    option(parser, "--readout NAME", replayed, type=inputs.readout_name)
    option(parser, "--candidates N", "maximum number of candidate thresholds to run (default: 12)")
    inputs.add_policy_options(parser)
    parser.excludes("policy", "max_drop", "confidence", "loss", "readout", "candidates", "gate")
    option(parser, "--batch-size N", "number of windows per batch", default=32)
    option(parser, "--out DIR", "folder of the live run", type=out_folder, required=True)
    add_shared(parser, "--fitted DIR", "--seed N", *COMPUTE)
    parser = add_verb(kinds, "benchmark", _record_benchmark.__doc__, _record_benchmark, resumes=True)
    add_shared(parser, "model")
    option(parser, "name", f"a benchmark: {', '.join(BENCHMARKS)}", metavar="NAME", choices=list(BENCHMARKS))
    option(parser, "--split NAME", role, **roles)
    option(parser, "--limit N", "maximum number of questions to record")
    option(parser, "--mean-state", "average the gate and the state over the tokens of the choices")
    option(parser, "--batch-tokens N", "number of tokens per batch (default: 8192)")
    where = "folder of the recording (default: MODEL/recordings/NAME/SPLIT)"
    option(parser, "--out DIR", where, type=out_folder)
    add_shared(parser, "--shots N", "--data DIR", "--hidden", "--dtype NAME", *COMPUTE)
    inputs.add_custom_readouts(parser)


def _record_task(options: argparse.Namespace) -> None:
    """Record a split of the task that a run was trained on.

    loopscope record task runs/mine --split validation
    loopscope record task runs/mine --split test --hidden
    loopscope record task runs/paper --split extrapolation --levels 11-14 \\
        --examples 10000
    # deeper than in training
    loopscope record task runs/mine --split test --loops 8
    loopscope record task runs/own --split test --with-model my_model:Net
    """
    settings = inputs.finished_run(options.run, options.with_model)
    task_of_run(options.run, settings, options.with_task)
    from loopscope.recording.recording_folder import Keep
    from loopscope.recording.task_recording import record_task

    inputs.import_models(options)
    out = options.out or recordings_at(options.run, options.loops, settings.num_loops) / options.split
    keep = Keep(logits=not options.no_logits, hidden=options.hidden)
    with _recording_progress(options, f"recording {options.split}", out) as advance:
        how = {"device": inputs.device_of(options), "progress": advance, "loops": options.loops}
        how |= {"custom_tasks": options.with_task}
        recording = record_task(options.run, options.split, out, keep, options.examples, options.levels, **how)
    size, depth = recording.num_examples, recording.num_loops
    summary = {"recording": str(out), "split": recording.split, "examples": size, "loops": depth}
    trained = "" if depth == settings.num_loops else f" (trained with {settings.num_loops})"
    title = f"{out}: {size:,} {recording.split} examples, {depth} loops{trained}. Forced exits:"
    print_by_loop(title, summary, {"accuracy": recording.correct.mean(axis=0).tolist()}, options.json)


def _record_text(options: argparse.Namespace) -> None:
    """Record every next token of a text.

    loopscope record text runs/ouro mine.txt --out recordings/mine
    loopscope record text runs/small-ouro train.txt --split train \\
        --limit 100000 --hidden --out recordings/train

    In a text file, <|endoftext|> separates the documents. In a .jsonl file, every line is a document {"text": ...}. A
    guarantee counts documents, not tokens, so give many documents. --split names the role of the text; for example,
    LoopScope rejects calibration on a test recording.
    """
    out = _recording_folder(options, options.split)
    folder = inputs.find_model(options.model, text=True)
    shape = read_model_shape(folder)
    check_context(options.context or shape.block_size, shape.block_size)
    read_documents(options.files)
    from loopscope.recording.text_recording import record_text

    chosen = given(options, "context", "limit", "hidden", "dtype")
    with _recording_progress(options, f"recording {options.split}", out) as advance:
        model = inputs.load_text_model(folder, options)
        recording = record_text(
            options.model, options.files, options.split, out, model=model, progress=advance, **chosen
        )
    documents, tokens = recording.provenance["documents"], recording.num_examples
    summary = {"recording": str(out), "split": options.split, "tokens": tokens, "documents": documents}
    by_loop = {
        "loss": recording.cross_entropy.mean(axis=0).tolist(),
        "accuracy": recording.correct.mean(axis=0).tolist(),
        "agreement": (recording.predicted == recording.predicted[:, -1:]).mean(axis=0).tolist(),
    }
    what = f"{tokens:,} next tokens of {documents:,} {options.split} documents"
    title = f"{out}: {what}; means over tokens. agreement: with full depth."
    print_by_loop(title, summary | {"loops": recording.num_loops}, by_loop, options.json)


def _record_live(options: argparse.Namespace) -> None:
    """Run a recorded text live, with candidate thresholds for a guarantee or with one policy to check.

    loopscope record live MODEL mine.txt --recording rec/mine \\
        --cache propagate --max-drop 0.05 --out rec/live
    loopscope calibrate rec/live --loss disagreement --max-drop 0.05 \\
        --out text.json
    loopscope record live MODEL other.txt --recording rec/test \\
        --cache propagate --policy text.json --out rec/check
    loopscope check rec/check --policy text.json

    With the caches `propagate` and `latest`, an early exit changes the keys that later tokens attend to. A recording is
    made at full depth, so it cannot show the answers at these later tokens. LoopScope uses a fifth of the documents in
    --recording to select candidate thresholds, and orders the candidates from cautious to bold. LoopScope runs the
    remaining documents token by token with each candidate. The run stops at the first candidate that is not proven to
    lose at most --max-drop.
    """
    risk_options = given(options, "max_drop", "confidence", "loss", "readout")
    inputs.check_readouts(*filter(None, [options.readout]), auto=True)
    inputs.find_model(options.model, text=True)
    read_documents(options.files)
    recording = Trajectory.load(options.recording)
    gates = inputs.load_gates(options.fitted, recording)
    what: ExitPolicy | RiskTarget = build(RiskTarget, {"loss": "disagreement", **risk_options}, "record live")
    if options.policy is not None:
        what = inputs.load_policy(options.policy, options.any_model)
        what.scope.check(Scope(cache=options.cache))
    from loopscope.recording.live_text_recording import record_live

    with _recording_progress(options, f"running with the cache '{options.cache}'", options.out) as advance:
        runs = record_live(
            *(options.model, options.files, recording, options.out, options.cache, what),
            gates=gates,
            device=inputs.device_of(options),
            progress=advance,
            **given(options, "candidates", "seed", "batch_size"),
        )
    documents = len(set(runs.sequences.tolist()))
    lost = (runs.predictions != runs.full_depth).mean(axis=1)
    loops = runs.loops.mean(axis=1)
    if options.json:
        rows = {"thresholds": runs.thresholds.tolist(), "loops": loops.tolist(), "disagreement": lost.tolist()}
        summary = {"live_run": str(options.out), "cache": options.cache, "documents": documents}
        print_json(summary | {"tokens": runs.num_examples, "readout": runs.rule.readout} | rows)
        return
    title = (
        f"{options.out}: {runs.num_examples:,} next tokens of {documents:,} {runs.split} documents, run with the cache "
        f"'{options.cache}'; means over tokens (calibrate and check have those over documents)"
    )
    if options.policy is None:
        title += f"; {len(lost)} of {runs.contents.planned} candidates, up to the first that is not proven"
    cells = [
        [f"{threshold:.6g}", f"{deep:.3f}", percent(share, 2)]
        for threshold, deep, share in zip(runs.thresholds.tolist(), loops.tolist(), lost.tolist(), strict=True)
    ]
    print_table(title, [runs.rule.readout, "loops", "unlike full depth"], cells)


def _record_benchmark(options: argparse.Namespace) -> None:
    """Record every loop of a model on the questions of a benchmark, in one pass.

    loopscope record benchmark runs/ouro arc_easy --split test --data DIR
    loopscope record benchmark ByteDance/Ouro-1.4B mmlu --limit 100 \\
        --dtype bfloat16 --out recordings/mmlu
    """
    check_data(benchmark_named(options.name), options.split, options.data)
    out = _recording_folder(options, options.name, options.split)
    inputs.find_model(options.model, text=True)
    from loopscope.analysis.benchmark_results import metric_accuracies

    chosen = given(options, "data", "limit", "shots", "hidden", "dtype", "batch_tokens")
    with _recording_progress(options, f"{options.name}, {options.split}", out) as advance:
        recording = ls.record_benchmark(
            *(options.model, options.name, options.split, out),
            device=inputs.device_of(options),
            mean=options.mean_state,
            progress=advance,
            **chosen,
        )
    questions, metric, cut = recording.num_examples, recording.provenance["metric"], recording.provenance["cut"]
    if cut:
        print_note(f"{cut:,} prompts were longer than the model takes and lost their beginnings.")
    summary = {"recording": str(out), "split": options.split, "questions": questions, "metric": metric}
    title = f"{out}: {questions:,} {options.split} questions, scored by {metric}. Forced exits:"
    print_by_loop(title, summary | {"loops": recording.num_loops}, metric_accuracies(recording), options.json)


@contextmanager
def _recording_progress(options: argparse.Namespace, title: str, out: Path) -> Iterator[ProgressCallback]:
    """Show progress of a recording, and note if all of it existed before."""
    there = is_file(out / MANIFEST)
    with working(options, title) as advance:
        yield advance
    if there:
        print_note(f"{out} was there already, made with the same settings; nothing was recorded again.")


def _recording_folder(options: argparse.Namespace, *place: str) -> Path:
    """The folder that a recording is written to: --out, or a place in the run."""
    if options.out is None and not Path(options.model).is_dir():
        raise UserError("Say with --out where the recording goes.")
    return options.out or Path(options.model, "recordings", *place)
