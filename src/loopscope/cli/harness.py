"""`loopscope harness`: lm_eval's tasks on a looped model."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loopscope.cli.calibrating import check_any_model, load_policy, promises_answers
from loopscope.cli.options import any_model, compute_options, count, verb, whole
from loopscope.cli.show import print_json, print_table, say
from loopscope.cli.verbs import device_of

if TYPE_CHECKING:
    from loopscope.exits import ExitPolicy
    from loopscope.harness import Evaluation


def define(subparsers: Any) -> None:
    parser = verb(
        subparsers,
        "harness",
        "run lm_eval's tasks on a language model",
        """\
  loopscope harness ByteDance/Ouro-1.4B --tasks gsm8k --device cuda --dtype bfloat16
  loopscope harness MODEL --tasks arc_easy hellaswag --loops 2 --shots 8 --limit 200
  loopscope harness MODEL --tasks mmlu --policy policy.json --data data/benchmarks
  loopscope harness MODEL --tasks my_task.yaml --json

Tasks have lm_eval's names, or are the paths of their definitions; shots are the task's own unless --shots says so. The
average loops that were used stand beside the results: of a question, or of a token of text. docs/harness.md says how a
policy decides, and how lm_eval is called from Python.""",
        harness,
    )
    parser.add_argument("model", help="the folder of a checkpoint, or its name on the Hub")
    parser.add_argument("--tasks", nargs="+", required=True, metavar="NAME", help="lm_eval's tasks, or definitions")
    depth = parser.add_mutually_exclusive_group()
    depth.add_argument("--loops", type=count, metavar="N", help="a fixed depth (default: all loops)")
    depth.add_argument("--policy", type=Path, metavar="FILE", help="an exit policy")
    any_model(parser)
    parser.add_argument("--data", type=Path, metavar="DIR", help="read the six benchmarks from files, not the Hub")
    parser.add_argument("--limit", type=count, metavar="N", help="the first documents of every task only")
    parser.add_argument("--shots", type=whole, metavar="N", help="few-shot examples (default: the task's own)")
    parser.add_argument("--chat", action="store_true", help="ask by the model's chat template")
    parser.add_argument("--think-end", metavar="TEXT", help="an answer begins after this, as in </think>")
    parser.add_argument("--cache", choices=("all", "fill", "last"), default="all", help="of texts (default: all)")
    parser.add_argument("--batch-size", type=count, default=8, metavar="N", help="texts at a time (default: 8)")
    parser.add_argument("--batch-tokens", type=count, metavar="N", help="tokens of questions at a time")
    parser.add_argument("--dtype", help="float32, bfloat16 or float16 (default: the file's)")
    compute_options(parser)


def harness(options: argparse.Namespace) -> int:
    from loopscope.harness import evaluate, load
    from loopscope.progress import track

    check_any_model(options)
    device = device_of(options)
    policy = None if options.policy is None else load_policy(options.policy, options.any_model)
    if policy is not None and promises_answers(policy):
        _caution(policy, options.tasks)
    sizes = {} if options.batch_tokens is None else {"batch_tokens": options.batch_tokens}
    with track(", ".join(options.tasks)) as advance:
        model = load(
            options.model,
            loops=options.loops,
            policy=policy,
            cache=options.cache,
            device=str(device),
            dtype=options.dtype,
            batch_size=options.batch_size,
            think_end_token=options.think_end,
            progress=advance,
            **sizes,
        )
        found = evaluate(
            model, options.tasks, data=options.data, limit=options.limit, shots=options.shots, chat=options.chat
        )
    if options.json:
        print_json(found)
    else:
        _print(found, options.model)
    return 0


def _caution(policy: "ExitPolicy", tasks: list[str]) -> None:
    from loopscope.exits.signals import SIGNALS
    from loopscope.questions import BENCHMARKS

    say(
        "The policy's promise is about whole answers: it does not hold for tasks that generate or score text by tokens."
    )
    scored = [
        benchmark.title
        for benchmark in BENCHMARKS.values()
        if benchmark.metric == "acc_norm" and {benchmark.name, *benchmark.tasks} & {*tasks}
    ]
    if scored and policy.gate is None and SIGNALS.get(policy.readout, ("",))[0] == "logits":
        say(
            f"Recordings of {', '.join(scored)} are scored by acc_norm, by character, and here scores are plain "
            f"log-likelihoods: a threshold of {policy.readout} from there means something else here."
        )


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
    title = f"{name}: {found.model['exit_policy']}, of {found.model['num_loops']} loops. ±: standard error"
    print_table(title, ["task", "metric", "value", "shots", "documents", "average loops"], rows)
