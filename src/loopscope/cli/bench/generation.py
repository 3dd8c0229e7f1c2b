"""Measure policies and caches on a text, against full depth.

loopscope bench generation runs/small-ouro --text validation.txt --policy policy.json
loopscope bench generation runs/small-ouro --text validation.txt --readout gate --threshold 0.5 --cache propagate
loopscope bench generation runs/small-ouro --text validation.txt --readout top1 --threshold 0.8 --lossless --plain

Every way continues the beginnings of documents with what really follows, so that all meet the same tokens; lossless
text writes as many of its own, which are held against full depth's.
"""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loopscope.cli.devices import device_of, working
from loopscope.cli.inputs import check_texts, find_model
from loopscope.cli.options import CACHE_MODES, READOUTS, add_shared, add_verb, count
from loopscope.cli.output import percent, print_measured, print_note, print_table
from loopscope.cli.policies import check_any_model, check_runnable, load_policy
from loopscope.errors import UserError

if TYPE_CHECKING:
    from loopscope.bench.generation import GenerationBench
    from loopscope.engine.generation import Prompt


def define(kinds: Any) -> None:
    parser = add_verb(kinds, "generation", __doc__, execute)
    parser.add_argument("model", help="the folder of a checkpoint, or its name on the Hub")
    parser.add_argument(
        "--text", type=Path, nargs="+", required=True, metavar="FILE", help="text files whose documents are continued"
    )
    parser.add_argument(
        "--policy", action="append", type=Path, default=[], metavar="FILE", help="measure this policy (repeatable)"
    )
    add_shared(parser, "--any-model", "--with-readout")
    rules = f"measure this readout, with --threshold: {READOUTS} (repeatable)"
    parser.add_argument("--readout", action="append", default=[], metavar="NAME", help=rules)
    parser.add_argument(
        "--threshold",
        action="append",
        type=float,
        default=[],
        metavar="X",
        help="threshold of a readout, in the same order (repeatable)",
    )
    caches = f"measure this KV cache: {', '.join(CACHE_MODES)} (repeatable; default: every one)"
    parser.add_argument("--cache", action="append", metavar="MODE", help=caches)
    parser.add_argument("--lossless", action="store_true", help="measure lossless text, too, drafted by each rule")
    parser.add_argument(
        "--plain", action="store_true", help="measure full depth as public implementations write it, too"
    )
    parser.add_argument("--prompts", type=count, default=16, metavar="N", help="documents to continue (default: 16)")
    parser.add_argument(
        "--prompt-tokens", type=count, default=64, metavar="N", help="tokens that are given (default: 64)"
    )
    parser.add_argument("--new-tokens", type=count, default=64, metavar="N", help="tokens that follow (default: 64)")
    parser.add_argument("--batch-size", type=count, default=8, metavar="N", help="documents at a time (default: 8)")
    add_shared(parser, "--device", "--dtype", "--rounds", "--threads", "--json")


def execute(options: argparse.Namespace) -> None:
    check_any_model(options)
    if len(options.readout) != len(options.threshold):
        raise UserError("Every --readout needs its --threshold.")
    if not options.policy and not options.readout:
        raise UserError("Give a --policy, or a --readout with its --threshold.")
    check_texts(options.text)
    from loopscope.exits import ExitPolicy
    from loopscope.exits.readouts import check_threshold
    from loopscope.exits.scope import Scope
    from loopscope.models.configuration import read_model_shape

    policies = [load_policy(path, options.any_model) for path in options.policy]
    policies += [ExitPolicy(name, at) for name, at in zip(options.readout, options.threshold, strict=True)]
    for name, at in zip(options.readout, options.threshold, strict=True):
        check_threshold(name, at)
    folder = find_model(options.model, text=True)
    shape, size = read_model_shape(folder), options.prompt_tokens + options.new_tokens
    if size > shape.block_size:
        raise UserError(
            f"A prompt of {options.prompt_tokens:,} tokens and {options.new_tokens:,} after it are more than the "
            f"{shape.block_size:,} that the model takes; ask for fewer (--prompt-tokens, --new-tokens)."
        )
    for policy in policies:
        check_runnable(policy, shape.num_loops, Scope(unit="tokens"))
    from loopscope.bench.generation import bench_generation, ways_of
    from loopscope.models import load_model

    model = load_model(folder, device_of(options), options.dtype)
    prompts, caches = _prompts(folder, options), options.cache or list(CACHE_MODES)
    for policy in policies:
        if others := [cache for cache in caches if policy.scope.cache not in (None, cache)]:
            print_note(
                f"{policy} was calibrated for the cache '{policy.scope.cache}'; with {' and '.join(others)} it is "
                "measured without its promise."
            )
    with working(options, "measuring") as advance:
        ways = ways_of(policies, caches, options.lossless)
        result = bench_generation(
            options.model, model, prompts, ways, options.batch_size, options.rounds, advance, options.plain
        )
    _print(result, options.json)


def _print(result: "GenerationBench", as_json: bool) -> None:
    close, fast = [], []
    for timing in result.ways:
        name = timing.readout if timing.max_drop is None else f"{timing.readout}, loss ≤ {100 * timing.max_drop:g} %"
        way = [name, "" if timing.threshold is None else f"{timing.threshold:.4g}", timing.cache]
        drafts = "" if timing.drafts is None else f"{timing.drafts.accepted:,} of {timing.drafts.drafted:,}"
        average = "" if timing.average_loops is None else f"{timing.average_loops:.2f}"
        close.append([*way, average, f"{timing.run_loops:.2f}", percent(timing.agreement)])
        close[-1] += [f"{timing.kl:.4f}", drafts, f"{timing.cache_bytes / 2**20:.1f}"]
        ratios = (timing.speedup, timing.realised or "", timing.prompt_speedup, timing.writing_speedup)
        fast.append([*way, *map(str, (*ratios, timing.realised_of_run))])
    title = (
        f"{result.model}: {result.prompts} prompts of {result.prompt_tokens} tokens, {result.new_tokens:,} after them, "
        f"{result.batch_size} at a time; full depth ({result.num_loops} loops): "
        f"{result.full_tokens_per_second} tokens per second. run: loops that were run for a token, for the cache too. "
        "agrees, KL: with full depth's prediction. drafts: those that stood."
    )
    columns = ["readout", "at", "cache", "loops", "run", "agrees", "KL", "drafts", "cache, MiB"]
    print_measured(result, title, columns, close, as_json, keys=3)
    if as_json:
        return
    title = (
        "Against full depth: all of it, and the share of what the average loops allow; until the first token, and "
        "after it; after it, the share of what the loops that were run allow."
    )
    if (plain := result.plain) is not None:
        title += (
            f" Full depth itself is {plain.speedup} times as fast as the plain way, prompts {plain.prompt_speedup}, "
            f"writing {plain.writing_speedup}; {plain.differing} tokens differ."
        )
    print_table(
        title, ["readout", "at", "cache", "speed-up", "realised", "prompts", "writing", "of loops run"], fast, keys=3
    )


def _prompts(folder: Path, options: argparse.Namespace) -> "list[Prompt]":
    """The beginnings of the documents that are long enough, and what follows them."""
    from loopscope.documents import read_documents, tokenize_documents
    from loopscope.engine.generation import Prompt

    cut, size = options.prompt_tokens, options.prompt_tokens + options.new_tokens
    documents = tokenize_documents(read_documents(options.text), folder)
    found = [tokens for tokens in documents if len(tokens) >= size]
    if len(found) < options.prompts:
        there = f"Only {len(found)} of the documents have" if found else "No document has"
        fewer = "fewer --prompts, or " if found else ""
        raise UserError(f"{there} {size:,} tokens; ask for {fewer}shorter ones (--prompt-tokens, --new-tokens).")
    some = [found[place * len(found) // options.prompts] for place in range(options.prompts)]
    return [Prompt(key, tokens[:cut], tokens[cut:size]) for key, tokens in enumerate(some)]
