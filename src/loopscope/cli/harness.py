"""Run lm_eval's tasks on a language model.

loopscope harness ByteDance/Ouro-1.4B --tasks gsm8k --device cuda --dtype bfloat16
loopscope harness MODEL --tasks arc_easy hellaswag --loops 2 --shots 8 --limit 200
loopscope harness MODEL --tasks mmlu --policy policy.json --data data/benchmarks
loopscope harness MODEL --tasks my_task.yaml --json

Tasks have lm_eval's names, or are the paths of their definitions; shots are the task's own unless --shots says so. The
average loops that were used stand beside the results: of a question, or of a token of text. docs/harness.md says how a
policy decides, and how lm_eval is called from Python.
"""

import argparse
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loopscope.cli.devices import device_of, working
from loopscope.cli.inputs import find_model
from loopscope.cli.options import COMPUTE, add_shared, add_verb, count, values, whole
from loopscope.cli.output import print_json, print_table
from loopscope.cli.policies import check_any_model, check_runnable, load_policy, unnamed_model

if TYPE_CHECKING:
    from loopscope.exits import ExitPolicy
    from loopscope.harness import Evaluation


def define(subparsers: Any) -> None:
    parser = add_verb(subparsers, "harness", __doc__, execute)
    parser.add_argument("model", help="the folder of a checkpoint, or its name on the Hub")
    parser.add_argument(
        "--tasks", nargs="+", required=True, metavar="NAME", help="names of lm_eval's tasks, or files that define some"
    )
    depth = parser.add_mutually_exclusive_group()
    depth.add_argument("--loops", type=count, metavar="N", help="run so many loops of every token (default: all)")
    depth.add_argument("--policy", type=Path, metavar="FILE", help="policy file to exit by")
    add_shared(parser, "--any-model", "--with-readout")
    parser.add_argument("--limit", type=count, metavar="N", help="run only the first N documents of every task")
    parser.add_argument(
        "--shots", type=whole, metavar="N", help="few-shot examples of a question (default: the task's own)"
    )
    parser.add_argument("--chat", action="store_true", help="ask in the model's chat template")
    parser.add_argument(
        "--think-end",
        dest="think_end_token",
        metavar="TEXT",
        help="text after which an answer begins, such as </think>",
    )
    parser.add_argument(
        "--cache", default="full", metavar="MODE", help="KV cache of texts: full (default), propagate or latest"
    )
    parser.add_argument(
        "--batch-size", type=count, default=8, metavar="N", help="texts to write at a time (default: 8)"
    )
    parser.add_argument("--batch-tokens", type=count, metavar="N", help="tokens of questions to compute at a time")
    add_shared(parser, "--data", "--dtype", *COMPUTE)


def execute(options: argparse.Namespace) -> None:
    from loopscope.harness.task_names import check_tasks

    check_any_model(options)
    policy = None if options.policy is None else load_policy(options.policy, options.any_model)
    check_tasks(options.tasks, options.data)
    folder = find_model(options.model, text=True)
    _check_depth(policy, options.loops, folder)
    from loopscope.harness import evaluate, load

    device = device_of(options)
    given = values(options, "loops", "cache", "dtype", "batch_size", "batch_tokens", "think_end_token")
    with working(options, ", ".join(options.tasks), *unnamed_model(options.policy, policy)) as advance:
        model = load(options.model, policy=policy, device=str(device), progress=advance, **given)
        with redirect_stderr(StringIO()):  # lm_eval's bars and hints; ours goes where it went before
            found = evaluate(model, options.tasks, **values(options, "data", "limit", "shots", "chat"))
    if options.json:
        print_json(found)
    else:
        _print(found, options.model)


def _check_depth(policy: "ExitPolicy | None", loops: int | None, folder: Path) -> None:
    """Refuses what the model is not deep enough for; whether a policy is for questions or texts, tasks say later."""
    from loopscope.exits import ExitPolicy
    from loopscope.exits.scope import ANYTHING
    from loopscope.models.configuration import read_model_shape

    num_loops = read_model_shape(folder).num_loops
    check_runnable(policy or ExitPolicy("fixed", loops or num_loops), num_loops, ANYTHING)


def _print(found: "Evaluation", name: str) -> None:
    rows = []
    for task, metrics in found.results.items():
        loops = found.loops.get(task)
        for metric, value in metrics.items():
            plain, _, how = metric.partition(",")
            if plain.endswith("_stderr") or not isinstance(value, (int, float)) or not how:
                continue
            error = metrics.get(f"{plain}_stderr,{how}")
            rows.append(
                [
                    task,
                    plain if how == "none" else f"{plain} ({how})",
                    f"{value:.4f}" + (f" ± {error:.4f}" if isinstance(error, float) else ""),
                    str(found.shots.get(task, "")),
                    "" if task not in found.samples else str(found.samples[task]["effective"]),
                    "" if loops is None else f"{loops.average_loops:.3f}",
                ]
            )
    title = (
        f"{name}: {found.model['exit_policy']}, of {found.model['num_loops']} loops. ±: standard error. "
        "loops: mean over questions, or over tokens of texts"
    )
    print_table(title, ["task", "metric", "value", "shots", "documents", "loops"], rows)
