"""Run a task, a text or a benchmark through every loop of a checkpoint; or a text live, under exit policies.

loopscope record task runs/mine --split validation
loopscope record text runs/ouro mine.txt --out recordings/mine
loopscope record live runs/ouro mine.txt --recording recordings/mine --cache propagate --out recordings/live
loopscope record benchmark runs/ouro arc_easy --split test --data DIR
"""

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loopscope.cli.devices import device_of, working
from loopscope.cli.inputs import check_readouts, check_run, check_texts, find_model
from loopscope.cli.options import (
    BENCHMARKS,
    COMPUTE,
    CONFIDENCE,
    MAX_DROP,
    add_group,
    add_shared,
    add_verb,
    check_folder,
    count,
    levels,
    values,
    whole,
)
from loopscope.cli.output import percent, print_by_loop, print_json, print_note, print_table
from loopscope.cli.policies import check_any_model, load_gates, load_policy
from loopscope.errors import UserError, did_you_mean

if TYPE_CHECKING:
    from loopscope.exits import ExitPolicy
    from loopscope.progress import ProgressCallback

_SPLIT = "role of the data: train, validation (default) or test"
_THREE = "train, validation or test"


def define(subparsers: Any) -> None:
    kinds = add_group(subparsers, "record", __doc__)
    _define_task(kinds)
    _define_text(kinds)
    _define_live(kinds)
    _define_benchmark(kinds)


def _define_task(kinds: Any) -> None:
    text = """Record a split of the task that a run was trained on.

loopscope record task runs/mine --split validation
loopscope record task runs/mine --split test --hidden
loopscope record task runs/paper --split extrapolation --levels 11-14 --examples 10000
"""
    parser = add_verb(kinds, "task", text, _record_task, resumes=True)
    parser.add_argument("run", type=Path, help="the folder of a finished run")
    splits = "split to record: train, validation, test or extrapolation"
    parser.add_argument("--split", required=True, metavar="NAME", help=splits)
    parser.add_argument(
        "--examples", type=count, metavar="N", help="number of examples to record (default: the task's)"
    )
    parser.add_argument(
        "--levels", type=levels, metavar="A-B", help="range of difficulties, such as 11-14 (default: the task's)"
    )
    parser.add_argument("--no-logits", action="store_true", help="keep signals and predictions in place of the logits")
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="folder of the recording (default: RUN/recordings/SPLIT)"
    )
    add_shared(parser, "--hidden", "--with-readout", *COMPUTE)


def _define_text(kinds: Any) -> None:
    text = """Record every next token of a text.

loopscope record text runs/ouro mine.txt --out recordings/mine
loopscope record text runs/small-ouro train.txt --split train --limit 100000 --hidden --out recordings/train

A text file holds documents with <|endoftext|> between them, a .jsonl file one {"text": ...} per line. Promises count
documents, so give many. --split says what the text is to the model: calibrating on test is refused, for instance.
"""
    parser = add_verb(kinds, "text", text, _record_text, resumes=True)
    parser.add_argument("model", help="the folder of a checkpoint, or its name on the Hub")
    parser.add_argument("files", type=Path, nargs="+", metavar="FILE", help="text files to record")
    parser.add_argument("--split", default="validation", metavar="NAME", help=_SPLIT)
    parser.add_argument(
        "--context", type=count, metavar="N", help="tokens of a window (default: 512, or what the model takes)"
    )
    parser.add_argument("--limit", type=count, metavar="N", help="record at most so many tokens")
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="folder of the recording (default: MODEL/recordings/SPLIT)"
    )
    add_shared(parser, "--hidden", "--with-readout", "--dtype", *COMPUTE)


def _define_live(kinds: Any) -> None:
    text = """Run a recorded text live: with candidates for a promise, or with one policy to check it.

loopscope record live MODEL mine.txt --recording rec/mine --cache propagate --max-drop 0.05 --out rec/live
loopscope calibrate rec/live --loss disagreement --max-drop 0.05 --out text.json
loopscope record live MODEL other.txt --recording rec/test --cache propagate --policy text.json --out rec/check
loopscope evaluate rec/check --policy text.json

With the caches propagate and latest, later tokens see other keys than at full depth, and a recording says nothing of
them. A fifth of the documents of --recording is used to select candidates, from cautious to bold; the others run
token by token with each, up to the first that is not proven to lose at most --max-drop.
"""
    parser = add_verb(kinds, "live", text, _record_live, resumes=True)
    parser.add_argument("model", help="the folder of a checkpoint, or its name on the Hub")
    parser.add_argument("files", type=Path, nargs="+", metavar="FILE", help="the text files of the recording")
    of_text = "recording of these files, made by `record text`"
    parser.add_argument("--recording", type=Path, required=True, metavar="DIR", help=of_text)
    parser.add_argument(
        "--cache", default="propagate", metavar="MODE", help="KV cache to run with: full, propagate (default) or latest"
    )
    parser.add_argument(
        "--policy", type=Path, metavar="FILE", help="run this policy alone, on all documents, to check it"
    )
    parser.add_argument("--max-drop", type=float, metavar="X", help=MAX_DROP)
    parser.add_argument("--confidence", type=float, metavar="X", help=CONFIDENCE)
    losses = "what counts as lost, as in `calibrate` (default: disagreement)"
    parser.add_argument("--loss", choices=("gap", "disagreement"), help=losses)
    replayed = "readout of the candidates (default: auto, the one with the fewest loops in a replay)"
    parser.add_argument("--readout", metavar="NAME", help=replayed)
    parser.add_argument("--candidates", type=count, metavar="N", help="run at most so many candidates (default: 12)")
    add_shared(parser, "--gate", "--any-model", "--with-readout")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="random seed of the selection (default: 0)")
    parser.add_argument(
        "--batch-size", type=count, default=32, metavar="N", help="windows to run at a time (default: 32)"
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder of the live run")
    add_shared(parser, *COMPUTE)


def _define_benchmark(kinds: Any) -> None:
    text = """Record the questions of a benchmark, in one pass.

loopscope record benchmark runs/ouro arc_easy --split test --data DIR
loopscope record benchmark ByteDance/Ouro-1.4B mmlu --limit 100 --dtype bfloat16 --out recordings/mmlu
"""
    parser = add_verb(kinds, "benchmark", text, _record_benchmark, resumes=True)
    parser.add_argument("model", help="the folder of a checkpoint, or its name on the Hub")
    parser.add_argument("name", metavar="NAME", help=f"a benchmark: {BENCHMARKS}")
    parser.add_argument("--split", default="validation", metavar="NAME", help=_SPLIT)
    parser.add_argument("--limit", type=count, metavar="N", help="record at most so many questions")
    parser.add_argument(
        "--shots", type=whole, metavar="N", help="few-shot examples of a question (default: the benchmark's own)"
    )
    parser.add_argument(
        "--mean-state", action="store_true", help="read gate and state as means over the choices' tokens"
    )
    parser.add_argument("--batch-tokens", type=count, metavar="N", help="tokens to compute at a time (default: 8192)")
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="folder of the recording (default: MODEL/recordings/NAME/SPLIT)"
    )
    add_shared(parser, "--data", "--hidden", "--with-readout", "--dtype", *COMPUTE)


def _record_task(options: argparse.Namespace) -> None:
    from loopscope.arguments import check_split_name

    out = options.out or options.run / "recordings" / options.split
    check_folder(out)
    check_run(options.run)
    check_split_name(options.split)
    from loopscope.recording import Keep, record_task

    keep = Keep(logits=not options.no_logits, hidden=options.hidden)
    with _recording(options, f"recording {options.split}", out) as advance:
        recording = record_task(
            options.run, options.split, out, keep, options.examples, options.levels, device_of(options), advance
        )
    size, loops = recording.num_examples, recording.num_loops
    summary = {"recording": str(out), "split": recording.split, "examples": size, "loops": loops}
    title = f"{out}: {size:,} {recording.split} examples, {loops} loops. Forced exits:"
    print_by_loop(title, summary, {"accuracy": recording.correct.mean(axis=0).tolist()}, options.json)


def _record_text(options: argparse.Namespace) -> None:
    _check_split("text", options.split)
    out = _out(options, options.split)
    check_texts(options.files)
    from loopscope.documents import check_context, read_documents
    from loopscope.models.configuration import read_model_shape

    shape = read_model_shape(find_model(options.model, text=True))
    check_context(options.context or shape.block_size, shape.block_size)
    read_documents(options.files)
    from loopscope.recording import record_text

    device, given = device_of(options), values(options, "context", "limit", "hidden", "dtype")
    with _recording(options, f"recording {options.split}", out) as advance:
        recording = record_text(
            options.model, options.files, options.split, out, device=device, progress=advance, **given
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
    risk_options = values(options, "max_drop", "confidence", "loss", "readout")
    if options.policy is not None and (risk_options or options.gate or options.candidates is not None):
        raise UserError("A policy is run as it is; leave out --max-drop, --confidence, --loss, --readout and the like.")
    check_folder(options.out)
    check_any_model(options)
    check_readouts(options, auto=True)
    check_texts(options.files)
    find_model(options.model, text=True)
    from loopscope.documents import read_documents
    from loopscope.exits.risk_target import RiskTarget
    from loopscope.exits.scope import Scope
    from loopscope.trajectory import Trajectory

    read_documents(options.files)
    recording = Trajectory.load(options.recording)
    gates = load_gates(options.gate, recording)
    what: ExitPolicy | RiskTarget = RiskTarget(**{"loss": "disagreement", **risk_options})
    if options.policy is not None:
        what = load_policy(options.policy, options.any_model)
        what.scope.check(Scope(cache=options.cache))
    given = values(options, "candidates", "seed", "batch_size")
    from loopscope.recording import record_live

    with _recording(options, f"running with the cache '{options.cache}'", options.out) as advance:
        runs = record_live(
            *(options.model, options.files, recording, options.out, options.cache, what),
            gates=gates,
            device=device_of(options),
            progress=advance,
            **given,
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
        f"'{options.cache}'; means over tokens (calibrate and evaluate have those over documents)"
    )
    if options.policy is None:
        title += f"; {len(lost)} of {runs.contents.planned} candidates, up to the first that is not proven"
    cells = [
        [f"{threshold:.6g}", f"{deep:.3f}", percent(share, 2)]
        for threshold, deep, share in zip(runs.thresholds.tolist(), loops.tolist(), lost.tolist(), strict=True)
    ]
    print_table(title, [runs.rule.readout, "loops", "unlike full depth"], cells)


def _record_benchmark(options: argparse.Namespace) -> None:
    _check_split("benchmark", options.split)
    from loopscope.questions.benchmarks import benchmark_named
    from loopscope.questions.lm_eval_tasks import check_data

    check_data(benchmark_named(options.name), options.split, options.data)
    out = _out(options, options.name, options.split)
    find_model(options.model, text=True)
    from loopscope.analysis.benchmarks import metric_accuracies
    from loopscope.recording import record_benchmark

    device, given = device_of(options), values(options, "data", "limit", "shots", "hidden", "dtype", "batch_tokens")
    given["mean"] = options.mean_state
    with _recording(options, f"{options.name}, {options.split}", out) as advance:
        recording = record_benchmark(
            options.model, options.name, options.split, out, device=device, progress=advance, **given
        )
    questions, metric, cut = recording.num_examples, recording.provenance["metric"], recording.provenance["cut"]
    if cut:
        print_note(f"{cut:,} prompts were longer than the model takes and lost their beginnings.")
    summary = {"recording": str(out), "split": options.split, "questions": questions, "metric": metric}
    title = f"{out}: {questions:,} {options.split} questions, scored by {metric}. Forced exits:"
    print_by_loop(title, summary | {"loops": recording.num_loops}, metric_accuracies(recording), options.json)


@contextmanager
def _recording(options: argparse.Namespace, title: str, out: Path) -> "Iterator[ProgressCallback]":
    """Progress; where there is none, all of it was there before, which is said."""
    begun = False
    with working(options, title) as advance:

        def noticed(done: int, total: int, note: str) -> None:
            nonlocal begun
            begun = True
            advance(done, total, note)

        yield noticed
    if not begun:
        print_note(f"{out} was there already, made with the same settings; nothing was recorded again.")


def _check_split(what: str, split: str) -> None:
    splits = ("train", "validation", "test")
    if split == "extrapolation":
        raise UserError(f"The split 'extrapolation' is of tasks, and no {what} can be recorded as it; choose {_THREE}.")
    if split not in splits:
        raise UserError(f"A {what} has no split '{split}'{did_you_mean(split, splits)}; choose {_THREE}.")


def _out(options: argparse.Namespace, *place: str) -> Path:
    if options.out is None and not Path(options.model).is_dir():
        raise UserError("Say with --out where the recording goes.")
    out: Path = options.out or Path(options.model, "recordings", *place)
    check_folder(out)
    return out
