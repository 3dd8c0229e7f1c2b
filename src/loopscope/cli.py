"""The command line: one verb a stage, in the order of the stages. Heavy imports happen inside the verbs."""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loopscope.errors import UserError

if TYPE_CHECKING:
    from loopscope.exits import Frontier

_EPILOG = """\
A first run, about five minutes on two CPU cores:
  loopscope train demo --out runs/demo
  loopscope record runs/demo --split validation
  loopscope record runs/demo --split test
  loopscope evaluate runs/demo/recordings/validation runs/demo/recordings/test
"""


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    try:
        return int(options.verb(options))
    except UserError as error:
        print(f"loopscope: {error}", file=sys.stderr)
    except OSError as error:
        if error.filename is None:
            raise
        print(f"loopscope: {error.filename}: {error.strerror}.", file=sys.stderr)
    except KeyboardInterrupt:
        print("loopscope: interrupted; the same command continues where it stopped.", file=sys.stderr)
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
    try:
        device = torch.device(options.device)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError):
        raise UserError(f"The device '{options.device}' is not available here; use --device cpu.") from None
    return device


def _train(options: argparse.Namespace) -> int:
    from loopscope.training import read_settings

    settings = read_settings(options.settings, options.set)
    device = _device(options)
    from loopscope.progress import clock, track
    from loopscope.training import estimate, train
    from loopscope.training.loop import steps_done

    start, steps = steps_done(options.out), settings.training.steps
    if start < steps and not options.force:
        expected = estimate(settings, device)
        expected.check()
        _say(
            f"{steps - start:,} steps to go, about {clock(expected.seconds * (1 - start / steps))} on a quiet machine."
        )
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

    targets = options.at or [0.9, 0.95, 0.98, 0.99]
    if not all(0 < target <= 1 for target in targets):
        raise UserError("--at takes accuracies between 0 and 1, such as 0.95.")
    calibration, evaluation = Trajectory.load(options.calibration), Trajectory.load(options.evaluation)
    names = options.readout or [name for name in READOUTS if available(name, calibration)]
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
    print(json.dumps(value, indent=2, allow_nan=False))


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
