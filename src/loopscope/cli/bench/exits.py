"""Measure adaptive depth against full depth.

loopscope bench exits --waiting  # the paper's model, random weights, about 1.3 loops
loopscope bench exits runs/demo/fixed-geometric runs/demo/linear-gate
loopscope bench exits runs/demo/fixed-geometric --readout margin --waiting --json
loopscope bench exits runs/demo/fixed-geometric --policy runs/demo/fixed-geometric/policy.json
"""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loopscope.cli.devices import device_of
from loopscope.cli.inputs import check_readouts, check_run
from loopscope.cli.options import PRESETS, READOUTS, add_shared, add_verb, count
from loopscope.cli.output import machine_line, percent, print_json, print_table
from loopscope.cli.policies import POLICIES, check_any_model, check_runs_on, policies_by_model, run_weights
from loopscope.errors import UserError
from loopscope.recording_places import find_recordings

if TYPE_CHECKING:
    from loopscope.bench.exits import BenchedModel, ExitBench
    from loopscope.exits import ExitPolicy


def define(kinds: Any) -> None:
    parser = add_verb(kinds, "exits", __doc__, execute)
    parser.add_argument(
        "runs", type=Path, nargs="*", metavar="RUN", help="recorded runs to measure (default: random weights)"
    )
    rules = f"exit by this readout: {READOUTS} (repeatable; default: several)"
    parser.add_argument("--readout", action="append", metavar="NAME", help=rules)
    parser.add_argument("--policy", action="append", type=Path, default=[], metavar="FILE", help=POLICIES)
    add_shared(parser, "--any-model", "--with-readout")
    parser.add_argument(
        "--batch-size",
        type=count,
        metavar="N",
        help="rows of a batch (default: 64 of random weights, else the fastest)",
    )
    parser.add_argument(
        "--waiting", action="store_true", help="measure also the batch in which all wait for the slowest"
    )
    parser.add_argument(
        "--settings", default="paper", help=f"settings of the random model: a TOML file, or {PRESETS} (default: paper)"
    )
    parser.add_argument(
        "--set", action="append", default=[], metavar="A.B=C", help="change a setting of the random model (repeatable)"
    )
    parser.add_argument(
        "--examples", type=count, default=2048, metavar="N", help="examples for random weights (default: 2048)"
    )
    parser.add_argument(
        "--loops", type=float, default=1.3, metavar="X", help="average loops of the random model (default: 1.3)"
    )
    add_shared(parser, "--rounds", "--threads", "--json")
    parser.set_defaults(device="cpu")


def execute(options: argparse.Namespace) -> None:
    from loopscope.training.settings import read_settings

    check_any_model(options)
    if options.policy and not options.runs:
        raise UserError("A policy needs the run that it was calibrated for; give its folder, too.")
    for run in options.runs:
        check_run(run)
        find_recordings(run)
    check_readouts(options)
    policies = policies_by_model(options.policy, [run_weights(run) for run in options.runs], options.any_model)
    for run, own in zip(options.runs, policies, strict=True):
        for policy in own:
            check_runs_on(policy, run)
    if not options.runs:
        read_settings(options.settings, options.set)
    from loopscope.bench.exits import bench_exits
    from loopscope.progress import track

    device_of(options)
    size = options.batch_size or (None if options.runs else 64)
    results = []
    for model in _models(options, policies):
        with track(f"measuring {model.name}") as advance:
            results.append(bench_exits(model, options.rounds, size, options.waiting, advance))
    if options.json:
        print_json(results)
        return
    for result in results:
        _print(result)


def _models(options: argparse.Namespace, policies: "list[list[ExitPolicy]]") -> "list[BenchedModel]":
    """Those to measure; of runs, each with its own policies."""
    from loopscope.bench.exits import random_model, trained_model

    if not options.runs:
        readouts = options.readout or ["margin"]
        return [random_model(options.settings, options.set, options.examples, options.loops, readouts)]
    return [trained_model(run, options.readout, own) for run, own in zip(options.runs, policies, strict=True)]


def _print(result: "ExitBench") -> None:
    waiting = any(timing.waiting_realised for timing in result.policies)
    columns = ["readout", "accuracy", "loops", "by tokens", "ms", "speed-up", "realised"]
    columns += [*(["waiting"] if waiting else []), "batch", "close", "differ"]
    full, depth = "" if result.full_accuracy is None else percent(result.full_accuracy), f"{result.num_loops:.2f}"
    rows = [["final loop", full, depth, depth, f"{result.full_milliseconds.median:.3g}", "1", ""]]
    rows[0] += [*([""] if waiting else []), str(result.full_batch_size), "", ""]
    for timing in result.policies:
        rows.append(
            [
                timing.readout if timing.max_drop is None else f"{timing.readout}, loss ≤ {100 * timing.max_drop:g} %",
                "" if timing.accuracy is None else percent(timing.accuracy),
                f"{timing.average_loops:.2f}",
                f"{timing.token_loops:.2f}",
                f"{timing.milliseconds.median:.3g}",
                f"{timing.speedup.median:.2f}",
                str(timing.realised),
                *([str(timing.waiting_realised)] if waiting else []),
                str(timing.batch_size),
                str(timing.agreement.close),
                str(timing.agreement.differing + timing.agreement.close_differing),
            ]
        )
    title = (
        f"{result.model}: {result.examples:,} examples. loops: mean over examples; by tokens: mean over tokens. "
        f"ms: of an example. realised: share of the ideal speed-up (the paper's: {result.paper_realised}). "
        f"close: within 1e-5 of the threshold. differ: unlike the replay. {machine_line(result.machine)}"
    )
    print_table(title, columns, rows)
