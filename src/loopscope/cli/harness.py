"""Run lm_eval's tasks on a language model.

loopscope harness ByteDance/Ouro-1.4B --tasks gsm8k --device cuda \\
    --dtype bfloat16
loopscope harness MODEL --tasks arc_easy hellaswag --loops 2 --shots 8 \\
    --limit 200
loopscope harness MODEL --tasks mmlu --policy policy.json \\
    --data data/benchmarks
loopscope harness MODEL --tasks my_task.yaml --json

Give tasks by their names in lm_eval, or by the paths of their definitions. The results include the average loops per
question, or per token of generated text. For exits by a policy, and for calls of lm_eval from Python, see
docs/how-to/lm-eval.md.
"""

import argparse
from contextlib import redirect_stderr
from io import StringIO
from typing import TYPE_CHECKING, Any, get_args

from loopscope.cli import inputs
from loopscope.cli.options import COMPUTE, add_shared, add_verb, given, option
from loopscope.cli.output import print_table, show, working
from loopscope.integrations.lm_eval.task_names import check_tasks
from loopscope.models.checkpoint_folder import read_model_shape
from loopscope.policy import ExitPolicy
from loopscope.scope import ANYTHING, CacheMode

if TYPE_CHECKING:
    from loopscope.integrations.lm_eval.evaluation import Evaluation


def define(subparsers: Any) -> None:
    """Add the arguments of `loopscope harness` to the parser."""
    parser = add_verb(subparsers, "harness", __doc__, execute)
    add_shared(parser, "model")
    option(parser, "--tasks NAME", "names of lm_eval's tasks, or files that define tasks", nargs="+", required=True)
    depth = parser.add_mutually_exclusive_group()
    option(depth, "--loops N", "number of loops to run for every token (default: all)")
    option(depth, "--policy FILE", "policy file with the exit rule")
    inputs.add_policy_options(parser)
    option(parser, "--limit N", "run only the first N documents of every task")
    option(parser, "--think-end TEXT", "text after which an answer begins, such as </think>", dest="think_end_token")
    caches = "KV cache for generated text: full, propagate or latest (default: the policy's cache, else full)"
    option(parser, "--cache MODE", caches, choices=get_args(CacheMode))
    option(parser, "--batch-size N", "number of texts that the model writes together", default=8)
    option(parser, "--batch-tokens N", "number of question tokens per batch")
    add_shared(parser, "--shots N", "--chat", "--data DIR", "--dtype NAME", *COMPUTE)


def execute(options: argparse.Namespace) -> None:
    """Execute `loopscope harness` with its parsed arguments."""
    policy = None if options.policy is None else inputs.load_policy(options.policy, options.any_model)
    check_tasks(options.tasks, options.data)
    num_loops = read_model_shape(inputs.find_model(options.model, text=True)).num_loops
    # whether a policy is for questions or texts, tasks say later
    inputs.check_runnable(policy or ExitPolicy("fixed", options.loops or num_loops), num_loops, ANYTHING)
    from loopscope.integrations.lm_eval.evaluation import evaluate
    from loopscope.integrations.lm_eval.lm_eval_model import LoopScopeLM

    device = inputs.device_of(options)
    chosen = given(options, "loops", "cache", "dtype", "batch_size", "batch_tokens", "think_end_token")
    with working(options, ", ".join(options.tasks), *inputs.unnamed_model(options.policy, policy)) as advance:
        model = LoopScopeLM(options.model, policy=policy, device=str(device), progress=advance, **chosen)
        with redirect_stderr(StringIO()):  # lm_eval's bars and hints; ours goes where it went before
            found = evaluate(model, options.tasks, **given(options, "data", "limit", "shots", "chat"))
    show(found, options.json, lambda: _print_evaluation(found, options.model))


def _print_evaluation(found: "Evaluation", name: str) -> None:
    """Print the results of lm_eval's tasks."""
    rows = []
    for task, metrics in found.results.items():
        documents = "" if task not in found.samples else str(found.samples[task]["effective"])
        loops = "" if task not in found.loops else f"{found.loops[task].average_loops:.3f}"
        for metric, value in metrics.items():
            plain, _, how = metric.partition(",")
            if plain.endswith("_stderr") or not isinstance(value, (int, float)) or not how:
                continue
            error = metrics.get(f"{plain}_stderr,{how}")
            measured = f"{value:.4f}" + (f" ± {error:.4f}" if isinstance(error, float) else "")
            shown = plain if how == "none" else f"{plain} ({how})"
            rows.append([task, shown, measured, str(found.shots.get(task, "")), documents, loops])
    title = (
        f"{name}: {found.model['exit_policy']}, of {found.model['num_loops']} loops. ±: standard error. "
        "loops: mean over questions, or over tokens of texts"
    )
    print_table(title, ["task", "metric", "value", "shots", "documents", "loops"], rows)
