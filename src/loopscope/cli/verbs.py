"""What does each verb do? Heavy imports happen inside the verbs, so that `--help` stays quick."""

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loopscope.cli.show import percent, print_json, print_table, say
from loopscope.errors import UserError

if TYPE_CHECKING:
    from loopscope.report import Results


def device_of(options: argparse.Namespace) -> Any:
    import torch

    from loopscope.machine import keep_memory

    keep_memory()
    if options.threads:
        torch.set_num_threads(options.threads)
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # deterministic; read at the first use of CUDA
    try:
        device = torch.device(options.device)
        if device.type not in ("cpu", "cuda"):
            raise RuntimeError
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError):
        raise UserError(f"The device '{options.device}' is not available here; use --device cpu.") from None
    return device


def train(options: argparse.Namespace) -> int:
    from loopscope.training import read_settings

    settings = read_settings(options.settings, options.set)
    device = device_of(options)
    from loopscope.progress import clock, track
    from loopscope.training import check_memory, estimate, train
    from loopscope.training.loop import steps_done

    start, steps = steps_done(options.out), settings.training.steps
    if start < steps and not options.force:
        check_memory(settings, device)
        expected = estimate(settings, device, start)
        expected.check()
        say(f"{steps - start:,} steps to go, about {clock(expected.seconds)} on a quiet machine.")
    with track("training") as advance:
        result = train(settings, options.out, device, advance)
    final = result.final
    if options.json:
        print_json({"run": str(result.folder), "resumed_from": result.resumed_from, **final})
        return 0
    rows = [
        [str(loop), f"{loss:.4f}", percent(accuracy)]
        for loop, (loss, accuracy) in enumerate(
            zip(final["validation_loss"], final["validation_accuracy"], strict=True), start=1
        )
    ]
    state = "was finished already" if start == steps else f"went on from step {start:,}" if start else "is finished"
    print_table(f"{result.folder} {state}. Validation sample, forced exits:", ["loop", "loss", "accuracy"], rows)
    return 0


def record(options: argparse.Namespace) -> int:
    from loopscope.progress import track
    from loopscope.recording import Keep, record

    out = options.out or options.run / "recordings" / options.split
    with track(f"recording {options.split}") as advance:
        trajectory = record(
            options.run,
            options.split,
            out,
            Keep(logits=not options.no_logits, hidden=options.hidden),
            options.examples,
            options.levels,
            device_of(options),
            advance,
        )
    accuracy = trajectory.correct.mean(axis=0).tolist()
    summary = {
        "recording": str(out),
        "split": trajectory.split,
        "examples": trajectory.num_examples,
        "loops": trajectory.num_loops,
        "accuracy": accuracy,
    }
    if options.json:
        print_json(summary)
        return 0
    rows = [[str(loop), percent(value)] for loop, value in enumerate(accuracy, start=1)]
    title = (
        f"{out}: {trajectory.num_examples:,} {trajectory.split} examples, {trajectory.num_loops} loops. Forced exits:"
    )
    print_table(title, ["loop", "accuracy"], rows)
    return 0


def evaluate(options: argparse.Namespace) -> int:
    from loopscope.exits.sweep import available_readouts, sweep
    from loopscope.report.results import frontier_result
    from loopscope.trajectory import Trajectory

    targets = _targets(options.at or [0.9, 0.95, 0.98, 0.99])
    calibration, evaluation = Trajectory.load(options.calibration), Trajectory.load(options.evaluation)
    names = options.readout or available_readouts(calibration, evaluation)
    frontiers = [sweep(name, calibration, evaluation) for name in names]
    if options.json:
        print_json({"readouts": [frontier_result(frontier, targets) for frontier in frontiers]})
        return 0
    rows = []
    for frontier in frontiers:
        depths = [frontier.depth_at(target) for target in targets]
        point = frontier.select()
        rows.append(
            [
                frontier.readout,
                *("N/A" if depth is None else f"{depth:.2f}" for depth in depths),
                "" if point.policy.threshold is None else f"{point.policy.threshold:.4g}",
                percent(point.accuracy),
                f"{point.average_loops:.2f}",
            ]
        )
    title = (
        f"{evaluation.num_examples:,} {evaluation.split or 'evaluation'} examples. D@X: least average loops on the "
        "evaluation curve that reach X. Selected: the most accurate threshold on calibration data, evaluated."
    )
    columns = ["readout", *(f"D@{100 * target:g}" for target in targets), "selected", "accuracy", "loops"]
    print_table(title, columns, rows)
    return 0


def diagnose(options: argparse.Namespace) -> int:
    from loopscope.analysis import Subject, diagnose
    from loopscope.report import gap_rows, read_source

    (target,) = _targets([options.at])
    source = read_source(options.run, options.unseen)
    subject = Subject(source.validation, source.test)
    reference = None
    if options.reference is not None and options.reference.resolve() == options.run.resolve():
        reference = subject
    elif options.reference is not None:
        other = read_source(options.reference, options.unseen)
        reference = Subject(other.validation, other.test)
    diagnosis = diagnose(subject, reference, target)
    if options.json:
        print_json(diagnosis)
        return 0
    print(diagnosis.sentence)
    columns = ["gap", "between", "at", "loops", "95 % interval", "both reach it", f"each reaches {100 * target:g}%"]
    print_table("", columns, gap_rows(diagnosis))
    return 0


def report(options: argparse.Namespace) -> int:
    from loopscope.report import collect, read_source

    targets = _targets(options.at or [0.95, 0.98, 0.99])
    sources = [read_source(run, options.unseen) for run in options.runs]
    results = collect(sources, options.reference, targets, options.unseen)
    return _write_and_show(results, options.out, options.json)


def demo(options: argparse.Namespace) -> int:
    from loopscope.progress import track
    from loopscope.report import collect, read_source
    from loopscope.studies.demo import REFERENCE, TARGETS, demo_jobs
    from loopscope.studies.local import run_all

    jobs = demo_jobs(options.out, options.set)
    with track("demo") as advance:
        run_all(jobs, advance, options.workers)
    say("Analysing the recordings.")
    sources = [read_source(job.folder, unseen_only=True) for job in jobs]
    results = collect(sources, REFERENCE, TARGETS, unseen_only=True)
    return _write_and_show(results, options.out / "report", options.json, only_headline=True)


def _write_and_show(results: "Results", folder: Path, as_json: bool, only_headline: bool = False) -> int:
    """Writes the report, then prints its tables, the most important last, and its verdicts."""
    try:
        from loopscope.report.write import write_report
    except ImportError as error:
        raise UserError(f"The report needs {error.name}; install it with: pip install 'loopscope[report]'.") from None
    from loopscope.report import tables

    written = write_report(results, folder)
    if as_json:
        print_json(results)
        return 0
    for table in reversed(tables(results)[: 1 if only_headline else None]):
        print_table(table.title, table.columns, table.rows)
    for model in results.models:
        print(f"\n{model.label}{' (the reference)' if model.is_reference else ''}: {model.diagnosis.sentence}")
    print(f"\nThe report: {written}")
    return 0


def _targets(values: list[float]) -> list[float]:
    if not all(0 < target <= 1 for target in values):
        raise UserError("--at takes accuracies between 0 and 1, such as 0.95.")
    return list({f"{target:g}": target for target in values}.values())
