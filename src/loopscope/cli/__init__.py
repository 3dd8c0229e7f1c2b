"""The command line: one verb a stage, in the order of the stages, each with its options and examples."""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from loopscope.cli import (
    answering,
    benchmarks,
    calibrating,
    checking,
    gating,
    generating,
    harness,
    language,
    running,
    studying,
    verbs,
)
from loopscope.cli.options import Version, any_model, compute_options, count, levels, opening, products, verb
from loopscope.errors import UserError
from loopscope.machine import out_of_memory

_EPILOG = """\
All of it at once, on a small task (some minutes on two CPU cores):
  loopscope demo --out runs/demo

The paper's study, scaled down until it runs on two CPU cores in two hours:
  loopscope study run studies/mano.toml

Or stage by stage:
  loopscope train demo --out runs/mine
  loopscope record runs/mine --split validation
  loopscope record runs/mine --split test
  loopscope evaluate runs/mine/recordings/validation runs/mine/recordings/test
  loopscope diagnose runs/mine
  loopscope report runs/mine --out runs/mine/report
  loopscope calibrate runs/mine/recordings/validation --max-drop 0.01 --out policy.json
  loopscope evaluate runs/mine/recordings/test --policy policy.json
  loopscope run runs/mine examples.txt --policy policy.json
  loopscope bench exits runs/mine
"""


_POLICIES = "a policy of one of the runs, which the hash in it tells (repeatable)"
_RECORDINGS = "the one that thresholds are chosen on and the one they are evaluated on; with --policy a held-out one"


_GOING_ON = (verbs.train, verbs.record, language.pretrain, studying.run)
"""What finds, when it is done again, whatever was finished before."""


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    try:
        return int(options.verb(options))
    except UserError as error:
        if _follows():
            return 0  # the first worker has the same error; failing here could end it before it has said so
        print(f"loopscope: {error}", file=sys.stderr)
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        print(f"loopscope: {where}{error.strerror or error}.", file=sys.stderr)
    except MemoryError:
        print("loopscope: there is not enough memory for this; ask for fewer examples.", file=sys.stderr)
    except RuntimeError as error:
        if not out_of_memory(error):
            raise
        print(
            "loopscope: there is not enough memory for this; ask for less at a time (a smaller --batch-tokens or "
            "--batch-size, where there is one), or take a lower precision (--dtype bfloat16).",
            file=sys.stderr,
        )
    except KeyboardInterrupt:
        if not _follows():
            more = "; run the same command again to go on" if options.verb in _GOING_ON else ""
            print(f"loopscope: interrupted{more}.", file=sys.stderr)
        return 130
    return 2


def _follows() -> bool:
    """Whether torchrun started this process, and another one speaks for all that it started."""
    return "TORCHELASTIC_RUN_ID" in os.environ and os.environ.get("RANK") != "0"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="loopscope",
        description="Adaptive depth in looped Transformers: is the trajectory to blame, or the readout?",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=Version())
    subparsers = parser.add_subparsers(title="verbs", metavar="VERB", required=True)

    train = verb(
        subparsers,
        "train",
        "train a looped Transformer",
        """\
  loopscope train demo --out runs/demo
  loopscope train demo --out runs/gate --set objective.name=learned_gate --set model.gate=linear
  loopscope train paper --out runs/paper --set training.seed=1        (on a GPU)
  loopscope train my.toml --out runs/mine --device cuda
  torchrun --nproc-per-node 4 -m loopscope.cli train paper --out runs/paper --device cuda

A killed or interrupted run continues with the same command and ends bit-identical.""",
        verbs.train,
    )
    train.add_argument("settings", help="a preset (demo, paper) or a TOML file")
    train.add_argument("--out", type=Path, required=True, metavar="DIR", help="the run's folder")
    train.add_argument("--set", action="append", default=[], metavar="A.B=C", help="change a setting (repeatable)")
    train.add_argument("--force", action="store_true", help="start even a run that is far too big for this machine")
    compute_options(train)

    record = verb(
        subparsers,
        "record",
        "run a split, a text or a benchmark through every loop of a checkpoint",
        """\
  loopscope record runs/demo --split validation
  loopscope record runs/demo --split test --hidden
  loopscope record runs/paper --split extrapolation --levels 11-14 --examples 10000
  loopscope record Ouro-1.4B --text mine.txt --out recordings/mine                     (every token of a text)
  loopscope record small-ouro --text train.txt --split train --limit 100000 --hidden --out recordings/train
  loopscope record Ouro-1.4B --benchmark arc_easy --split test --data DIR              (all questions, in one pass)

A text file holds documents with <|endoftext|> between them, a .jsonl file one {"text": ...} a line. Promises count
documents, so give many. --split says what the text is to the model: calibrating on test is refused, for instance.""",
        verbs.record,
    )
    record.add_argument(
        "run", type=Path, help="the folder of a finished run, or with --text or --benchmark any checkpoint"
    )
    record.add_argument("--split", help="train, validation, test or extrapolation (default of a text: validation)")
    record.add_argument("--out", type=Path, metavar="DIR", help="default: RUN/recordings/SPLIT")
    record.add_argument("--text", type=Path, nargs="+", metavar="FILE", help="record the next tokens of a text")
    record.add_argument("--context", type=count, metavar="N", help="tokens of a text at a time (default: up to 512)")
    record.add_argument("--benchmark", metavar="NAME", help="record its questions (docs/benchmarks.md has the six)")
    record.add_argument("--data", type=Path, metavar="DIR", help="local files of a benchmark (default: the Hub)")
    record.add_argument("--mean-state", action="store_true", help="gate and state averaged over the choices' tokens")
    record.add_argument("--batch-tokens", type=count, metavar="N", help="of questions (default: 8192)")
    record.add_argument("--limit", type=count, metavar="N", help="at most so many tokens of a text, or questions")
    record.add_argument("--dtype", metavar="NAME", help="precision of a language model: float32, bfloat16, float16")
    record.add_argument("--examples", type=count, metavar="N", help="how many examples (default: the task's)")
    record.add_argument("--levels", type=levels, metavar="A-B", help="difficulties (default: the task's)")
    record.add_argument("--hidden", action="store_true", help="keep the pooled hidden states")
    record.add_argument("--no-logits", action="store_true", help="keep signals and predictions in place of the logits")
    compute_options(record)

    evaluate = verb(
        subparsers,
        "evaluate",
        "sweep the readouts of a recording",
        """\
  loopscope evaluate runs/demo/recordings/validation runs/demo/recordings/test
  loopscope evaluate VALIDATION TEST --readout margin --readout gate --at 0.95 --json
  loopscope evaluate runs/demo/fixed-geometric/recordings/test --policy policy.json

With --policy: is the policy's promise kept on these held-out examples? The exit code is 1 if it is broken.""",
        verbs.evaluate,
    )
    evaluate.add_argument("recordings", type=Path, nargs="+", metavar="RECORDING", help=_RECORDINGS)
    evaluate.add_argument("--policy", type=Path, metavar="FILE", help="check this policy on one held-out recording")
    any_model(evaluate)
    evaluate.add_argument("--readout", action="append", metavar="NAME", help="a readout (repeatable; default: all)")
    evaluate.add_argument("--gate", action="append", type=Path, default=[], metavar="DIR", help="a fitted gate, too")
    evaluate.add_argument("--at", action="append", type=float, metavar="X", help="an accuracy for D@X (repeatable)")
    evaluate.add_argument("--json", action="store_true", help="print JSON")

    diagnose = verb(
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

    compare = verb(
        subparsers,
        "compare",
        "compare two readouts on the same examples",
        """\
  loopscope compare runs/demo/linear-gate gate margin
  loopscope compare runs/demo/linear-gate gate margin --with runs/demo/fixed-geometric --unseen
  loopscope compare runs/mine gate:linear gate --gate gates/linear     (recorded with --hidden)

Both at the threshold that validation chooses, and (--at) at the least depth that reaches an accuracy. With --with, the
second readout runs on another model's recordings of the same examples.""",
        verbs.compare,
    )
    compare.add_argument("run", type=Path, help="a run whose validation and test splits are recorded")
    compare.add_argument("first", metavar="READOUT", help="the first readout")
    compare.add_argument("second", metavar="OTHER", help="the second readout")
    compare.add_argument("--with", type=Path, metavar="RUN", dest="other", help="the run of the second (default: RUN)")
    compare.add_argument("--gate", action="append", type=Path, default=[], metavar="DIR", help="a fitted gate of RUN")
    compare.add_argument("--at", type=float, default=0.95, metavar="X", help="the accuracy of D@X (default: 0.95)")
    compare.add_argument("--unseen", action="store_true", help="only examples that training did not have")
    compare.add_argument("--json", action="store_true", help="print JSON")

    report = verb(
        subparsers,
        "report",
        "write tables, figures and a page on some runs",
        """\
  loopscope report runs/demo/fixed-geometric runs/demo/linear-gate --reference fixed-geometric --out report
  loopscope report runs/seed-* --out report --at 0.95 --at 0.99 --unseen
  loopscope report runs/mine --policy policy.json --out report --open""",
        verbs.report,
    )
    report.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="runs whose splits are recorded")
    report.add_argument("--reference", metavar="NAME", help="the name of the run whose trajectory is the measure")
    report.add_argument("--policy", action="append", type=Path, default=[], metavar="FILE", help=_POLICIES)
    any_model(report)
    report.add_argument("--out", type=Path, required=True, metavar="DIR", help="the report's folder")
    report.add_argument("--at", action="append", type=float, metavar="X", help="a target accuracy (repeatable)")
    report.add_argument("--unseen", action="store_true", help="only examples that training did not have")
    report.add_argument("--json", action="store_true", help="print the results as JSON")
    products(report, "overview")
    opening(report)

    calibrating.define(subparsers)

    run = verb(
        subparsers,
        "run",
        "answer a file of examples with adaptive depth",
        """\
  loopscope run runs/demo/fixed-geometric examples.txt --readout margin
  echo "+ 1 * 0 1" | loopscope run runs/demo/fixed-geometric - --readout margin --threshold 4
  loopscope run runs/mine examples.txt --readout fixed --threshold 4 --out answers.jsonl
  loopscope run runs/mine examples.txt --gate gates/linear
  loopscope run runs/mine examples.txt --policy policy.json           (as `loopscope calibrate` wrote it)

One example a line, as the task writes them: `+ 1 * 0 1` (prefix notation) or `0110`. The answers are JSON lines in the
order of the examples. Without --threshold it is chosen on the run's validation recording.""",
        running.run,
    )
    run.add_argument("run", type=Path, help="the folder of a finished run")
    run.add_argument("examples", help="a file with one example a line, or - for standard input")
    rule = run.add_mutually_exclusive_group()
    rule.add_argument("--readout", default="margin", metavar="NAME", help="the exit rule (default: margin)")
    rule.add_argument("--gate", type=Path, metavar="DIR", help="a fitted gate as the exit rule")
    rule.add_argument("--policy", type=Path, metavar="FILE", help="the exit rule and its threshold from a policy file")
    any_model(run)
    run.add_argument("--threshold", type=float, metavar="X", help="its threshold (default: as validation chooses)")
    run.add_argument("--batch-size", type=count, default=256, metavar="N", help="rows at a time (default: 256)")
    run.add_argument("--out", type=Path, metavar="FILE", help="where the answers go (default: standard output)")
    compute_options(run, json=False)

    generating.define(subparsers)
    _bench(subparsers)

    harness.define(subparsers)
    checking.define(subparsers)
    gating.define(subparsers)
    language.define(subparsers)
    studying.define(subparsers)
    return parser


def _bench(subparsers: Any) -> None:
    bench = subparsers.add_parser(
        "bench", help="measure speed-ups side by side", description="Measure speed-ups side by side, interleaved."
    )
    kinds = bench.add_subparsers(title="what", metavar="WHAT", required=True)

    exits = verb(
        kinds,
        "exits",
        "adaptive depth against full depth",
        """\
  loopscope bench exits --waiting                          (the paper's model, random weights, about 1.3 loops)
  loopscope bench exits runs/demo/fixed-geometric runs/demo/linear-gate
  loopscope bench exits runs/demo/fixed-geometric --readout margin --waiting --json
  loopscope bench exits runs/demo/fixed-geometric --policy runs/demo/fixed-geometric/policy.json""",
        benchmarks.exits,
    )
    exits.add_argument("runs", type=Path, nargs="*", metavar="RUN", help="recorded runs (default: random weights)")
    exits.add_argument("--readout", action="append", metavar="NAME", help="a readout (repeatable; default: several)")
    exits.add_argument("--policy", action="append", type=Path, default=[], metavar="FILE", help=_POLICIES)
    any_model(exits)
    exits.add_argument("--batch-size", type=count, metavar="N", help="rows (default: 64 at random, else the fastest)")
    exits.add_argument("--waiting", action="store_true", help="also the batch in which all wait for the slowest")
    exits.add_argument("--settings", default="paper", help="preset or TOML file of the random model (default: paper)")
    exits.add_argument("--set", action="append", default=[], metavar="A.B=C", help="change a setting of it")
    exits.add_argument("--examples", type=count, default=2048, metavar="N", help="for random weights (default: 2048)")
    exits.add_argument("--loops", type=float, default=1.3, metavar="X", help="average loops of it (default: 1.3)")

    language_models = answering.define_benches(kinds)

    train = verb(
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
    train.add_argument("--steps", type=count, default=4, metavar="N", help="steps of each way a round (default: 4)")

    record = verb(
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
    record.add_argument("--examples", type=count, metavar="N", help="how many examples (default: the task's)")

    sweep = verb(
        kinds,
        "sweep",
        "a sweep against its signal, and against a replay of every threshold",
        """\
  loopscope bench sweep
  loopscope bench sweep --examples 10000 --classes 4""",
        benchmarks.sweep,
    )
    for name, default in (("examples", 50_000), ("loops", 6), ("classes", 23), ("width", 64)):
        sweep.add_argument(f"--{name}", type=count, default=default, metavar="N", help=f"default: {default:,}")

    promises = verb(
        kinds,
        "promises",
        "are promises kept, and what do they cost, where the truth is known",
        """\
  loopscope bench promises
  loopscope bench promises runs/demo/fixed-geometric/recordings/test --figure promises.png
  loopscope bench promises --calibrations 100 --examples 500 --json

Calibrations on data drawn from populations whose risk is known, beside the usual way: the laxest threshold whose
loss on the same data is within the limit. Recordings serve as populations for the price.""",
        benchmarks.promises,
    )
    promises.add_argument("recordings", type=Path, nargs="*", metavar="RECORDING", help="populations for the price")
    promises.add_argument("--calibrations", type=count, default=1000, metavar="N", help="of each (default: 1,000)")
    promises.add_argument("--examples", type=count, default=2000, metavar="N", help="in each (default: 2,000)")
    promises.add_argument("--figure", type=Path, metavar="FILE", help="draw it, as PNG and PDF")
    promises.add_argument("--json", action="store_true", help="print JSON")

    for parser in (exits, train, record, sweep, *language_models):
        parser.add_argument("--rounds", type=count, default=5, metavar="N", help="rounds after warm-up (default: 5)")
        parser.add_argument("--threads", type=count, metavar="N", help="CPU threads (default: as PyTorch chooses)")
        parser.add_argument("--json", action="store_true", help="print JSON")
        if parser not in language_models:
            parser.set_defaults(device="cpu")
