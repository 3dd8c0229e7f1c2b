"""`loopscope record --benchmark`, `loopscope bench scoring` and `bench generation`: a language model at every loop."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loopscope.cli.benchmarks import machine_line
from loopscope.cli.calibrating import check_any_model, load_policy
from loopscope.cli.options import any_model, count, verb
from loopscope.cli.show import percent, print_json, print_table, say
from loopscope.cli.verbs import device_of
from loopscope.errors import UserError

if TYPE_CHECKING:
    from loopscope.engine.generation import Prompt


def record_benchmark(options: argparse.Namespace) -> int:
    from loopscope.analysis.questions import metrics
    from loopscope.models.hub import find_checkpoint
    from loopscope.progress import track
    from loopscope.scoring import record_benchmark

    split = options.split or "validation"
    if split not in ("train", "validation", "test"):
        raise UserError(f"A benchmark has no split '{split}'; choose train, validation or test.")
    if options.out is None and not Path(options.run).is_dir():
        raise UserError("Say with --out where the recording goes.")
    out = options.out or Path(options.run) / "recordings" / options.benchmark / split
    device = device_of(options)
    sizes = {} if options.batch_tokens is None else {"batch_tokens": options.batch_tokens}
    with track(f"{options.benchmark}, {split}") as advance:
        trajectory = record_benchmark(
            find_checkpoint(options.run),
            options.benchmark,
            split,  # type: ignore[arg-type]
            out,
            data=options.data,
            limit=options.limit,
            hidden=options.hidden,
            mean=options.mean_state,
            device=device,
            dtype=options.dtype,
            progress=advance,
            **sizes,
        )
    accuracy = metrics(trajectory)
    scored, cut = trajectory.provenance["metric"], trajectory.provenance["cut"]
    if cut:
        say(f"{cut:,} prompts were longer than the model takes and lost their beginnings.")
    summary = {"recording": str(out), "split": split, "questions": trajectory.num_examples, "metric": scored}
    if options.json:
        print_json({**summary, "loops": trajectory.num_loops, **accuracy})
        return 0
    rows = [
        [str(loop), *(percent(shares[loop - 1]) for shares in accuracy.values())]
        for loop in range(1, trajectory.num_loops + 1)
    ]
    title = f"{out}: {trajectory.num_examples:,} {split} questions, scored by {scored}. Forced exits:"
    print_table(title, ["loop", *accuracy], rows)
    return 0


def define_benches(kinds: Any) -> list[argparse.ArgumentParser]:
    scoring = verb(
        kinds,
        "scoring",
        "all loops of a benchmark in one pass, against the usual ways",
        """\
  loopscope bench scoring runs/small-ouro --benchmark arc_challenge --data DIR --limit 16
  loopscope bench scoring ByteDance/Ouro-1.4B --benchmark mmlu --limit 100""",
        bench_scoring,
    )
    scoring.add_argument("model", help="the folder of a checkpoint, or its name on the Hub")
    scoring.add_argument("--benchmark", default="arc_challenge", metavar="NAME", help="default: arc_challenge")
    scoring.add_argument("--data", type=Path, metavar="DIR", help="local files (default: the Hub)")
    scoring.add_argument("--limit", type=count, default=16, metavar="N", help="questions (default: 16)")

    generation = verb(
        kinds,
        "generation",
        "policies and caches on a text, against full depth",
        """\
  loopscope bench generation runs/small-ouro --text validation.txt --policy policy.json
  loopscope bench generation runs/small-ouro --text validation.txt --readout gate --threshold 0.5 --cache fill

Every way continues the beginnings of documents with what really follows, so that all meet the same tokens.""",
        bench_generation,
    )
    generation.add_argument("model", help="the folder of a checkpoint, or its name on the Hub")
    generation.add_argument("--text", type=Path, nargs="+", required=True, metavar="FILE", help="a text")
    generation.add_argument("--policy", action="append", type=Path, default=[], metavar="FILE", help="(repeatable)")
    any_model(generation)
    generation.add_argument("--readout", action="append", default=[], metavar="NAME", help="a rule (repeatable)")
    generation.add_argument("--threshold", action="append", type=float, default=[], metavar="X", help="of each readout")
    generation.add_argument("--cache", action="append", metavar="NAME", help="all, fill, last (default: every one)")
    generation.add_argument("--prompts", type=count, default=16, metavar="N", help="documents (default: 16)")
    generation.add_argument("--prompt-tokens", type=count, default=64, metavar="N", help="default: 64")
    generation.add_argument("--new-tokens", type=count, default=64, metavar="N", help="default: 64")
    generation.add_argument("--batch-size", type=count, default=8, metavar="N", help="default: 8")
    for parser in (scoring, generation):
        parser.add_argument("--device", default="cpu", help="cpu (default) or cuda")
        parser.add_argument("--dtype", metavar="NAME", help="float32, bfloat16 or float16 (default: the file's)")
    return [scoring, generation]


def bench_scoring(options: argparse.Namespace) -> int:
    from loopscope.bench.scoring import bench_scoring
    from loopscope.progress import track

    device = device_of(options)
    with track("measuring") as advance:
        result = bench_scoring(
            options.model,
            options.benchmark,
            options.data,
            options.limit,
            options.rounds,
            advance,
            device,
            options.dtype,
        )
    if options.json:
        print_json(result)
        return 0
    rows = [
        ["one pass, ms a question", str(result.milliseconds)],
        ["a forward for every choice", f"{result.per_choice} times as long"],
        ["a forward for every choice and depth", f"{result.per_choice_and_depth} times as long"],
    ]
    if result.per_question is not None:
        rows.append(["a forward for every question", f"{result.per_question} times as long"])
    rows.append(["largest difference of a log-likelihood", f"{result.largest_difference:.1e}"])
    shared = f", {result.shared_tokens:.0f} of them shared" if result.shared_tokens else ""
    title = (
        f"{result.model}, {result.benchmark}, {result.shots} shots: {result.questions} questions, contexts of "
        f"{result.context_tokens:.0f} tokens{shared}, choices of {result.choice_tokens:.1f}. "
        f"{machine_line(result.machine)}"
    )
    print_table(title, ["", "median [quartiles]"], rows)
    return 0


def bench_generation(options: argparse.Namespace) -> int:
    from loopscope.bench.generation import bench_generation
    from loopscope.engine.decoding import CACHES
    from loopscope.exits import ExitPolicy
    from loopscope.models import load_model
    from loopscope.models.hub import find_checkpoint
    from loopscope.progress import track

    check_any_model(options)
    if len(options.readout) != len(options.threshold):
        raise UserError("Every --readout needs its --threshold.")
    policies = [load_policy(path, options.any_model) for path in options.policy]
    policies += [ExitPolicy(name, at) for name, at in zip(options.readout, options.threshold, strict=True)]
    if not policies:
        raise UserError("Give a --policy, or a --readout with its --threshold.")
    if unknown := [name for name in options.cache or () if name not in CACHES]:
        raise UserError(f"There is no cache '{unknown[0]}'; choose one of {', '.join(CACHES)}.")
    folder = find_checkpoint(options.model)
    model = load_model(folder, device_of(options), options.dtype)
    prompts = _prompts(folder, options)
    with track("measuring") as advance:
        result = bench_generation(
            str(options.model),
            model,
            prompts,
            policies,
            options.cache or CACHES,
            options.batch_size,
            options.rounds,
            advance,
        )
    if options.json:
        print_json(result)
        return 0
    rows = [
        [
            timing.readout if timing.max_drop is None else f"{timing.readout}, loss ≤ {100 * timing.max_drop:g} %",
            "" if timing.threshold is None else f"{timing.threshold:.4g}",
            timing.cache,
            f"{timing.average_loops:.2f}",
            f"{timing.run_loops:.2f}",
            percent(timing.agreement),
            f"{timing.kl:.4f}",
            str(timing.speedup),
            str(timing.realised),
            f"{timing.cache_bytes / 2**20:.1f}",
        ]
        for timing in result.ways
    ]
    columns = ["readout", "at", "cache", "loops", "run", "agrees", "KL", "speed-up", "realised", "cache, MiB"]
    title = (
        f"{result.model}: {result.prompts} prompts of {result.prompt_tokens} tokens, {result.new_tokens:,} after them, "
        f" {result.batch_size} at a time; full depth ({result.num_loops} loops): "
        f"{result.full_tokens_per_second} tokens a second. run: loops that were run for a token, for the memory too. "
        f"agrees, KL: with full depth's prediction. {machine_line(result.machine)}"
    )
    print_table(title, columns, rows)
    return 0


def _prompts(folder: Path, options: argparse.Namespace) -> "list[Prompt]":
    """The beginnings of the documents that are long enough, and what follows them."""
    from loopscope.engine.generation import Prompt
    from loopscope.text import encode, read_documents

    size = options.prompt_tokens + options.new_tokens
    found = [tokens for tokens in encode(read_documents(options.text), folder) if len(tokens) >= size]
    if len(found) < options.prompts:
        raise UserError(
            f"Only {len(found)} documents have {size} tokens; ask for fewer --prompts, or shorter ones "
            "(--prompt-tokens, --new-tokens)."
        )
    some = [found[place * len(found) // options.prompts] for place in range(options.prompts)]
    return [
        Prompt(key, tokens[: options.prompt_tokens], tokens[options.prompt_tokens : size])
        for key, tokens in enumerate(some)
    ]
