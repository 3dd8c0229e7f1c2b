"""The command line: one verb a stage, in the order of the stages. Heavy imports happen inside the verbs."""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loopscope.errors import UserError

if TYPE_CHECKING:
    from loopscope.exits import Frontier
    from loopscope.report import Results

_EPILOG = """\
All of it at once, on a small task (some minutes on two CPU cores):
  loopscope demo --out runs/demo

Or stage by stage:
  loopscope train demo --out runs/mine
  loopscope record runs/mine --split validation
  loopscope record runs/mine --split test
  loopscope evaluate runs/mine/recordings/validation runs/mine/recordings/test
  loopscope diagnose runs/mine
  loopscope report runs/mine --out runs/mine/report
"""


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    try:
        return int(options.verb(options))
    except UserError as error:
        print(f"loopscope: {error}", file=sys.stderr)
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        print(f"loopscope: {where}{error.strerror or error}.", file=sys.stderr)
    except MemoryError:
        print("loopscope: there is not enough memory for this; ask for fewer examples.", file=sys.stderr)
    except KeyboardInterrupt:
        print("loopscope: interrupted; run the same command again to go on.", file=sys.stderr)
        return 130
    return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="loopscope",
        description="Adaptive depth in looped Transformers: is the trajectory to blame, or the readout?",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=_Version())
    verbs = parser.add_subparsers(title="verbs", metavar="VERB", required=True)

    train = _verb(
        verbs,
        "train",
        "train a looped Transformer",
        """\
  loopscope train demo --out runs/demo
  loopscope train demo --out runs/gate --set objective.name=learned_gate --set model.gate=linear
  loopscope train paper --out runs/paper --set training.seed=1        (on a GPU)
  loopscope train my.toml --out runs/mine --device cuda

A killed or interrupted run continues with the same command and ends bit-identical.""",
        _train,
    )
    train.add_argument("settings", help="a preset (demo, paper) or a TOML file")
    train.add_argument("--out", type=Path, required=True, metavar="DIR", help="the run's folder")
    train.add_argument("--set", action="append", default=[], metavar="A.B=C", help="change a setting (repeatable)")
    train.add_argument("--force", action="store_true", help="start even a run that is far too big for this machine")
    _compute_options(train)

    record = _verb(
        verbs,
        "record",
        "run a split through every loop of a checkpoint",
        """\
  loopscope record runs/demo --split validation
  loopscope record runs/demo --split test --hidden
  loopscope record runs/paper --split extrapolation --levels 11-14 --examples 10000""",
        _record,
    )
    record.add_argument("run", type=Path, help="the folder of a finished run")
    record.add_argument("--split", required=True, help="train, validation, test or extrapolation")
    record.add_argument("--out", type=Path, metavar="DIR", help="default: RUN/recordings/SPLIT")
    record.add_argument("--examples", type=_count, metavar="N", help="how many examples (default: the task's)")
    record.add_argument("--levels", type=_levels, metavar="A-B", help="difficulties (default: the task's)")
    record.add_argument("--hidden", action="store_true", help="keep the pooled hidden states")
    record.add_argument("--no-logits", action="store_true", help="keep signals and predictions in place of the logits")
    _compute_options(record)

    evaluate = _verb(
        verbs,
        "evaluate",
        "sweep the readouts of a recording",
        """\
  loopscope evaluate runs/demo/recordings/validation runs/demo/recordings/test
  loopscope evaluate VALIDATION TEST --readout margin --readout gate --at 0.95 --json""",
        _evaluate,
    )
    evaluate.add_argument("calibration", type=Path, help="the recording that thresholds are chosen on")
    evaluate.add_argument("evaluation", type=Path, help="the recording that they are evaluated on")
    evaluate.add_argument("--readout", action="append", metavar="NAME", help="a readout (repeatable; default: all)")
    evaluate.add_argument("--at", action="append", type=float, metavar="X", help="an accuracy for D@X (repeatable)")
    evaluate.add_argument("--json", action="store_true", help="print JSON")

    diagnose = _verb(
        verbs,
        "diagnose",
        "say which part is to blame, the trajectory or the readout",
        """\
  loopscope diagnose runs/demo/linear-gate --reference runs/demo/fixed-geometric
  loopscope diagnose runs/demo/linear-gate --at 0.9 --json

A run needs its validation and test splits recorded; a folder that holds two recordings named so will do.""",
        _diagnose,
    )
    diagnose.add_argument("run", type=Path, help="the run to be diagnosed")
    diagnose.add_argument("--reference", type=Path, metavar="RUN", help="the run whose trajectory is the measure")
    diagnose.add_argument("--at", type=float, default=0.95, metavar="X", help="the target accuracy (default: 0.95)")
    diagnose.add_argument("--unseen", action="store_true", help="only examples that training did not have")
    diagnose.add_argument("--json", action="store_true", help="print JSON")

    report = _verb(
        verbs,
        "report",
        "write tables, figures and a page on some runs",
        """\
  loopscope report runs/demo/fixed-geometric runs/demo/linear-gate --reference fixed-geometric --out report
  loopscope report runs/seed-* --out report --at 0.95 --at 0.99 --unseen""",
        _report,
    )
    report.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="runs whose splits are recorded")
    report.add_argument("--reference", metavar="NAME", help="the name of the run whose trajectory is the measure")
    report.add_argument("--out", type=Path, required=True, metavar="DIR", help="the report's folder")
    report.add_argument("--at", action="append", type=float, metavar="X", help="a target accuracy (repeatable)")
    report.add_argument("--unseen", action="store_true", help="only examples that training did not have")
    report.add_argument("--json", action="store_true", help="print the results as JSON")

    demo = _verb(
        verbs,
        "demo",
        "train, record, diagnose and report four small models",
        """\
  loopscope demo --out runs/demo
  loopscope demo --out runs/quick --set training.steps=300

An interrupted demo continues with the same command; what is finished is used again.""",
        _demo,
    )
    demo.add_argument("--out", type=Path, default=Path("runs/demo"), metavar="DIR", help="default: runs/demo")
    demo.add_argument("--set", action="append", default=[], metavar="A.B=C", help="change a setting of all models")
    demo.add_argument("--workers", type=_count, metavar="N", help="models at a time (default: one a core)")
    demo.add_argument("--json", action="store_true", help="print the results as JSON")
    return parser


class _Version(str):
    """Looked up when it is printed, not at every start."""

    def __mod__(self, _: Any) -> str:
        from loopscope.artifacts import loopscope_version

        return f"loopscope {loopscope_version()}"


def _verb(verbs: Any, name: str, purpose: str, examples: str, run: Any) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = verbs.add_parser(
        name,
        help=purpose,
        description=purpose.capitalize() + ".",
        epilog="examples:\n" + examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(verb=run)
    return parser


def _compute_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", default="cpu", help="cpu (default) or cuda")
    parser.add_argument("--threads", type=_count, metavar="N", help="CPU threads (default: as PyTorch chooses)")
    parser.add_argument("--json", action="store_true", help="print JSON")


def _count(text: str) -> int:
    if not text.isdigit() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"'{text}' is not a whole number from 1 on")
    return int(text)


def _levels(text: str) -> range:
    first, dash, last = text.partition("-")
    if (
        not first.isdigit()
        or (dash and not last.isdigit())
        or (levels := range(int(first), int(last or first) + 1)).start < 1
    ):
        raise argparse.ArgumentTypeError(f"'{text}' is not a range of difficulties such as 11-14")
    if not levels:
        raise argparse.ArgumentTypeError(f"'{text}' is an empty range")
    return levels


def _device(options: argparse.Namespace) -> Any:
    import torch

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


def _train(options: argparse.Namespace) -> int:
    from loopscope.training import read_settings

    settings = read_settings(options.settings, options.set)
    device = _device(options)
    from loopscope.progress import clock, track
    from loopscope.training import check_memory, estimate, train
    from loopscope.training.loop import steps_done

    start, steps = steps_done(options.out), settings.training.steps
    if start < steps and not options.force:
        check_memory(settings, device)
        expected = estimate(settings, device, start)
        expected.check()
        _say(f"{steps - start:,} steps to go, about {clock(expected.seconds)} on a quiet machine.")
    with track("training") as advance:
        result = train(settings, options.out, device, advance)
    final = result.final
    if options.json:
        _print_json({"run": str(result.folder), "resumed_from": result.resumed_from, **final})
        return 0
    rows = [
        [str(loop), f"{loss:.4f}", _percent(accuracy)]
        for loop, (loss, accuracy) in enumerate(
            zip(final["validation_loss"], final["validation_accuracy"], strict=True), start=1
        )
    ]
    state = "was finished already" if start == steps else f"went on from step {start:,}" if start else "is finished"
    _print_table(f"{result.folder} {state}. Validation sample, forced exits:", ["loop", "loss", "accuracy"], rows)
    return 0


def _record(options: argparse.Namespace) -> int:
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
            _device(options),
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
        _print_json(summary)
        return 0
    rows = [[str(loop), _percent(value)] for loop, value in enumerate(accuracy, start=1)]
    title = (
        f"{out}: {trajectory.num_examples:,} {trajectory.split} examples, {trajectory.num_loops} loops. Forced exits:"
    )
    _print_table(title, ["loop", "accuracy"], rows)
    return 0


def _evaluate(options: argparse.Namespace) -> int:
    from loopscope.exits import READOUTS, sweep
    from loopscope.exits.sweep import available
    from loopscope.trajectory import Trajectory

    targets = _targets(options.at or [0.9, 0.95, 0.98, 0.99])
    calibration, evaluation = Trajectory.load(options.calibration), Trajectory.load(options.evaluation)
    both = (calibration, evaluation)
    names = options.readout or [name for name in READOUTS if all(available(name, recording) for recording in both)]
    frontiers = [sweep(name, calibration, evaluation) for name in names]
    if options.json:
        _print_json({"readouts": [_frontier_json(frontier, targets) for frontier in frontiers]})
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
                _percent(point.accuracy),
                f"{point.average_loops:.2f}",
            ]
        )
    title = (
        f"{evaluation.num_examples:,} {evaluation.split or 'evaluation'} examples. D@X: least average loops on the "
        "evaluation curve that reach X. Selected: the most accurate threshold on calibration data, evaluated."
    )
    columns = ["readout", *(f"D@{100 * target:g}" for target in targets), "selected", "accuracy", "loops"]
    _print_table(title, columns, rows)
    return 0


def _diagnose(options: argparse.Namespace) -> int:
    from loopscope.analysis import Subject, diagnose
    from loopscope.report import gap_rows, read_source

    (target,) = _targets([options.at])
    source = read_source(options.run, options.unseen)
    reference = None
    if options.reference is not None:
        other = read_source(options.reference, options.unseen)
        reference = Subject(other.validation, other.test)
    diagnosis = diagnose(Subject(source.validation, source.test), reference, target)
    if options.json:
        _print_json(diagnosis)
        return 0
    print(diagnosis.sentence)
    columns = ["gap", "between", "at", "loops", "95 % interval", "reaches it", f"reaches {target:.0%}"]
    _print_table("", columns, gap_rows(diagnosis))
    return 0


def _report(options: argparse.Namespace) -> int:
    from loopscope.report import collect, read_source

    targets = _targets(options.at or [0.95, 0.98, 0.99])
    sources = [read_source(run, options.unseen) for run in options.runs]
    results = collect(sources, options.reference, targets, options.unseen)
    return _write_and_show(results, options.out, options.json)


def _demo(options: argparse.Namespace) -> int:
    from loopscope.progress import track
    from loopscope.report import collect, read_source
    from loopscope.studies.demo import REFERENCE, TARGETS, demo_jobs
    from loopscope.studies.local import run_all

    jobs = demo_jobs(options.out, options.set)
    with track("demo") as advance:
        run_all(jobs, advance, options.workers)
    _say("Analysing the recordings.")
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
        _print_json(results)
        return 0
    for table in reversed(tables(results)[: 1 if only_headline else None]):
        _print_table(table.title, table.columns, table.rows)
    for model in results.models:
        print(f"\n{model.label}{' (the reference)' if model.is_reference else ''}: {model.diagnosis.sentence}")
    print(f"\nThe report: {written}")
    return 0


def _targets(values: list[float]) -> list[float]:
    if not all(0 < target <= 1 for target in values):
        raise UserError("--at takes accuracies between 0 and 1, such as 0.95.")
    return values


def _frontier_json(frontier: "Frontier", targets: list[float]) -> dict[str, Any]:
    point = frontier.select()
    return {
        "readout": frontier.readout,
        "depth_at": {f"{target:g}": frontier.depth_at(target) for target in targets},
        "selected": {
            "threshold": point.policy.threshold,
            "accuracy": point.accuracy,
            "average_loops": point.average_loops,
            "calibration_accuracy": point.calibration_accuracy,
            "calibration_average_loops": point.calibration_average_loops,
        },
        "thresholds": [] if frontier.readout == "oracle" else frontier.thresholds.tolist(),
        "accuracy": frontier.accuracy.tolist(),
        "average_loops": frontier.average_loops.tolist(),
    }


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _say(text: str) -> None:
    print(text, file=sys.stderr)


def _print_json(value: object) -> None:
    from loopscope.config import to_json

    print(to_json(value).decode(), end="")


def _print_table(title: str, columns: list[str], rows: list[list[str]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left", title_style="bold")
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if index else "left")
    for row in rows:
        table.add_row(*row)
    Console(width=None if sys.stdout.isatty() else int(os.environ.get("COLUMNS", "110"))).print(table)


if __name__ == "__main__":
    sys.exit(main())
