"""The command line: one verb a stage, in the order of the stages, each with its options and examples."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from loopscope.cli import benchmarks, running, verbs
from loopscope.errors import UserError

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
  loopscope run runs/mine examples.txt --readout margin
  loopscope bench exits runs/mine
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
    subparsers = parser.add_subparsers(title="verbs", metavar="VERB", required=True)

    train = _verb(
        subparsers,
        "train",
        "train a looped Transformer",
        """\
  loopscope train demo --out runs/demo
  loopscope train demo --out runs/gate --set objective.name=learned_gate --set model.gate=linear
  loopscope train paper --out runs/paper --set training.seed=1        (on a GPU)
  loopscope train my.toml --out runs/mine --device cuda

A killed or interrupted run continues with the same command and ends bit-identical.""",
        verbs.train,
    )
    train.add_argument("settings", help="a preset (demo, paper) or a TOML file")
    train.add_argument("--out", type=Path, required=True, metavar="DIR", help="the run's folder")
    train.add_argument("--set", action="append", default=[], metavar="A.B=C", help="change a setting (repeatable)")
    train.add_argument("--force", action="store_true", help="start even a run that is far too big for this machine")
    _compute_options(train)

    record = _verb(
        subparsers,
        "record",
        "run a split through every loop of a checkpoint",
        """\
  loopscope record runs/demo --split validation
  loopscope record runs/demo --split test --hidden
  loopscope record runs/paper --split extrapolation --levels 11-14 --examples 10000""",
        verbs.record,
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
        subparsers,
        "evaluate",
        "sweep the readouts of a recording",
        """\
  loopscope evaluate runs/demo/recordings/validation runs/demo/recordings/test
  loopscope evaluate VALIDATION TEST --readout margin --readout gate --at 0.95 --json""",
        verbs.evaluate,
    )
    evaluate.add_argument("calibration", type=Path, help="the recording that thresholds are chosen on")
    evaluate.add_argument("evaluation", type=Path, help="the recording that they are evaluated on")
    evaluate.add_argument("--readout", action="append", metavar="NAME", help="a readout (repeatable; default: all)")
    evaluate.add_argument("--at", action="append", type=float, metavar="X", help="an accuracy for D@X (repeatable)")
    evaluate.add_argument("--json", action="store_true", help="print JSON")

    diagnose = _verb(
        subparsers,
        "diagnose",
        "say which part is to blame, the trajectory or the readout",
        """\
  loopscope diagnose runs/demo/linear-gate --reference runs/demo/fixed-geometric --unseen
  loopscope diagnose runs/demo/linear-gate --at 0.9 --json

A run needs its validation and test splits recorded; a folder that holds two recordings named so will do.""",
        verbs.diagnose,
    )
    diagnose.add_argument("run", type=Path, help="the run to be diagnosed")
    diagnose.add_argument("--reference", type=Path, metavar="RUN", help="the run whose trajectory is the measure")
    diagnose.add_argument("--at", type=float, default=0.95, metavar="X", help="the target accuracy (default: 0.95)")
    diagnose.add_argument("--unseen", action="store_true", help="only examples that training did not have")
    diagnose.add_argument("--json", action="store_true", help="print JSON")

    report = _verb(
        subparsers,
        "report",
        "write tables, figures and a page on some runs",
        """\
  loopscope report runs/demo/fixed-geometric runs/demo/linear-gate --reference fixed-geometric --out report
  loopscope report runs/seed-* --out report --at 0.95 --at 0.99 --unseen""",
        verbs.report,
    )
    report.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="runs whose splits are recorded")
    report.add_argument("--reference", metavar="NAME", help="the name of the run whose trajectory is the measure")
    report.add_argument("--out", type=Path, required=True, metavar="DIR", help="the report's folder")
    report.add_argument("--at", action="append", type=float, metavar="X", help="a target accuracy (repeatable)")
    report.add_argument("--unseen", action="store_true", help="only examples that training did not have")
    report.add_argument("--json", action="store_true", help="print the results as JSON")

    run = _verb(
        subparsers,
        "run",
        "answer a file of examples with adaptive depth",
        """\
  loopscope run runs/demo/fixed-geometric examples.txt --readout margin
  echo "+ 1 * 0 1" | loopscope run runs/demo/fixed-geometric - --readout margin --threshold 4
  loopscope run runs/mine examples.txt --readout fixed --threshold 4 --out answers.jsonl

One example a line, as the task writes them: `+ 1 * 0 1` (prefix notation) or `0110`. The answers are JSON lines in the
order of the examples. Without --threshold it is chosen on the run's validation recording.""",
        running.run,
    )
    run.add_argument("run", type=Path, help="the folder of a finished run")
    run.add_argument("examples", help="a file with one example a line, or - for standard input")
    run.add_argument("--readout", default="margin", metavar="NAME", help="the exit rule (default: margin)")
    run.add_argument("--threshold", type=float, metavar="X", help="its threshold (default: as validation chooses)")
    run.add_argument("--batch-size", type=_count, default=256, metavar="N", help="rows at a time (default: 256)")
    run.add_argument("--out", type=Path, metavar="FILE", help="where the answers go (default: standard output)")
    _compute_options(run, json=False)

    _bench(subparsers)

    demo = _verb(
        subparsers,
        "demo",
        "train, record, diagnose and report four small models",
        """\
  loopscope demo --out runs/demo
  loopscope demo --out runs/quick --set training.steps=300

An interrupted demo continues with the same command; what is finished is used again.""",
        verbs.demo,
    )
    demo.add_argument("--out", type=Path, default=Path("runs/demo"), metavar="DIR", help="default: runs/demo")
    demo.add_argument("--set", action="append", default=[], metavar="A.B=C", help="change a setting of all models")
    demo.add_argument("--workers", type=_count, metavar="N", help="models at a time (default: one a core)")
    demo.add_argument("--json", action="store_true", help="print the results as JSON")
    return parser


def _bench(subparsers: Any) -> None:
    bench = subparsers.add_parser(
        "bench", help="measure speed-ups side by side", description="Measure speed-ups side by side, interleaved."
    )
    kinds = bench.add_subparsers(title="what", metavar="WHAT", required=True)

    exits = _verb(
        kinds,
        "exits",
        "adaptive depth against full depth",
        """\
  loopscope bench exits --waiting                          (the paper's model, random weights, about 1.3 loops)
  loopscope bench exits runs/demo/fixed-geometric runs/demo/linear-gate
  loopscope bench exits runs/demo/fixed-geometric --readout margin --waiting --json""",
        benchmarks.exits,
    )
    exits.add_argument("runs", type=Path, nargs="*", metavar="RUN", help="recorded runs (default: random weights)")
    exits.add_argument("--readout", action="append", metavar="NAME", help="a readout (repeatable; default: several)")
    exits.add_argument("--batch-size", type=_count, metavar="N", help="rows (default: 64 at random, else the fastest)")
    exits.add_argument("--waiting", action="store_true", help="also the batch in which all wait for the slowest")
    exits.add_argument("--settings", default="paper", help="preset or TOML file of the random model (default: paper)")
    exits.add_argument("--set", action="append", default=[], metavar="A.B=C", help="change a setting of it")
    exits.add_argument("--examples", type=_count, default=2048, metavar="N", help="for random weights (default: 2048)")
    exits.add_argument("--loops", type=float, default=1.3, metavar="X", help="average loops of it (default: 1.3)")

    train = _verb(
        kinds,
        "train",
        "a training step against the plain padded one",
        """\
  loopscope bench train demo
  loopscope bench train paper --set training.batch_size=64 --steps 1""",
        benchmarks.train,
    )
    train.add_argument("settings", nargs="?", default="demo", help="a preset or a TOML file (default: demo)")
    train.add_argument("--set", action="append", default=[], metavar="A.B=C", help="change a setting (repeatable)")
    train.add_argument("--steps", type=_count, default=4, metavar="N", help="steps of each way a round (default: 4)")

    record = _verb(
        kinds,
        "record",
        "a recording against the bare forward pass",
        """\
  loopscope bench record runs/demo/fixed-geometric
  loopscope bench record runs/demo/mlp-gate --split validation --examples 5000""",
        benchmarks.record,
    )
    record.add_argument("run", type=Path, help="the folder of a finished run")
    record.add_argument("--split", default="test", help="default: test")
    record.add_argument("--examples", type=_count, metavar="N", help="how many examples (default: the task's)")

    sweep = _verb(
        kinds,
        "sweep",
        "a sweep against its signal, and against a replay of every threshold",
        """\
  loopscope bench sweep
  loopscope bench sweep --examples 10000 --classes 4""",
        benchmarks.sweep,
    )
    for name, default in (("examples", 50_000), ("loops", 6), ("classes", 23), ("width", 64)):
        sweep.add_argument(f"--{name}", type=_count, default=default, metavar="N", help=f"default: {default:,}")

    for parser in (exits, train, record, sweep):
        parser.add_argument("--rounds", type=_count, default=5, metavar="N", help="rounds after warm-up (default: 5)")
        parser.add_argument("--threads", type=_count, metavar="N", help="CPU threads (default: as PyTorch chooses)")
        parser.add_argument("--json", action="store_true", help="print JSON")
        parser.set_defaults(device="cpu")


class _Version(str):
    """Looked up when it is printed, not at every start."""

    def __mod__(self, _: Any) -> str:
        from loopscope.artifacts import loopscope_version

        return f"loopscope {loopscope_version()}"


def _verb(subparsers: Any, name: str, purpose: str, examples: str, run: Any) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = subparsers.add_parser(
        name,
        help=purpose,
        description=purpose.capitalize() + ".",
        epilog="examples:\n" + examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(verb=run)
    return parser


def _compute_options(parser: argparse.ArgumentParser, json: bool = True) -> None:
    parser.add_argument("--device", default="cpu", help="cpu (default) or cuda")
    parser.add_argument("--threads", type=_count, metavar="N", help="CPU threads (default: as PyTorch chooses)")
    if json:
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
