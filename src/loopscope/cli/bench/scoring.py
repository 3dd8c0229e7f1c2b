"""Measure all loops of a benchmark in one pass, against the usual ways.

loopscope bench scoring runs/small-ouro --benchmark arc_challenge --data DIR --limit 16
loopscope bench scoring ByteDance/Ouro-1.4B --benchmark mmlu --limit 100
"""

import argparse
from typing import Any

from loopscope.cli.devices import device_of, working
from loopscope.cli.inputs import find_model
from loopscope.cli.options import BENCHMARKS, add_shared, add_verb, count
from loopscope.cli.output import print_measured


def define(kinds: Any) -> None:
    parser = add_verb(kinds, "scoring", __doc__, execute)
    parser.add_argument("model", help="the folder of a checkpoint, or its name on the Hub")
    parser.add_argument(
        "--benchmark",
        default="arc_challenge",
        metavar="NAME",
        help=f"benchmark to score: {BENCHMARKS} (default: arc_challenge)",
    )
    parser.add_argument("--limit", type=count, default=16, metavar="N", help="questions to score (default: 16)")
    add_shared(parser, "--data", "--device", "--dtype", "--rounds", "--threads", "--json")


def execute(options: argparse.Namespace) -> None:
    from loopscope.questions.benchmarks import benchmark_named
    from loopscope.questions.lm_eval_tasks import check_data

    check_data(benchmark_named(options.benchmark), "test", options.data)
    find_model(options.model, text=True)
    from loopscope.bench.scoring import bench_scoring

    device, questions = device_of(options), (options.model, options.benchmark, options.data, options.limit)
    with working(options, "measuring") as advance:
        result = bench_scoring(*questions, options.rounds, advance, device, options.dtype)
    rows = [
        ["one pass, ms per question", str(result.milliseconds)],
        ["a forward for every choice", f"{result.per_choice} times as long"],
        ["a forward for every choice and depth", f"{result.per_choice_and_depth} times as long"],
    ]
    if result.per_question is not None:
        rows.append(["a forward for every question", f"{result.per_question} times as long"])
    rows.append(["largest difference of a log-likelihood", f"{result.largest_difference:.1e}"])
    shared = f", {result.shared_tokens:.0f} of them shared" if result.shared_tokens else ""
    title = (
        f"{result.model}, {result.benchmark}, {result.shots} shots: {result.questions} questions, contexts of "
        f"{result.context_tokens:.0f} tokens{shared}, choices of {result.choice_tokens:.1f}."
    )
    print_measured(result, title, ["", "median [quartiles]"], rows, options.json)
